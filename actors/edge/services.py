"""What every request handler of the edge works with."""

from __future__ import annotations

import trio
from attrs import field, frozen

from actors.edge.chat_completions import Bounds, Models
from actors.edge.feedback import Ratings
from actors.edge.health import Readiness
from actors.edge.identity import Identities
from actors.edge.metrics import Figures
from actors.edge.server import Server
from actors.edge.turns import Turns
from supervision.actor import Context


@frozen
class Services:
    """One edge's parts, made once when it starts."""

    context: Context
    turns: Turns
    models: Models
    bounds: Bounds
    identities: Identities
    figures: Figures
    readiness: Readiness
    ratings: Ratings
    keepalive: float
    """Seconds between comments on a silent stream."""
    turn_seconds: float
    """From a turn's admission to its end."""
    body_bytes: int
    body_seconds: float
    """For a body to arrive."""
    metrics_need_admin: bool
    draining: trio.Event = field(factory=trio.Event)
    """Set when the edge stops: idle websockets close, and nothing new is begun on them."""

    def gauges(self, server: Server) -> dict[str, float]:
        """Return what is so at this moment, for `/metrics`."""
        readers = list(self.turns.readers())
        return {
            "connections": server.connections,
            "connections_accepted_total": server.accepted,
            "connections_contained_total": server.contained,
            "turns_open": len(readers),
            "turns_reattached_total": self.turns.reattached,
            "turns_broken_total": self.turns.broken,
            "events_duplicate_total": self.turns.duplicates,
        }
