"""What was asked lately, remembered: a bounded mapping that forgets what was not asked again."""

from __future__ import annotations

from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """At most twice `generation` values by text. Getting one keeps it for another generation.

    Two dictionaries, of which the older is dropped when the newer is full: as good as least-recently-used for
    skewed traffic, and nothing is reordered on the way. Texts over `longest` characters are not kept.
    """

    def __init__(self, generation: int, longest: int) -> None:
        self._generation = generation
        self._longest = longest
        self._young: dict[str, V] = {}
        self._old: dict[str, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, text: str) -> V | None:
        """Return what is remembered of a text, or None."""
        found = self._young.get(text)
        if found is None and (found := self._old.pop(text, None)) is not None:
            self.put(text, found)
        return found

    def put(self, text: str, value: V) -> None:
        """Remember a value, unless the text is too long."""
        if len(text) > self._longest:
            return
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, {}
        self._young[text] = value

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old = {}, {}
