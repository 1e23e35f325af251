"""Kills at every point: what a client hears is the golden text, what is charged is what it received."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import trio

from actors.batcher import MEMORY_PAUSE, MEMORY_TRIES
from actors.protocol import (
    CancelTurn,
    LiveTurnList,
    LiveTurns,
    ReadTurn,
    TurnDone,
    TurnFailed,
    TurnRefused,
)
from actors.scripted_engine import last_message
from gpu.errors import GpuFull
from gpu.sequence import Request, StepOutput
from store.journal import Journal, JournalError
from store.journal_records import Record
from supervision.envelope import Envelope
from tests.actors.small_tree import Reading, SmallTree, on_virtual_time, script_of, small_tree

GOLDEN = "the golden text, été"
TOKENS = len(GOLDEN.encode())


async def until(reading: Reading, characters: int) -> None:
    while len(reading.text) < characters:
        message, _ = await reading.client.receive()
        await reading.hear(message)


async def books_are_exact(small: SmallTree, *readings: Reading) -> None:
    """Each turn charged for every position it received, once, and no reservation left."""
    await trio.sleep(10)
    assert small.books.reserved == {}
    for reading in readings:
        assert isinstance(reading.last, TurnDone), reading.last
        charged = small.books.tokens_of(reading.request_id)
        assert sum(charged.values()) == reading.last.usage.completion_tokens
        for choice, count in charged.items():
            witnessed = small.books.witnessed[reading.request_id, choice]
            assert witnessed >= set(range(count))


# ------------------------------------------------------------------ each actor, in mid-stream


@pytest.mark.parametrize("victim", ["batcher.0", "session.0", "safety.0", "limiter", "ledger", "router"])
@pytest.mark.parametrize("after", [1, 7, TOKENS - 2])
@on_virtual_time
async def test_the_death_of_any_actor_changes_no_word_and_no_charge(
    victim: str, after: int, tmp_path: Path
) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        await until(reading, after)
        await small.restart(victim)
        await reading.finish()
        assert reading.text == GOLDEN
        assert reading.reasons == ["stop"]
        assert reading.last.usage.completion_tokens == TOKENS
        await books_are_exact(small, reading)


@on_virtual_time
async def test_a_batcher_that_is_away_for_long_is_waited_for(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        await until(reading, 5)
        await small.tree.kill("batcher.0")
        await trio.sleep(30)
        await small.start("batcher.0")
        await reading.finish()
        assert reading.text == GOLDEN
        await books_are_exact(small, reading)


@on_virtual_time
async def test_a_turn_moves_to_another_batcher(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        await small.start("batcher.1")
        reading = small.reader(small.opening("go", temperature=1.0, seed=5))
        await reading.open()
        await until(reading, 5)
        await small.tree.kill("batcher.0")
        await reading.finish()
        assert reading.text == GOLDEN
        await small.start("batcher.0")
        await books_are_exact(small, reading)


@on_virtual_time
async def test_a_session_host_that_dies_again_and_again_loses_nothing(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        reading = small.reader(small.opening("go", n=2))
        await reading.open()
        while not reading.is_over:
            with trio.move_on_after(0.08):
                await reading.finish()
            await small.restart("session.0")
            await reading.attach()
        assert reading.texts == [GOLDEN, GOLDEN]
        await books_are_exact(small, reading)


@on_virtual_time
async def test_two_deaths_at_once_are_survived(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        await until(reading, 5)
        for name in ("session.0", "batcher.0", "limiter", "ledger", "safety.0", "router"):
            await small.tree.kill(name)
        for name in ("limiter", "ledger", "safety.0", "router", "batcher.0", "session.0"):
            await small.start(name)
        await reading.finish()
        assert reading.text == GOLDEN
        await books_are_exact(small, reading)


@on_virtual_time
async def test_a_resumed_turn_that_nobody_comes_back_for_ends_after_the_grace(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of("x" * 1500)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        await until(reading, 5)
        await small.restart("session.0")
        live = await small.edge.ask("session.0", LiveTurns(("turn-1", "gone")), timeout=5)
        assert live == LiveTurnList(("turn-1",))
        await trio.sleep(11)
        record = await small.edge.ask("session.0", ReadTurn("turn-1", "acme"), timeout=5)
        assert record.status == "incomplete"
        assert record.texts[0].startswith(reading.text)
        await trio.sleep(1)
        assert small.books.tokens_of("turn-1") == {0: record.usage.completion_tokens}
        assert small.books.reserved == {}


@on_virtual_time
async def test_the_death_of_an_edge_starts_the_grace_of_its_turns(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of("x" * 1500)) as small:
        edge = small.tree.client("edge.1")
        reading = small.reader(small.opening("go"), edge)
        await reading.open()
        await small.tree.kill("edge.1")
        await trio.sleep(5)
        again = small.reader(small.opening("go"))
        again.opened, again.opening = reading.opened, reading.opening
        await again.attach()
        await again.finish()
        assert again.text == "x" * 1500


# ------------------------------------------------------------------ every journal write


class Dies(Exception):
    """A planted death, at one journal write."""


def dying_at(number: int, *, before: bool) -> Callable[[Journal, Iterable[Record]], None]:
    """Return a `Journal.write` that dies at its nth call, before or after the commit."""
    write = Journal.write
    calls = iter(range(1, 1_000_000))

    def dies(journal: Journal, records: Iterable[Record]) -> None:
        this = next(calls)
        if this == number and before:
            raise Dies
        write(journal, records)
        if this == number:
            raise Dies

    return dies


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 10, 20, 39, 40, 41, 42, 43, 44, 45])
@on_virtual_time
async def test_a_death_at_any_journal_write_loses_and_doubles_nothing(
    number: int, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "write", dying_at(number, before=before))
            reading = small.reader(small.opening("go"))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reading.run)
                with trio.move_on_after(20):
                    assert isinstance(await small.tree.crash_of("session.0"), Dies)
                    await small.start("session.0")
        assert reading.text == GOLDEN
        assert reading.last.usage.completion_tokens == TOKENS
        await books_are_exact(small, reading)


# ------------------------------------------------------------------ lost, doubled and late messages


def faults_on(kind: str, delays: Callable[[int], list[float]]) -> Callable[[Envelope], list[float]]:
    """Return a fault for the nth message of one kind."""
    seen = iter(range(1_000_000))

    def fault(envelope: Envelope) -> list[float]:
        return delays(next(seen)) if envelope.kind == kind else [0.0]

    return fault


@pytest.mark.parametrize(
    "delays",
    [
        lambda n: [] if n == 5 else [0.0],
        lambda n: [] if n % 3 == 1 else [0.0],
        lambda n: [0.0, 0.0],
        lambda n: [0.05] if n % 2 else [0.0],
        lambda n: [] if n >= TOKENS - 1 and n < TOKENS + 3 else [0.0],
    ],
    ids=["one lost", "a third lost", "all doubled", "reordered", "the last lost"],
)
@on_virtual_time
async def test_lost_doubled_and_reordered_tokens_change_nothing(
    delays: Callable[[int], list[float]], tmp_path: Path
) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        small.tree.hub.fault = faults_on("Tokens", delays)
        reading = await small.say("go")
        assert reading.text == GOLDEN
        await books_are_exact(small, reading)


@pytest.mark.parametrize(
    "kind",
    ["Reserve", "Screen", "Route", "Generate", "Settle", "Charge", "Reserved", "Screened", "Routed",
     "GenerationAccepted", "Settled", "Charged", "CancelGeneration", "Witness"],
)  # fmt: skip
@on_virtual_time
async def test_any_one_message_may_be_lost_or_doubled(kind: str, tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        for delays in (lambda n: [] if n == 0 else [0.0], lambda n: [0.0, 0.0]):
            small.tree.hub.fault = faults_on(kind, delays)
            reading = await small.say("go", stop=("été",))
            small.tree.hub.fault = None
            assert reading.refused is None
            assert reading.text == GOLDEN.removesuffix("été")
            await books_are_exact(small, reading)


# ------------------------------------------------------------------ poison


def poison(request: Request) -> bytes:
    if b"poison" in last_message(request.prompt):
        raise RuntimeError("a request that kills its batcher")
    return GOLDEN.encode()


async def keep_alive(small: SmallTree, name: str, crashes: list[BaseException]) -> None:
    """Start an actor again whenever it crashes."""
    while True:
        crashes.append(await small.tree.crash_of(name))
        await trio.sleep(0.3)
        await small.start(name)


@on_virtual_time
async def test_a_poison_request_is_refused_after_two_batchers_and_harms_no_other(tmp_path: Path) -> None:
    async with small_tree(tmp_path, poison) as small, trio.open_nursery() as nursery:
        crashes: list[BaseException] = []
        nursery.start_soon(keep_alive, small, "batcher.0", crashes)
        edges = [small.tree.client(f"edge.{n}") for n in range(1, 6)]
        texts = ["good", "good", "poison", "good", "good"]
        readings = [small.reader(small.opening(t), e) for t, e in zip(texts, edges, strict=True)]
        async with trio.open_nursery() as turns:
            for reading in readings:
                turns.start_soon(reading.run)
        bad = readings.pop(2)
        assert isinstance(bad.last, TurnFailed)
        assert bad.last.error.code == "engine_failed"
        assert [r.text for r in readings] == [GOLDEN] * 4
        assert len(crashes) == 2
        await books_are_exact(small, *readings)
        assert bad.request_id not in small.books.charges
        await small.tree.context("session.0").pause(1)
        assert small.books.waived == {bad.request_id}
        nursery.cancel_scope.cancel()


# ------------------------------------------------------------------ a device without memory


@pytest.mark.parametrize("killed", [False, True])
@on_virtual_time
async def test_what_is_shed_for_want_of_memory_is_told_to_ask_again_and_the_rest_goes_on(
    killed: bool, tmp_path: Path
) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        old, new = (
            small.reader(small.opening("go")),
            small.reader(small.opening("go"), small.tree.client("edge.1")),
        )
        for reading in (old, new):
            await reading.open()
            await until(reading, 3)
        engine = small.tree._running["batcher.0"].runtime.actor._engine
        step, failures = engine.step, [GpuFull("the GPU's memory is full")] * MEMORY_TRIES

        def short_of_memory() -> StepOutput:
            if failures:
                raise failures.pop()
            return step()

        engine.step = short_of_memory
        if killed:
            await trio.sleep(MEMORY_PAUSE * MEMORY_TRIES)
            assert not failures
            await small.restart("session.0")
        await new.finish()
        await old.finish()
        error = new.last.error
        assert (error.status, error.code, error.headers) == (
            503,
            "server_is_overloaded",
            (("retry-after", "1"),),
        )
        assert error.message.endswith("the GPU's memory is full")
        assert GOLDEN.startswith(new.text)
        assert old.text == GOLDEN
        again = await small.say("go")
        assert again.text == GOLDEN
        await books_are_exact(small, old, again)


# ------------------------------------------------------------------ a disk that takes nothing


@on_virtual_time
async def test_a_full_disk_pauses_turns_refuses_new_ones_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        await until(reading, 5)

        def full(_: Journal, records: Iterable[Record]) -> None:
            raise JournalError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "write", full)
            await trio.sleep(3)
            before = len(reading.text)
            for message, _ in small.edge.received():
                await reading.hear(message)
            assert len(reading.text) <= before + 3
            refused = await small.edge.ask("session.0", small.opening("go"), timeout=5)
            assert isinstance(refused, TurnRefused)
            assert refused.error.status == 503
        await reading.finish()
        assert reading.text == GOLDEN
        await books_are_exact(small, reading)


# ------------------------------------------------------------------ money at the edges of time


@on_virtual_time
async def test_a_cancel_at_the_instant_of_the_last_token_is_one_charge(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of("abc")) as small:
        for attempt in range(200):
            opening = small.opening("go")
            reading = small.reader(opening)
            await reading.open()
            await trio.sleep(0.025 + 0.0001 * attempt)
            await small.edge.ask("session.0", CancelTurn(opening.request_id, "acme"), timeout=5)
            await reading.finish()
        await trio.sleep(5)
        assert small.books.reserved == {}
        for request_id, charges in small.books.charges.items():
            assert len(charges) == 1
            record = await small.edge.ask("session.0", ReadTurn(request_id, "acme"), timeout=5)
            assert sum(small.books.tokens_of(request_id).values()) == record.usage.completion_tokens
        assert len(small.books.charges) == 200


@on_virtual_time
async def test_with_room_for_one_the_next_call_finds_it_free(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        for _ in range(5):
            await small.say("go")
            assert small.books.reserved == {}
        assert small.books.max_open == 1


@on_virtual_time
async def test_a_session_host_that_stops_lets_those_that_are_heard_end(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(GOLDEN)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        await until(reading, 3)

        async def hear_all(*, task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            while not reading.is_over:
                message, _ = await small.edge.receive()
                await reading.hear(message)

        async with trio.open_nursery() as nursery:
            await nursery.start(hear_all)
            await small.tree.stop("session.0")
        assert reading.text == GOLDEN
        await small.start("session.0")
        await books_are_exact(small, reading)
