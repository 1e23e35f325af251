"""Whether the server is alive, and may be sent work."""

from __future__ import annotations

import trio

from actors.protocol import ReadMetrics
from supervision.actor import Context
from supervision.errors import AskFailed, Refused

NEEDED = ("session", "safety", "router", "limiter", "ledger", "batcher")
FRESH = 0.5
"""Seconds that an answer is good for: probes cost the actors little, however many probers there are."""
PROBE_SECONDS = 1.0


class Readiness:
    """Asks one replica of each kind that a turn needs whether it answers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._missing: dict[str, str] = {}
        self._checked = -FRESH
        self._lock = trio.Lock()

    async def missing(self) -> dict[str, str]:
        """Return what keeps the server from working, by kind: empty when it is ready."""
        async with self._lock:
            if trio.current_time() - self._checked >= FRESH:
                self._missing = await self._check()
                self._checked = trio.current_time()
        return self._missing

    async def _check(self) -> dict[str, str]:
        found: dict[str, str] = {}
        async with trio.open_nursery() as nursery:
            for kind in NEEDED:
                nursery.start_soon(self._probe, kind, found)
        return dict(sorted(found.items()))

    async def _probe(self, kind: str, found: dict[str, str]) -> None:
        reason = "down"
        for name in self._context.tree.up(kind):
            try:
                await self._context.ask(name, ReadMetrics(), timeout=PROBE_SECONDS)
            except Refused:
                return  # it does not keep figures, and said so: it answers
            except AskFailed as error:
                reason = type(error).__name__
            else:
                return
        found[kind] = reason
