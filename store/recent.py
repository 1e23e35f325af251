"""What was asked lately, remembered: a bounded mapping that forgets what was not asked again."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K", str, bytes)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At most twice `generation` values by text or key. Getting one keeps it for another generation.

    Two dictionaries, of which the older is dropped when the newer is full: as good as least-recently-used for
    skewed traffic, and nothing is reordered on the way. Keys over `longest` are not kept.
    """

    def __init__(self, generation: int, longest: int) -> None:
        self._generation = generation
        self._longest = longest
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        """Return what is remembered of a key, or None."""
        found = self._young.get(key)
        if found is None and (found := self._old.pop(key, None)) is not None:
            self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        """Remember a value, unless the key is too long."""
        if len(key) > self._longest:
            return
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old = {}, {}
