"""The end of a turn's money: settle with the limiter, charge the books, until both have confirmed it."""

from __future__ import annotations

from collections.abc import Sequence

import trio
from attrs import frozen

from actors.protocol import (
    Charge,
    Charged,
    Hit,
    OpenTurn,
    Release,
    Settle,
    Settled,
    TurnStatus,
    Usage,
    Waive,
)
from actors.turn_host import Host, Unavailable
from store.journal_records import Acknowledged

_ROUND = 60.0
"""Seconds of trying after which it is said in the log that it still does not work."""


@frozen
class Settlement:
    """What a turn received. `spans` are (choice, from, to); no spans and no `fast_answer` are no charge."""

    request_id: str
    owner: str
    key_id: str
    model: str
    usage: Usage
    spans: tuple[tuple[int, int, int], ...]
    fast_answer: str = ""
    is_due: bool = True
    """False for a turn that failed before it received anything: it costs nothing, and the books are told so."""

    @property
    def tokens(self) -> int:
        """What it cost the limiter's buckets."""
        return self.usage.prompt_tokens + self.usage.completion_tokens


def settlement_of(
    opening: OpenTurn,
    model: str,
    prompt_tokens: int,
    counts: Sequence[int],
    cached_tokens: int,
    status: TurnStatus,
    hit: Hit | None,
) -> Settlement:
    """Return what a turn owes: a function of what the journal has, so that every incarnation says the same.

    `counts` are the tokens received of each choice. The prompt is paid with the first token, or by whoever
    broke off; a turn that failed before any token came owes nothing, an answer of the catalog no tokens.
    """
    if hit is not None:
        usage, counts = Usage(0, 0), ()
    else:
        usage = Usage(prompt_tokens, sum(counts), cached_tokens)
    return Settlement(
        opening.request_id,
        opening.owner,
        opening.key_id,
        model,
        usage,
        tuple((choice, 0, count) for choice, count in enumerate(counts) if count),
        f"{hit.release}/{hit.entry}" if hit else "",
        is_due=status != "failed" or sum(counts) > 0,
    )


class Settling:
    """Settles one turn that has ended. `settled` is set when the limiter has given its place back."""

    def __init__(self, host: Host, settlement: Settlement, *, settled: bool, charged: bool) -> None:
        self.host = host
        self.settlement = settlement
        self.settled = trio.Event()
        self._needs_charge = not charged
        if settled:
            self.settled.set()

    async def run(self) -> None:
        """Return when both are confirmed and journalled. Cancellation: the next incarnation goes on."""
        async with trio.open_nursery() as nursery:
            if not self.settled.is_set():
                nursery.start_soon(self._settle)
            if self._needs_charge:
                nursery.start_soon(self._charge)

    async def _settle(self) -> None:
        due = self.settlement
        message: Settle | Release = (
            Settle(due.request_id, due.owner, due.tokens)
            if due.is_due
            else Release(due.request_id, due.owner)
        )
        await self._until_confirmed("limiter", message, Settled)
        self.settled.set()
        await self.host.writer.commit(Acknowledged(due.request_id, settled=True))

    async def _charge(self) -> None:
        due = self.settlement
        message: Charge | Waive = Waive(due.request_id, due.owner)
        if due.is_due:
            message = Charge(
                due.request_id,
                due.owner,
                due.key_id,
                due.model,
                due.usage.prompt_tokens,
                due.usage.cached_tokens,
                due.spans,
                due.fast_answer,
            )
        await self._until_confirmed("ledger", message, Charged)
        await self.host.writer.commit(Acknowledged(due.request_id, charged=True))

    async def _until_confirmed(
        self, to: str, message: Settle | Release | Charge | Waive, answer: type[Settled | Charged]
    ) -> None:
        request_id = self.settlement.request_id
        while True:
            try:
                await self.host.ask_until(
                    lambda: [to],
                    message,
                    answer,
                    patience=_ROUND,
                    owner=self.settlement.owner,
                    accept=lambda reply: getattr(reply, "request_id", "") == request_id,
                )
            except Unavailable:
                self.host.counters["settlements_delayed"] += 1
            else:
                return
