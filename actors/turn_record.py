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
    encode,
    key_id_of,
)
from actors.turn_settlement import Settlement, settlement_of
from store.journal_records import History, Opening, Turn
from store.journal_salvage import UNREADABLE


def row_of(admitted: Admitted, created: float) -> Opening:
    """Return the journal's row of a turn that everybody said yes to. `created` is in Unix seconds."""
    opening = admitted.opening
    return Opening(
        opening.owner,
        opening.request_id,
        created,
        admitted.model,
        admitted.batcher,
        opening.idempotency_key,
        opening.body_digest,
        encode(opening),
        admitted.prompt,
        encode(admitted.allow),
        encode(admitted.headers),
        encode(admitted.hit) if admitted.hit else b"",
        opening.key_id,
    )


def admitted_of(turn: Turn) -> Admitted:
    """Return what a journalled turn started with: undo `row_of`. Raises for a row that does not decode."""
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
    """Return what a turn owes, from the journal alone. Raises for an opening that does not decode."""
    admitted = admitted_of(history.turn)
    counts = [
        sum(len(chunk.tokens) for chunk in history.chunks if chunk.choice == choice)
        for choice in range(admitted.opening.n)
    ]
    cached = next((c.cached_tokens for c in history.chunks if c.choice == 0 and c.position == 0), 0)
    return settlement_of(
        admitted.opening, admitted.model, len(admitted.prompt), counts, cached, status, admitted.hit
    )


def settlement_of_rows(history: History, status: TurnStatus) -> Settlement:
    """Return what a turn owes whose opening does not decode: what the rest of its rows bear out, or nothing.

    With its chunks whole that is the same as ever. What cannot be shown is not charged.
    """
    row = history.turn.opening
    label = _fast_answer_of(row) if row.answer else ""
    counts: dict[int, int] = {}
    for chunk in () if row.answer else history.chunks:
        counts[chunk.choice] = counts.get(chunk.choice, 0) + len(chunk.tokens)
    prompt_tokens = 0 if row.answer else len(row.prompt)
    cached = next((c.cached_tokens for c in history.chunks if c.choice == 0 and c.position == 0), 0)
    received = sum(counts.values())
    is_known = not history.is_damaged and bool(label or not row.answer)
    return Settlement(
        row.request_id,
        row.owner,
        key_id_of(row),
        row.model,
        Usage(prompt_tokens, received, cached),
        tuple((choice, 0, count) for choice, count in sorted(counts.items()) if count),
        label,
        is_due=is_known and (status != "failed" or received > 0),
    )


def _fast_answer_of(row: Opening) -> str:
    """Return `<release>/<entry>` of a turn that the catalog answered; "" when that cannot be read."""
    try:
        return dict(decode_headers(row.headers)).get("x-antiphon-fast-answer", "")
    except UNREADABLE:
        return ""


def record_of(history: History) -> TurnRecord:
    """Return the turn as `ReadTurn` answers it. Raises for rows that do not decode."""
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
        opening.echo,
    )
