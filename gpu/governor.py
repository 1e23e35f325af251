"""How much of a prompt may be computed beside sequences that decode, and wait for it."""

from __future__ import annotations

STRETCH = 2.0
"""A step with a piece of a prompt in it may take this many times one without."""
UNSEEN = 0.02
"""Seconds that a step may take anyway: no reader sees a gap of fifty tokens a second."""
_SMALLEST = 4
_FRESH = 0.2
"""Weight of the newest measurement."""


class ChunkGovernor:
    """Measures what decoding alone takes, and what a prompt's token adds, and sizes chunks by both.

    Decoding is measured apart for about as many sequences: one takes a fifth of the time of sixteen. How a prompt
    is cut never changes what is computed, so timing decides here without a trace in any reply.
    """

    def __init__(self, token_budget: int) -> None:
        self._budget = token_budget
        self._alone: dict[int, float] = {}
        """Seconds, by how many bits the number of sequences has."""
        self._per_token: float | None = None
        self.chunk = min(token_budget, 16)

    def note(self, decoded: int, prefilled: int, seconds: float) -> None:
        """A step's tokens, and how long its forward pass took."""
        if decoded and not prefilled:
            size = decoded.bit_length()
            self._alone[size] = _blend(self._alone.get(size), seconds)
        elif prefilled:
            beside = self._expected(decoded) if decoded else 0.0
            self._per_token = _blend(self._per_token, max(seconds - beside, 0.0) / prefilled)
        alone = self._expected(max(decoded, 1))
        if alone and self._per_token:
            extra = max((STRETCH - 1) * alone, UNSEEN - alone)
            self.chunk = int(max(_SMALLEST, min(self._budget, extra / self._per_token)))

    def _expected(self, decoded: int) -> float:
        """What decoding so many alone would take: as measured last for the nearest size; 0.0 before the first."""
        size = decoded.bit_length()
        nearest = min(self._alone, key=lambda known: (abs(known - size), known), default=None)
        return 0.0 if nearest is None else self._alone[nearest]


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _FRESH * (new - old)
