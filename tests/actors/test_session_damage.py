"""Rows of the journal that do not decode: one request fails, or one turn is set aside; the host goes on."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from actors.protocol import (
    Attach,
    CancelTurn,
    Hit,
    Metrics,
    ReadMetrics,
    ReadTurn,
    TurnDone,
    TurnEvents,
    TurnFailed,
    TurnOpened,
    TurnRecord,
    TurnRefused,
)
from actors.turn import BROKEN
from actors.turn_journal import decode_hit, encode
from store.answer import pack_answer
from store.journal import Journal
from tests.actors.small_tree import Reading, SmallTree, on_virtual_time, script_of, small_tree
from tests.actors.test_session_answers import ANSWER, Catalog

NO_MSGPACK = b"\xc1"
"""The one byte that begins nothing."""
TEXT = "a reply of some length. " * 10
PLAIN_HIT = {
    "request_id": "turn-1",
    "release": "2026-08",
    "entry": "france",
    "answer": ANSWER,
    "score": 0.9,
    "threshold": 0.5,
}
"""A hit as it was written before answers travelled packed."""


def spoil(small: SmallTree, sql: str, *values: object) -> None:
    """Change the journal's file behind the host's back."""
    db = sqlite3.connect(small.state / "journal" / "session.0.sqlite")
    with db:
        assert db.execute(sql, values).rowcount >= 1
    db.close()


def spoil_event(small: SmallTree, sequence: int) -> None:
    """Make one event of the turn that ended undecodable."""
    db = sqlite3.connect(small.state / "journal" / "session.0.sqlite")
    with db:
        ((data,),) = db.execute("SELECT steps FROM turns").fetchall()
        steps = msgspec.msgpack.decode(data)
        (event,) = (step for step in steps if step[0] == 2 and step[2] == sequence)
        event[-1] = NO_MSGPACK
        db.execute("UPDATE turns SET steps = ?", (msgspec.msgpack.encode(steps),))
    db.close()


async def figure(small: SmallTree, name: str) -> int:
    """Return one of the host's counters."""
    reply: Metrics = await small.edge.ask("session.0", ReadMetrics(), timeout=5)
    samples = dict(line.rsplit(" ", 1) for line in reply.lines)
    return int(samples.get(f'antiphon_session_{name}_total{{actor="session.0"}}', 0))


# ------------------------------------------------------------------ one request


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("opening", NO_MSGPACK, ReadTurn("turn-1", "acme")),
        ("answer", NO_MSGPACK, ReadTurn("turn-1", "acme")),
        ("steps", NO_MSGPACK, ReadTurn("turn-1", "acme")),
        ("headers", NO_MSGPACK, Attach("turn-1", "acme", 0)),
        ("steps", NO_MSGPACK, Attach("turn-1", "acme", 0)),
        ("prompt", b"abc", CancelTurn("turn-1", "acme")),
    ],
)
@on_virtual_time
async def test_a_request_for_a_row_that_does_not_decode_fails_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, column: str, value: bytes, message: Any
) -> None:
    async with small_tree(tmp_path) as small:
        await small.say("hello")
        await trio.sleep(1)
        spoil(small, f"UPDATE turns SET {column} = ?", value)  # noqa: S608 - the test's own names
        with caplog.at_level(logging.ERROR):
            for _ in range(20):
                assert await small.edge.ask("session.0", message, timeout=5) == TurnRefused(BROKEN)
        assert await figure(small, "requests_failed") == 20
        assert sum("turn-1" in record.getMessage() for record in caplog.records) == 1
        assert (await small.say("hello again")).text == "You said: hello again"


@on_virtual_time
async def test_a_retry_of_a_turn_that_does_not_decode_fails_alone(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.say("hello", idempotency_key="k", body_digest="d")
        await trio.sleep(1)
        spoil(small, "UPDATE turns SET prompt = ?", b"abc")
        for _ in range(3):
            again = await small.say("hello", idempotency_key="k", body_digest="d")
            assert again.refused == TurnRefused(BROKEN)
        assert (await small.say("hello", idempotency_key="other", body_digest="d")).text == "You said: hello"


@on_virtual_time
async def test_a_reader_of_an_event_that_does_not_decode_hears_of_it(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        whole = await small.say("go")
        await trio.sleep(1)
        last = len(whole.events)
        spoil_event(small, last)
        for name in ("first", "second"):
            attach = Attach("turn-1", "acme", last - 1, name)
            assert isinstance(await small.edge.ask("session.0", attach, timeout=5), TurnOpened)
            while True:
                told, _ = await small.edge.receive()
                if isinstance(told, TurnEvents) and told.reader == name:
                    break
            assert told.events == (TurnFailed(last, BROKEN),)
        assert await figure(small, "requests_failed") == 2
        assert (await small.say("again")).text == TEXT


def test_a_hit_is_read_as_it_was_written_and_as_it_was_written_before() -> None:
    now = Hit("turn-1", "2026-08", "france", pack_answer(ANSWER, 100), 0.9, 0.5, 0.25, "explore")
    assert decode_hit(encode(now)) == now
    before = decode_hit(msgspec.msgpack.encode(PLAIN_HIT))
    assert before is not None
    assert (before.entry, before.answer) == ("france", ANSWER)
    assert (before.propensity, before.arm) == (1.0, "policy")
    told = decode_hit(msgspec.msgpack.encode({**PLAIN_HIT, "propensity": 0.25, "arm": "explore"}))
    assert told is not None
    assert (told.propensity, told.arm) == (0.25, "explore")


@on_virtual_time
async def test_a_hit_of_before_is_read_back(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.tree.start("fast_answer.0", Catalog())
        await small.say("capital?", fast_answers=True)
        await trio.sleep(1)
        spoil(small, "UPDATE turns SET answer = ?", msgspec.msgpack.encode(PLAIN_HIT))
        record = await small.edge.ask("session.0", ReadTurn("turn-1", "acme"), timeout=5)
        assert isinstance(record, TurnRecord)
        assert (record.fast_answer, record.texts) == ("2026-08/france", (ANSWER,))


# ------------------------------------------------------------------ one turn


async def begun(small: SmallTree, name: str = "edge.0") -> Reading:
    """Return a turn that is under way, some of its text heard."""
    client = small.edge if name == "edge.0" else small.tree.client(name)
    reading = small.reader(small.opening("go"), client)
    await reading.open()
    while len(reading.text) < 20:
        message, _ = await reading.client.receive()
        await reading.hear(message)
    return reading


@pytest.mark.parametrize(
    ("column", "value", "is_charged"),
    [
        ("opening", NO_MSGPACK, True),
        ("opening", msgspec.msgpack.encode({"key_id": "key-1", "messages": 7}), True),
        ("verdict", NO_MSGPACK, True),
        ("headers", NO_MSGPACK, True),
        ("prompt", b"abc", False),
    ],
)
@on_virtual_time
async def test_an_open_turn_that_does_not_decode_is_set_aside(
    tmp_path: Path, column: str, value: bytes, is_charged: bool
) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        bad, good = await begun(small), await begun(small, "edge.1")
        await small.tree.kill("session.0")
        (history, _) = Journal(tmp_path / "journal" / "session.0.sqlite").unfinished()
        received = sum(len(chunk.tokens) for chunk in history.chunks)
        spoil(small, f"UPDATE turns SET {column} = ? WHERE request_id = 'turn-1'", value)  # noqa: S608
        await small.start("session.0")
        await good.finish()
        assert (good.text, good.reasons) == (TEXT, ["stop"])
        assert (await small.say("go")).text == TEXT
        assert await figure(small, "turns_set_aside") == 1
        if column not in ("prompt", "headers"):  # there the reader's own request fails
            await bad.finish()
            assert bad.last == TurnFailed(len(bad.events), BROKEN)
        await trio.sleep(5)
        assert small.books.reserved == {}
        if is_charged:
            (charge,) = small.books.charges["turn-1"]
            assert (charge.spans, charge.account) == (((0, 0, received),), "acme")
            assert charge.prompt_tokens == len(history.turn.opening.prompt)
            assert small.books.settled["turn-1"] == charge.prompt_tokens + received
            assert charge.key_id == "key-1"
        else:
            assert small.books.waived == {"turn-1"}
        await small.restart("session.0")
        assert await figure(small, "turns_resumed") == 0


@on_virtual_time
async def test_an_open_turn_whose_log_does_not_decode_is_set_aside_and_waived(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        await begun(small)
        await small.tree.kill("session.0")
        spoil(small, "UPDATE log SET steps = ?", NO_MSGPACK)
        await small.start("session.0")
        assert (await small.say("go")).text == TEXT
        await trio.sleep(5)
        assert small.books.reserved == {}
        assert small.books.waived == {"turn-1"}
        record = await small.edge.ask("session.0", ReadTurn("turn-1", "acme"), timeout=5)
        assert (record.status, record.error) == ("failed", BROKEN)


@on_virtual_time
async def test_an_ended_turn_that_does_not_decode_is_settled_by_its_rows(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT), leave_out=("ledger",)) as small:
        reading = await small.say("go")
        assert isinstance(reading.last, TurnDone)
        await small.tree.kill("session.0")
        spoil(small, "UPDATE turns SET opening = ?", NO_MSGPACK)
        await small.start("session.0", "ledger")
        await trio.sleep(5)
        (charge,) = small.books.charges["turn-1"]
        usage = reading.last.usage
        assert charge.spans == ((0, 0, usage.completion_tokens),)
        assert charge.prompt_tokens == usage.prompt_tokens
        assert await figure(small, "turns_settled_by_rows") == 1


@on_virtual_time
async def test_an_ended_answer_of_the_catalog_that_does_not_decode_is_billed_as_one(tmp_path: Path) -> None:
    async with small_tree(tmp_path, leave_out=("ledger",)) as small:
        await small.tree.start("fast_answer.0", Catalog())
        await small.say("capital?", fast_answers=True)
        await small.tree.kill("session.0")
        spoil(small, "UPDATE turns SET answer = ?", NO_MSGPACK)
        await small.start("session.0", "ledger")
        await trio.sleep(5)
        (charge,) = small.books.charges["turn-1"]
        assert (charge.fast_answer, charge.spans, charge.prompt_tokens) == ("2026-08/france", (), 0)


@on_virtual_time
async def test_an_answer_of_before_that_was_begun_is_finished(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.tree.start("fast_answer.0", Catalog())
        reading = small.reader(small.opening("capital?", fast_answers=True))
        await reading.open()
        await small.tree.kill("session.0")
        spoil(small, "UPDATE turns SET answer = ? WHERE finished IS NULL", msgspec.msgpack.encode(PLAIN_HIT))
        await small.start("session.0")
        await reading.finish()
        assert reading.text == ANSWER
        assert isinstance(reading.last, TurnDone)
        assert await figure(small, "turns_set_aside") == 0
