"""The body of a streamed reply: a turn's events on their way to one client's socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Protocol, Self

import trio
from quart.wrappers.response import ResponseBody

from actors.edge import sse
from actors.edge.turn_reader import TurnReader
from actors.edge.turns import Turns
from actors.protocol import ErrorBody, TurnEvent


class Renderer(Protocol):
    """How a turn's events look on the wire."""

    def opening(self) -> bytes:
        """Return what comes first."""

    def render(self, events: Iterable[TurnEvent]) -> bytes:
        """Return what becomes of these events; nothing when they show nothing."""

    def broken(self, error: ErrorBody) -> bytes:
        """Return the end of a stream that the edge gives up."""


class Listener:
    """Waits for a turn's events on a client's behalf: keeps the window open and mends what breaks."""

    def __init__(self, turns: Turns, reader: TurnReader) -> None:
        self._turns = turns
        self.reader = reader
        self._handed = 0

    async def wait(self, seconds: float) -> tuple[TurnEvent, ...]:
        """Return the events that are here, waiting for some; none after `seconds`, or at the end.

        What was returned before counts as passed on by now: call this when the client's socket has taken it.
        """
        reader = self.reader
        if self._handed > reader.passed:
            await self._turns.passed_on(reader, self._handed)
        give_up = trio.current_time() + seconds
        while True:
            events = await reader.next(max(give_up - trio.current_time(), 0.0))
            if events:
                self._handed = events[-1].sequence
            if events or reader.ended:
                return events
            self._turns.mend(reader)
            if trio.current_time() >= give_up:
                return ()


class EventStream(ResponseBody):
    """An event stream as Quart sends it. Not an async generator: its end needs no garbage collector.

    What waits together is written together, so the cost of an event falls as the load rises. Between events a
    comment goes out every `keepalive` seconds from the first write on.
    """

    def __init__(self, listener: Listener, renderer: Renderer, keepalive: float) -> None:
        self._listener = listener
        self._renderer = renderer
        self._keepalive = keepalive
        self._is_open = False
        self._is_over = False
        self._written = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The request's end closes the reader, whether or not this was ever entered."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._is_open:
            self._is_open = True
            await trio.lowlevel.checkpoint()
            return self._wrote(self._renderer.opening() or sse.KEEPALIVE)
        while not self._is_over:
            events = await self._listener.wait(self._written + self._keepalive - trio.current_time())
            made = self._render(events)
            if made:
                return self._wrote(made)
        await self._listener.wait(0)
        raise StopAsyncIteration

    def _render(self, events: tuple[TurnEvent, ...]) -> bytes:
        reader = self._listener.reader
        made = self._renderer.render(events) if events else b""
        if reader.ended and reader.drained:
            self._is_over = True
            if reader.broken is not None:
                made += self._renderer.broken(reader.broken)
        elif not made and trio.current_time() >= self._written + self._keepalive:
            made = sse.KEEPALIVE
        return made

    def _wrote(self, data: bytes) -> bytes:
        self._written = trio.current_time()
        return data
