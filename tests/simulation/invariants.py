"""The promises (invariants A to F), looked at from outside and from the disks, once all is quiet."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from actors.protocol import ChoiceDone, TextDelta, TurnDone, TurnFailed
from actors.turn_journal import decode_event, decode_opening
from store.books import Books
from store.books_reconcile import reconcile
from store.books_schema import REQUESTS, SPANS
from store.journal import Journal
from store.journal_records import History
from tests.simulation.clients import Attempt, Client, Wish
from tests.simulation.world import World

MAY_FAIL = {
    "turn_cancelled",
    "turn_abandoned",
    "deadline_exceeded",
    "engine_failed",
    "server_is_overloaded",
}
"""Codes with which a turn may end in a storm. Anything else is a bug's."""
SLACK = 3.0
"""Seconds after its deadline by which a turn has ended, restarts of its host included."""


def residue(world: World) -> list[str]:
    """What is still there; when all is quiet, nothing is (invariant F)."""
    return [what for what in _residue(world) if what]


def _residue(world: World) -> Iterator[str]:
    late = sum(len(mailbox._delayed) for mailbox in world.tree.hub._mailboxes.values())
    yield f"{late} messages are on their way" if late else ""
    for name in world.names:
        incarnation = world.actors.get(name)
        if incarnation is None or not world.tree.tree.epoch(name):
            yield f"{name} is not up"
            continue
        yield f"{name} is stopping" if incarnation.stopping else ""
        actor: Any = incarnation.actor
        context = world.tree.context(name)
        yield f"{name}: {len(context.pending)} answers owed" if len(context.pending) else ""
        match name.partition(".")[0]:
            case "session":
                left = (actor._turns, actor._readers, actor._settling, actor._earlier.admissions)
                yield f"{name}: {[list(x) for x in left]}" if any(left) else ""
                yield f"{name}: asks in flight" if len(context.slots) else ""
                yield f"{name}: unsettled turns" if actor._host.journal.unfinished() else ""
            case "batcher":
                left = (actor._engine._requests, actor._generations)
                yield f"{name}: {[list(x) for x in left]}" if any(left) else ""
                yield f"{name}: {actor._witnessing.owed} witness events" if actor._witnessing.owed else ""
            case "limiter":
                yield f"{name}: reservations {list(actor._meter.open)}" if actor._meter.open else ""
            case "edge":
                yield f"{name}: readers" if actor.turns._readers else ""


def check(world: World, clients: Sequence[Client]) -> Iterator[str]:
    """Yield every broken promise."""
    turns = dict(_journalled(world))
    by_request = {attempt.turn: client for client in clients for attempt in client.attempts if attempt.turn}
    for client in clients:
        for attempt in client.attempts:
            if attempt.turn and attempt.turn not in turns:
                yield f"A: {client.wish.name} was told of {attempt.turn}, which no journal has"
            elif attempt.turn:
                yield from _check_attempt(world, attempt, turns[attempt.turn])
        yield from _check_client(client, turns)
    openings = {a.opening.request_id: c for c in clients for a in c.attempts}
    for request_id, history in turns.items():
        client = by_request.get(request_id) or openings.get(request_id)
        if client is None:
            yield f"A: nobody asked for {request_id}"
            continue
        yield from _check_turn(world, request_id, history, client)
    yield from _check_money(world, turns)


def _journalled(world: World) -> Iterator[tuple[str, History]]:
    for name in world.names:
        if name.startswith("session"):
            actor: Any = world.actors[name].actor
            journal: Journal = actor._host.journal
            for owner, request_id in journal._db.execute("SELECT owner, request_id FROM turns").fetchall():
                history = journal.history(owner, request_id)
                assert history is not None
                yield request_id, history


# ---------------------------------------------------------------------- A, B, D, E


def _check_turn(world: World, request_id: str, history: History, client: Client) -> Iterator[str]:
    wish, turn = client.wish, history.turn
    events = [decode_event(record) for record in history.events]
    if turn.opening.owner != wish.owner:
        yield f"D: {request_id} belongs to {turn.opening.owner}"
    if [e.sequence for e in events] != list(range(1, len(events) + 1)):
        yield f"B: {request_id} has sequences {[e.sequence for e in events]}"
    endings = [e for e in events if isinstance(e, TurnDone | TurnFailed)]
    if len(endings) != 1 or events[-1] is not endings[0] or turn.finished is None:
        yield f"A: {request_id} has {len(endings)} endings, status {turn.status}"
        return
    if turn.finished > turn.opening.created + wish.deadline + SLACK:
        yield f"A: {request_id} ended {turn.finished - turn.opening.created:.1f} s after its beginning"
    yield from _check_ending(request_id, endings[0], turn.status, client)
    yield from _check_text(world, request_id, events, client, is_whole=turn.status == "completed")


def _check_ending(
    request_id: str, ending: TurnDone | TurnFailed, status: str, client: Client
) -> Iterator[str]:
    if isinstance(ending, TurnDone):
        if status != "completed":
            yield f"A: {request_id} is done and {status}"
        return
    code = ending.error.code
    if code not in MAY_FAIL:
        yield f"A: {request_id} failed of {ending.error}"
    if code == "turn_cancelled" and not client.has_cancelled:
        yield f"A: {request_id} was cancelled and nobody had asked for it"
    if code == "deadline_exceeded" and client.wish.deadline > 100:
        yield f"A: {request_id} is out of time too early"


def _check_text(
    world: World, request_id: str, events: Sequence[Any], client: Client, *, is_whole: bool
) -> Iterator[str]:
    wish = client.wish
    texts, reasons = [""] * wish.n, Counter[int]()
    for event in events:
        if isinstance(event, TextDelta):
            if event.start != len(texts[event.choice]) or not event.text:
                yield f"B: {request_id}/{event.choice} goes on at {event.start}, not {len(texts[event.choice])}"
            texts[event.choice] += event.text
        elif isinstance(event, ChoiceDone):
            reasons[event.choice] += 1
            if event.finish_reason != wish.golden(event.choice).reason:
                yield f"B: {request_id}/{event.choice} ended with {event.finish_reason}"
    for choice, text in enumerate(texts):
        whole = wish.golden(choice).text
        if not whole.startswith(text) or ((is_whole or reasons[choice]) and text != whole):
            yield f"B: {request_id}/{choice} is {text!r}, not {whole!r}"
        if reasons[choice] > 1 or (is_whole and not reasons[choice]):
            yield f"A: {request_id}/{choice} ended {reasons[choice]} times"
        yield from _check_verdicts(world, request_id, choice, text)


def _check_verdicts(world: World, request_id: str, choice: int, text: str) -> Iterator[str]:
    """Every character was in a text that a checker read and allowed (invariant E)."""
    covered = 0
    for start, read, end in sorted(world.screened.get((request_id, choice), ()), key=lambda s: s[2]):
        if start <= covered < end and text[start:end] == read[: max(0, min(end, len(text)) - start)]:
            covered = end
    if covered < len(text):
        yield f"E: {request_id}/{choice}: {text[covered:]!r} left without a verdict"


def _check_attempt(world: World, attempt: Attempt, history: History) -> Iterator[str]:
    said = [decode_event(record) for record in history.events]
    if history.turn.opening.owner != attempt.wish.owner:
        yield f"D: {attempt.wish.name} heard {attempt.turn} of {history.turn.opening.owner}"
    if said[: len(attempt.events)] != attempt.events:
        yield f"B: {attempt.wish.name} heard of {attempt.turn} what its journal has not"


def _check_client(client: Client, turns: dict[str, History]) -> Iterator[str]:
    wish, last = client.wish, client.attempts[-1]
    if wish.is_bad:
        if last.ending != "left" and (last.error is None or last.error.code != "content_policy_violation"):
            yield f"E: {wish.name} asked for a forbidden thing and got {last.error or last.last}"
    elif wish.is_poison:
        if isinstance(last.last, TurnDone):
            yield f"H: {wish.name} is poison and was answered"
    elif last.ending == "refused" and last.error is not None and not client.has_left:
        yield f"A: {wish.name} was refused: {last.error}"
    yield from _check_key(wish, turns)
    heard = [a for a in client.attempts if a.ending == "heard" and isinstance(a.last, TurnDone)]
    for attempt in heard:
        for choice in range(wish.n):
            if attempt.texts[choice] != wish.golden(choice).text:
                yield f"B: {wish.name} read {attempt.texts[choice]!r}"


def _check_key(wish: Wish, turns: dict[str, History]) -> Iterator[str]:
    if wish.key:
        kept = [
            request_id
            for request_id, history in turns.items()
            if (history.turn.opening.owner, history.turn.opening.idempotency_key) == (wish.owner, wish.key)
            and history.turn.status == "completed"
        ]
        if len(kept) > 1:
            yield f"C: {wish.name} has {len(kept)} turns for one key: {kept}"


# ---------------------------------------------------------------------- C


def _check_money(world: World, turns: dict[str, History]) -> Iterator[str]:
    ledger: Any = world.actors["ledger"].actor
    books: Books = ledger._books
    for drift in reconcile(books, settled_before=2**60).drifts:
        yield f"C: {drift.kind} of {drift.about}: {drift.what}"
    with books.engine.connect() as connection:
        rows = {row.request_id: row for row in connection.execute(sa.select(REQUESTS))}
        spans = defaultdict(list)
        for row in connection.execute(sa.select(SPANS).order_by(SPANS.c.start)):
            spans[row.request_id, row.choice].append((row.start, row.end))
    spent: Counter[str] = Counter()
    for request_id, history in turns.items():
        yield from _check_charge(request_id, history, rows.pop(request_id, None), spans, spent)
    for request_id in rows:
        yield f"C: {request_id} is charged and no journal has it"
    limiter: Any = world.actors["limiter"].actor
    found = {scope: b.spent for scope, b in limiter._meter.budgets.items() if b.spent or b.held}
    if found != dict(spent):
        yield f"C: the limiter says {found} were used, the journals {dict(spent)}"
    if any(b.held for b in limiter._meter.budgets.values()):
        yield "C: tokens are held while nothing runs"


def _check_charge(
    request_id: str,
    history: History,
    row: Any,
    spans: dict[tuple[str, int], list[tuple[int, int]]],
    spent: Counter[str],
) -> Iterator[str]:
    opening = decode_opening(history.turn.opening.opening)
    counts = [0] * opening.n
    for chunk in history.chunks:
        if chunk.position != counts[chunk.choice]:
            yield f"B: {request_id}/{chunk.choice} has tokens at {chunk.position}, not {counts[chunk.choice]}"
        counts[chunk.choice] += len(chunk.tokens)
    if history.turn.status == "failed" and not sum(counts):
        if row is not None:
            yield f"C: {request_id} failed before it received anything, and is charged"
        return
    if row is None:
        yield f"C: {request_id} is not charged"
        return
    is_hit = bool(history.turn.opening.answer)
    prompt = 0 if is_hit else len(history.turn.opening.prompt)
    if (row.prompt_tokens, bool(row.fast_answer)) != (prompt, is_hit):
        yield f"C: {request_id} is charged {row.prompt_tokens} prompt tokens, {row.fast_answer!r}"
    yield from _check_spans(request_id, counts, spans)
    if prompt + sum(counts):
        spent[f"owner:{opening.owner}"] += prompt + sum(counts)
    done = decode_event(history.events[-1]) if history.events else None
    if isinstance(done, TurnDone) and done.usage.completion_tokens != sum(counts):
        yield f"C: {request_id} says {done.usage}, received {counts}"


def _check_spans(
    request_id: str, counts: Sequence[int], spans: dict[tuple[str, int], list[tuple[int, int]]]
) -> Iterator[str]:
    """What was charged of each choice is one whole, from its first position to its last."""
    for choice, count in enumerate(counts):
        intervals = spans.get((request_id, choice), [])
        ends = [0, *(end for _, end in intervals)]
        if [start for start, _ in intervals] != ends[:-1] or ends[-1] != count:
            yield f"C: {request_id}/{choice} received {count} tokens, charged {intervals}"
