"""Asking for a verdict: no answer is no text. There is no way past this but an `Allow` of a checker."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from actors.protocol import Allow, Block, Screen, Screened
from actors.turn_errors import unavailable
from actors.turn_host import Host, Unavailable

MAX_DEATHS = 3
"""Checkers that may die while they hold one text; then it is the text, and the turn fails."""


async def verdict(host: Host, screen: Screen, owner: str) -> Allow | Block:
    """Return a checker's verdict on the text: replicas first, the fallback after them, patiently.

    Raises `TurnError` (503) when nobody gives one. A final verdict that does not cover the text is none.
    """
    try:
        screened = await host.ask_until(
            lambda: _checkers(host, screen.request_id),
            screen,
            Screened,
            patience=host.settings.safety_patience,
            timeout=host.settings.safety_timeout,
            owner=owner,
            accept=lambda reply: fits(screen, reply.verdict),
            max_deaths=MAX_DEATHS,
        )
    except Unavailable as error:
        host.counters["safety_unavailable"] += 1
        raise unavailable(
            "The safety check is unavailable, so nothing can be shown. Try again later."
        ) from error
    return screened.verdict


def fits(screen: Screen, verdict: Allow | Block) -> bool:
    """Whether a verdict is about this text, and reaches as far as it must."""
    about = (verdict.request_id, verdict.direction, verdict.choice)
    if about != (screen.request_id, screen.direction, screen.choice):
        return False
    end = screen.start + len(screen.text)
    if isinstance(verdict, Block):
        return verdict.end <= end
    return verdict.end == end if screen.final else screen.start <= verdict.end <= end


def _checkers(host: Host, request_id: str) -> Sequence[str]:
    """Live replicas, a turn always beginning at the same one, then the fallback."""
    replicas = host.context.tree.up("safety")
    at = crc32(request_id.encode()) % len(replicas) if replicas else 0
    return [*replicas[at:], *replicas[:at], *host.context.tree.up("safety_fallback")]
