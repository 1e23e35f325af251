"""The batcher on a GPU, with the engine and nvidia-smi played by the test: pinned, short of memory, gone."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from actors import batcher as batcher_module
from actors import batcher_gpu
from actors.batcher import Batcher, BatcherSettings
from actors.batcher_gpu import RETRY_AFTER, Seat
from actors.protocol import GenerationAccepted, GenerationRefused, TokenChunk, Tokens
from actors.scripted_engine import ScriptedEngine
from gpu.errors import EngineError, GpuFailed, GpuFull, ModelError
from gpu.kernels.cuda_cards import Card
from supervision.errors import CannotGoOn
from supervision.local import Client, LocalTree
from supervision.spec import SupervisorSpec
from tests.actors.test_batcher import REPLY, generate, say_reply, text_of

UUID = "GPU-5a1f"
LISTED = tuple(
    Card(i, uuid, "NVIDIA H100", 81559, (9, 0), "580.1") for i, uuid in enumerate((UUID, "GPU-77c2"))
)
SETTINGS = BatcherSettings("some.gguf", "small", "cuda", device=UUID, device_name="NVIDIA H100", max_batch=7)


class OnCard(ScriptedEngine):
    """A step waits for `gate`, then raises what is first in `faults`; None stands for a step that is well."""

    def __init__(self) -> None:
        super().__init__(say_reply)
        self.faults: list[EngineError | None] = []
        self.gate = threading.Event()
        self.gate.set()

    def step(self) -> Any:
        self.gate.wait(30)
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        return super().step()


def on_real_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Steps run in threads, which no virtual clock knows of. The limit only ends a test that hangs."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            with trio.fail_after(60):
                await test(*args, **kwargs)

        trio.run(bounded)

    return run


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> list[Card]:
    """What nvidia-smi lists."""
    cards = list(LISTED)
    monkeypatch.setattr(batcher_gpu, "list_cards", lambda _environment: tuple(cards))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(batcher_module, "MEMORY_PAUSE", 0.0)
    return cards


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> OnCard:
    made = OnCard()
    monkeypatch.setattr(batcher_module, "load_engine_on_gpu", lambda _path, **_sizes: made)
    return made


@asynccontextmanager
async def running(state: Path) -> AsyncIterator[tuple[LocalTree, Client]]:
    async with LocalTree(state_dir=state) as tree:
        await tree.start("batcher.0", Batcher(SETTINGS))
        yield tree, tree.client("session.0")


async def until_end(session: Client, *names: str) -> dict[str, list[TokenChunk]]:
    """Every chunk of these generations, when the last has ended."""
    found: dict[str, list[TokenChunk]] = {name: [] for name in names}
    while not all(chunks and chunks[-1].finish for chunks in found.values()):
        message, _ = await session.receive()
        for chunk in message.chunks if isinstance(message, Tokens) else ():
            found[chunk.generation].append(chunk)
    return found


@on_real_time
async def test_it_loads_with_its_own_card_the_only_one_in_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def load(path: str, **sizes: int) -> OnCard:
        seen.append((os.environ["CUDA_VISIBLE_DEVICES"], path, sizes))
        return OnCard()

    monkeypatch.setattr(batcher_module, "load_engine_on_gpu", load)
    async with running(tmp_path) as (_, session):
        assert seen == [(UUID, "some.gguf", {"max_batch": 7})]
        assert await session.ask("batcher.0", generate(), timeout=30) == GenerationAccepted("turn/0")
        assert text_of((await until_end(session, "turn/0"))["turn/0"]) == REPLY


@on_real_time
async def test_a_step_without_memory_costs_nobody_a_word(tmp_path: Path, engine: OnCard) -> None:
    engine.faults = [GpuFull("full")] * (batcher_module.MEMORY_TRIES - 1)
    async with running(tmp_path) as (_, session):
        await session.ask("batcher.0", generate(), timeout=30)
        assert text_of((await until_end(session, "turn/0"))["turn/0"]) == REPLY
    assert engine.faults == []


@on_real_time
async def test_while_memory_is_short_new_work_is_refused_with_503(tmp_path: Path, engine: OnCard) -> None:
    engine.gate.clear()
    engine.faults = [GpuFull("full")]
    async with running(tmp_path) as (_, session), trio.open_nursery() as nursery:
        await session.ask("batcher.0", generate("a/0"), timeout=30)

        async def refused() -> None:
            answer = await session.ask("batcher.0", generate("b/0"), timeout=30)
            assert isinstance(answer, GenerationRefused)
            assert (answer.error.status, answer.error.code) == (503, "server_is_overloaded")
            assert "memory is full" in answer.error.message

        nursery.start_soon(refused)
        await trio.testing.wait_all_tasks_blocked()
        engine.gate.set()
        assert text_of((await until_end(session, "a/0"))["a/0"]) == REPLY
        assert isinstance(await session.ask("batcher.0", generate("b/0"), timeout=30), GenerationAccepted)


@on_real_time
async def test_memory_that_stays_short_costs_the_newest_and_then_work_goes_on(
    tmp_path: Path, engine: OnCard
) -> None:
    engine.gate.clear()
    engine.faults = [None, *[GpuFull("the GPU's memory is full")] * (2 * batcher_module.MEMORY_TRIES)]
    async with running(tmp_path) as (_, session), trio.open_nursery() as nursery:
        await session.ask("batcher.0", generate("old/0"), timeout=30)
        for name in ("middle/0", "new/0"):
            nursery.start_soon(partial(session.ask, "batcher.0", generate(name), timeout=30))
        await trio.testing.wait_all_tasks_blocked()
        engine.gate.set()
        found = await until_end(session, "old/0", "middle/0", "new/0")
        assert text_of(found["old/0"]) == REPLY
        for name in ("middle/0", "new/0"):
            assert (found[name][-1].finish, found[name][-1].error) == ("shed", "the GPU's memory is full")
            assert text_of(found[name]) == REPLY[: found[name][-1].position]
        assert isinstance(await session.ask("batcher.0", generate("next/0"), timeout=30), GenerationAccepted)
        assert text_of((await until_end(session, "next/0"))["next/0"]) == REPLY


@on_real_time
async def test_a_card_that_falls_off_the_bus_ends_its_batcher_in_plain_words(
    tmp_path: Path, engine: OnCard, listed: list[Card]
) -> None:
    async with running(tmp_path) as (tree, session):
        engine.faults = [GpuFailed("the GPU failed: cudaErrorUnknown: unknown error")]
        del listed[0]
        await session.ask("batcher.0", generate(), timeout=30)
        crash = await tree.crash_of("batcher.0")
        assert isinstance(crash, CannotGoOn)
        assert str(crash).startswith(f"NVIDIA H100 ({UUID}) fell off the bus: nvidia-smi lists it no more.")
        assert "cudaErrorUnknown" in str(crash)


@on_real_time
async def test_a_card_that_failed_and_is_still_there_is_told_apart(tmp_path: Path, engine: OnCard) -> None:
    async with running(tmp_path) as (tree, session):
        engine.faults = [GpuFailed("the GPU failed: cudaErrorIllegalAddress")]
        await session.ask("batcher.0", generate(), timeout=30)
        crash = await tree.crash_of("batcher.0")
        assert str(crash) == f"NVIDIA H100 ({UUID}): the GPU failed: cudaErrorIllegalAddress"


def cannot_load() -> OnCard:
    raise ModelError("the model leaves 0 MiB free")


@on_real_time
async def test_a_tree_that_only_starts_hears_at_once_that_a_model_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batcher_gpu, "RETRY_AFTER", math.inf)
    with pytest.raises(CannotGoOn, match=r"NVIDIA H100 \(GPU-5a1f\): the model leaves 0 MiB free"):
        await Seat(UUID, "NVIDIA H100").load(cannot_load, others_serve=False)


@on_real_time
async def test_while_others_serve_the_next_try_waits(
    monkeypatch: pytest.MonkeyPatch, listed: list[Card]
) -> None:
    """A group gives up after a few restarts in ten seconds, and with it the tree."""
    slept = []

    async def sleep(seconds: float) -> None:
        await trio.lowlevel.checkpoint()
        slept.append(seconds)

    monkeypatch.setattr(trio, "sleep", sleep)
    listed.clear()
    with pytest.raises(CannotGoOn, match="fell off the bus"):
        await Seat(UUID, "NVIDIA H100").load(cannot_load, others_serve=True)
    assert slept == [RETRY_AFTER]
    assert SupervisorSpec("engines", "one_for_one", ()).window < RETRY_AFTER


@on_real_time
async def test_whether_others_serve_is_seen_in_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    async def load(_seat: Seat, make: Any, *, others_serve: bool) -> OnCard:
        await trio.lowlevel.checkpoint()
        seen.append(others_serve)
        return OnCard()

    monkeypatch.setattr(Seat, "load", load)
    async with running(tmp_path) as (tree, _):
        tree.client("edge.0")
        await tree.restart("batcher.0", Batcher(SETTINGS))
    assert seen == [False, True]
