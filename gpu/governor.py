"""How much of a prompt may be computed beside sequences that decode, and wait for it."""

from __future__ import annotations

STRETCH = 2.0
"""A step with a piece of a prompt in it may take this many times one without."""
_SMALLEST = 4
_FRESH = 0.2
"""Weight of the newest measurement."""


class ChunkGovernor:
    """Measures what decoding alone takes, and what a prompt's token adds, and sizes chunks by both.

    How a prompt is cut never changes what is computed, so timing decides here without a trace in any reply.
    """

    def __init__(self, token_budget: int) -> None:
        self._budget = token_budget
        self._alone: float | None = None
        self._per_token: float | None = None
        self.chunk = min(token_budget, 16)

    def note(self, decoded: int, prefilled: int, seconds: float) -> None:
        """A step's tokens, and how long its forward pass took."""
        if decoded and not prefilled:
            self._alone = _blend(self._alone, seconds)
        elif prefilled:
            beside = (self._alone or 0.0) if decoded else 0.0
            self._per_token = _blend(self._per_token, max(seconds - beside, 0.0) / prefilled)
        if self._alone and self._per_token:
            fitting = (STRETCH - 1) * self._alone / self._per_token
            self.chunk = int(max(_SMALLEST, min(self._budget, fitting)))


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _FRESH * (new - old)
