"""Every message of the system: the contract between the actors. Read this first.

Who sends what to whom, in the order of a turn's life (docs/architecture.md draws it):

    edge     → session   OpenTurn, Attach, Consumed, Leave, CancelTurn, ReadTurn
    session  → limiter   Reserve, Settle, Release
    session  → safety    Screen
    session  → fast_answer  Lookup, LookupMany
    session  → router    Route
    session  → batcher   Generate, CancelGeneration
    batcher  → session   Tokens
    session  → edge      TurnEvents
    session  → ledger    Charge, Waive
    batcher  → ledger    Witness
    batcher  → router    Load

`repeatable=True` says that a caller may send the message again when it does not know what became of the first.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import frozen

from gpu.sampling_params import SamplingParams
from store.answer import unpack_answer
from supervision.message import WhenFull, message

# ------------------------------------------------------------------ values


@frozen
class ChatMessage:
    """One message of a conversation; content parts are already joined to text at the edge."""

    role: str
    content: str
    name: str = ""


@frozen
class ErrorBody:
    """An error as the OpenAI wire has it, with its HTTP status. `param` and `code` "" become null."""

    status: int
    type: str
    message: str
    param: str = ""
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()


@frozen
class Usage:
    """Token counts of a turn: the prompt once, the completion over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@frozen
class TokenLogprob:
    """Natural-log probability of a token and of the likeliest ones, as the engine reports it (token ids)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen
class TextLogprob:
    """The same with the tokens' bytes, as a client gets it."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


# ------------------------------------------------------------------ verdicts

Direction = Literal["input", "output"]

CATEGORIES = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/intent",
    "self-harm/instructions",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
"""The categories of the moderations endpoint: a rule of the policy names one."""


@frozen
class Allow:
    """A checker read characters [0, end) of this text and found nothing: only this lets text pass.

    Made by the safety actor. `Generate` and `TurnEvents` cannot be built without one that covers them.
    """

    request_id: str
    direction: Direction
    choice: int
    end: int
    checker: str
    policy: str
    """Digest of the policy that was applied."""


@frozen
class Block:
    """The text must not pass: which of `CATEGORIES` and which rule of the policy."""

    request_id: str
    direction: Direction
    choice: int
    category: str
    rule: str
    checker: str
    policy: str
    end: int = 0
    """Characters before the offending one that may still be shown."""


class Unscreened(ValueError):
    """Text was about to pass without a verdict that covers it: a bug, never a user's fault."""


@message(repeatable=True)
class Screen:
    """Ask for a verdict on a text, or on the next piece of one. Reply: `Screened`.

    `text` is everything from `start` that has no verdict yet; `context` is up to 64 characters before it.
    Unless `final`, the verdict may end early, where a match could still begin; the asker sends the rest again
    with what comes next. So the verdict does not depend on how the text was cut.
    """

    request_id: str
    direction: Direction
    choice: int
    start: int
    text: str
    context: str
    final: bool


@message(repeatable=True)
class Screened:
    """The checker's answer. There is no third value: no answer means no text."""

    verdict: Allow | Block


@message(repeatable=True)
class Moderate:
    """Score texts for `/v1/moderations`. Reply: `Moderated`."""

    inputs: tuple[str, ...]


@message(repeatable=True)
class Moderated:
    """One set of flagged categories for each input."""

    flagged: tuple[tuple[str, ...], ...]
    policy: str


# ------------------------------------------------------------------ edge ↔ session


@message(repeatable=True, when_full=WhenFull.REFUSE)
class OpenTurn:
    """Begin a turn. Reply: `TurnOpened` or `TurnRefused`, before a byte of the 200 goes out.

    Repeating it with the same `request_id` attaches to the turn that is there.
    """

    request_id: str
    owner: str
    key_id: str
    model: str
    messages: tuple[ChatMessage, ...]
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stream: bool = True
    background: bool = False
    priority: int = 0
    conversation: str = ""
    idempotency_key: str = ""
    body_digest: str = ""
    """SHA-256 hex of the request's body: what a retry is recognised by."""
    is_retry: bool = False
    """The client says that it asked before (`x-stainless-retry-count` above 0)."""
    prompt_cache_key: str = ""
    fast_answers: bool = False
    """The key takes part, and the request is a first turn without context of its own."""
    deadline: float = 600.0
    """Seconds from admission to the end of the turn."""
    metadata: tuple[tuple[str, str], ...] = ()
    user: str = ""
    face: Literal["chat", "responses"] = "chat"
    store: bool = True
    """The client may read the turn again by its id; the journal keeps it either way while a retry may come."""
    echo: str = ""
    """JSON of what the face repeats of the request when the turn is read again. Nobody else looks into it."""


@message(repeatable=True)
class TurnOpened:
    """The turn is accepted and journalled. Events follow as `TurnEvents`, from sequence `after` + 1.

    `replayed`: it was there before (a retry, an idempotency key, an `Attach`); nothing is generated or charged again.
    """

    request_id: str
    model: str
    created: int
    """Unix seconds."""
    prompt_tokens: int
    headers: tuple[tuple[str, str], ...] = ()
    """`x-ratelimit-*`, `x-antiphon-fast-answer`."""
    after: int = 0
    replayed: bool = False


@message(repeatable=True)
class TurnRefused:
    """Nothing was begun, reserved or charged."""

    error: ErrorBody


@message(repeatable=True)
class Attach:
    """Hear a turn from the event after `after` on. Reply: `TurnOpened`, or `TurnRefused` (404 also when not the owner's)."""

    request_id: str
    owner: str
    after: int
    reader: str = ""
    """Names this reader of the turn; `""` means the request_id. The events it hears carry it."""


@message(repeatable=True, when_full=WhenFull.WAIT)
class Consumed:
    """The client's socket took every event up to `through`: opens the flow-control window.

    Not `NEWEST`: one edge sends these for many turns, and the newest of one says nothing of another.
    """

    request_id: str
    through: int
    reader: str = ""


@message(repeatable=True)
class Leave:
    """The reader is gone. The turn goes on for the disconnect grace, or for good in the background."""

    request_id: str
    reader: str = ""


@message(repeatable=True)
class CancelTurn:
    """End the turn now; what was generated is kept, marked incomplete, and billed. Reply: `TurnCancelled` or `TurnRefused`."""

    request_id: str
    owner: str


@message(repeatable=True)
class TurnCancelled:
    """The turn has ended, whether by this or before."""

    request_id: str


@message(repeatable=True)
class ReadTurn:
    """Read what is known of a turn. Reply: `TurnRecord` or `TurnRefused`."""

    request_id: str
    owner: str


TurnStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


@message(repeatable=True)
class TurnRecord:
    """A turn as the journal has it. `texts` has one entry per choice."""

    request_id: str
    model: str
    created: int
    status: TurnStatus
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    usage: Usage
    background: bool
    error: ErrorBody | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    last_sequence: int = 0
    store: bool = True
    """As the `OpenTurn` said; the edge shows a turn that has ended by its id only when it was to be stored."""
    fast_answer: str = ""
    """`<release>/<entry>` when the catalog answered."""
    echo: str = ""
    """As the `OpenTurn` said."""


@frozen
class TextDelta:
    """New text of one choice. `start` is its offset in characters in the reply."""

    sequence: int
    choice: int
    start: int
    text: str
    logprobs: tuple[TextLogprob, ...] = ()


@frozen
class ChoiceDone:
    """A choice has ended: `stop | length | content_filter`."""

    sequence: int
    choice: int
    finish_reason: str


@frozen
class TurnDone:
    """The last event of a turn that finished."""

    sequence: int
    usage: Usage
    fast_answer: str = ""
    """`<release>/<entry>` when the catalog answered."""


@frozen
class TurnFailed:
    """The last event of a turn that did not."""

    sequence: int
    error: ErrorBody


TurnEvent = TextDelta | ChoiceDone | TurnDone | TurnFailed


@message(repeatable=True, when_full=WhenFull.WAIT)
class TurnEvents:
    """What the client may see next, in order, coalesced while the pipe was busy. A `tell`.

    Raises `Unscreened` when a delta is not covered by an `Allow` of its choice.
    """

    request_id: str
    events: tuple[TurnEvent, ...]
    allows: tuple[Allow, ...]
    """The newest output verdict of each choice that has text here."""
    reader: str = ""
    """Who hears them: the `request_id` of the `OpenTurn` (a retry's own, when the turn was there before),
    or the `reader` of the `Attach`. Two readers of one turn at one edge are told apart by it."""

    def __attrs_post_init__(self) -> None:
        covered = {
            a.choice: a.end
            for a in self.allows
            if a.request_id == self.request_id and a.direction == "output"
        }
        for event in self.events:
            if isinstance(event, TextDelta) and event.start + len(event.text) > covered.get(event.choice, 0):
                raise Unscreened(
                    f"turn {self.request_id} choice {event.choice}: text past {covered.get(event.choice, 0)}"
                )


# ------------------------------------------------------------------ limits


@message(repeatable=True)
class Reserve:
    """Hold a request, its tokens and a place among the concurrent. Reply: `Reserved` or `LimitExceeded`.

    Idempotent by `request_id`. `tokens` is prompt + max_tokens × n.
    """

    request_id: str
    owner: str
    key_id: str
    model: str
    tokens: int


@message(repeatable=True)
class Reserved:
    """Held until settled or released. `headers` are the `x-ratelimit-*` of this moment."""

    request_id: str
    headers: tuple[tuple[str, str], ...]


@message(repeatable=True)
class LimitExceeded:
    """Nothing is held."""

    request_id: str
    error: ErrorBody


@message(repeatable=True, when_full=WhenFull.WAIT)
class Settle:
    """The turn used this much; give back the rest and the place. Reply: `Settled`. Idempotent by `request_id`."""

    request_id: str
    owner: str
    tokens: int


@message(repeatable=True, when_full=WhenFull.WAIT)
class Release:
    """The turn used nothing. Reply: `Settled`. Idempotent by `request_id`."""

    request_id: str
    owner: str


@message(repeatable=True)
class Settled:
    """The reservation is closed. `known` is False when there was none (any more)."""

    request_id: str
    known: bool


@message(repeatable=True)
class OpenReservations:
    """Which reservations are open? Reply: `ReservationList`. The limiter asks sessions `LiveTurns` the other way round."""


@message(repeatable=True)
class ReservationList:
    """Open reservations, by request."""

    request_ids: tuple[str, ...]


@message(repeatable=True)
class LiveTurns:
    """Limiter → session: which of these turns do you still run, or have yet to settle? Reply: `LiveTurnList`."""

    request_ids: tuple[str, ...]


@message(repeatable=True)
class LiveTurnList:
    """The ones of those asked for that are open here."""

    request_ids: tuple[str, ...]


# ------------------------------------------------------------------ routing


@message(repeatable=True)
class Route:
    """Which batcher for this model? Reply: `Routed` or `Unroutable`. `avoid` names batchers that just failed it."""

    request_id: str
    owner: str
    model: str
    prompt_tokens: int
    prefix: str = ""
    """Digest of the prompt's first blocks and the owner: the batcher that has it is preferred."""
    avoid: tuple[str, ...] = ()


@message(repeatable=True)
class Routed:
    """The decision and why, as it is logged."""

    request_id: str
    batcher: str
    model: str
    reason: str
    context_length: int
    """Tokens a request may have there; 0 is not known yet."""


@message(repeatable=True)
class Unroutable:
    """Unknown model (404), or no batcher is up (503)."""

    request_id: str
    error: ErrorBody


@message(repeatable=True, when_full=WhenFull.NEWEST)
class Load:
    """Batcher → router, at most ten times a second: how much work is there."""

    model: str
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    context_length: int
    """Tokens a request may have there."""


# ------------------------------------------------------------------ session ↔ batcher


@message(repeatable=True)
class Generate:
    """Produce one choice of a turn. Reply: `GenerationAccepted` or `GenerationRefused`; then `Tokens`, a `tell` per step.

    `generation` is `<request_id>/<choice>`. `emitted` are the reply's tokens that are already known: the engine
    goes on at position len(emitted). Repeating it for a running generation is a no-op that re-sends nothing.
    """

    generation: str
    owner: str
    model: str
    prompt: tuple[int, ...]
    params: SamplingParams
    allow: Allow
    emitted: tuple[int, ...] = ()
    cache_key: str = ""
    priority: int = 0
    charge: bool = True

    def __attrs_post_init__(self) -> None:
        if self.allow.direction != "input" or not self.generation.startswith(self.allow.request_id):
            raise Unscreened(f"generation {self.generation} without a verdict on its input")


@message(repeatable=True)
class GenerationAccepted:
    """It is queued or running."""

    generation: str


@message(repeatable=True)
class GenerationRefused:
    """Queue full (503), or the request cannot be run (400)."""

    generation: str
    error: ErrorBody


@message(repeatable=True, when_full=WhenFull.WAIT)
class CancelGeneration:
    """Stop it. Reply: `GenerationCancelled` when its slot and blocks are free."""

    generation: str


@message(repeatable=True)
class GenerationCancelled:
    """It is gone; `known` is False when it was not there."""

    generation: str
    known: bool


@frozen
class TokenChunk:
    """What one step gave one generation. `position` is that of the first token."""

    generation: str
    position: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Literal["", "stop", "length", "error", "shed"]
    """"error": the request's own fault, or ours; "shed": there is no room for it just now."""
    error: str
    cached_tokens: int


@message(repeatable=True, when_full=WhenFull.WAIT)
class Tokens:
    """One step's output for one session host."""

    chunks: tuple[TokenChunk, ...]


# ------------------------------------------------------------------ books


@message(repeatable=True, when_full=WhenFull.WAIT)
class Charge:
    """Enter what a turn received: positions [a, b) of each choice. Reply: `Charged`, when it is durable.

    The books charge the union of positions per request and choice, so repeating adds nothing.
    """

    request_id: str
    account: str
    key_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    spans: tuple[tuple[int, int, int], ...]
    """(choice, from, to): half-open."""
    fast_answer: str = ""


@message(repeatable=True, when_full=WhenFull.WAIT)
class Waive:
    """A turn failed before its first token was let out: nothing is owed for it, whatever the engine made.

    Without it the books could not tell such a turn from a charge that was lost. Reply: `Charged` with 0.
    """

    request_id: str
    account: str


@message(repeatable=True)
class Charged:
    """Durable. `micros` is what this charge added, in millionths of the price list's currency."""

    request_id: str
    micros: int


@frozen
class WitnessEvent:
    """`key` is unique for the event: the outbox repeats it until it is acknowledged."""

    key: str
    request_id: str
    choice: int
    account: str
    model: str
    prompt_tokens: int
    start: int
    end: int


@message(repeatable=True, when_full=WhenFull.WAIT)
class Witness:
    """The batcher's own count of what it generated for a request. Reply: `Charged` with 0. At least once."""

    events: tuple[WitnessEvent, ...]


# ------------------------------------------------------------------ fast answers


@message(repeatable=True)
class Lookup:
    """Is there a reviewed answer to this first question? Reply: `Hit` or `Declined`, within 200 ms or never."""

    request_id: str
    owner: str
    text: str
    is_probe: bool
    """Nobody waits for the reply, so it leaves no decision row."""


@message(repeatable=True)
class Hit:
    """The answer, where it comes from, and what was decided how (for the feedback log)."""

    request_id: str
    release: str
    entry: str
    packed: bytes
    """As the catalog keeps it: who shows the answer unpacks it, not who finds a thousand others meanwhile."""
    score: float
    threshold: float
    propensity: float
    arm: str
    """`policy`, or `explore` for an owner in the randomised slice."""

    @property
    def answer(self) -> str:
        """The text. Raises `store.answer.DamagedAnswer` when it is damaged."""
        return unpack_answer(self.packed)


@message(repeatable=True)
class Declined:
    """`reason`: no_release, too_long (no key can be made of it), miss, below_threshold, exploration, mismatch."""

    request_id: str
    reason: str
    release: str
    entry: str
    score: float
    threshold: float
    propensity: float
    arm: str


@message(repeatable=True)
class LookupMany:
    """Several lookups at once, in columns of equal length. Reply: `LookedUp`, in the same order."""

    request_ids: tuple[str, ...]
    owners: tuple[str, ...]
    texts: tuple[str, ...]

    def __attrs_post_init__(self) -> None:
        if not len(self.request_ids) == len(self.owners) == len(self.texts):
            raise ValueError("a LookupMany with columns of different lengths")


@message(repeatable=True)
class LookedUp:
    """The answers to a `LookupMany`, all from one release. A reason of "" means a hit; else as in `Declined`."""

    release: str
    threshold: float
    reasons: tuple[str, ...]
    entries: tuple[str, ...]
    packed: tuple[bytes, ...]
    """As in `Hit`; empty where there is none."""
    scores: tuple[float, ...]
    propensities: tuple[float, ...]
    arms: tuple[str, ...]


# ------------------------------------------------------------------ figures


@message(repeatable=True)
class ReadMetrics:
    """What are your figures? Reply: `Metrics`. The edge asks every actor and prints them at `/metrics`."""


@message(repeatable=True)
class Metrics:
    """Counters and gauges by full sample name with labels, as Prometheus text lines."""

    lines: tuple[str, ...]
    content_type: ClassVar[str] = "text/plain; version=0.0.4"
