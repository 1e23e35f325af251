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
        self._spent: deque[float] = deque()

    def spend(self, now: float) -> float | None:
        """Note a restart; returns the seconds to wait before it, or None: it is one too many.

        The delay is the backoff, doubled for each restart already within the window, up to the limit.
        """
        while self._spent and self._spent[0] <= now - self._window:
            self._spent.popleft()
        if len(self._spent) >= self._intensity:
            return None
        delay = min(self._limit, self._backoff * 2.0 ** len(self._spent))
        self._spent.append(now)
        return delay * self._rng.uniform(_JITTER, 1.0)
