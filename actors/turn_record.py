"""A turn as it is read back: what the journal has, as a client may see it."""

from __future__ import annotations

from typing import cast

from actors.protocol import ChoiceDone, TextDelta, TurnDone, TurnOpened, TurnRecord, TurnStatus, Usage
from actors.turn_admission import Admitted
from actors.turn_journal import (
    decode_allow,
    decode_error,
    decode_event,
    decode_headers,
    decode_hit,
    decode_opening,
)
from actors.turn_settlement import Settlement, settlement_of
from store.journal_records import History, Turn


def admitted_of(turn: Turn) -> Admitted:
    """Return what a journalled turn started with."""
    row = turn.opening
    return Admitted(
        decode_opening(row.opening),
        row.model,
        row.prompt,
        row.batcher,
        decode_allow(row.verdict),
        decode_headers(row.headers),
        decode_hit(row.answer),
    )


def opened_of(turn: Turn, *, after: int, replayed: bool) -> TurnOpened:
    """Return the reply to whoever opens or attaches to this turn."""
    row = turn.opening
    prompt_tokens = 0 if row.answer else len(row.prompt)
    headers = decode_headers(row.headers)
    return TurnOpened(
        row.request_id, row.model, int(row.created), prompt_tokens, headers, after=after, replayed=replayed
    )


def settlement_of_history(history: History, status: TurnStatus) -> Settlement:
    """Return what a turn owes, from the journal alone."""
    admitted = admitted_of(history.turn)
    counts = [
        sum(len(chunk.tokens) for chunk in history.chunks if chunk.choice == choice)
        for choice in range(admitted.opening.n)
    ]
    cached = next((c.cached_tokens for c in history.chunks if c.choice == 0 and c.position == 0), 0)
    return settlement_of(
        admitted.opening, admitted.model, len(admitted.prompt), counts, cached, status, admitted.hit
    )


def record_of(history: History) -> TurnRecord:
    """Return the turn as `ReadTurn` answers it."""
    turn, row = history.turn, history.turn.opening
    opening = decode_opening(row.opening)
    events = [decode_event(record) for record in history.events]
    texts, reasons = [""] * opening.n, [""] * opening.n
    usage: Usage | None = None
    for event in events:
        match event:
            case TextDelta():
                texts[event.choice] += event.text
            case ChoiceDone():
                reasons[event.choice] = event.finish_reason
            case TurnDone():
                usage = event.usage
    status = cast("TurnStatus", turn.status)
    hit = decode_hit(row.answer)
    return TurnRecord(
        row.request_id,
        row.model,
        int(row.created),
        status,
        tuple(texts),
        tuple(reasons),
        usage or settlement_of_history(history, status).usage,
        opening.background,
        decode_error(turn.error),
        opening.metadata,
        len(events),
        opening.store,
        f"{hit.release}/{hit.entry}" if hit else "",
    )
