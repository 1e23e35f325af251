"""Judging by its heartbeat whether a child lives and gets on."""

from __future__ import annotations

import math

_MISSED = 2.5
"""Beats without which a child counts as stopped: two missed in a row, and half of one for jitter."""


class Vigil:
    """Watches one incarnation, on its caller's clock, from its first beat on."""

    def __init__(self, heartbeat: float, watchdog: float, now: float) -> None:
        self._heartbeat = heartbeat
        self._watchdog = watchdog
        self._last_beat = now
        self._progress = -1
        self._stuck_since = math.inf

    def beat(self, now: float, progress: int, *, busy: bool) -> None:
        """Take a beat."""
        self._last_beat = now
        if not busy:
            self._stuck_since = math.inf
        elif progress != self._progress or self._stuck_since == math.inf:
            self._stuck_since = now
        self._progress = progress

    @property
    def deadline(self) -> float:
        """When to look again, if no beat comes before."""
        return min(self._last_beat + _MISSED * self._heartbeat, self._stuck_since + self._watchdog)

    def verdict(self, now: float) -> str:
        """Return why the child must be killed, or "" while it need not."""
        if now >= self._last_beat + _MISSED * self._heartbeat:
            return f"no heartbeat for {now - self._last_beat:.1f} s"
        if now >= self._stuck_since + self._watchdog:
            return f"busy without progress for {now - self._stuck_since:.1f} s"
        return ""

    def forgive(self, now: float) -> None:
        """The watcher itself was late to look: give the child one more interval to be heard."""
        self._last_beat = max(self._last_beat, now - (_MISSED - 1.0) * self._heartbeat)
