"""One choice of a turn: its tokens become text, its text is checked, and what may be seen goes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import trio

from actors.bell import Bell
from actors.protocol import Allow, Block, ChoiceDone, Hit, TextDelta, TurnEvent
from actors.turn_errors import internal, unavailable
from actors.turn_generation import Generation
from actors.turn_host import Host
from actors.turn_journal import decode_logprobs
from actors.turn_safety import verdict
from actors.turn_text import ChoiceText
from store.journal_records import Chunk

PIECES_A_SECOND = 10
"""Deltas of a catalog's answer that is given at a pace."""


class Out(Protocol):
    """Where a choice's events go."""

    async def emit(self, *events: TurnEvent, verdict: Allow | None = None) -> None:
        """Journal them and let them out."""


class Choice:
    """Runs one generation, or hands on a catalog's answer, through stop strings and verdicts."""

    def __init__(
        self, host: Host, out: Out, text: ChoiceText, generation: Generation, hit: Hit | None, pace: float
    ) -> None:
        """`pace` is in characters a second, for an answer of the catalog; 0 gives it at once."""
        self.text = text
        self.generation = generation
        self._host = host
        self._out = out
        self._hit = hit
        self._pace = pace if hit is not None else 0.0
        self._inbox: deque[Chunk] = deque()
        self._bell = Bell()
        self._is_done = False
        if hit is not None:
            text.push_text(hit.answer)

    def take(self, row: Chunk) -> None:
        """Take tokens that are in the journal."""
        self._inbox.append(row)
        self._bell.ring()

    def recall(self, chunks: Sequence[Chunk], events: Sequence[TurnEvent]) -> None:
        """Take up what the journal has of this choice."""
        for row in chunks:
            self.generation.recall(row)
            if row.finish in ("error", "shed"):
                self.take(row)
            else:
                self._push(row)
        mine = [e for e in events if isinstance(e, TextDelta | ChoiceDone) and e.choice == self.text.choice]
        self.text.skip(max((e.start + len(e.text) for e in mine if isinstance(e, TextDelta)), default=0))
        self._is_done = any(isinstance(event, ChoiceDone) for event in mine)

    async def run(self) -> None:
        """Return when the choice has ended and its `ChoiceDone` is out. Raises `TurnError`."""
        if self._is_done:
            return
        async with trio.open_nursery() as nursery:
            if self._hit is None:
                nursery.start_soon(self._generate)
            await self._speak()
            nursery.cancel_scope.cancel()

    async def _generate(self) -> None:
        if await self.generation.run():
            return
        row = self.generation.cut()
        await self._host.writer.commit(row, then=lambda: self.take(row))

    async def _speak(self) -> None:
        while not self._is_done:
            while self._inbox:
                self._push(self._inbox.popleft())
            if self.text.finish:
                self.generation.stop()
            screen = self.text.next_screen()
            if screen is not None:
                await self._let_out(await verdict(self._host, screen, self.generation.job.owner))
            elif self.text.is_out:
                await self._done(self.text.finish)
            else:
                await self._bell.wait()

    def _push(self, row: Chunk) -> None:
        if row.finish == "shed":
            raise unavailable(f"The engine has no room for this request just now: {row.error}")
        if row.finish == "error":
            raise internal(f"The engine failed on this request: {row.error}", "engine_failed")
        self.text.push(row.tokens, decode_logprobs(row.logprobs), row.finish)

    async def _let_out(self, found: Allow | Block) -> None:
        if isinstance(found, Block):
            await self._blocked(found)
            return
        delta = self.text.release(found)
        if delta is not None and self._pace:
            delta = await self._paced(delta, found)
        events: list[TurnEvent] = [] if delta is None else [delta]
        if self.text.is_out:
            self._is_done = True
            events.append(ChoiceDone(0, self.text.choice, self.text.finish))
        if events:
            await self._out.emit(*events, verdict=found)

    async def _paced(self, delta: TextDelta, found: Allow) -> TextDelta:
        """Give a delta out piece by piece, as one would read it; returns the last piece.

        Cancellation: what went out is in the journal, and the rest goes out when the turn is taken up again.
        """
        piece = max(1, round(self._pace / PIECES_A_SECOND))
        rest = delta
        while len(rest.text) > piece:
            first, rest = _cut(rest, piece)
            await self._out.emit(first, verdict=found)
            await trio.sleep(len(first.text) / self._pace)
        return rest

    async def _blocked(self, block: Block) -> None:
        """End the choice; what stands before the offending text goes out if a checker allows it by itself."""
        self.generation.stop()
        self._host.counters["output_blocked"] += 1
        if block.end > self.text.released:
            before = self.text.screen_until(block.end, final=True)
            found = await verdict(self._host, before, self.generation.job.owner)
            if isinstance(found, Allow) and (delta := self.text.release(found)) is not None:
                await self._out.emit(delta, verdict=found)
        await self._done("content_filter")

    async def _done(self, finish_reason: str) -> None:
        self._is_done = True
        await self._out.emit(ChoiceDone(0, self.text.choice, finish_reason))


def _cut(delta: TextDelta, at: int) -> tuple[TextDelta, TextDelta]:
    return (
        TextDelta(0, delta.choice, delta.start, delta.text[:at]),
        TextDelta(0, delta.choice, delta.start + at, delta.text[at:]),
    )
