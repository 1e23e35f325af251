"""The child's side: one incarnation of an actor, from its birth on.

Its process was forked by a template (`supervision.template`), which has loaded all of this already.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import socket
from pathlib import Path

import trio

from supervision import chaos_hooks, control, log, prctl, wire
from supervision.actor import Actor
from supervision.errors import SupervisionError
from supervision.nng import open_mailbox
from supervision.runtime import Runtime

LOG = logging.getLogger("supervision.process")


_ALLOCATIONS = 20_000
"""Objects made, less those gone, before the collector looks at the young ones."""


class BadActor(SupervisionError):
    """The tree's data names no actor, or settings its class does not take."""


def actor_class(path: str) -> type[Actor]:
    """Return the class `"package.module:Class"`. Raises `BadActor`."""
    module, _, name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadActor(f"no actor {path!r}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise BadActor(f"{path!r} is not an Actor")
    return cls


def load_actor(path: str, settings: object) -> Actor:
    """Return the actor `"package.module:Class"`, made from plain settings. Raises `BadActor`."""
    cls = actor_class(path)
    try:
        made: Actor = cls(wire.structure(settings, cls.Settings))  # type: ignore[arg-type,call-arg]
    except ValueError as error:
        raise BadActor(f"settings of {path}: {error}") from error
    return made


def spare_the_collector() -> None:
    """Take what is loaded out of the garbage collector's sight, and have it look less often.

    Messages make many objects and no cycles: at the default threshold the collector would run every few
    frames, over everything that was imported.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, 20, 50)


class Line:
    """The child's end of the control descriptor, inside trio."""

    def __init__(self, descriptor: socket.socket) -> None:
        self._socket = trio.socket.from_stdlib_socket(descriptor)
        self._raw = descriptor

    def say(self, report: control.Report) -> None:
        """Send a report, or lose it: the supervisor that does not read is stopped, and will look again."""
        try:
            os.write(self._raw.fileno(), control.encode(report))
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return

    async def hear(self) -> control.Report | None:
        """Return the supervisor's next report; None: it is gone."""
        data = await self._socket.recv(control.MAX_REPORT)
        return control.decode(data) if data else None


async def live(birth: control.Birth, actor: Actor, line: Line) -> None:
    """Run the actor: mailbox, tree pushes, heartbeat, SIGTERM."""
    state_dir = Path(birth.state_dir)
    async with open_mailbox(birth.name, state_dir / "run") as mailbox, trio.open_nursery() as nursery:
        runtime = Runtime(
            actor,
            mailbox,
            name=birth.name,
            epoch=birth.epoch,
            tree=birth.tree,
            state_dir=state_dir,
            files=birth.files,
        )
        nursery.start_soon(_take_pushes, line, runtime)
        nursery.start_soon(_stop_on_sigterm, runtime, birth.grace)
        nursery.start_soon(_run, runtime, line, birth.heartbeat, nursery.cancel_scope)


async def _run(runtime: Runtime, line: Line, heartbeat: float, scope: trio.CancelScope) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_beat_when_ready, runtime, line, heartbeat)
        await runtime.run()
        nursery.cancel_scope.cancel()
    scope.cancel()


async def _beat_when_ready(runtime: Runtime, line: Line, heartbeat: float) -> None:
    await runtime.ready.wait()
    line.say(control.Ready())
    while True:
        pulse = runtime.context.pulse
        line.say(control.Beat(pulse.progress, pulse.busy or runtime.depth > 0, runtime.depth))
        await trio.sleep(heartbeat)


async def _take_pushes(line: Line, runtime: Runtime) -> None:
    while True:
        report = await line.hear()
        if report is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(report, control.Push):
            runtime.push(report.tree)


async def _stop_on_sigterm(runtime: Runtime, grace: float) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            runtime.stop(grace)


def main(descriptor: int, parent: int) -> int:
    """Wait for the birth, and be the actor until it ends; returns the exit status."""
    raw = socket.socket(fileno=descriptor)
    data = raw.recv(control.MAX_REPORT)
    if not data:
        return 0
    prctl.die_with_parent(parent)
    birth = control.decode(data)
    if not isinstance(birth, control.Birth):
        raise TypeError(f"the first report is {birth!r}, not Birth")
    raw.setblocking(False)
    log.install(birth.name, birth.epoch)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the supervisor's to answer
    chaos_hooks.install(Path(birth.state_dir))
    return trio.run(_contained, birth, raw)


async def _contained(birth: control.Birth, raw: socket.socket) -> int:
    line = Line(raw)
    actor: Actor | None = None
    try:
        actor = load_actor(birth.actor, birth.settings)
        spare_the_collector()
        await live(birth, actor, line)
    except Exception as error:
        was_up = actor is not None and _was_up(actor)
        LOG.exception("actor died")
        line.say(control.Dying(log.describe(error, with_words=not was_up)))
        return 1
    LOG.info("actor stopped")
    return 0


def _was_up(actor: Actor) -> bool:
    """Whether it may have seen a message: then an exception's words may quote it."""
    context = getattr(actor, "context", None)
    return context is not None and context.pulse.progress > 0
