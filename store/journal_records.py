"""What the turn journal holds, as values."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from attrs import frozen


def pack_tokens(tokens: tuple[int, ...]) -> bytes:
    """Return token ids as 32-bit integers of this machine, side by side."""
    return array("I", tokens).tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Undo `pack_tokens`."""
    tokens = array("I")
    tokens.frombytes(data)
    return tuple(tokens)


# ------------------------------------------------------------------ what is written


@frozen
class Opening:
    """A turn was accepted. `opening`, `verdict`, `headers` and `answer` are the session's own encodings."""

    owner: str
    request_id: str
    created: float
    """Unix seconds."""
    model: str
    batcher: str
    idempotency_key: str
    body_digest: str
    opening: bytes
    prompt: tuple[int, ...]
    verdict: bytes
    """The verdict on the input."""
    headers: bytes
    answer: bytes = b""
    """The catalog's answer, when it has one."""
    key_id: str = ""
    """The API key that opened it; "" in rows of a program that did not note it here."""


@frozen
class Step:
    """What happens to an open turn many times a second, and is read back in order."""

    request_id: str


@frozen
class Chunk(Step):
    """Tokens of one choice from `position` on, as a step of the engine gave them."""

    choice: int
    position: int
    tokens: tuple[int, ...]
    logprobs: bytes = b""
    finish: str = ""
    error: str = ""
    cached_tokens: int = 0


@frozen
class Verdict(Step):
    """A verdict on one choice's output; the newest counts."""

    choice: int
    body: bytes


@frozen
class Event(Step):
    """What a client may see; `sequence` counts from 1 without gaps."""

    sequence: int
    kind: str
    body: bytes


@frozen
class Close:
    """The turn has ended, this way."""

    request_id: str
    status: str
    finished: float
    """Unix seconds."""
    error: bytes = b""


@frozen
class Acknowledged:
    """The limiter (`settled`) or the books (`charged`) have confirmed this turn's end."""

    request_id: str
    settled: bool = False
    charged: bool = False


Record = Opening | Step | Close | Acknowledged

_TAGS: tuple[type[Step], ...] = (Chunk, Verdict, Event)


def to_plain(step: Step) -> tuple[Any, ...]:
    """Return a step as a tuple that starts with its tag."""
    if isinstance(step, Chunk):
        return (
            0,
            step.request_id,
            step.choice,
            step.position,
            step.tokens,
            step.logprobs,
            step.finish,
            step.error,
            step.cached_tokens,
        )
    if isinstance(step, Verdict):
        return (1, step.request_id, step.choice, step.body)
    if isinstance(step, Event):
        return (2, step.request_id, step.sequence, step.kind, step.body)
    raise TypeError(f"{type(step).__name__} is no step of a turn")


def from_plain(plain: Sequence[Any]) -> Step:
    """Undo `to_plain`."""
    tag, *values = plain
    if tag == 0:
        values[3] = tuple(values[3])
    made: Step = _TAGS[tag](*values)
    return made


# ------------------------------------------------------------------ what is read


@frozen
class Turn:
    """A turn's own row."""

    opening: Opening
    status: str = "in_progress"
    finished: float | None = None
    error: bytes = b""
    settled: bool = False
    charged: bool = False


@frozen
class History:
    """All that is known of one turn, to go on from. Chunks by choice and position, events by sequence."""

    turn: Turn
    chunks: tuple[Chunk, ...] = ()
    events: tuple[Event, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    """The newest of each choice."""
    is_damaged: bool = False
    """Some of its rows cannot be read: what is here may have gaps."""

    @classmethod
    def of(cls, turn: Turn, steps: Sequence[Step]) -> History:
        """Sort a turn's steps by kind."""
        chunks = sorted((s for s in steps if isinstance(s, Chunk)), key=lambda c: (c.choice, c.position))
        newest = {s.choice: s for s in steps if isinstance(s, Verdict)}
        return cls(
            turn,
            tuple(chunks),
            tuple(s for s in steps if isinstance(s, Event)),
            tuple(newest[choice] for choice in sorted(newest)),
        )
