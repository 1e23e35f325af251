"""How often and how soon a group may restart what dies in it."""

from __future__ import annotations

import random

_JITTER = 0.5
"""A delay is drawn between this share of itself and all of it, so that groups do not restart in step."""


class RestartBudget:
    """Restarts within a sliding window, and the delay before the next. Times are the caller's clock.

    Of a unit that was never ready every restart counts, however long ago: one that takes longer to fail than the
    window is would be tried for ever.
    """

    def __init__(
        self, intensity: int, window: float, backoff: float, backoff_limit: float, rng: random.Random
    ) -> None:
        self._intensity = intensity
        self._window = window
        self._backoff = backoff
        self._limit = backoff_limit
        self._rng = rng
        self._spent: list[tuple[float, str]] = []
        self._proven: set[str] = set()

    def prove(self, name: str) -> None:
        """Note that `name` is ready: from now on its restarts are forgotten after the window."""
        self._proven.add(name)

    def span(self, now: float) -> float:
        """Seconds over which those restarts lie that count: the window, or more."""
        return max(self._window, now - min((at for at, _ in self._spent), default=now))

    def spend(self, now: float, name: str) -> float | None:
        """Note that `name` is restarted; returns the seconds to wait before it, or None: it is one too many.

        The first restart waits for nothing. The next ones of the same unit wait for the backoff, doubled with
        each of them that is still within the window, up to the limit. The intensity counts them all together.
        """
        since = now - self._window
        self._spent = [(at, each) for at, each in self._spent if at > since or each not in self._proven]
        if len(self._spent) >= self._intensity:
            return None
        before = sum(each == name for _, each in self._spent)
        self._spent.append((now, name))
        if not before:
            return 0.0
        return min(self._limit, self._backoff * 2.0 ** (before - 1)) * self._rng.uniform(_JITTER, 1.0)
