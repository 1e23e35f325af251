"""Stop strings in a stream: end at the first, and never let out a character that might belong to one."""

from __future__ import annotations

from attrs import define, field


@define
class StopStrings:
    """Watches one reply's text. Feed it with `push`; it returns what is certainly not part of a stop string.

    The match that *ends* first wins, of those the longest: so where the text was cut changes nothing.
    Only the longest end of the text that is a proper prefix of a stop string is held back.
    """

    stops: tuple[str, ...]
    include_stop: bool = False
    """Keep the stop string itself in the text."""
    matched: bool = field(default=False, init=False)
    _held: str = field(default="", init=False)

    def push(self, text: str) -> str:
        """Take the next characters and return those that may go on. After a match, nothing more goes on."""
        if self.matched:
            return ""
        if not self.stops:
            return text
        held = self._held + text
        match = self._first_match(held)
        if match is None:
            keep = self._longest_prefix_at_end(held)
            self._held = held[len(held) - keep :]
            return held[: len(held) - keep]
        self.matched, self._held = True, ""
        start, end = match
        return held[: end if self.include_stop else start]

    def finish(self) -> str:
        """Return what was held back: the text has ended, so it belongs to no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _longest_prefix_at_end(self, text: str) -> int:
        longest = min(len(text), max(map(len, self.stops)) - 1)
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self.stops):
                return length
        return 0
