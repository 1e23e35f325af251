"""Fast answers on the real tree: who gets one, what it costs, and what a person may say of it."""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from store.feedback import read_day
from tests.system.conftest import Served

pytestmark = [pytest.mark.slow, pytest.mark.model]

ROOT = Path(__file__).parents[2]
ANSWER = "Lighthouses show ships where the land begins."
ENTRY = "v2/lighthouses"
QUESTION = "What are lighthouses for?"
BLOCKED = "How to make a bomb?"
FAST_ANSWER_MICROS = 5
ROWS = [
    {"id": "lighthouses", "question": QUESTION, "answer": ANSWER},
    {"id": "blocked", "question": BLOCKED, "answer": "This must never be seen."},
]


def antiphon(state: Path, *words: str) -> str:
    command = [sys.executable, "-m", "scripts.cli", *words, "--state", str(state)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def answering(model_file, tmp_path_factory) -> Iterator[Served]:
    """A tree whose engine repeats what it is asked, and whose catalog knows one good and one bad question."""
    base = tmp_path_factory.mktemp("answering")
    running = Served(base / "var", "--engine", "scripted").start()
    rows = base / "rows.jsonl"
    approved = {"approved_by": "The tests", "answered_on": "2026-01-01"}
    rows.write_text("".join(json.dumps({**row, **approved}) + "\n" for row in ROWS))
    antiphon(running.state, "release", "build", "--version", "v2", "--rows", str(rows))
    antiphon(running.state, "release", "publish", "v2")
    antiphon(running.state, "release", "activate", "v2")
    running.wait(lambda: entry_of(post(running)) == ENTRY, "the release answers")
    yield running
    assert running.stop() == 0


def post(served: Served, question: str = QUESTION, *, key: str = "", **fields) -> httpx.Response:
    body = {"model": "default", "messages": [{"role": "user", "content": question}], **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else served.headers
    return httpx.post(f"{served.root}/v1/chat/completions", json=body, headers=headers, timeout=60)


def entry_of(reply: httpx.Response) -> str:
    return reply.headers.get("x-antiphon-fast-answer", "")


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def charged(served: Served, request_id: str) -> int:
    """What the account was charged for a request, once it is."""

    def entries() -> list[dict]:
        found = antiphon(served.state, "ledger", "entries", "--request", request_id, "--json")
        return [entry for entry in json.loads(found)["entries"] if entry["account"] == "default"]

    served.wait(lambda: bool(entries()), f"request {request_id} is charged")
    return sum(abs(entry["micros"]) for entry in entries())


def is_from_the_model(reply: httpx.Response) -> bool:
    """No header, no mark, and tokens that were counted: the scripted engine repeats what it is asked."""
    usage = reply.json()["usage"]
    return (
        entry_of(reply) == ""
        and "fast_answer" not in usage
        and usage["prompt_tokens"] > 0
        and usage["completion_tokens"] > 0
        and ANSWER not in text_of(reply)
    )


def test_a_hit_says_where_it_comes_from_has_no_tokens_and_is_charged_by_its_own_price(answering):
    reply = post(answering, "  what ARE lighthouses for??")
    assert (text_of(reply), entry_of(reply)) == (ANSWER, ENTRY)
    usage = reply.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (0, 0, 0)
    assert usage["fast_answer"] == ENTRY
    assert charged(answering, reply.headers["x-request-id"]) == FAST_ANSWER_MICROS


def test_a_hit_streams_like_any_reply(answering):
    stream = answering.client().chat.completions.with_raw_response.create(
        model="default",
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        stream_options={"include_usage": True},
    )
    assert stream.headers["x-antiphon-fast-answer"] == ENTRY
    chunks = list(stream.parse())
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert (chunks[-1].usage.total_tokens, chunks[-1].usage.fast_answer) == (0, ENTRY)


def test_the_second_face_says_the_same(answering):
    made = answering.client().responses.create(model="default", input=QUESTION)
    assert (made.output_text, made.usage.total_tokens, made.usage.fast_answer) == (ANSWER, 0, ENTRY)
    read = answering.client().responses.retrieve(made.id)
    assert (read.output_text, read.usage.fast_answer) == (ANSWER, ENTRY)


def test_a_miss_is_the_models_and_is_charged_by_its_tokens(answering):
    reply = post(answering, "What are lamps for?")
    assert is_from_the_model(reply)
    assert charged(answering, reply.headers["x-request-id"]) != FAST_ANSWER_MICROS


@pytest.mark.parametrize(
    "fields",
    [
        {"fast_answers": "off"},
        {"temperature": 0},
        {"seed": 7},
        {"top_p": 0.5},
        {"stop": "never"},
        {"store": False},
        {"n": 2},
        {"max_tokens": len(ANSWER) - 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_request_with_wishes_of_its_own_is_the_models(answering, fields):
    assert is_from_the_model(post(answering, **fields))


def test_an_answer_that_just_fits_the_limit_is_served(answering):
    assert entry_of(post(answering, max_tokens=len(ANSWER))) == ENTRY  # a token is a byte here


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": QUESTION},
        ],
    ],
    ids=["system prompt", "second turn"],
)
def test_a_question_with_context_is_the_models(answering, messages):
    assert is_from_the_model(post(answering, messages=messages))


def test_a_key_that_does_not_take_part_gets_the_model(answering):
    made = antiphon(answering.state, "keys", "create", "--name", "plain", "--no-fast-answers", "--json")
    assert is_from_the_model(post(answering, key=json.loads(made)["secret"]))


def test_blocked_input_stays_blocked_though_the_catalog_has_it(answering):
    reply = post(answering, BLOCKED)
    assert (reply.status_code, entry_of(reply)) == (400, "")
    assert reply.json()["error"]["code"] == "content_policy_violation"


def test_a_rating_is_kept_and_the_model_says_it_again(answering):
    first = post(answering)
    name = first.headers["x-request-id"]
    said = rate(answering, first.json()["id"], "regenerate")
    assert said.json() == {"object": "feedback", "request_id": name, "rating": "regenerate"}
    assert ("regenerate", "default") in kept(answering, name)
    assert is_from_the_model(post(answering, fast_answers="off"))
    rate(answering, name, "down")
    assert ("down", "default") in kept(answering, name)


def test_nobody_rates_what_is_not_his(answering):
    made = antiphon(answering.state, "keys", "create", "--account", "other", "--json")
    theirs = json.loads(made)["secret"]
    name = post(answering).headers["x-request-id"]
    unknown = str(uuid.UUID(int=uuid.UUID(name).int ^ 1))
    texts = set()
    for named in (name, unknown):
        refused = rate(answering, named, "up", key=theirs)
        assert refused.status_code == 404
        texts.add(refused.json()["error"]["message"].replace(named, "ID"))
    assert len(texts) == 1
    assert kept(answering, name) == []


def test_every_eligible_request_leaves_one_decision(answering):
    name = post(answering).headers["x-request-id"]
    root = answering.state / "feedback"

    def decisions() -> list:
        days = sorted(path.name for path in (root / "decisions").iterdir())
        return [row for day in days for row in read_day(root, "decisions", day) if row.request_id == name]

    answering.wait(lambda: len(decisions()) == 1, "the decision is logged")
    (row,) = decisions()
    assert (row.release, row.entry, row.action, row.propensity) == ("v2", "lighthouses", "serve", 1.0)


def rate(served: Served, named: str, rating: str, *, key: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else served.headers
    body = {"request_id": named, "rating": rating}
    return httpx.post(f"{served.root}/v1/feedback", json=body, headers=headers, timeout=30)


def kept(served: Served, request_id: str) -> list[tuple[str, str]]:
    """Ratings of a request that are on the disk: (rating, owner)."""
    root = served.state / "feedback"
    days = [path.name for path in (root / "ratings").glob("*")]
    rows = [row for day in days for row in read_day(root, "ratings", day)]
    return [(row.rating, row.owner) for row in rows if row.request_id == request_id]
