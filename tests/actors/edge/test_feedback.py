"""`/v1/feedback`: a rating of one's own reply is on the disk before it is confirmed; any other is a 404."""

import time
from itertools import chain
from pathlib import Path

import pytest
import trio

from actors.edge.errors import ApiError
from actors.edge.feedback import Ratings
from store.feedback import RatingRow, RowLog, day_of, read_day
from tests.actors.edge.harness import Script, chat, door, trio_test

PATH = "/v1/feedback"
NOBODYS = "01890a5d-ac96-774b-bcce-b302099a8057"


def kept(tmp_path) -> list[tuple[str, str, str]]:
    root = tmp_path / "feedback"
    days = [path.name for path in (root / "ratings").glob("*")]
    return [(r.request_id, r.owner, r.rating) for day in days for r in read_day(root, "ratings", day)]


def rated(tmp_path):
    return door(tmp_path, feedback_root=str(tmp_path / "feedback"))


@trio_test
async def test_a_rating_is_kept_under_the_name_of_its_request(tmp_path):
    async with rated(tmp_path) as d:
        reply = await d.post(chat())
        name = reply.headers["x-request-id"]
        for named, rating in ((name, "up"), (reply.json()["id"], "down"), (f"resp_{name}", "regenerate")):
            answer = await d.post({"request_id": named, "rating": rating}, PATH)
            assert answer.status_code == 200
            assert answer.json() == {"object": "feedback", "request_id": name, "rating": rating}
            assert kept(tmp_path)[-1] == (name, "acme", rating)
        (file,) = (tmp_path / "feedback" / "ratings").glob("*/*.jsonl")
        assert file.name == f"edge.0-{d.edge.context.epoch}.jsonl"
        assert (
            abs(next(read_day(tmp_path / "feedback", "ratings", day_of(time.time()))).at - time.time()) < 60
        )


@pytest.mark.parametrize("stream", [False, True])
@trio_test
async def test_a_reply_that_is_replayed_is_rated_by_the_name_it_carries(tmp_path, stream):
    async with rated(tmp_path) as d:
        key = {"idempotency-key": "k"}
        first, again = [await d.post(chat(stream=stream), headers=key) for _ in range(2)]
        name = first.headers["x-request-id"]
        assert again.headers["x-request-id"] == name
        answer = await d.post({"request_id": again.headers["x-request-id"], "rating": "up"}, PATH)
        assert answer.status_code == 200
        assert kept(tmp_path) == [(name, "acme", "up")]


@trio_test
async def test_somebody_elses_reply_and_none_at_all_are_the_same_404(tmp_path):
    async with rated(tmp_path) as d:
        name = (await d.post(chat())).headers["x-request-id"]
        _, secret = d.accounts.create_key("other", "theirs")
        theirs = {"authorization": f"Bearer {secret}"}
        texts = set()
        for named, headers in ((name, theirs), (NOBODYS, {}), (NOBODYS, theirs)):
            answer = await d.post({"request_id": named, "rating": "up"}, PATH, headers=headers)
            assert answer.status_code == 404
            texts.add(answer.json()["error"]["message"].replace(named, "ID"))
        assert texts == {"No request with id 'ID' was found."}
        assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"rating": "up"}, 400, "request_id"),
        ({"request_id": NOBODYS}, 400, "rating"),
        ({"request_id": NOBODYS, "rating": "meh"}, 400, "rating"),
        ({"request_id": NOBODYS, "rating": 1}, 400, "rating"),
        ({"request_id": 7, "rating": "up"}, 400, "request_id"),
        ({"request_id": "x" * 65, "rating": "up"}, 400, "request_id"),
        ({"request_id": NOBODYS, "rating": "up", "text": "x"}, 400, "text"),
        ({"request_id": "../../etc/passwd", "rating": "up"}, 404, None),
        ({"request_id": "", "rating": "up"}, 404, None),
        ({"request_id": "\u202e", "rating": "up"}, 404, None),
        ([], 400, None),
    ],
)
@trio_test
async def test_what_is_no_feedback_is_refused_by_name(tmp_path, body, status, param):
    async with rated(tmp_path) as d:
        answer = await d.post(body, PATH)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert kept(tmp_path) == []
        await d.golden()


@trio_test
async def test_feedback_needs_a_key_that_may_write(tmp_path):
    async with rated(tmp_path) as d:
        name = (await d.post(chat())).headers["x-request-id"]
        _, secret = d.accounts.create_key("acme", "reader", read_only=True)
        body = {"request_id": name, "rating": "up"}
        for key, status in ((secret, 403), ("wrong", 401)):
            answer = await d.post(body, PATH, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status
        assert kept(tmp_path) == []


@trio_test
async def test_a_rating_that_cannot_be_kept_is_not_confirmed(tmp_path):
    (tmp_path / "feedback").write_text("not a directory")
    async with rated(tmp_path) as d:
        name = (await d.post(chat())).headers["x-request-id"]
        answer = await d.post({"request_id": name, "rating": "up"}, PATH)
        assert answer.status_code == 503
        (tmp_path / "feedback").unlink()
        assert (await d.post({"request_id": name, "rating": "down"}, PATH)).status_code == 200
        assert kept(tmp_path) == [(name, "acme", "down")]


class Disk(RowLog):
    """Counts writes; fails those that are said to."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        super().__init__(Path("nowhere"), "ratings", "w")
        self.written = []
        self.fails = fails

    def write(self, rows, *, flushed=False):
        assert flushed
        self.written.append([row.request_id for row in rows])
        if len(self.written) in self.fails:
            raise OSError("no space left")


async def keep_ten(ratings) -> list[str]:
    """Keep ten rows at once; return which were refused."""
    refused = []

    async def keep(number):
        try:
            await ratings.keep(RatingRow(1.0, str(number), "acme", "up"))
        except ApiError:
            refused.append(str(number))

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(keep, number)
    return refused


@trio_test
async def test_ratings_that_wait_together_are_written_together():
    disk = Disk()
    assert await keep_ten(Ratings(disk)) == []
    assert sorted(chain(*disk.written)) == [str(number) for number in range(10)]
    assert len(disk.written) <= 3


@trio_test
async def test_each_rating_hears_of_its_own_write_and_none_is_written_twice():
    disk = Disk(fails=(1,))
    ratings = Ratings(disk)
    refused = await keep_ten(ratings)
    assert sorted(refused) == sorted(disk.written[0])
    await ratings.keep(RatingRow(1.0, "later", "acme", "up"))
    assert disk.written[-1] == ["later"]
    assert sorted(chain(*disk.written)) == sorted([*map(str, range(10)), "later"])


@trio_test
async def test_a_reply_that_is_still_on_its_way_can_be_rated(tmp_path):
    script = Script(hold_after=1)
    async with door(tmp_path, script, feedback_root=str(tmp_path / "feedback")) as d, d.http() as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply:
            name = reply.headers["x-request-id"]
            answer = await d.post({"request_id": name, "rating": "regenerate"}, PATH)
            assert answer.status_code == 200
        assert kept(tmp_path) == [(name, "acme", "regenerate")]
