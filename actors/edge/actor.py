"""The edge: the door of the tree. It proves who asks, checks what is asked, passes on what may be said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

from attrs import field, frozen

from actors.edge.app import create_app
from actors.edge.chat_completions import Bounds, Models
from actors.edge.errors import overloaded
from actors.edge.feedback import Ratings
from actors.edge.health import Readiness
from actors.edge.identity import Identities
from actors.edge.metrics import Figures
from actors.edge.sampling import ModelInfo
from actors.edge.server import Server, ServerLimits, listener_of
from actors.edge.services import Services
from actors.edge.turns import Patience, Turns
from actors.protocol import Metrics, ReadMetrics, TurnEvents
from store.accounts import Accounts
from store.feedback import RowLog
from supervision.actor import Actor, Sender

log = logging.getLogger(__name__)

LAST_WORDS = 2.0
"""Seconds for the explicit end of a stream to leave, after which its connection is reset."""


@frozen
class EdgeSettings:
    """What an edge is told. Times are in seconds, sizes in bytes."""

    models: tuple[ModelInfo, ...]
    accounts: str
    """Path or URL of the accounts' database."""
    feedback_root: str = ""
    """The directory of ratings; "" is `feedback` under the state directory."""
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    keepalive: float = 12.0
    """Between comments on a stream that says nothing: intermediaries and clients give up on silence."""
    window: int = 4096
    """Events that may wait for one client here."""
    turn_seconds: float = 600.0
    drain_seconds: float = 20.0
    """After SIGTERM, for open requests to end by themselves. Keep it below the child's grace."""
    metrics_need_admin: bool = False
    bounds: Bounds = field(factory=Bounds)
    patience: Patience = field(factory=Patience)
    limits: ServerLimits = field(factory=ServerLimits)


class Edge(Actor):
    """Serves HTTP and websockets on the inherited listening socket `listen`.

    It keeps nothing that must outlive it: a turn belongs to its session host, and a client that lost its
    edge comes back through another.
    """

    Settings: ClassVar[type] = EdgeSettings

    def __init__(self, settings: EdgeSettings) -> None:
        self._settings = settings

    async def on_start(self) -> None:
        """Open the accounts and begin to accept."""
        settings = self._settings
        context = self.context
        self._accounts = Accounts(settings.accounts)
        self._turns = Turns(context, settings.patience, settings.window)
        self._services = Services(
            context=context,
            turns=self._turns,
            models=Models(settings.models),
            bounds=settings.bounds,
            identities=Identities(self._accounts),
            figures=Figures(context.name),
            readiness=Readiness(context),
            ratings=Ratings(self._row_log()),
            keepalive=settings.keepalive,
            turn_seconds=settings.turn_seconds,
            body_bytes=settings.body_bytes,
            body_seconds=settings.body_seconds,
            metrics_need_admin=settings.metrics_need_admin,
        )
        app = create_app(self._services, self._gauges)
        self._server = Server(app, settings.limits)
        await context.nursery.start(self._server.run, listener_of(context.file("listen")))

    async def on_message(self, message: Any, sender: Sender) -> Any:
        """Pass a turn's events to their reader; tell the figures."""
        if isinstance(message, TurnEvents):
            self._turns.on_events(message)
        elif isinstance(message, ReadMetrics):
            return Metrics(self._services.figures.lines(self._gauges()))
        else:
            log.warning("unexpected %s from %s", type(message).__name__, sender.name)
        return None

    async def on_down(self, name: str, epoch: int) -> None:  # noqa: ARG002
        """A session host's readers attach again."""
        self._turns.on_down(name)

    async def on_stop(self) -> None:
        """Accept no more, let open requests end, then end each stream explicitly, and reset what is left."""
        self._services.draining.set()
        if not await self._server.drain(self._settings.drain_seconds):
            self._turns.end_all(overloaded("The server is restarting: ask again.").body)
            await self._server.drain(LAST_WORDS)
        self._server.abort_all()
        self._accounts.close()

    def _row_log(self) -> RowLog:
        root = self._settings.feedback_root or self.context.state_dir / "feedback"
        return RowLog(Path(root), "ratings", f"{self.context.name}-{self.context.epoch}")

    def _gauges(self) -> dict[str, float]:
        return self._services.gauges(self._server)
