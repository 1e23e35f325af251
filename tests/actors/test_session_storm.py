"""Many turns, random deaths, cancels and departures, from a seed: every promise holds for every turn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from actors.protocol import CancelTurn, ReadTurn, TurnDone, TurnRecord
from actors.scripted_engine import last_message
from gpu.sequence import Request
from tests.actors.small_tree import Reading, SmallTree, on_virtual_time, small_tree

VICTIMS = ("batcher.0", "batcher.1", "session.0", "safety.0", "safety.1", "limiter", "ledger", "router")


def long_echo(request: Request) -> bytes:
    """A reply that names its asker in every word: a foreign word is seen at once."""
    return last_message(request.prompt) * 12


def golden(reading: Reading) -> str:
    return reading.opening.messages[-1].content * 12


async def kill_at_random(small: SmallTree, rng: random.Random, kills: int) -> None:
    for _ in range(kills):
        await trio.sleep(rng.uniform(0.0, 0.4))
        name = rng.choice(VICTIMS)
        await small.tree.kill(name)
        await trio.sleep(rng.uniform(0.0, 0.1))
        await small.start(name)


async def chat(small: SmallTree, reading: Reading, rng: random.Random) -> None:
    await trio.sleep(rng.uniform(0.0, 2.0))
    await reading.open()
    if reading.refused is not None:
        return
    if rng.random() < 0.3:
        with trio.move_on_after(rng.uniform(0.0, 1.5)):
            await reading.finish()
        cancel = CancelTurn(reading.request_id, reading.opening.owner)
        await small.persist(reading.client, "session.0", cancel)
    await reading.finish()


async def check(small: SmallTree, reading: Reading) -> None:
    if reading.refused is not None:
        assert reading.refused.error.status == 503
        return
    whole = golden(reading)
    assert all(whole.startswith(text) for text in reading.texts)
    if isinstance(reading.last, TurnDone):
        assert reading.texts == [whole] * reading.opening.n
    owner, request_id = reading.opening.owner, reading.request_id
    record: TurnRecord = await small.edge.ask("session.0", ReadTurn(request_id, owner), timeout=5)
    assert record.texts == tuple(reading.texts)
    assert record.last_sequence == len(reading.events)
    charged = small.books.tokens_of(request_id)
    assert sum(charged.values()) == record.usage.completion_tokens
    assert len({c.spans for c in small.books.charges.get(request_id, [])}) <= 1
    for choice, count in charged.items():
        assert small.books.witnessed[request_id, choice] >= set(range(count))


async def storm(seed: int, state: Path) -> None:
    rng = random.Random(seed)
    async with small_tree(state, long_echo, batcher_patience=30.0) as small:
        await small.start("batcher.1", "safety.1")
        readings = []
        for number in range(8):
            opening = small.opening(f"<{number}>é", n=rng.choice((1, 1, 2)), owner=f"owner-{number % 3}")
            readings.append(small.reader(opening, small.tree.client(f"edge.{number + 1}")))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_at_random, small, rng, 12)
            for reading in readings:
                nursery.start_soon(chat, small, reading, rng)
        await trio.sleep(30)
        assert small.books.reserved == {}
        for reading in readings:
            await check(small, reading)
        for name in ("batcher.0", "batcher.1"):
            assert small.tree._running[name].runtime.actor._engine._requests == {}
        session = small.tree._running["session.0"].runtime.actor
        assert (session._turns, session._readers, session._settling) == ({}, {}, set())
        assert session._earlier.admissions == {}


@pytest.mark.parametrize("seed", range(6))
def test_a_storm_breaks_no_promise(seed: int, tmp_path: Path) -> None:
    on_virtual_time(storm)(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_many_storms_break_no_promise(seed: int, tmp_path: Path) -> None:
    on_virtual_time(storm)(seed, tmp_path)
