"""Spares: processes spawned ahead of need, so that a dead actor's successor has its imports behind it.

A spare is a child that has not been told who it is: it has loaded its actor's module and waits for its birth on its
control descriptor. It holds no state, has no epoch, and nobody can send it anything. Taking one turns a restart of most
of a second into one of a tenth. Each child has its own: its log and inherited descriptors are those it will need.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress

import trio
from attrs import frozen

from supervision.spec import ChildSpec

SETTLED = 3.0
"""Seconds a child must have lived before a spare is made for it: one that crashes at once is not worth one."""
_LOOK = 0.5
"""Seconds between two looks. One spare is made at a look, so that a start is never a crowd."""


@frozen
class Spawned:
    """A process and our end of its control descriptor, on which nothing has been said yet."""

    process: subprocess.Popen[bytes]
    ours: socket.socket


class Spares:
    """At most one spare for each child. Used by the supervisor's own thread alone."""

    def __init__(self, spawn: Callable[[ChildSpec], Spawned], gone: Callable[[int], None]) -> None:
        self._spawn = spawn
        self._gone = gone
        self._waiting: dict[str, Spawned] = {}
        self._wanted: dict[str, tuple[ChildSpec, float]] = {}

    def take(self, spec: ChildSpec) -> Spawned | None:
        """Return the child's spare, or None; and want the next one, once the child has settled."""
        self._wanted[spec.name] = (spec, trio.current_time() + SETTLED)
        spare = self._waiting.pop(spec.name, None)
        return spare if spare is not None and self._lives(spare) else None

    async def keep(self) -> None:
        """Make what is wanted, for ever. Cancellation: every spare stays, until `dismiss`."""
        while True:
            await trio.sleep(_LOOK)
            now = trio.current_time()
            due = next((spec for spec, at in self._wanted.values() if at <= now and self._lacks(spec)), None)
            if due is not None:
                with suppress(OSError):  # no process or descriptor to be had now: the next look tries again
                    self._waiting[due.name] = self._spawn(due)

    def dismiss(self) -> None:
        """Kill and reap every spare, and make no more."""
        self._wanted.clear()
        while self._waiting:
            self.discard(self._waiting.popitem()[1])

    def discard(self, spare: Spawned) -> None:
        """Kill and reap one that was taken and is not to be used."""
        spare.process.kill()
        spare.process.wait()
        self._bury(spare)

    def _lacks(self, spec: ChildSpec) -> bool:
        spare = self._waiting.get(spec.name)
        if spare is not None and not self._lives(spare):
            del self._waiting[spec.name]
            spare = None
        return spare is None

    def _lives(self, spare: Spawned) -> bool:
        if spare.process.poll() is None:
            return True
        self._bury(spare)
        return False

    def _bury(self, spare: Spawned) -> None:
        spare.ours.close()
        self._gone(spare.process.pid)
