"""Group commit: one writer, and as many acts in each transaction as have gathered since the last one began.

An act is acknowledged when the transaction that holds it is durable, never before. An error of the writer
comes out of `run`, which ends the actor: nothing that was waiting is acknowledged, those who asked get
`ActorDown` and ask again. The disk's error is not retried, for after a failed fsync nobody knows what the
disk holds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import trio

Act = TypeVar("Act")
Outcome = TypeVar("Outcome")

MOST_AT_ONCE = 2048
"""Acts in one transaction: bounds how long the last one waits, and the memory of a batch."""


class GroupCommit(Generic[Act, Outcome]):
    """Collects acts and writes them in groups in a thread.

    `write` gets a group in order and returns its outcomes when they are durable; `done` is awaited with
    each act and outcome, in order, in the actor's own thread. `in_thread` False is for a `write` that waits
    for no flush: going to a thread and back would take longer than it does.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Act]], Sequence[Outcome]],
        done: Callable[[Act, Outcome], Awaitable[None]],
        *,
        in_thread: bool = True,
    ) -> None:
        self._write = write
        self._done = done
        self._in_thread = in_thread
        self._waiting: list[Act] = []
        self._wake = trio.Event()
        self._idle = trio.Event()
        self._idle.set()
        self.groups = 0
        """Transactions so far."""
        self.acts = 0
        """Acts in them."""

    @property
    def waiting(self) -> int:
        """Acts that no transaction has begun to write."""
        return len(self._waiting)

    def submit(self, act: Act) -> None:
        """Put an act into the next group."""
        self._waiting.append(act)
        self._idle = trio.Event() if self._idle.is_set() else self._idle
        self._wake.set()

    async def drained(self) -> None:
        """Wait until everything submitted is durable and acknowledged."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write group after group, for ever.

        Raises whatever `write` does. Cancellation: a group that is being written is finished in its thread,
        its acts stay unacknowledged, as after a kill.
        """
        while True:
            await self._wake.wait()
            group, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
            if not self._waiting:
                self._wake = trio.Event()
            outcomes = await self._outcomes(group)
            self.groups += 1
            self.acts += len(group)
            for act, outcome in zip(group, outcomes, strict=True):
                await self._done(act, outcome)
            if not self._waiting:
                self._idle.set()

    async def _outcomes(self, group: Sequence[Act]) -> Sequence[Outcome]:
        if self._in_thread:
            return await trio.to_thread.run_sync(self._write, group)
        return self._write(group)
