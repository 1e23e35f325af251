"""The tree as every actor sees it: names, epochs, up or down. Pushed whole; the newest wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

State = Literal["starting", "up", "down"]


@frozen
class Member:
    """One actor's line in the tree."""

    name: str
    epoch: int
    state: State


@frozen
class Tree:
    """A version of the whole tree. `version` only grows."""

    version: int = 0
    members: Mapping[str, Member] = field(factory=dict)

    def epoch(self, name: str) -> int:
        """Return the epoch of `name` if it is up, else 0."""
        member = self.members.get(name)
        return member.epoch if member is not None and member.state == "up" else 0

    def up(self, kind: str) -> list[str]:
        """Names of the live replicas of `kind`, sorted: `up("safety")` gives `["safety.0", "safety.1"]`."""
        return sorted(
            m.name
            for m in self.members.values()
            if m.state == "up" and (m.name == kind or m.name.rpartition(".")[0] == kind)
        )
