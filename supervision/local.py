"""A small tree in one process: real actors, real codec, no sockets, no processes, any clock.

    async with LocalTree() as tree:
        await tree.start("limiter", Limiter(settings))
        client = tree.client("test.0")
        reply = await client.ask("limiter", Reserve(...), timeout=5)
        message, sender = await client.receive()        # what others told or asked the client
        await client.reply(sender, Answer(...))

`kill(name)` does what SIGKILL does: nothing the actor had queued arrives, the tree is pushed without it,
whoever waits for it gets `ActorDown`, everyone's `on_down` is called. `stop(name)` is SIGTERM: `on_stop`,
then gone. `restart(name, actor)` kills it if it is up and starts `actor` under its name with a higher epoch.

An actor that raises is taken as dead, as in a real tree; `await tree.crash_of(name)` waits for that and
returns the exception. A crash nobody asked about is raised when the block ends, so no test passes over one.

`tree.hub.fault` loses, repeats, delays (`supervision.memory.SeededFaults`). Under `trio.testing.MockClock`
and a seeded scheduler the whole tree is replayable. Names are told and asked exactly as in a real tree, so
nothing an actor does differs here, save that a kill still runs its `finally` blocks, cut off from the hub.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trio
from attrs import define, field

from supervision.actor import LATER, Actor, Context, Sender
from supervision.context import ActorContext
from supervision.errors import ActorDown
from supervision.inbox import CAPACITY
from supervision.memory import Hub
from supervision.runtime import Runtime
from supervision.tree import Member, State, Tree

GRACE = 5.0
"""Seconds `stop` gives by default, as `ChildSpec.grace`."""


class _Mouthpiece(Actor):
    """The actor behind a `Client`: it hands on whatever it is sent."""

    def __init__(self) -> None:
        self.send, self.receive = trio.open_memory_channel[tuple[Any, Sender]](math.inf)
        self.downs: list[tuple[str, int]] = []
        self.given_up: list[Sender] = []

    async def on_message(self, message: Any, sender: Sender) -> Any:
        self.send.send_nowait((message, sender))
        return LATER if sender.correlation else None

    async def on_cancel(self, sender: Sender) -> None:
        self.given_up.append(sender)

    async def on_down(self, name: str, epoch: int) -> None:
        self.downs.append((name, epoch))


class Client:
    """A test's own place in the tree: a `Context` (`tell`, `ask`, `reply`, `tree`) and what it was sent."""

    def __init__(self, context: Context, mouthpiece: _Mouthpiece) -> None:
        self.context = context
        self.ask = context.ask
        self.tell = context.tell
        self.reply = context.reply
        self._mouthpiece = mouthpiece

    @property
    def name(self) -> str:
        """The client's name in the tree."""
        return self.context.name

    @property
    def epoch(self) -> int:
        """The client's epoch."""
        return self.context.epoch

    @property
    def tree(self) -> Tree:
        """The tree as the client knows it."""
        return self.context.tree

    @property
    def downs(self) -> list[tuple[str, int]]:
        """The deaths the client was told of, in order: (name, epoch)."""
        return self._mouthpiece.downs

    @property
    def given_up(self) -> list[Sender]:
        """The asks to the client that their askers gave up before it replied."""
        return self._mouthpiece.given_up

    async def receive(self) -> tuple[Any, Sender]:
        """Return the next message sent to the client, waiting for one. An ask is answered with `reply`."""
        return await self._mouthpiece.receive.receive()

    def received(self) -> list[tuple[Any, Sender]]:
        """Take everything that has been sent to the client so far, without waiting."""
        taken = []
        while self._mouthpiece.receive.statistics().current_buffer_used:
            taken.append(self._mouthpiece.receive.receive_nowait())
        return taken


@define
class _Running:
    runtime: Runtime
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    over: trio.Event = field(factory=trio.Event)
    crash: BaseException | None = None


class LocalTree:
    """Many actors in one process. Use it as an async context manager; see the module's text."""

    def __init__(self, *, state_dir: Path | None = None, hub: Hub | None = None) -> None:
        self.hub = hub or Hub()
        self.state_dir = state_dir or Path()
        self.tree = Tree()
        self._epochs = itertools.count(1)
        self._running: dict[str, _Running] = {}
        self._crashes: dict[str, BaseException] = {}
        self._crashed = trio.lowlevel.ParkingLot()
        self._manager = trio.open_nursery()
        self._nursery: trio.Nursery

    async def __aenter__(self) -> Self:
        self._nursery = await self._manager.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._nursery.cancel_scope.cancel()
        try:
            suppressed = await self._manager.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if error is not None and group.exceptions == (error,):
                return False  # the block's own exception comes out as it is
            raise
        crashes = [crash for crash in self._crashes.values() if isinstance(crash, Exception)]
        if error is None and crashes:
            raise ExceptionGroup("actors crashed and no one asked", crashes)
        return suppressed

    async def start(
        self, name: str, actor: Actor, *, capacity: int = CAPACITY, files: dict[str, int] | None = None
    ) -> int:
        """Start an actor; returns its epoch when it is up.

        An exception of its `on_start` is raised here; `ActorDown` when it was killed or stopped meanwhile.
        """
        running = self._launch(name, actor, capacity, files or {})
        await self._nursery.start(self._live, name, running)
        return running.runtime.context.epoch

    def client(self, name: str, *, capacity: int = CAPACITY) -> Client:
        """Join the tree as `name`, up at once."""
        mouthpiece = _Mouthpiece()
        running = self._launch(name, mouthpiece, capacity, {})
        running.runtime.actor.context = running.runtime.context
        self._nursery.start_soon(self._live, name, running)
        self._set(name, running.runtime.context.epoch, "up")
        return Client(running.runtime.context, mouthpiece)

    def context(self, name: str) -> ActorContext:
        """Return a running actor's context: its slots, pulse and dead letters, for a test to look at."""
        return self._running[name].runtime.context

    async def kill(self, name: str) -> None:
        """End an actor where it stands; returns when it is gone and everyone knows."""
        running = self._running[name]
        self.cut_down(name)
        await running.over.wait()

    def cut_down(self, name: str) -> None:
        """Begin `kill`: from now on nothing the actor says is heard.

        Never waits, so it may be called from anywhere, from the actor's own code too.
        """
        self.hub.cut_off(name)
        self._running[name].scope.cancel()

    async def gone(self, name: str) -> BaseException | None:
        """Wait until no incarnation is there; returns what the last one died of, None for a kill."""
        if name in self._running:
            await self._running[name].over.wait()
        return self._crashes.pop(name, None)

    async def stop(self, name: str, *, grace: float = GRACE) -> None:
        """Stop an actor in order; returns when it is gone and everyone knows."""
        running = self._running[name]
        running.runtime.stop(grace)
        await running.over.wait()

    async def restart(self, name: str, actor: Actor) -> int:
        """Start `actor` under a name that is taken; the one that has it is killed. Returns the epoch."""
        if name in self._running:
            await self.kill(name)
        return await self.start(name, actor)

    async def crash_of(self, name: str) -> BaseException:
        """Wait until `name` has crashed, and return why: its one exception, or an `ExceptionGroup`."""
        while name not in self._crashes:
            await self._crashed.park()
        return self._crashes.pop(name)

    def _launch(self, name: str, actor: Actor, capacity: int, files: dict[str, int]) -> _Running:
        if name in self._running:
            raise ValueError(f"{name} is running: kill or restart it")
        epoch = next(self._epochs)
        runtime = Runtime(
            actor,
            self.hub.mailbox(name),
            name=name,
            epoch=epoch,
            tree=self.tree,
            state_dir=self.state_dir,
            files=files,
            capacity=capacity,
        )
        running = self._running[name] = _Running(runtime)
        self._set(name, epoch, "starting")
        return running

    async def _live(
        self, name: str, running: _Running, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        ready = _Ready(lambda: self._set(name, running.runtime.context.epoch, "up"), task_status)
        try:
            with running.scope:
                await running.runtime.run(task_status=ready)
        except Exception as error:  # noqa: BLE001 - an actor's death is news, not the tree's end
            crash = _only(error)
            if not ready.is_ready:
                raise crash from None
            self._crashes[name] = crash
            self._crashed.unpark_all()
        finally:
            self._bury(name, running)
        if not ready.is_ready:
            raise ActorDown(name, "killed or stopped while it started")

    def _bury(self, name: str, running: _Running) -> None:
        self.hub.cut_off(name)
        del self._running[name]
        self._set(name, running.runtime.context.epoch, "down")
        running.over.set()

    def _set(self, name: str, epoch: int, state: State) -> None:
        members = {**self.tree.members, name: Member(name, epoch, state)}
        self.tree = Tree(self.tree.version + 1, members)
        for running in self._running.values():
            running.runtime.push(self.tree)


class _Ready:
    """A `TaskStatus` that marks the actor up before it lets `start` return."""

    def __init__(self, mark_up: Any, task_status: trio.TaskStatus[None]) -> None:
        self.is_ready = False
        self._mark_up = mark_up
        self._task_status = task_status

    def started(self, value: None = None) -> None:
        self.is_ready = True
        self._mark_up()
        self._task_status.started(value)


def _only(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
