"""A bell: one task waits for it, anybody rings it, and a ring before the wait is not lost."""

from __future__ import annotations

import trio


class Bell:
    """A re-armable event. Rings while nobody waits are remembered as one."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def ring(self) -> None:
        """Wake the waiting task, or have its next wait return at once."""
        self._event.set()

    async def wait(self) -> None:
        """Return at the next ring, or at once if there was one. Cancellation: the ring stays."""
        await self._event.wait()
        self._event = trio.Event()
