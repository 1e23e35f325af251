"""Sets of positions as sorted, disjoint, half-open intervals."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

Interval = tuple[int, int]


@define
class Positions:
    """A set of positions. `intervals` is sorted, and no two of them touch."""

    intervals: list[Interval] = field(factory=list)

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> Positions:
        """Return the union of intervals that may overlap."""
        positions = cls()
        for start, end in intervals:
            positions.add(start, end)
        return positions

    def __len__(self) -> int:
        return sum(end - start for start, end in self.intervals)

    def add(self, start: int, end: int) -> list[Interval]:
        """Add [start, end); returns the pieces of it that were new, in order."""
        touching = [i for i in self.intervals if i[0] <= end and i[1] >= start]
        pieces = _without(start, end, touching)
        if not pieces:
            return []
        apart = [i for i in self.intervals if not (i[0] <= end and i[1] >= start)]
        joined = (min([start, *(a for a, _ in touching)]), max([end, *(b for _, b in touching)]))
        self.intervals = sorted([*apart, joined])
        return pieces

    def minus(self, other: Positions) -> Positions:
        """Return the positions that are here and not there."""
        left = Positions()
        for start, end in self.intervals:
            for piece in _without(start, end, other.intervals):
                left.add(*piece)
        return left

    @property
    def end(self) -> int:
        """The position after the last one; 0 for the empty set."""
        return self.intervals[-1][1] if self.intervals else 0


def _without(start: int, end: int, taken: Iterable[Interval]) -> list[Interval]:
    pieces = []
    for a, b in taken:
        if b <= start or a >= end:
            continue
        if a > start:
            pieces.append((start, a))
        start = max(start, b)
    if start < end:
        pieces.append((start, end))
    return pieces
