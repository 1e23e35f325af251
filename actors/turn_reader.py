"""One reader of a turn: events in order under a flow-control window, from the journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from actors.bell import Bell
from actors.protocol import Allow, TextDelta, TurnDone, TurnEvent, TurnEvents, TurnFailed
from actors.turn_host import Host
from actors.turn_journal import decode_allow, decode_event
from store.journal_records import Event
from supervision.errors import ActorDown, Busy

EVENT_BYTES = 64
"""What an event weighs beside its text."""
MAX_EVENTS = 512
"""Events in one message at most."""
_BUSY_PAUSE = 0.05
_LAST = (TurnDone.__name__, TurnFailed.__name__)


class Reader:
    """Hands a turn's events to one edge. It never slows the turn: what the window has no room for waits.

    While `holds_last()` the turn's last event is kept back.
    """

    def __init__(
        self,
        host: Host,
        owner: str,
        request_id: str,
        name: str,
        edge: tuple[str, int],
        after: int,
        holds_last: Callable[[], bool],
    ) -> None:
        self.host = host
        self.owner = owner
        self.request_id = request_id
        self.name = name
        self.edge = edge
        self.sent = after
        self._holds_last = holds_last
        self._fetched = after
        self._backlog: deque[Event] = deque()
        self._in_flight: deque[tuple[int, int]] = deque()
        self._in_flight_bytes = 0
        self._bell = Bell()
        self._scope = trio.CancelScope()
        self.is_done = False
        """Whether the turn's last event was sent."""

    def news(self) -> None:
        """The journal has more events of the turn."""
        self._bell.ring()

    def consumed(self, through: int) -> None:
        """The client has taken every event up to `through`: the window opens by what they weighed."""
        while self._in_flight and self._in_flight[0][0] <= through:
            self._in_flight_bytes -= self._in_flight.popleft()[1]
        self._bell.ring()

    def leave(self) -> None:
        """Stop: the reader is gone."""
        self._scope.cancel()

    async def run(self) -> None:
        """Send until the last event is out, the edge is gone, or `leave`. Cancellation: as `leave`."""
        with self._scope:
            while not self.is_done:
                batch = self._next()
                if not batch:
                    await self._bell.wait()
                elif not await self._send(batch):
                    return

    def _next(self) -> list[Event]:
        if not self._backlog:
            self._backlog.extend(self.host.journal.events(self.owner, self.request_id, self._fetched))
            if self._backlog:
                self._fetched = self._backlog[-1].sequence
        batch: list[Event] = []
        while self._backlog and len(batch) < MAX_EVENTS and self._may_go(self._backlog[0]):
            event = self._backlog.popleft()
            weight = len(event.body) + EVENT_BYTES
            self._in_flight.append((event.sequence, weight))
            self._in_flight_bytes += weight
            batch.append(event)
        return batch

    def _may_go(self, event: Event) -> bool:
        if event.kind in _LAST and self._holds_last():
            return False
        return self._in_flight_bytes < self.host.settings.window_bytes

    async def _send(self, batch: list[Event]) -> bool:
        events = tuple(decode_event(record) for record in batch)
        message = TurnEvents(self.request_id, events, self._allows(events), self.name)
        edge, epoch = self.edge
        while True:
            try:
                await self.host.context.tell(edge, message, to_epoch=epoch, owner=self.owner)
            except ActorDown:
                return False
            except Busy:
                await trio.sleep(_BUSY_PAUSE)
                continue
            self.sent = events[-1].sequence
            self.is_done = isinstance(events[-1], TurnDone | TurnFailed)
            return True

    def _allows(self, events: tuple[TurnEvent, ...]) -> tuple[Allow, ...]:
        choices = {event.choice for event in events if isinstance(event, TextDelta)}
        if not choices:
            return ()
        verdicts = self.host.journal.verdicts(self.owner, self.request_id)
        return tuple(decode_allow(v.body) for v in verdicts if v.choice in choices)
