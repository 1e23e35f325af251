"""A client's place in a turn: what came from the session host, and what was passed on.

The session host sends `TurnEvents`; the reader takes each event once and in order, whatever arrives twice,
late or not at all, and whoever sends it after the first host died. The sequence of the last event taken
tells duplicates from gaps; the offset of each choice's text is the second witness.
"""

from __future__ import annotations

from collections import deque

import trio
from attrs import evolve

from actors.edge.tracing import CUT_OFF, Trace
from actors.protocol import ChoiceDone, ErrorBody, TextDelta, TurnDone, TurnEvent, TurnFailed


class TurnReader:
    """The events of one turn for one client. Fed by the edge's mailbox, drained by one request's task.

    At most `limit` events wait here. A client slower than that loses its place in the live feed, not an
    event: the rest comes from the journal, by attaching again, once what waits here was taken.
    """

    def __init__(self, name: str, request_id: str, owner: str, host: str, *, limit: int = 4096) -> None:
        self.name = name
        """What its events carry: two readers of one turn are told apart by it."""
        self.request_id = request_id
        self.owner = owner
        self.host = host
        self.received = 0
        """Sequence of the last event taken in."""
        self.passed = 0
        """Sequence of the last event that the client's socket took."""
        self.missing = False
        """Events are missing or their sender is gone: attach again after `received`."""
        self.recovering = False
        self.attached_at = -1
        self.fruitless = 0
        """Attaches in a row that brought no event."""
        self.duplicates = 0
        self.ended = False
        """Nothing more will come: the turn's last event is here, or the reader broke."""
        self.broken: ErrorBody | None = None
        """Why the edge itself gave up. Not an event of the turn: that may have gone on without us."""
        self.trace: Trace | None = None
        """Whose turn it is, when this reader's request opened it."""
        self.cut_off: list[int] = []
        """Choices that the safety policy ended."""
        self._waiting: deque[TurnEvent] = deque()
        self._limit = limit
        self._lengths: dict[int, int] = {}
        self._wake = trio.Event()

    @property
    def drained(self) -> bool:
        """Nothing waits here."""
        return not self._waiting

    def feed(self, events: tuple[TurnEvent, ...]) -> None:
        """Take events in. Never blocks and never fails, whatever their order."""
        for event in events:
            self._take(event)
        self._wake.set()

    def lose_host(self) -> None:
        """The session host died: attach again, unless everything is here."""
        self.missing = not self.ended
        self._wake.set()

    def break_off(self, error: ErrorBody) -> None:
        """Give up. What is already here is still passed on."""
        if not self.ended:
            self.broken = error
            self.ended = True
        self._wake.set()

    async def next(self, seconds: float) -> tuple[TurnEvent, ...]:
        """Wait for events and return all that are there; none when `seconds` passed, or at the end.

        Also returns, with nothing, when `missing` wants attention. Cancellation loses nothing.
        """
        with trio.move_on_after(seconds):
            while not (self._waiting or self.ended or (self.missing and not self.recovering)):
                await self._wake.wait()
                self._wake = trio.Event()
        events = tuple(self._waiting)
        self._waiting.clear()
        return events

    def wake(self) -> None:
        """Let a waiting `next` look again."""
        self._wake.set()

    def _take(self, event: TurnEvent) -> None:
        if self.ended:
            return
        if event.sequence <= self.received:
            self.duplicates += 1
            return
        gap = event.sequence != self.received + 1 or self._skips_text(event)
        if gap or len(self._waiting) >= self._limit:
            self.missing = True
            return
        self.received = event.sequence
        self.ended = isinstance(event, TurnDone | TurnFailed)
        if isinstance(event, ChoiceDone) and event.finish_reason == CUT_OFF:
            self.cut_off.append(event.choice)
        self._waiting.append(self._without_overlap(event))

    def _skips_text(self, event: TurnEvent) -> bool:
        return isinstance(event, TextDelta) and event.start > self._lengths.get(event.choice, 0)

    def _without_overlap(self, event: TurnEvent) -> TurnEvent:
        if not isinstance(event, TextDelta):
            return event
        seen = self._lengths.get(event.choice, 0)
        self._lengths[event.choice] = max(seen, event.start + len(event.text))
        return (
            event if event.start == seen else evolve(event, start=seen, text=event.text[seen - event.start :])
        )
