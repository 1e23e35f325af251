"""The batcher by itself, with the scripted engine: what it answers, what it frees, what it tells."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import evolve

from actors.batcher import BatcherSettings
from actors.protocol import (
    Allow,
    CancelGeneration,
    Charged,
    Generate,
    GenerationAccepted,
    GenerationCancelled,
    GenerationRefused,
    Load,
    Metrics,
    ReadMetrics,
    TokenChunk,
    Tokens,
    Witness,
)
from gpu.sampling_params import SamplingParams
from gpu.sequence import Request
from supervision.local import Client, LocalTree
from tests.actors.small_tree import ScriptedBatcher, on_virtual_time

REPLY = b"a reply of some length"


def generate(name: str = "turn/0", **fields: Any) -> Generate:
    allow = Allow(name.partition("/")[0], "input", 0, 2, "safety.0", "p")
    made = Generate(name, "acme", "small", tuple(b"<user>hi\n<assistant>"), SamplingParams(100, 0.0), allow)
    return evolve(made, **fields)


def say_reply(request: Request) -> bytes:
    return REPLY


@asynccontextmanager
async def batcher(
    state: Path, script: Any = say_reply, **settings: Any
) -> AsyncIterator[tuple[LocalTree, Client]]:
    made = BatcherSettings("", "small", "scripted", step_seconds=0.01, **settings)
    async with LocalTree(state_dir=state) as tree:
        await tree.start("batcher.0", ScriptedBatcher(made, script))
        yield tree, tree.client("session.0")


async def chunks(session: Client, count: int) -> list[TokenChunk]:
    """Take tokens until there are so many chunks, or nothing more comes."""
    taken: list[TokenChunk] = []
    with trio.move_on_after(5):
        while len(taken) < count:
            message, _ = await session.receive()
            if isinstance(message, Tokens):
                taken += message.chunks
    return taken


def text_of(taken: list[TokenChunk]) -> bytes:
    return bytes(token for chunk in taken for token in chunk.tokens)


@on_virtual_time
async def test_a_generation_comes_token_by_token_with_positions(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (_, session):
        assert await session.ask("batcher.0", generate(), timeout=5) == GenerationAccepted("turn/0")
        taken = await chunks(session, len(REPLY) + 1)
        assert text_of(taken) == REPLY
        assert [chunk.position for chunk in taken] == list(range(len(REPLY) + 1))
        assert [chunk.finish for chunk in taken] == [""] * len(REPLY) + ["stop"]


@on_virtual_time
async def test_one_step_is_one_message_to_each_session_host(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (tree, session):
        other = tree.client("session.1")
        for name in ("a/0", "b/0"):
            await session.ask("batcher.0", generate(name), timeout=5)
        await other.ask("batcher.0", generate("c/0"), timeout=5)
        await trio.sleep(0.1)
        for client, names in ((session, {"a/0", "b/0"}), (other, {"c/0"})):
            messages = [message for message, _ in client.received()]
            assert all(isinstance(message, Tokens) for message in messages)
            assert {chunk.generation for chunk in messages[-1].chunks} == names


@on_virtual_time
async def test_it_goes_on_after_emitted_tokens(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (_, session):
        await session.ask("batcher.0", generate(emitted=tuple(REPLY[:9])), timeout=5)
        taken = await chunks(session, len(REPLY) - 8)
        assert taken[0].position == 9
        assert text_of(taken) == REPLY[9:]


@on_virtual_time
async def test_asking_again_for_a_running_generation_changes_nothing(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (_, session):
        for _ in range(3):
            assert await session.ask("batcher.0", generate(), timeout=5) == GenerationAccepted("turn/0")
            await trio.sleep(0.03)
        taken = await chunks(session, len(REPLY) + 1)
        assert text_of(taken) == REPLY


@on_virtual_time
async def test_a_cancel_is_confirmed_when_the_blocks_are_free(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (tree, session):
        actor = tree._running["batcher.0"].runtime.actor
        for wait in (0.0, 0.005, 0.05):
            await session.ask("batcher.0", generate(), timeout=5)
            await trio.sleep(wait)
            reply = await session.ask("batcher.0", CancelGeneration("turn/0"), timeout=5)
            assert reply == GenerationCancelled("turn/0", known=True)
            assert actor._engine._requests == {}
            await trio.sleep(0.005)
            session.received()
            await trio.sleep(0.1)
            assert session.received() == []
        again = await session.ask("batcher.0", CancelGeneration("turn/0"), timeout=5)
        assert again == GenerationCancelled("turn/0", known=False)


@on_virtual_time
async def test_a_cancel_touches_no_other_generation(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (_, session):
        await session.ask("batcher.0", generate("a/0"), timeout=5)
        await session.ask("batcher.0", generate("b/0"), timeout=5)
        await session.ask("batcher.0", CancelGeneration("a/0"), timeout=5)
        taken = [c for c in await chunks(session, 1000) if c.generation == "b/0"]
        assert text_of(taken) == REPLY


@on_virtual_time
async def test_what_a_dead_session_host_wanted_is_dropped(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (tree, session):
        await session.ask("batcher.0", generate(), timeout=5)
        await trio.sleep(0.05)
        await tree.kill("session.0")
        await trio.sleep(0.05)
        actor = tree._running["batcher.0"].runtime.actor
        assert actor._engine._requests == {}
        successor = tree.client("session.0")
        await successor.ask("batcher.0", generate(emitted=tuple(REPLY[:2])), timeout=5)
        assert text_of(await chunks(successor, len(REPLY) - 1)) == REPLY[2:]


@on_virtual_time
async def test_a_full_engine_and_a_bad_request_are_refused_apart(tmp_path: Path) -> None:
    async with batcher(tmp_path, max_batch=1) as (tree, session):
        actor = tree._running["batcher.0"].runtime.actor
        actor._engine._max_waiting = 0
        await session.ask("batcher.0", generate("a/0"), timeout=5)
        full = await session.ask("batcher.0", generate("b/0"), timeout=5)
        assert isinstance(full, GenerationRefused)
        assert full.error.status == 503
        actor._engine._max_waiting = 10
        bad = await session.ask("batcher.0", generate("c/0", prompt=(65,) * 9000), timeout=5)
        assert isinstance(bad, GenerationRefused)
        assert (bad.error.status, bad.error.param) == (400, "messages")


@on_virtual_time
async def test_the_router_hears_of_load_at_most_ten_times_a_second(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (tree, session):
        router = tree.client("router")
        await session.ask("batcher.0", generate(), timeout=5)
        await trio.sleep(3)
        loads = [message for message, _ in router.received()]
        assert 3 <= len(loads) <= 31
        assert all(isinstance(load, Load) and load.model == "small" for load in loads)
        assert max(load.running for load in loads) == 1
        assert (loads[-1].running, loads[-1].waiting) == (0, 0)
        assert loads[-1].free_blocks == loads[-1].total_blocks > 0


async def events_of(ledger: Client, confirm: bool) -> list[tuple[int, int]]:
    message, sender = await ledger.receive()
    assert isinstance(message, Witness)
    if confirm:
        await ledger.reply(sender, Charged("", 0))
    return [(event.start, event.end) for event in message.events]


@on_virtual_time
async def test_the_books_hear_of_each_generation_until_they_confirm(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (tree, session):
        await session.ask("batcher.0", generate(), timeout=5)
        await chunks(session, len(REPLY) + 1)
        ledger = tree.client("ledger")
        assert await events_of(ledger, confirm=False) == [(0, len(REPLY))]
        assert await events_of(ledger, confirm=True) == [(0, len(REPLY))]
        await trio.sleep(20)
        assert ledger.received() == []


@on_virtual_time
async def test_a_batcher_killed_in_mid_reply_still_witnesses_what_it_sent(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (tree, session):
        await session.ask("batcher.0", generate(), timeout=5)
        taken = await chunks(session, 7)
        await tree.restart("batcher.0", ScriptedBatcher(BatcherSettings("", "small", "scripted"), say_reply))
        ledger = tree.client("ledger")
        ((start, end),) = await events_of(ledger, confirm=True)
        assert start == 0
        assert end >= taken[-1].position + 1


@on_virtual_time
async def test_an_engine_that_breaks_ends_the_incarnation(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (tree, session):
        await session.ask("batcher.0", generate(), timeout=5)

        def broken() -> None:
            raise RuntimeError("a kernel failed")

        tree._running["batcher.0"].runtime.actor._engine.step = broken
        assert str(await tree.crash_of("batcher.0")) == "a kernel failed"


@on_virtual_time
async def test_figures_are_named_as_operators_know_them(tmp_path: Path) -> None:
    async with batcher(tmp_path) as (_, session):
        await session.ask("batcher.0", generate(), timeout=5)
        await chunks(session, len(REPLY) + 1)
        metrics: Metrics = await session.ask("batcher.0", ReadMetrics(), timeout=5)
        names = {line.partition("{")[0] for line in metrics.lines}
        for name in (
            "antiphon_time_to_first_token_seconds_bucket",
            "antiphon_inter_token_latency_seconds_count",
            "antiphon_e2e_request_latency_seconds_sum",
            "antiphon_request_queue_time_seconds_count",
            "antiphon_num_requests_running",
            "antiphon_num_requests_waiting",
            "antiphon_kv_cache_usage_perc",
            "antiphon_prompt_tokens_total",
            "antiphon_generation_tokens_total",
            "antiphon_prefix_cache_queries_total",
            "antiphon_prefix_cache_hits_total",
            "antiphon_num_preemptions_total",
        ):
            assert name in names
        labels = 'actor="batcher.0",model_name="small",prompt_length="0-256"'
        assert f"antiphon_time_to_first_token_seconds_count{{{labels}}} 1" in metrics.lines
        assert f"antiphon_inter_token_latency_seconds_count{{{labels}}} {len(REPLY) - 1}" in metrics.lines
