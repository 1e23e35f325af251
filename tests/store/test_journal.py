from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.journal import Journal, JournalError
from store.journal_records import Acknowledged, Chunk, Close, Event, Opening, Record, Verdict


def opening(request_id: str = "r1", owner: str = "acme", **fields: object) -> Opening:
    values = {
        "created": 100.0,
        "model": "small",
        "batcher": "batcher.0",
        "idempotency_key": "",
        "body_digest": "",
        "opening": b"opening",
        "prompt": (1, 2, 70000),
        "verdict": b"allow",
        "headers": b"h",
        **fields,
    }
    return Opening(owner, request_id, **values)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal" / "session.0.sqlite"


def test_a_turn_comes_back_as_it_was_written(path: Path) -> None:
    journal = Journal(path)
    row = opening(answer=b"hit")
    steps = [
        Chunk("r1", 0, 0, (5, 6), b"lp", "", "", 3),
        Event("r1", 1, "TextDelta", b"one"),
        Verdict("r1", 0, b"old"),
        Chunk("r1", 0, 2, (), b"", "stop"),
        Verdict("r1", 0, b"new"),
    ]
    journal.write([row])
    journal.write(steps)
    journal.close()
    (history,) = Journal(path).unfinished()
    assert history.turn.opening == row
    assert history.turn.status == "in_progress"
    assert history.chunks == (steps[0], steps[3])
    assert history.events == (steps[1],)
    assert history.verdicts == (steps[4],)


def test_every_read_of_a_turn_is_its_owners(path: Path) -> None:
    journal = Journal(path)
    journal.write([opening(idempotency_key="k", body_digest="d"), Event("r1", 1, "TextDelta", b"secret")])
    assert journal.events("acme", "r1", 0)
    assert journal.turn("other", "r1") is None
    assert journal.history("other", "r1") is None
    assert journal.events("other", "r1", 0) == []
    assert journal.verdicts("other", "r1") == []
    assert journal.by_idempotency_key("other", "", "k") is None
    assert journal.by_body("other", "", "d", 0.0) is None
    assert journal.taken("r1")
    journal.write([Close("r1", "completed", 200.0)])
    assert journal.events("other", "r1", 0) == []
    assert journal.events("acme", "r1", 0)


def test_a_closed_turn_is_unfinished_until_it_is_settled_and_charged(path: Path) -> None:
    journal = Journal(path)
    journal.write([opening()])
    journal.write([Event("r1", 1, "TurnDone", b"x"), Close("r1", "completed", 200.0)])
    journal.write([Acknowledged("r1", settled=True)])
    (history,) = journal.unfinished()
    assert (history.turn.settled, history.turn.charged) == (True, False)
    assert [event.sequence for event in history.events] == [1]
    journal.write([Acknowledged("r1", charged=True)])
    assert journal.unfinished() == []
    assert journal.turn("acme", "r1").status == "completed"  # type: ignore[union-attr]


def test_the_first_close_counts(path: Path) -> None:
    journal = Journal(path)
    journal.write([opening(), Close("r1", "completed", 200.0), Close("r1", "failed", 300.0, b"e")])
    turn = journal.turn("acme", "r1")
    assert turn is not None
    assert (turn.status, turn.finished, turn.error) == ("completed", 200.0, b"")


def test_events_of_a_live_and_of_an_ended_turn_are_read_from_any_sequence(path: Path) -> None:
    journal = Journal(path)
    events = [Event("r1", n, "TextDelta", b"%d" % n) for n in range(1, 6)]
    journal.write([opening(), *events])
    assert journal.events("acme", "r1", 3) == events[3:]
    journal.write([Close("r1", "completed", 200.0)])
    assert journal.events("acme", "r1", 3) == events[3:]


def test_the_newest_turn_with_a_key_or_a_body_is_found(path: Path) -> None:
    journal = Journal(path)
    journal.write([opening("r1", idempotency_key="k", body_digest="d", created=1.0)])
    journal.write([opening("r2", idempotency_key="k", body_digest="d", created=2.0)])
    journal.write([Close("r1", "completed", 50.0), Close("r2", "completed", 60.0)])
    assert journal.by_idempotency_key("acme", "", "k").opening.request_id == "r2"  # type: ignore[union-attr]
    assert journal.by_body("acme", "", "d", 55.0).opening.request_id == "r2"  # type: ignore[union-attr]
    assert journal.by_body("acme", "", "d", 61.0) is None


def test_two_keys_of_one_account_do_not_see_each_others_repetitions(path: Path) -> None:
    journal = Journal(path)
    journal.write([opening("r1", idempotency_key="k", body_digest="d", key_id="one", created=1.0)])
    journal.write([opening("r2", idempotency_key="k", body_digest="d", key_id="two", created=2.0)])
    for key_id, request_id in (("one", "r1"), ("two", "r2")):
        for turn in (
            journal.by_idempotency_key("acme", key_id, "k"),
            journal.by_body("acme", key_id, "d", 0.0),
        ):
            assert turn is not None
            assert (turn.opening.request_id, turn.opening.key_id) == (request_id, key_id)
    assert journal.by_idempotency_key("acme", "three", "k") is None
    assert journal.by_body("acme", "three", "d", 0.0) is None


def test_a_file_that_does_not_say_which_key_opened_a_turn_is_read(path: Path) -> None:
    journal = Journal(path)
    journal.write([opening(idempotency_key="k", body_digest="d"), Event("r1", 1, "TextDelta", b"one")])
    journal.close()
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE turns DROP COLUMN key_id")
    db.close()
    journal = Journal(path)
    (history,) = journal.unfinished()
    assert history.turn.opening == opening(idempotency_key="k", body_digest="d")
    assert history.turn == journal.by_idempotency_key("acme", "any", "k")
    assert history.turn == journal.by_body("acme", "any", "d", 0.0)
    journal.write([opening("r2", key_id="one")])
    assert journal.turn("acme", "r2").opening.key_id == "one"  # type: ignore[union-attr]


# ------------------------------------------------------------------ rows that do not decode

NO_MSGPACK = b"\xc1"
"""The one byte that begins nothing."""


def spoil(path: Path, sql: str, *values: object) -> Journal:
    """Change the file behind the journal's back, and open it."""
    db = sqlite3.connect(path)
    with db:
        assert db.execute(sql, values).rowcount == 1
    db.close()
    return Journal(path)


def three_turns(path: Path) -> None:
    journal = Journal(path)
    journal.write([opening("r1"), opening("r2")])
    journal.write([Chunk("r1", 0, 0, (5,)), Event("r1", 1, "TextDelta", b"one")])
    journal.write([Chunk("r2", 0, 0, (6,)), Event("r2", 1, "TextDelta", b"one")])
    journal.write([opening("r3")])
    journal.write([Event("r3", 1, "TurnDone", b"x"), Close("r3", "completed", 200.0)])
    journal.close()


@pytest.mark.parametrize(
    ("sql", "value", "damaged"),
    [
        ("UPDATE turns SET prompt = ? WHERE request_id = 'r1'", b"abc", {"r1"}),
        ("UPDATE turns SET steps = ? WHERE request_id = 'r3'", NO_MSGPACK, {"r3"}),
        ("UPDATE log SET steps = ? WHERE id = 1", NO_MSGPACK, {"r1", "r2"}),
        ("UPDATE log SET steps = ? WHERE id = 1", msgspec.msgpack.encode([[9, "r1"]]), {"r1"}),
        ("UPDATE log SET steps = ? WHERE id = 1", msgspec.msgpack.encode([[0, "r1", 0]]), {"r1"}),
        ("UPDATE log SET steps = ? WHERE id = 1", msgspec.msgpack.encode([7]), {"r1", "r2"}),
    ],
)
def test_a_row_that_does_not_decode_damages_its_turn_alone(
    path: Path, sql: str, value: bytes, damaged: set[str]
) -> None:
    three_turns(path)
    histories = {h.turn.opening.request_id: h for h in spoil(path, sql, value).unfinished()}
    assert set(histories) == {"r1", "r2", "r3"}
    assert {name for name, history in histories.items() if history.is_damaged} == damaged
    assert histories["r2"].chunks == (Chunk("r2", 0, 0, (6,)),)


def test_what_is_left_of_a_damaged_turn_is_there(path: Path) -> None:
    three_turns(path)
    journal = spoil(path, "UPDATE turns SET prompt = ? WHERE request_id = 'r1'", b"abc")
    damaged = journal.unfinished()[0]
    assert damaged.turn.opening == opening("r1", prompt=())
    assert [event.sequence for event in damaged.events] == [1]


def test_the_log_is_trimmed_to_what_open_turns_need(path: Path) -> None:
    journal = Journal(path)
    journal.write([opening("old")])
    journal.write([Event("old", 1, "TextDelta", b"x")])
    journal.write([opening("r2")])
    for n in range(1, 20):
        journal.write([Event("r2", n, "TextDelta", b"x")])
    journal.write([Close("r2", "completed", 1.0)])
    rows = sqlite3.connect(path)
    assert rows.execute("SELECT count(*) FROM log").fetchone() == (20,)
    journal.write([Close("old", "completed", 1.0)])
    assert rows.execute("SELECT count(*) FROM log").fetchone() == (0,)
    journal.write([opening("r3"), Event("r3", 1, "TextDelta", b"y")])
    journal.close()
    histories = {h.turn.opening.request_id: h for h in Journal(path).unfinished()}
    assert [e.body for e in histories["r3"].events] == [b"y"]
    assert len(histories["r2"].events) == 19


def test_a_transaction_that_fails_leaves_nothing(path: Path) -> None:
    journal = Journal(path)
    journal.write([opening()])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal._db.execute("PRAGMA busy_timeout=1")
    with pytest.raises(JournalError, match="cannot write"):
        journal.write([Event("r1", 1, "TextDelta", b"x")])
    assert journal.events("acme", "r1", 0) == []
    other.execute("ROLLBACK")
    journal.write([Event("r1", 1, "TextDelta", b"x")])
    assert len(journal.events("acme", "r1", 0)) == 1


def test_finished_turns_are_forgotten_when_they_owe_nothing(path: Path) -> None:
    journal = Journal(path)
    for name in ("paid", "owing", "fresh"):
        journal.write([opening(name), Close(name, "completed", 500.0 if name == "fresh" else 100.0)])
    for name in ("paid", "fresh"):
        journal.write([Acknowledged(name, settled=True, charged=True)])
    assert journal.forget(before=200.0) == 1
    assert [journal.taken(name) for name in ("paid", "owing", "fresh")] == [False, True, True]


def test_a_checkpoint_keeps_everything(path: Path) -> None:
    journal = Journal(path)
    journal.write([opening()])
    while not journal.checkpoint_due:
        journal.write([Event("r1", 1, "TextDelta", b"x" * 100_000)])
    journal.checkpoint()
    assert not journal.checkpoint_due
    journal.write([Verdict("r1", 0, b"v")])
    journal.close()
    assert Journal(path).verdicts("acme", "r1") == [Verdict("r1", 0, b"v")]


def test_a_file_that_is_no_journal_is_refused_by_name(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(JournalError, match=r"session\.0\.sqlite"):
        Journal(path)


def test_a_journal_of_a_later_version_is_refused(path: Path) -> None:
    Journal(path).close()
    sqlite3.connect(path).execute("PRAGMA user_version=99")
    with pytest.raises(JournalError, match="version 99"):
        Journal(path)


@st.composite
def histories(draw: st.DrawFn) -> list[list[Record]]:
    """Transactions over three turns, each opened before its steps and perhaps closed after."""
    batches: list[list[Record]] = []
    sequences = dict.fromkeys("abc", 0)
    opened: set[str] = set()
    closed: set[str] = set()
    for _ in range(draw(st.integers(0, 20))):
        turn = draw(st.sampled_from("abc"))
        if turn not in opened:
            opened.add(turn)
            batches.append([opening(turn)])
        elif turn not in closed and draw(st.booleans()):
            sequences[turn] += 1
            batches.append([Event(turn, sequences[turn], "TextDelta", turn.encode())])
        elif turn not in closed:
            closed.add(turn)
            batches.append([Close(turn, "completed", 1.0)])
    return batches


@settings(max_examples=40, deadline=None)
@given(batches=histories(), cut=st.integers(0, 20))
def test_a_successor_knows_exactly_what_was_committed(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Record]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("j") / "j.sqlite"
    journal = Journal(path)
    for batch in batches[:cut]:
        journal.write(batch)
    before = journal.unfinished()
    journal.close()
    successor = Journal(path)
    assert successor.unfinished() == before
    for batch in batches[cut:]:
        successor.write(batch)
    written = [record for batch in batches for record in batch]
    for turn in "abc":
        events = [r for r in written if isinstance(r, Event) and r.request_id == turn]
        assert successor.events("acme", turn, 0) == events
