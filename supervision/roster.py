"""The supervisor's list of who lives: the tree it pushes and the facts `antiphon ps` prints."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from supervision.child import Incarnation
from supervision.tree import Member, State, Tree


@define
class Entry:
    """One actor's facts, over all its incarnations."""

    name: str
    epoch: int = 0
    state: State = "down"
    restarts: int = -1
    depth: int = 0
    last_error: str = ""
    incarnation: Incarnation | None = None


class Roster:
    """Every change makes a newer tree, pushed at once to every child that runs."""

    def __init__(self, next_epoch: Callable[[], int]) -> None:
        self.entries: dict[str, Entry] = {}
        self.tree = Tree()
        self._next_epoch = next_epoch

    def enlist(self, name: str) -> None:
        """Name an actor of the tree, in its order. Raises `ValueError` when the name is taken."""
        if name in self.entries:
            raise ValueError(f"two children are called {name!r}: names are addresses, make them differ")
        self.entries[name] = Entry(name)

    def begin(self, name: str) -> int:
        """A new incarnation of `name` is about to be launched; returns its epoch."""
        entry = self.entries[name]
        entry.epoch = self._next_epoch()
        entry.restarts += 1
        self._set(entry, "starting")
        return entry.epoch

    def launched(self, name: str, incarnation: Incarnation) -> None:
        """The incarnation has a process: from now on it is pushed every tree."""
        self.entries[name].incarnation = incarnation
        incarnation.push(self.tree)

    def up(self, name: str) -> None:
        """The incarnation is ready."""
        self._set(self.entries[name], "up")

    def down(self, name: str, error: str) -> None:
        """The incarnation is gone; `error` is "" after an orderly stop."""
        entry = self.entries[name]
        entry.incarnation = None
        entry.depth = 0
        entry.last_error = error or entry.last_error
        self._set(entry, "down")

    def _set(self, entry: Entry, state: State) -> None:
        entry.state = state
        members = {**self.tree.members, entry.name: Member(entry.name, entry.epoch, state)}
        self.tree = Tree(self.tree.version + 1, members)
        for other in self.entries.values():
            if other.incarnation is not None:
                other.incarnation.push(self.tree)
