"""A circuit breaker: when a peer keeps failing, stop waiting for it, and probe it until it answers again.

A state machine on whatever monotonic clock its caller has; it waits for nothing and draws no numbers.

    closed --- `failures` in a row ---> open --- after the pause ---> half-open --- a success ---> closed
                                          ^                               |
                                          +---- a failure: pause doubled -+
"""

from __future__ import annotations

from typing import Literal

from attrs import define, field, frozen

State = Literal["closed", "open", "half_open"]
Leave = Literal["ask", "probe", "refuse"]
"""`probe` means ask, but let nobody wait for the answer."""


@frozen
class BreakerSettings:
    """When to open, and for how long. Durations are in seconds."""

    failures: int = 1
    """In a row, without a success between them."""
    pause: float = 0.5
    """From opening to the first probe; doubled by each probe that fails."""
    longest_pause: float = 30.0
    probe_limit: float = 5.0
    """A probe without a word for this long has failed: a lost one cannot keep the breaker shut for good."""


@define
class Breaker:
    """The breaker of one peer. Call `leave` before asking, then `succeeded` or `failed`, once."""

    settings: BreakerSettings = field(factory=BreakerSettings)
    state: State = "closed"
    opened: int = 0
    """Times it has opened."""
    _in_a_row: int = 0
    _pause: float = 0.0
    _until: float = 0.0
    """Open: when a probe may go. Half-open: when the probe is given up."""

    def leave(self, now: float) -> Leave:
        """Say what may be done now. `probe` is given once, and makes an open breaker half-open."""
        if self.state == "closed":
            return "ask"
        if now < self._until:
            return "refuse"
        if self.state == "half_open":
            self.failed(now)
            return "refuse"
        self.state, self._until = "half_open", now + self.settings.probe_limit
        return "probe"

    def succeeded(self) -> None:
        """Record an answer in time, whatever it said. One that comes after opening is too late to count."""
        if self.state != "open":
            self.reset()

    def failed(self, now: float) -> None:
        """Record no answer in time, a full mailbox or a dead peer. An open breaker stays as it is."""
        if self.state == "open":
            return
        self._in_a_row += 1
        if self.state == "half_open" or self._in_a_row >= self.settings.failures:
            self._open(now)

    def reset(self) -> None:
        """Close: the peer answered, or is a new incarnation of which nothing bad is known."""
        self.state, self._in_a_row, self._pause = "closed", 0, 0.0

    def _open(self, now: float) -> None:
        self._pause = min(self.settings.longest_pause, self._pause * 2 or self.settings.pause)
        self.state, self._until, self._in_a_row = "open", now + self._pause, 0
        self.opened += 1
