"""The ledger: the one writer of the books.

A `Charge` is acknowledged when it is durable. While one transaction is on its way to the disk the next ones
gather into a single group (`actors.group_commit`), so the number of charges a second is not bound by the
disk's flushes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import trio
from attrs import frozen

from actors.group_commit import GroupCommit
from actors.protocol import Charge, Charged, Metrics, ReadMetrics, Waive, Witness
from store.books import Books, Waiver, Witnessed
from store.books_posting import Delivery
from store.prices import Price
from supervision.actor import LATER, Actor, Sender

log = logging.getLogger(__name__)


@frozen
class PriceSettings:
    """A model's price.

    Micro-units per million tokens, and per fast answer. `model` "*": every other model.
    """

    model: str
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    fast_answer: int = 0


@frozen
class LedgerSettings:
    """`books` is a path or a database URL; "" is `books.sqlite` in the state directory."""

    books: str = ""
    prices: tuple[PriceSettings, ...] = ()


@frozen
class _Refused:
    """A charge that cannot be a delivery: a fault of its sender, kept in sight of reconciling."""

    request_id: str
    why: str


_What = Delivery | Waiver | _Refused | tuple[Witnessed, ...]


@frozen
class _Act:
    what: _What
    sender: Sender


class Ledger(Actor):
    """Answers `Charge`, `Waive` and `Witness` with `Charged`.

    When it dies, whatever was not acknowledged is asked again and adds nothing twice.
    """

    Settings: ClassVar[type] = LedgerSettings

    def __init__(self, settings: LedgerSettings) -> None:
        self._settings = settings
        self._books: Books
        self._writer = GroupCommit(self._write, self._acknowledge)
        self._micros = 0
        self._refused = 0

    async def on_start(self) -> None:
        """Open the books and publish the prices."""
        self._books = await trio.to_thread.run_sync(self._open)
        self.context.nursery.start_soon(self._writer.run)

    async def on_message(self, message: Any, sender: Sender) -> Any:
        """Put a charge, a waiver or a witness into the next group, or report figures."""
        match message:
            case Charge():
                return self._submit(_delivery(message), sender)
            case Waive():
                return self._submit(Waiver(message.request_id, message.account), sender)
            case Witness():
                return self._submit(tuple(_witnessed(message)), sender)
            case ReadMetrics():
                return Metrics(self._metrics())
        return None

    async def on_stop(self) -> None:
        """Finish what was asked."""
        await self._writer.drained()
        self._books.close()

    def _open(self) -> Books:
        books = Books(self._settings.books or self.context.state_dir / "books.sqlite")
        prices = [
            Price(p.model, p.prompt, p.cached, p.completion, p.fast_answer) for p in self._settings.prices
        ]
        books.publish(prices, _now())
        return books

    def _submit(self, what: _What, sender: Sender) -> Any:
        self._writer.submit(_Act(what, sender))
        self.context.busy(True)
        return LATER if sender.correlation else None

    def _write(self, acts: Sequence[_Act]) -> list[Charged]:
        """Write a group, in the writer's thread."""
        now = _now()
        deliveries = [act.what for act in acts if isinstance(act.what, Delivery)]
        added = iter(self._books.enter(deliveries, now) if deliveries else [])
        waivers = [act.what for act in acts if isinstance(act.what, Waiver)]
        if waivers:
            self._books.waive(waivers, now)
        events = [event for act in acts if isinstance(act.what, tuple) for event in act.what]
        if events:
            self._books.witness(events, now)
        return [self._outcome(act, added, now) for act in acts]

    def _outcome(self, act: _Act, added: Any, now: int) -> Charged:
        match act.what:
            case Delivery(request_id=request_id):
                return Charged(request_id, next(added))
            case Waiver(request_id=request_id):
                return Charged(request_id, 0)
            case _Refused(request_id=request_id, why=why):
                log.error("charge refused", extra={"fields": {"request_id": request_id, "why": why}})
                self._books.note_conflict(request_id, why, now)
                return Charged(request_id, 0)
            case events:
                return Charged(events[0].request_id if events else "", 0)

    async def _acknowledge(self, act: _Act, charged: Charged) -> None:
        self._micros += charged.micros
        self._refused += isinstance(act.what, _Refused)
        self.context.progress()
        self.context.busy(self._writer.waiting > 0)
        await self.context.reply(act.sender, charged)

    def _metrics(self) -> tuple[str, ...]:
        return (
            f"antiphon_ledger_acts_total {self._writer.acts}",
            f"antiphon_ledger_transactions_total {self._writer.groups}",
            f"antiphon_ledger_charged_micros_total {self._micros}",
            f"antiphon_ledger_refused_total {self._refused}",
            f"antiphon_ledger_waiting {self._writer.waiting}",
        )


def _delivery(charge: Charge) -> Delivery | _Refused:
    try:
        return Delivery(
            charge.request_id,
            charge.account,
            charge.key_id,
            charge.model,
            charge.prompt_tokens,
            charge.cached_tokens,
            charge.spans,
            charge.fast_answer,
        )
    except ValueError as error:
        return _Refused(charge.request_id, str(error))


def _witnessed(witness: Witness) -> list[Witnessed]:
    return [
        Witnessed(e.key, e.request_id, e.choice, e.account, e.model, e.prompt_tokens, e.start, e.end)
        for e in witness.events
        if e.start < e.end
    ]


def _now() -> int:
    return time.time_ns() // 1_000_000
