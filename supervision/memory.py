"""Mailboxes of one process, joined by a `Hub`, with faults on request.

Everything goes through the codec, so what works here can be sent for real. Nothing here reads a clock
but trio's, so a test runs under `MockClock`, and a seeded simulation is replayable.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence

import trio
from attrs import frozen

from supervision import wire
from supervision.envelope import Envelope
from supervision.mailbox import Mailbox
from supervision.outbox import CAPACITY, Outbox

Fault = Callable[[Envelope], Sequence[float]]
"""Decides what becomes of a message: one copy arrives after each delay returned, in seconds.

`[0.0]` is a faithful network, `[]` loses the message, `[0.0, 0.0]` repeats it, `[0.3]` delays it, so that
later ones overtake it.
"""


@frozen
class SeededFaults:
    """A `Fault` that loses, repeats and delays at random, from a seed of its own.

    `lose`, `repeat` and `delay` are probabilities; a delayed message waits up to `at_most` seconds.
    """

    rng: random.Random
    lose: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    at_most: float = 1.0

    def __call__(self, _: Envelope) -> Sequence[float]:
        """Return the delay of each copy that arrives."""
        if self.rng.random() < self.lose:
            return []
        copies = 2 if self.rng.random() < self.repeat else 1
        return [self._delay() for _ in range(copies)]

    def _delay(self) -> float:
        return self.rng.uniform(0.0, self.at_most) if self.rng.random() < self.delay else 0.0


class Hub:
    """The network of a process. `fault` may be set and cleared at any time."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.fault: Fault | None = None
        self._mailboxes: dict[str, MemoryMailbox] = {}
        self._queues: dict[str, dict[str, Outbox]] = {}

    def mailbox(self, name: str) -> MemoryMailbox:
        """Return a new mailbox under `name`; one that had the name before is cut off."""
        self.cut_off(name)
        made = MemoryMailbox(name, self)
        self._mailboxes[name] = made
        return made

    def cut_off(self, name: str) -> None:
        """Take a mailbox off the network, as a kill does: nothing it queued or had waiting is delivered."""
        gone = self._mailboxes.pop(name, None)
        if gone is not None:
            gone.hang_up()

    def queues_to(self, name: str) -> dict[str, Outbox]:
        """Return the queues towards `name`, by sender."""
        return self._queues.setdefault(name, {})


class MemoryMailbox(Mailbox):
    """A mailbox on a `Hub`. Its receiver takes straight from its senders' queues."""

    def __init__(self, name: str, hub: Hub) -> None:
        self.name = name
        self.hub = hub
        self._cut_off = False
        self._outboxes: dict[str, Outbox] = {}
        self._turns: deque[str] = deque()
        self._delayed: list[tuple[float, int, bytes]] = []
        self._sent = 0
        self._arrivals = trio.lowlevel.ParkingLot()

    def outbox(self, to: str) -> Outbox:
        """Return the queue towards `to`."""
        found = self._outboxes.get(to)
        if found is None:
            found = self._outboxes[to] = _NotifyingOutbox(to, self.hub)
            if self._cut_off:
                found.close()
            else:
                self.hub.queues_to(to)[self.name] = found
        return found

    async def receive(self) -> bytes:
        """Return the next frame: from each sender in turn, after the faults have had their say."""
        while True:
            due = self._due()
            if due:
                return wire.frame(due)
            taken, fault = self._take_turn(), self.hub.fault
            if not taken:
                await self._wait()
            elif fault is None:
                return wire.frame(taken)
            else:
                self._corrupt(taken, fault)

    def forget(self, to: str) -> int:
        """Drop what is queued for `to`."""
        gone = self._outboxes.pop(to, None)
        if gone is None:
            return 0
        queues = self.hub.queues_to(to)
        if queues.get(self.name) is gone:
            del queues[self.name]
        return gone.close()

    async def flush(self) -> None:
        """Return when the peers have taken everything."""
        for outbox in list(self._outboxes.values()):
            await outbox.drained()

    def hang_up(self) -> None:
        """Drop everything this mailbox queued, and take nothing more."""
        self._cut_off = True
        for to in list(self._outboxes):
            self.forget(to)
            self.outbox(to)

    def wake(self) -> None:
        """Something was queued for this mailbox."""
        self._arrivals.unpark_all()

    def _take_turn(self) -> list[bytes]:
        queues = {} if self._cut_off else self.hub.queues_to(self.name)
        for sender in [*self._turns, *(name for name in queues if name not in self._turns)]:
            if sender in self._turns:
                self._turns.remove(sender)
            taken = queues[sender].take() if sender in queues else []
            if taken:
                self._turns.append(sender)
                return taken
        return []

    def _corrupt(self, taken: list[bytes], fault: Fault) -> None:
        now = trio.current_time()
        for data in taken:
            (envelope,) = wire.decode(wire.frame([data]))
            for delay in fault(envelope):
                self._sent += 1
                self._delayed.append((now + delay, self._sent, data))

    def _due(self) -> list[bytes]:
        if not self._delayed:
            return []
        now = trio.current_time()
        self._delayed.sort()
        count = sum(1 for at, _, _ in self._delayed if at <= now)
        due = [data for _, _, data in self._delayed[: min(count, wire.MAX_ENVELOPES)]]
        del self._delayed[: len(due)]
        return due

    async def _wait(self) -> None:
        until = min((at for at, _, _ in self._delayed), default=math.inf)
        with trio.move_on_at(until):
            await self._arrivals.park()


class _NotifyingOutbox(Outbox):
    """An outbox that wakes the receiver itself: in one process no one stands between."""

    def __init__(self, peer: str, hub: Hub) -> None:
        super().__init__(peer, hub.capacity)
        self._hub = hub

    def offer(self, kind: str, data: bytes) -> bool:
        taken = super().offer(kind, data)
        if taken:
            self._notify()
        return taken

    def put_control(self, kind: str, data: bytes) -> None:
        super().put_control(kind, data)
        self._notify()

    def _notify(self) -> None:
        receiver = self._hub._mailboxes.get(self.peer)  # noqa: SLF001 - one module
        if receiver is not None and len(self) == 1:
            receiver.wake()
