"""How often and how soon a group may restart what dies in it."""

from __future__ import annotations

import random
from collections import deque

_JITTER = 0.5
"""A delay is drawn between this share of itself and all of it, so that groups do not restart in step."""


class RestartBudget:
    """Restarts within a sliding window, and the delay before the next. Times are the caller's clock."""

    def __init__(
        self, intensity: int, window: float, backoff: float, backoff_limit: float, rng: random.Random
    ) -> None:
        self._intensity = intensity
        self._window = window
        self._backoff = backoff
        self._limit = backoff_limit
        self._rng = rng
        self._spent: deque[tuple[float, str]] = deque()

    def spend(self, now: float, name: str) -> float | None:
        """Note that `name` is restarted; returns the seconds to wait before it, or None: it is one too many.

        The first restart waits for nothing. The next ones of the same unit wait for the backoff, doubled with
        each of them that is still within the window, up to the limit. The intensity counts them all together.
        """
        while self._spent and self._spent[0][0] <= now - self._window:
            self._spent.popleft()
        if len(self._spent) >= self._intensity:
            return None
        before = sum(each == name for _, each in self._spent)
        self._spent.append((now, name))
        if not before:
            return 0.0
        return min(self._limit, self._backoff * 2.0 ** (before - 1)) * self._rng.uniform(_JITTER, 1.0)
