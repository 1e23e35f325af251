"""What was asked lately, remembered: a bounded mapping that forgets what was not asked again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

K = TypeVar("K", str, bytes)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At most twice `generation` values by text or key, and what one call adds. Getting one keeps it longer.

    Two dictionaries, of which the older is dropped when the newer is full: as good as least-recently-used for
    skewed traffic, and nothing is reordered on the way. Values are true. Keys over `longest` are not kept.
    """

    def __init__(self, generation: int, longest: int) -> None:
        self._generation = generation
        self._longest = longest
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get_many(self, keys: Sequence[K]) -> list[V | None]:
        """Return what is remembered of each key, None where nothing is."""
        young, old = self._young.get, self._old
        return [young(key) or (self._kept(key) if key in old else None) for key in keys]

    def put_many(self, keys: Sequence[K], values: Sequence[V]) -> None:
        """Remember the value of each key, save those with too long a key."""
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, {}
        items = zip(keys, values, strict=True)
        if max(map(len, keys), default=0) <= self._longest:
            self._young.update(items)
        else:
            self._young.update([item for item in items if len(item[0]) <= self._longest])

    def _kept(self, key: K) -> V:
        value = self._old[key]
        if len(self._young) < self._generation:
            self._young[key] = value
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old = {}, {}
