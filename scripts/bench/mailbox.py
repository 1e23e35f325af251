"""The mailbox against raw pynng: `tell` under load, `ask` with 64 in flight, and what the codec costs.

Every figure is between two real processes. Ours and raw take turns within one run, so that a busy machine
slows both alike; a row is the median over the rounds.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pynng
import trio
from attrs import frozen

from scripts.bench.report import Row
from supervision import wire
from supervision.actor import Actor, Sender
from supervision.context import ActorContext
from supervision.envelope import Envelope
from supervision.message import WhenFull, message
from supervision.nng import open_mailbox
from supervision.process import spare_the_collector
from supervision.runtime import Runtime
from supervision.tree import Member, Tree

NAME = "mailbox"
ROUNDS = 7
IN_FLIGHT = 64
BODY = "x" * 180
"""Makes an envelope of some 260 bytes, about a step's message for one turn."""

_LAST = -1
"""The number of a round's last message."""

_TREE = Tree(1, {"server": Member("server", 1, "up"), "client": Member("client", 2, "up")})

Part = Callable[[Connection, Path], Awaitable[None]]
"""One end of a measurement, in a process of its own: it is told over the pipe how many to send, or says when
the last has come."""


@message(repeatable=True, when_full=WhenFull.WAIT)
class BenchItem:
    """A tell; an ask and its reply."""

    number: int
    text: str


@frozen
class _Contest:
    """Ours against raw: how many messages a round has, and who sends and gets them."""

    ours: tuple[Part, Part]
    raw: tuple[Part, Part]
    count: int
    raw_count: int


def run() -> list[Row]:
    """Return the rows: ratios to raw pynng, the rates behind them, the codec's cost."""
    tells = _Contest((_tell_server, _tell_client), (_pull_server, _push_client), 40_000, 3_000)
    asks = _Contest((_ask_server, _ask_client), (_rep_server, _req_client), 8_000, 2_000)
    return [
        *_rows("tell under load", "raw asend/arecv, one a frame", _rates(tells), floor=10, aim=20),
        *_rows(f"ask, {IN_FLIGHT} in flight", "raw Req0/Rep0 contexts", _rates(asks), floor=3, aim=5),
        *_codec_rows(),
    ]


def _rates(contest: _Contest) -> list[tuple[float, float]]:
    with _two_processes(*contest.ours) as ours, _two_processes(*contest.raw) as raw:
        ours(contest.count // 10)
        raw(contest.raw_count // 10)
        return [(ours(contest.count), raw(contest.raw_count)) for _ in range(ROUNDS)]


def _rows(what: str, raw: str, rates: list[tuple[float, float]], **bounds: float) -> list[Row]:
    return [
        _row(f"{what} / {raw}", [mine / theirs for mine, theirs in rates], "x", **bounds),
        _row(what, [mine for mine, _ in rates], "1/s"),
        _row(raw, [theirs for _, theirs in rates], "1/s"),
    ]


def _row(name: str, values: list[float], unit: str, **bounds: Any) -> Row:
    return Row(name, statistics.median(values), unit, low=min(values), high=max(values), **bounds)


# ------------------------------------------------------------------ two processes


@contextmanager
def _two_processes(server: Part, client: Part) -> Iterator[Callable[[int], float]]:
    """Give a function that sends so many messages from one process to another and returns the rate."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench") as run_dir:
        to_server, to_client = spawn.Pipe(), spawn.Pipe()
        ends = [
            spawn.Process(target=_in_process, args=(part, pipe[1], run_dir), daemon=True)
            for part, pipe in ((server, to_server), (client, to_client))
        ]
        for end in ends:
            end.start()

        def rate(count: int) -> float:
            to_client[0].send(count)
            began: float = to_client[0].recv()
            ended: float = to_server[0].recv()
            return count / (ended - began)

        try:
            yield rate
        finally:
            for end in ends:
                end.kill()
                end.join()


def _in_process(part: Part, pipe: Connection, run_dir: str) -> None:
    spare_the_collector()
    trio.run(part, pipe, Path(run_dir))


async def _told(pipe: Connection) -> int:
    await trio.lowlevel.wait_readable(pipe.fileno())
    count: int = pipe.recv()
    return count


# ------------------------------------------------------------------ ours


class _Server(Actor):
    """Echoes asks, and says when a round's last message has come."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def on_message(self, message: BenchItem, sender: Sender) -> Any:
        if message.number == _LAST:
            self._pipe.send(time.monotonic())
        return message if sender.correlation else None


async def _as_actor(
    name: str, actor: Actor, run_dir: Path, use: Callable[[ActorContext], Awaitable[None]]
) -> None:
    async with open_mailbox(name, run_dir) as mailbox, trio.open_nursery() as nursery:
        runtime = Runtime(actor, mailbox, name=name, epoch=_TREE.epoch(name), tree=_TREE)
        await nursery.start(runtime.run)
        await use(runtime.context)


async def _idle(_: ActorContext) -> None:
    await trio.sleep_forever()


async def _tell_server(pipe: Connection, run_dir: Path) -> None:
    await _as_actor("server", _Server(pipe), run_dir, _idle)


_ask_server = _tell_server


async def _tell_client(pipe: Connection, run_dir: Path) -> None:
    async def tell(context: ActorContext) -> None:
        while True:
            count = await _told(pipe)
            pipe.send(time.monotonic())
            for number in range(count - 1):
                await context.tell("server", BenchItem(number, BODY))
            await context.tell("server", BenchItem(_LAST, BODY))

    await _as_actor("client", Actor(), run_dir, tell)


async def _ask_client(pipe: Connection, run_dir: Path) -> None:
    async def ask(context: ActorContext) -> None:
        async def some(numbers: Iterator[int]) -> None:
            for number in numbers:
                await context.ask("server", BenchItem(number, BODY), timeout=30)

        await _in_flight(pipe, some)

    await _as_actor("client", Actor(), run_dir, ask)


async def _in_flight(pipe: Connection, some: Callable[[Iterator[int]], Awaitable[None]]) -> None:
    """Share a round's numbers among `IN_FLIGHT` tasks; its last goes alone when all others are answered."""
    while True:
        numbers = iter(range(await _told(pipe) - 1))
        pipe.send(time.monotonic())
        async with trio.open_nursery() as nursery:
            for _ in range(IN_FLIGHT):
                nursery.start_soon(some, numbers)
        await some(iter([_LAST]))


# ------------------------------------------------------------------ raw pynng


def _raw(number: int) -> bytes:
    return wire.encode(
        Envelope(0, "server", 1, "client", 2, 1, "BenchItem", -1, "", "", BenchItem(number, BODY))
    )


async def _pull_server(pipe: Connection, run_dir: Path) -> None:
    last = _raw(_LAST)
    with pynng.Pull0(listen=f"ipc://{run_dir}/raw") as pull:
        while True:
            if await pull.arecv() == last:
                pipe.send(time.monotonic())


async def _push_client(pipe: Connection, run_dir: Path) -> None:
    one, last = _raw(0), _raw(_LAST)
    with pynng.Push0(dial=f"ipc://{run_dir}/raw", block_on_dial=False, reconnect_time_min=20) as push:
        while True:
            count = await _told(pipe)
            pipe.send(time.monotonic())
            for _ in range(count - 1):
                await push.asend(one)
            await push.asend(last)


async def _rep_server(pipe: Connection, run_dir: Path) -> None:
    last = _raw(_LAST)

    async def echo(context: Any) -> None:
        while True:
            request = await context.arecv()
            if request == last:
                pipe.send(time.monotonic())
            await context.asend(request)

    with pynng.Rep0(listen=f"ipc://{run_dir}/raw") as rep:
        async with trio.open_nursery() as nursery:
            for _ in range(IN_FLIGHT):
                nursery.start_soon(echo, rep.new_context())


async def _req_client(pipe: Connection, run_dir: Path) -> None:
    one, last = _raw(0), _raw(_LAST)
    with pynng.Req0(dial=f"ipc://{run_dir}/raw", block_on_dial=False, reconnect_time_min=20) as req:

        async def some(numbers: Iterator[int]) -> None:
            with req.new_context() as context:
                for number in numbers:
                    await context.asend(last if number == _LAST else one)
                    await context.arecv()

        await _in_flight(pipe, some)


# ------------------------------------------------------------------ the codec


def _codec_rows() -> list[Row]:
    body = BenchItem(5, "x" * 920)
    envelope = Envelope(
        1, "session.0", 5, "edge.0", 6, 1234, "BenchItem", 9000, "org/project/user", "4bf92f3577b34da6", body
    )
    data = wire.encode(envelope)
    framed = wire.frame([data] * wire.MAX_ENVELOPES)

    def read() -> None:
        for found in wire.decode(framed):
            wire.open_body(found.kind, found.body)

    name = f"envelope of {len(data)} bytes"
    return [
        _row(f"{name}, out", _microseconds(partial(wire.encode, envelope), 1), "us", floor=5, better="lower"),
        _row(f"{name}, in", _microseconds(read, wire.MAX_ENVELOPES), "us", floor=5, better="lower"),
    ]


def _microseconds(call: Callable[[], object], envelopes: int) -> list[float]:
    calls = 2560 // envelopes
    found = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(calls):
            call()
        found.append((time.thread_time() - began) / (calls * envelopes) * 1e6)
    return found
