"""The second witness: tells the books, at least once, what this batcher generated."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import trio

from actors.bell import Bell
from actors.protocol import Charged, Witness, WitnessEvent
from store.witness_outbox import Count, OutboxError, WitnessOutbox
from supervision.actor import Context
from supervision.errors import AskFailed

log = logging.getLogger(__name__)

_ASK_TIMEOUT = 5.0
_PAUSE_FIRST, _PAUSE_LAST = 0.05, 1.0
_MOST = 256
"""Events in one message."""


class Witnessing:
    """Counts in the outbox, and the task that hands finished ones to the ledger."""

    def __init__(self, outbox: WitnessOutbox, context: Context) -> None:
        self._outbox = outbox
        self._context = context
        self._due: dict[str, Count] = {count.key: count for count in outbox.pending()}
        self._bell = Bell()
        self.failures = 0

    @property
    def owed(self) -> int:
        """Events that the books have yet to confirm."""
        return len(self._due)

    def count(self, counts: Iterable[Count]) -> None:
        """Bring running generations' counts forward, before their tokens leave.

        A disk that takes nothing does not stop the engine: the count is then in memory alone.
        """
        try:
            self._outbox.write(counts)
        except OutboxError:
            self.failures += 1
            log.exception("%s", self._context.name)

    def finished(self, count: Count) -> None:
        """A generation has ended with this count: tell the books."""
        if count.end > count.start:
            self._due[count.key] = count
            self._bell.ring()

    async def run(self) -> None:
        """Tell the books, for ever."""
        self._bell.ring()
        pause = _PAUSE_FIRST
        while True:
            await self._bell.wait()
            while self._due:
                if await self._tell(list(self._due.values())[:_MOST]):
                    pause = _PAUSE_FIRST
                else:
                    await trio.sleep(pause)
                    pause = min(2 * pause, _PAUSE_LAST)

    async def _tell(self, counts: list[Count]) -> bool:
        events = tuple(
            WitnessEvent(c.key, c.request_id, c.choice, c.account, c.model, c.prompt_tokens, c.start, c.end)
            for c in counts
        )
        try:
            reply = await self._context.ask("ledger", Witness(events), timeout=_ASK_TIMEOUT)
        except AskFailed:
            return False
        if not isinstance(reply, Charged):
            return False
        for count in counts:
            if self._due.get(count.key) == count:
                del self._due[count.key]
        try:
            self._outbox.confirm(counts)
        except OutboxError:
            log.exception("%s", self._context.name)
        return True
