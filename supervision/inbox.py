"""What waits for the actor's own task, in order of arrival."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import trio
from attrs import frozen

from supervision.actor import Sender
from supervision.envelope import Envelope
from supervision.message import KEEP_NEWEST

CAPACITY = 1024
"""Messages that may wait. Asks past it are refused with `Busy`."""

_TELLS = 2
"""At this many times the capacity the socket is left unread, so that tells wait at their senders."""

_HARD = 16
"""An actor that waits for replies must read its socket; at this many times the capacity a tell is lost."""


@frozen
class Down:
    """An incarnation is gone: `on_down`."""

    name: str
    epoch: int


@frozen
class GaveUp:
    """The asker of a `LATER` gave up: `on_cancel`."""

    sender: Sender


class Arrived(NamedTuple):
    """A tell or an ask, and when it stops being wanted. A named tuple, for one is made per message."""

    envelope: Envelope
    deadline: float


class Inbox:
    """The actor's queue. One task puts, one takes."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._queue: deque[Arrived | Down | GaveUp] = deque()
        self._taker = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, item: Arrived | Down | GaveUp) -> None:
        """Append."""
        self._queue.append(item)
        if len(self._queue) == 1:
            self._taker.unpark()

    def accept(self, arrived: Arrived) -> bool:
        """Take a message if it finds room; False: an ask must be refused, a tell is lost.

        In a full inbox a keep-the-newest message takes the place of its elder, if there is one.
        """
        queue = self._queue
        if len(queue) >= self.capacity:
            return self._squeeze(arrived)
        queue.append(arrived)
        if len(queue) == 1:
            self._taker.unpark()
        return True

    def _squeeze(self, arrived: Arrived) -> bool:
        new = arrived.envelope
        if new.kind in KEEP_NEWEST and self._replace(arrived):
            return True
        if new.correlation or len(self._queue) >= _HARD * self.capacity:
            return False
        self._queue.append(arrived)
        return True

    def _replace(self, arrived: Arrived) -> bool:
        for index in range(len(self._queue) - 1, -1, -1):
            item = self._queue[index]
            if isinstance(item, Arrived) and _supersedes(arrived.envelope, item.envelope):
                self._queue[index] = arrived
                return True
        return False

    def withdraw(self, sender: str, epoch: int, correlation: int) -> bool:
        """Remove an ask that has not been begun; False: it is not here."""
        for index, item in enumerate(self._queue):
            if isinstance(item, Arrived) and _is_ask(item.envelope, sender, epoch, correlation):
                del self._queue[index]
                return True
        return False

    async def wait(self) -> None:
        """Return when something is here. Cancellation: nothing happened."""
        while not self._queue:
            await self._taker.park()

    def take(self) -> Arrived | Down | GaveUp | None:
        """Return the oldest item, or None."""
        queue = self._queue
        if self._room and len(queue) <= self.capacity:
            self._room.unpark_all()
        return queue.popleft() if queue else None

    async def wait_room(self, must_read: bool) -> None:
        """Return when the socket may be read: there is room, or the actor itself `must_read` replies."""
        if len(self._queue) >= _TELLS * self.capacity and not must_read:
            await self._room.park()

    def wake_reader(self) -> None:
        """Have the reader look again: the actor has begun to wait for a reply."""
        self._room.unpark_all()


def _supersedes(new: Envelope, old: Envelope) -> bool:
    return not old.correlation and not new.correlation and old.kind == new.kind and old.sender == new.sender


def _is_ask(envelope: Envelope, sender: str, epoch: int, correlation: int) -> bool:
    return (
        envelope.correlation == correlation and envelope.sender == sender and envelope.sender_epoch == epoch
    )
