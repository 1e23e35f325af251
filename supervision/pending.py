"""Asks this actor has begun and not yet answered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio
from attrs import define

from supervision.actor import Sender
from supervision.slots import Alarms

Key = tuple[str, int, int]
"""Names an ask at its receiver: sender, sender's epoch, correlation."""


@define
class _Open:
    sender: Sender
    alarm: int = 0
    deferred: bool = False
    given_up: bool = False


class Pending:
    """The answers owed. `give_up` is called for a deferred ask (`LATER`) that its asker no longer wants."""

    def __init__(self, alarms: Alarms, give_up: Callable[[Sender], None]) -> None:
        self._alarms = alarms
        self._give_up = give_up
        self._open: dict[Key, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, sender: Sender) -> None:
        """Owe an answer: the actor is about to handle the ask."""
        self._open[key_of(sender)] = _Open(sender)

    def defer(self, sender: Sender) -> None:
        """Watch the deadline of an ask the actor will answer later, unless it has answered already."""
        key = key_of(sender)
        entry = self._open.get(key)
        if entry is None:
            return
        entry.deferred = True
        if entry.given_up or trio.current_time() >= sender.deadline:
            self.cancel(key)
        else:
            entry.alarm = self._alarms.set(sender.deadline, partial(self._expire, key))

    def close(self, sender: Sender) -> bool:
        """Note that an answer goes out; False when none is owed any more."""
        entry = self._open.pop(key_of(sender), None)
        if entry is None:
            return False
        self._alarms.call_off(entry.alarm)
        return not entry.given_up

    def cancel(self, key: Key) -> bool:
        """Note that the asker gave up; False when the ask is not one that was begun."""
        entry = self._open.get(key)
        if entry is None:
            return False
        entry.given_up = True
        if entry.deferred:
            self.close(entry.sender)
            self._give_up(entry.sender)
        return True

    def _expire(self, key: Key) -> None:
        self.cancel(key)

    def lose(self, name: str, epoch: int) -> None:
        """Owe nothing to an asker that is gone."""
        for key in [key for key in self._open if key[:2] == (name, epoch)]:
            self.close(self._open[key].sender)


def key_of(sender: Sender) -> Key:
    """Return the name of the ask that `sender` made."""
    return (sender.name, sender.epoch, sender.correlation)
