"""The bounded queue of encoded messages towards one peer."""

from __future__ import annotations

from collections import deque

import trio

from supervision.message import WhenFull
from supervision.wire import FRAME_TARGET, MAX_ENVELOPES

CAPACITY = 1024
"""Messages one peer may be behind before its queue is full."""

_TURN = 64
"""A sender that never waits is made to yield this often, so that the queue's owner gets to run."""


class OutboxFull(Exception):
    """The queue is full and the message says to refuse."""


class OutboxClosed(Exception):
    """The peer is gone; nothing more is taken."""


class Outbox:
    """Messages for one peer, oldest first, each with its kind. Many tasks put, one takes."""

    def __init__(self, peer: str, capacity: int = CAPACITY) -> None:
        self.peer = peer
        self.capacity = capacity
        self.closed = False
        self._queue: deque[tuple[str, bytes]] = deque()
        self._takers = trio.lowlevel.ParkingLot()
        self._putters = trio.lowlevel.ParkingLot()
        self._drainers = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, kind: str, data: bytes) -> bool:
        """Queue a message that need not wait, without a checkpoint; False: `put` it instead."""
        waiting = len(self._queue)
        if self.closed or waiting >= self.capacity or waiting % _TURN == _TURN - 1:
            return False
        self._queue.append((kind, data))
        if not waiting:
            self._takers.unpark()
        return True

    async def put(self, kind: str, data: bytes, when_full: WhenFull) -> None:
        """Queue a message as its class says. Raises `OutboxFull` or `OutboxClosed`.

        Cancellation: the message is queued whole or not at all.
        """
        await trio.lowlevel.checkpoint()
        if len(self._queue) >= self.capacity and await self._squeeze(kind, data, when_full):
            return
        self.put_control(kind, data)

    def put_control(self, kind: str, data: bytes) -> None:
        """Queue what may not wait (a cancel, a refusal: one per ask at most), full or not."""
        if self.closed:
            raise OutboxClosed(self.peer)
        self._queue.append((kind, data))
        if len(self._queue) == 1:
            self._takers.unpark()

    async def _squeeze(self, kind: str, data: bytes, when_full: WhenFull) -> bool:
        """Deal with a full queue; True when the message has replaced an older one."""
        if when_full is WhenFull.NEWEST and self._replace(kind, data):
            return True
        while len(self._queue) >= self.capacity and not self.closed:
            if when_full is not WhenFull.WAIT:
                raise OutboxFull(self.peer)
            await self._putters.park()
        return False

    def _replace(self, kind: str, data: bytes) -> bool:
        for index in range(len(self._queue) - 1, -1, -1):
            if self._queue[index][0] == kind:
                self._queue[index] = (kind, data)
                return True
        return False

    async def wait(self) -> None:
        """Return when something is queued. Raises `OutboxClosed`. Cancellation: nothing happened."""
        while not self._queue:
            if self.closed:
                raise OutboxClosed(self.peer)
            await self._takers.park()

    def take(self) -> list[bytes]:
        """Take the oldest messages that make one frame; none when the queue is empty."""
        taken: list[bytes] = []
        size = 0
        queue = self._queue
        while queue and len(taken) < MAX_ENVELOPES:
            data = queue[0][1]
            size += len(data)
            if taken and size > FRAME_TARGET:
                break
            queue.popleft()
            taken.append(data)
        if self._putters and len(queue) < self.capacity:
            self._putters.unpark(count=self.capacity - len(queue))
        if self._drainers and not queue:
            self._drainers.unpark_all()
        return taken

    async def drained(self) -> None:
        """Return when nothing is queued. Cancellation: nothing happened."""
        while self._queue:
            await self._drainers.park()

    def close(self) -> int:
        """Take no more, drop what is queued, wake everyone. Returns how many messages were dropped."""
        dropped = len(self._queue)
        self._queue.clear()
        self.closed = True
        self._putters.unpark_all()
        self._takers.unpark_all()
        self._drainers.unpark_all()
        return dropped
