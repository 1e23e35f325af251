"""A replica answers from the active release, declines with a reason, and swaps between two lookups."""

import functools
import json
import os

import pytest
import trio

from actors.fast_answer import WRITE_EVERY, FastAnswer, FastAnswerSettings
from actors.protocol import Declined, Hit, LookedUp, Lookup, LookupMany, ReadMetrics
from store.answer import pack_answer
from store.catalog_build import CatalogBuilder, open_source
from store.decision import ALWAYS, EVEN, INPUTS, SCHEMA, Logistic, Threshold
from store.feedback import day_of, read_day
from store.release import CATALOG, MANIFEST, POINTER
from store.release_publish import activate, build, publish, rollback
from supervision.local import LocalTree
from tests.actors import virtual_time

NAME = "fast_answer.0"
QUESTION = "Which release is this?"
BY_WORDS = Logistic(SCHEMA, "words", ("request_words",), (-1.0,), 3.5)
"""Good enough below four words."""


def on_virtual_time(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        virtual_time.run(functools.partial(test, *args, **kwargs))

    return run


def release(root, version, *, model=ALWAYS, threshold=EVEN, answers=None):
    """Publish a release whose answer is its own version."""
    answers = {QUESTION: version, "a b c": "short", "a b c d": "long"} | (answers or {})
    base = root.parent / f"made-{version}"
    base.mkdir()
    rows = base / "rows.jsonl"
    lines = [
        {"question": q, "answer": a, "approved_by": "Ada", "answered_on": "2026-03-01", "id": f"e{i}"}
        for i, (q, a) in enumerate(answers.items())
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    CatalogBuilder(open_source(rows)).build(base / CATALOG)
    build(base / version, version, base / CATALOG, model, threshold)
    publish(root, base / version)
    return version


@pytest.fixture
def root(tmp_path):
    return tmp_path / "releases"


def replica(root, **settings):
    return FastAnswer(FastAnswerSettings(str(root), **settings))


async def asked(client, text, owner="acme", request_id="r1", *, is_probe=False):
    return await client.ask(NAME, Lookup(request_id, owner, text, is_probe), timeout=5, owner=owner)


async def until(holds, every=0.05):
    """Wait on the virtual clock until an async condition holds."""
    while not await holds():  # noqa: ASYNC110 - what is waited for happens in a thread and on a disk
        await trio.sleep(every)


async def answers(client):
    return isinstance(await asked(client, QUESTION), Hit)


async def counted(actor, what):
    return actor.counters[what] > 0


async def served_by(client, version):
    """Wait until lookups are answered from a release; each of them must be answered by one or the other."""

    async def serves():
        reply = await asked(client, QUESTION)
        assert isinstance(reply, Hit)
        assert reply.answer == reply.release
        return reply.release == version

    await until(serves)


@on_virtual_time
async def test_a_question_in_any_spelling_is_a_hit(root):
    activate(root, release(root, "v1"))
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root))
        reply = await asked(tree.client("session.0"), "  which RELEASE is this??")
        assert reply == Hit("r1", "v1", "e0", pack_answer("v1", 100), pytest.approx(1.0), 0.5, 1.0, "policy")


@pytest.mark.parametrize(
    ("text", "reason"), [("Who am I?", "miss"), ("x" * 600, "too_long"), ("", "too_long")]
)
@on_virtual_time
async def test_what_the_catalog_does_not_have_is_declined(root, text, reason):
    activate(root, release(root, "v1"))
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root))
        assert await asked(tree.client("session.0"), text) == Declined(
            "r1", reason, "v1", "", 0.0, 0.5, 1.0, "policy"
        )


@on_virtual_time
async def test_without_a_release_it_is_up_and_declines(root):
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root))
        reply = await asked(tree.client("session.0"), QUESTION)
        assert (type(reply), reply.reason) == (Declined, "no_release")


@on_virtual_time
async def test_the_first_release_serves_when_it_is_activated(root):
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root))
        client = tree.client("session.0")
        activate(root, release(root, "v1"))
        await until(lambda: answers(client))
        await served_by(client, "v1")


@on_virtual_time
async def test_a_score_below_the_threshold_is_declined(root):
    activate(root, release(root, "v1", model=BY_WORDS))
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root))
        client = tree.client("session.0")
        short, long = await asked(client, "a b c"), await asked(client, "A b c d")
        assert (short.answer, long.reason, long.entry) == ("short", "below_threshold", "e2")
        assert long.score < 0.5 < short.score


@on_virtual_time
async def test_many_lookups_are_answered_in_order_from_one_release(root):
    activate(root, release(root, "v1", model=BY_WORDS))
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root))
        texts = ("a b c", "nothing", "x" * 600, "a b c d", "A B C?")
        many = LookupMany(tuple(f"r{i}" for i in range(5)), ("acme",) * 5, texts)
        reply = await tree.client("session.0").ask(NAME, many, timeout=5)
        assert isinstance(reply, LookedUp)
        assert reply.reasons == ("", "miss", "too_long", "below_threshold", "")
        short = pack_answer("short", 100)
        assert reply.packed == (short, b"", b"", b"", short)
        assert (reply.release, reply.threshold) == ("v1", 0.5)
        alone = [await asked(tree.client(f"session.{i}"), text) for i, text in enumerate(texts, 1)]
        assert [a.score for a in alone] == list(reply.scores), "a score does not depend on the batch"


def test_columns_of_different_lengths_are_no_message():
    with pytest.raises(ValueError, match="different lengths"):
        LookupMany(("r1", "r2"), ("acme", "acme"), ("only one",))


@on_virtual_time
async def test_a_lookup_in_anothers_name_is_refused(root):
    activate(root, release(root, "v1"))
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root))
        client = tree.client("session.0")
        reply = await client.ask(NAME, Lookup("r1", "acme", QUESTION, False), timeout=5, owner="other")
        assert reply == Declined("r1", "mismatch", "", "", 0.0, 0.0, 1.0, "policy")


@on_virtual_time
async def test_releases_swap_and_roll_back_without_a_lookup_lost_or_mixed(root):
    for version in ("v1", "v2"):
        release(root, version)
    activate(root, "v1")
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root))
        client = tree.client("session.0")
        await served_by(client, "v1")
        for _ in range(5):
            activate(root, "v2")
            await served_by(client, "v2")
            rollback(root)
            await served_by(client, "v1")


@on_virtual_time
async def test_a_threshold_of_a_new_release_holds_at_once(root):
    release(root, "v1")
    release(root, "v2", model=BY_WORDS, threshold=Threshold(SCHEMA, "strict", 0.99))
    activate(root, "v1")
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root))
        client = tree.client("session.0")
        activate(root, "v2")

        async def swapped():
            return (await asked(client, "a b c")).release == "v2"

        await until(swapped)
        reply = await asked(client, "a b c")
        assert (reply.reason, reply.threshold) == ("below_threshold", 0.99)


def truncate_catalog(root):
    os.truncate(root / "v2" / CATALOG, 4096)


def truncate_manifest(root):
    os.truncate(root / "v2" / MANIFEST, 10)


def break_pointer(root):
    (root / POINTER).write_bytes(b"{")


@pytest.mark.parametrize("damage", [truncate_catalog, truncate_manifest, break_pointer])
@on_virtual_time
async def test_a_release_that_is_refused_leaves_the_old_one_answering(root, damage):
    for version in ("v1", "v2"):
        release(root, version)
    activate(root, "v1")
    async with LocalTree() as tree:
        actor = replica(root)
        await tree.start(NAME, actor)
        activate(root, "v2")
        damage(root)
        await until(lambda: counted(actor, "refused_releases"))
        await served_by(tree.client("session.0"), "v1")


@on_virtual_time
async def test_a_release_that_was_refused_is_tried_again(root):
    activate(root, release(root, "v1"))
    whole = (root / "v1" / CATALOG).read_bytes()
    os.truncate(root / "v1" / CATALOG, 4096)
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root))
        client = tree.client("session.0")
        assert (await asked(client, QUESTION)).reason == "no_release"
        (root / "v1" / CATALOG).write_bytes(whole)
        await until(lambda: answers(client), every=1)
        await served_by(client, "v1")


@on_virtual_time
async def test_in_the_slice_a_coin_decides_and_says_so(root):
    activate(root, release(root, "v1"))
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root, explore=1.0, salt="s"))
        client = tree.client("session.0")
        replies = [await asked(client, QUESTION, owner=f"owner-{i}") for i in range(20)]
        assert {type(r) for r in replies} == {Hit, Declined}
        assert {r.reason for r in replies if isinstance(r, Declined)} == {"exploration"}
        assert {(r.arm, r.propensity) for r in replies} == {("explore", 0.5)}


@on_virtual_time
async def test_every_lookup_leaves_one_row_without_its_text(root, tmp_path):
    activate(root, release(root, "v1"))
    feedback = tmp_path / "feedback"
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root, feedback_root=str(feedback)))
        client = tree.client("session.0")
        hit, _ = (
            await asked(client, QUESTION, request_id="r1"),
            await asked(client, "secret", request_id="r2"),
        )
        await trio.sleep(2 * WRITE_EVERY)
        await asked(client, QUESTION, request_id="r3")
        await asked(client, QUESTION, request_id="r3", is_probe=True)
        await tree.stop(NAME)
    (day,) = (path.name for path in (feedback / "decisions").iterdir())
    rows = list(read_day(feedback, "decisions", day))
    assert [(r.request_id, r.entry, r.action, r.reason) for r in rows] == [
        ("r1", "e0", "serve", ""),
        ("r2", "", "decline", "miss"),
        ("r3", "e0", "serve", ""),
    ]
    assert (rows[0].score, len(rows[0].inputs), day) == (hit.score, len(INPUTS), day_of(rows[0].at))
    assert b"secret" not in b"".join(path.read_bytes() for path in feedback.rglob("*.jsonl"))


@on_virtual_time
async def test_a_log_that_cannot_be_written_costs_no_answer(root, tmp_path):
    activate(root, release(root, "v1"))
    (tmp_path / "feedback").write_text("in the way")
    async with LocalTree() as tree:
        actor = replica(root, feedback_root=str(tmp_path / "feedback"))
        await tree.start(NAME, actor)
        client = tree.client("session.0")
        await asked(client, QUESTION)
        await until(lambda: counted(actor, "lost_rows"))
        await served_by(client, "v1")


@on_virtual_time
async def test_its_figures_say_what_became_of_lookups(root):
    activate(root, release(root, "v1"))
    async with LocalTree() as tree:
        await tree.start(NAME, replica(root))
        client = tree.client("session.0")
        for text in (QUESTION, QUESTION, "nothing"):
            await asked(client, text)
        lines = (await client.ask(NAME, ReadMetrics(), timeout=5)).lines
        assert 'antiphon_fast_answer_lookups_total{actor="fast_answer.0",outcome="hit"} 2' in lines
        assert 'antiphon_fast_answer_lookups_total{actor="fast_answer.0",outcome="miss"} 1' in lines
        assert 'antiphon_fast_answer_swaps_total{actor="fast_answer.0"} 1' in lines
        assert sum("_lookups_total{" in line for line in lines) == 2
        assert 'antiphon_fast_answer_entries{actor="fast_answer.0",release="v1"} 3' in lines
