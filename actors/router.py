"""The router: which batcher runs a turn.

It knows what each batcher last said of itself (`Load`), and counts what it has sent there since, so that a
burst between two reports is spread too. Every decision is logged with its reason: `prefix` (the batcher has
the prompt's beginning in its cache), `only` (no other can), `least loaded`.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, field, frozen

from actors.protocol import ErrorBody, Load, Metrics, ReadMetrics, Route, Routed, Unroutable
from actors.turn_errors import overloaded
from supervision.actor import LATER, Actor, Sender

log = logging.getLogger(__name__)

_PREFIXES = 16_384
"""Prompt beginnings whose batcher is remembered, the least recently used forgotten first."""
_PREFIX_WORTH = 4
"""A batcher that has the prefix is preferred until it has so many more requests than the least loaded one."""


@frozen
class RouterSettings:
    """`models` are the names served, the main one first. `aliases` map further names to them.

    `batchers` names the model of each batcher that does not serve the main one.
    """

    models: tuple[str, ...]
    aliases: Mapping[str, str] = field(factory=dict)
    batchers: Mapping[str, str] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if not self.models:
            raise ValueError("models: at least one model must be served")
        for name in (*self.aliases.values(), *self.batchers.values()):
            if name not in self.models:
                raise ValueError(f"{name!r} is not among the models served: {', '.join(self.models)}")


@frozen
class _Known:
    """A batcher's last report, and what was routed to it since. `epoch` is the incarnation that said it."""

    epoch: int
    load: Load
    since: int = 0

    @property
    def requests(self) -> int:
        return self.load.running + self.load.waiting + self.since

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is better: fewer requests, then more free blocks."""
        return self.requests, -self.load.free_blocks


class Router(Actor):
    """Answers `Route` with `Routed` or `Unroutable`; hears `Load`."""

    Settings: ClassVar[type] = RouterSettings

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._known: dict[str, _Known] = {}
        self._prefixes: OrderedDict[str, str] = OrderedDict()
        self._decisions: Counter[str] = Counter()

    async def on_message(self, message: Any, sender: Sender) -> Any:
        """Decide, or take a batcher's report."""
        match message:
            case Route():
                answer, reason = self._route(message)
                await self.context.reply(sender, answer)
                self._log(message, answer, reason)  # afterwards: the turn waits for the answer
                return LATER
            case Load():
                self._take_load(message, sender)
            case ReadMetrics():
                return Metrics(self._metrics())
        return None

    async def on_down(self, name: str, epoch: int) -> None:
        """Forget what is known of an incarnation that is gone: its load, and the prefixes it had."""
        known = self._known.get(name)
        if known is not None and known.epoch <= epoch:
            del self._known[name]
        for prefix in [p for p, batcher in self._prefixes.items() if batcher == name]:
            del self._prefixes[prefix]

    def _take_load(self, load: Load, sender: Sender) -> None:
        if self.context.tree.epoch(sender.name) == sender.epoch:
            self._known[sender.name] = _Known(sender.epoch, load)

    def _route(self, route: Route) -> tuple[Routed | Unroutable, str]:
        model = self._settings.aliases.get(route.model, route.model)
        if model not in self._settings.models:
            return Unroutable(route.request_id, unknown_model(route.model)), "unknown model"
        up = [b for b in self.context.tree.up("batcher") if self._model_of(b) == model]
        able = [b for b in up if b not in route.avoid]
        if not able:
            return Unroutable(route.request_id, no_batcher(model)), "all avoided" if up else "none up"
        batcher, reason = self._choose(route, able)
        self._note(route, batcher)
        return Routed(
            route.request_id, batcher, model, reason, self._known[batcher].load.context_length
        ), reason

    def _choose(self, route: Route, able: list[str]) -> tuple[str, str]:
        if len(able) == 1:
            return able[0], "only"
        least = min(able, key=lambda batcher: (self._rank(batcher), batcher))
        holder = self._prefixes.get(route.prefix) if route.prefix else None
        if holder in able and self._rank(holder)[0] <= self._rank(least)[0] + _PREFIX_WORTH:
            return holder, "prefix"
        return least, "least loaded"

    def _rank(self, batcher: str) -> tuple[int, int]:
        known = self._known.get(batcher)
        return (0, 0) if known is None else known.rank

    def _model_of(self, batcher: str) -> str:
        known = self._known.get(batcher)
        if known is not None:
            return known.load.model
        return self._settings.batchers.get(batcher, self._settings.models[0])

    def _note(self, route: Route, batcher: str) -> None:
        known = self._known.get(batcher)
        if known is None:
            empty = Load(self._model_of(batcher), 0, 0, 0, 0, 0)
            known = _Known(self.context.tree.epoch(batcher), empty)
        self._known[batcher] = evolve(known, since=known.since + 1)
        if route.prefix:
            self._prefixes[route.prefix] = batcher
            self._prefixes.move_to_end(route.prefix)
            if len(self._prefixes) > _PREFIXES:
                self._prefixes.popitem(last=False)

    def _log(self, route: Route, answer: Routed | Unroutable, reason: str) -> None:
        self._decisions[reason] += 1
        batcher = answer.batcher if isinstance(answer, Routed) else ""
        facts = {"request_id": route.request_id, "model": route.model, "batcher": batcher, "reason": reason}
        log.info("route", extra={"fields": facts})

    def _metrics(self) -> tuple[str, ...]:
        decisions = [
            f'antiphon_router_decisions_total{{reason="{reason}"}} {count}'
            for reason, count in sorted(self._decisions.items())
        ]
        loads = [
            f'antiphon_router_batcher_requests{{batcher="{name}"}} {known.requests}'
            for name, known in sorted(self._known.items())
        ]
        return (*decisions, *loads, f"antiphon_router_prefixes {len(self._prefixes)}")


def unknown_model(name: str) -> ErrorBody:
    """Return the 404 of a model that is not served, or not to this caller: the text is the same."""
    text = f"The model `{name}` does not exist or you do not have access to it."
    return ErrorBody(404, "invalid_request_error", text, param="model", code="model_not_found")


def no_batcher(model: str) -> ErrorBody:
    """Return the 503 of a model that no engine can run now."""
    return overloaded(f"No engine is ready for {model} right now. Try again in a moment.")
