"""The session's way into its journal: many turns' records in one transaction, and their codec."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import trio
from attrs import define, field, frozen

from actors.bell import Bell
from actors.protocol import (
    Allow,
    ChoiceDone,
    ErrorBody,
    Hit,
    OpenTurn,
    TextDelta,
    TokenLogprob,
    TurnDone,
    TurnEvent,
    TurnFailed,
)
from store.answer import pack_answer
from store.journal import Journal, JournalError
from store.journal_records import Event, Opening, Record

log = logging.getLogger(__name__)

_RETRY_FIRST = 0.02
_RETRY_LAST = 0.5
"""Seconds between tries while the disk takes nothing, doubled from first to last."""

_EVENTS: dict[str, type] = {cls.__name__: cls for cls in (TextDelta, ChoiceDone, TurnDone, TurnFailed)}


def encode(value: Any) -> bytes:
    """Return the bytes of a value of the protocol."""
    return msgspec.msgpack.encode(value)


def decode_opening(data: bytes) -> OpenTurn:
    """Undo `encode`."""
    return msgspec.msgpack.decode(data, type=OpenTurn)


def decode_allow(data: bytes) -> Allow:
    """Undo `encode`."""
    return msgspec.msgpack.decode(data, type=Allow)


@frozen
class _OpenedBy:
    """The one field of an opening that is read whatever the others are."""

    key_id: str


def key_id_of(row: Opening) -> str:
    """Return the API key that opened a turn; "" when nothing in its row says so."""
    if row.key_id:
        return row.key_id
    try:
        return msgspec.msgpack.decode(row.opening, type=_OpenedBy).key_id
    except (msgspec.MsgspecError, ValueError):
        return ""


@frozen
class _PlainHit:
    """A hit as it was written before answers travelled packed."""

    request_id: str
    release: str
    entry: str
    answer: str
    score: float
    threshold: float
    propensity: float = 1.0
    arm: str = "policy"


def decode_hit(data: bytes) -> Hit | None:
    """Undo `encode`, today's or that of before; no bytes are no answer."""
    if not data:
        return None
    try:
        return msgspec.msgpack.decode(data, type=Hit)
    except msgspec.ValidationError:
        old = msgspec.msgpack.decode(data, type=_PlainHit)
    packed = pack_answer(old.answer, sys.maxsize)
    return Hit(
        old.request_id, old.release, old.entry, packed, old.score, old.threshold, old.propensity, old.arm
    )


def decode_error(data: bytes) -> ErrorBody | None:
    """Undo `encode`; no bytes are no error."""
    return msgspec.msgpack.decode(data, type=ErrorBody) if data else None


def decode_headers(data: bytes) -> tuple[tuple[str, str], ...]:
    """Undo `encode`."""
    return msgspec.msgpack.decode(data, type=tuple[tuple[str, str], ...])


def decode_logprobs(data: bytes) -> tuple[TokenLogprob, ...]:
    """Undo `encode`; no bytes are none."""
    return msgspec.msgpack.decode(data, type=tuple[TokenLogprob, ...]) if data else ()


def event_record(request_id: str, event: TurnEvent) -> Event:
    """Return the journal's row of an event."""
    return Event(request_id, event.sequence, type(event).__name__, encode(event))


def decode_event(record: Event) -> TurnEvent:
    """Undo `event_record`."""
    found: TurnEvent = msgspec.msgpack.decode(record.body, type=_EVENTS[record.kind])
    return found


@define
class _Batch:
    records: list[Record] = field(factory=list)
    then: list[Callable[[], None]] = field(factory=list)
    written: trio.Event = field(factory=trio.Event)


class JournalWriter:
    """One task that writes what all turns of the host have to say since its last transaction.

    Records are written in the order they were added, and the `then` functions called in that order after the
    commit. While the disk takes nothing they wait, and `stalled` says so; none is lost.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.stalled = False
        self._batch = _Batch()
        self._bell = Bell()

    def add(self, *records: Record, then: Callable[[], None] | None = None) -> trio.Event:
        """Have the records written; returns the event of their commit."""
        batch = self._batch
        batch.records += records
        if then is not None:
            batch.then.append(then)
        self._bell.ring()
        return batch.written

    async def commit(self, *records: Record, then: Callable[[], None] | None = None) -> None:
        """Have the records written, and wait for it. Cancellation: they are written all the same."""
        await self.add(*records, then=then).wait()

    async def run(self) -> None:
        """Write, for ever. The one task that calls this owns the journal's transactions."""
        while True:
            await self._bell.wait()
            await trio.lowlevel.checkpoint()
            await self._write()

    async def _write(self) -> None:
        pause = _RETRY_FIRST
        while self._batch.records:
            batch = self._batch
            try:
                self.journal.write(batch.records)
            except JournalError:
                self.stalled = True
                log.exception("trying again in %.2f s", pause)
                await trio.sleep(pause)
                pause = min(2 * pause, _RETRY_LAST)
                continue
            self.stalled = False
            self._batch = _Batch()
            for call in batch.then:
                call()
            batch.written.set()
