"""A turn's events as chat completion chunks, and a whole turn as one chat completion."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from attrs import define, field

from actors.edge import request_ids, sse
from actors.edge.errors import encode as encode_error
from actors.protocol import (
    ChoiceDone,
    ErrorBody,
    TextDelta,
    TextLogprob,
    TurnDone,
    TurnEvent,
    TurnFailed,
    TurnOpened,
    TurnRecord,
    Usage,
)

LEAST_LOGPROB = -9999.0
"""What the wire says for a probability of zero: JSON has no infinity."""


class ChatStream:
    """Renders one streamed chat completion. `opening`, then `render` as events come, to the last."""

    def __init__(
        self,
        opened: TurnOpened,
        *,
        n: int,
        include_usage: bool = False,
        logprobs: bool = False,
        service_tier: str | None = None,
    ) -> None:
        self._head = _head(opened, "chat.completion.chunk", service_tier)
        self._n = n
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._held: dict[int, list[TextLogprob]] = {}
        """Log-probabilities of tokens whose text has not come yet."""

    def opening(self) -> bytes:
        """Return the first chunk of every choice."""
        role = {"role": "assistant", "content": ""}
        return sse.events(self._chunk(choice, role) for choice in range(self._n))

    def render(self, events: Iterable[TurnEvent]) -> bytes:
        """Return the chunks of events that are here together; neighbouring texts become one chunk."""
        return b"".join(self._event(event) for event in merged(events))

    def broken(self, error: ErrorBody) -> bytes:
        """Return the end of a stream that the edge has to give up: an error, no finish reason, no [DONE]."""
        return sse.event(encode_error(error))

    def _event(self, event: TurnEvent) -> bytes:
        match event:
            case TextDelta(choice=choice, text="", logprobs=logprobs):
                self._held.setdefault(choice, []).extend(logprobs)
                return b""
            case TextDelta(choice=choice, text=text):
                logprobs = (*self._held.pop(choice, ()), *event.logprobs)
                return sse.event(self._chunk(choice, {"content": text}, logprobs))
            case ChoiceDone(choice=choice, finish_reason=reason):
                logprobs = tuple(self._held.pop(choice, ()))
                return sse.event(self._chunk(choice, {}, logprobs, reason))
            case TurnDone(usage=usage, fast_answer=fast_answer):
                return self._usage(usage, fast_answer) + sse.DONE
            case TurnFailed(error=error):
                return self.broken(error)

    def _chunk(
        self,
        choice: int,
        delta: dict[str, str],
        logprobs: tuple[TextLogprob, ...] = (),
        finish_reason: str | None = None,
    ) -> bytes:
        shown = chat_logprobs(logprobs) if self._logprobs and logprobs else None
        chunk = {
            **self._head,
            "choices": [{"index": choice, "delta": delta, "logprobs": shown, "finish_reason": finish_reason}],
        }
        if self._include_usage:
            chunk["usage"] = None
        return sse.encode(chunk)

    def _usage(self, usage: Usage, fast_answer: str) -> bytes:
        if not self._include_usage:
            return b""
        return sse.event(sse.encode({**self._head, "choices": [], "usage": chat_usage(usage, fast_answer)}))


@define
class GatheredChoice:
    """What one choice of a turn came to."""

    texts: list[str] = field(factory=list)
    logprobs: list[TextLogprob] = field(factory=list)
    finish_reason: str = ""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)


class Gathered:
    """A turn gathered to the end, for replies that are sent whole."""

    def __init__(self, n: int) -> None:
        self.choices = [GatheredChoice() for _ in range(n)]
        self.usage: Usage | None = None
        self.fast_answer = ""
        self.error: ErrorBody | None = None

    def take(self, events: Iterable[TurnEvent]) -> None:
        """Add events, in order."""
        for event in events:
            match event:
                case TextDelta(choice=choice, text=text, logprobs=logprobs):
                    self.choices[choice].texts.append(text)
                    self.choices[choice].logprobs.extend(logprobs)
                case ChoiceDone(choice=choice, finish_reason=reason):
                    self.choices[choice].finish_reason = reason
                case TurnDone(usage=usage, fast_answer=fast_answer):
                    self.usage, self.fast_answer = usage, fast_answer
                case TurnFailed(error=error):
                    self.error = error


def completion(
    opened: TurnOpened, gathered: Gathered, *, logprobs: bool, service_tier: str | None
) -> dict[str, Any]:
    """Return a finished turn as a chat completion."""
    return {
        **_head(opened, "chat.completion", service_tier),
        "choices": [
            _choice(
                index,
                choice.text,
                choice.finish_reason,
                chat_logprobs(choice.logprobs) if logprobs else None,
            )
            for index, choice in enumerate(gathered.choices)
        ],
        "usage": chat_usage(gathered.usage or Usage(opened.prompt_tokens, 0), gathered.fast_answer),
    }


def stored_completion(record: TurnRecord) -> dict[str, Any]:
    """Return a finished turn that was stored. What it keeps has no log-probabilities, asked for or not."""
    ended = zip(record.texts, record.finish_reasons, strict=True)
    return {
        **_head(record, "chat.completion", "default"),
        "choices": [_choice(index, text, reason, None) for index, (text, reason) in enumerate(ended)],
        "usage": chat_usage(record.usage, record.fast_answer),
        "metadata": dict(record.metadata),
    }


def _choice(index: int, text: str, finish_reason: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": text, "refusal": None, "annotations": []},
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def merged(events: Iterable[TurnEvent]) -> list[TurnEvent]:
    """Join texts of one choice that follow each other with nothing but other choices' texts between.

    The joined event has the sequence of its last part, and stands where its first part stood.
    """
    made: list[TurnEvent] = []
    open_at: dict[int, int] = {}
    for event in events:
        if not isinstance(event, TextDelta):
            open_at.clear()
            made.append(event)
        elif event.choice in open_at:
            at = open_at[event.choice]
            made[at] = _joined(made[at], event)
        else:
            open_at[event.choice] = len(made)
            made.append(event)
    return made


def _joined(first: TurnEvent, second: TextDelta) -> TextDelta:
    if not isinstance(first, TextDelta):
        raise TypeError(f"cannot join text to {type(first).__name__}")
    return TextDelta(
        second.sequence,
        first.choice,
        first.start,
        first.text + second.text,
        (*first.logprobs, *second.logprobs),
    )


def chat_usage(usage: Usage, fast_answer: str = "") -> dict[str, Any]:
    """Return usage as chat completions have it. Cached tokens are part of the prompt's, not added to them."""
    return {
        **fast_answer_mark(fast_answer),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def fast_answer_mark(fast_answer: str) -> dict[str, str]:
    """Return what usage says beyond the wire's own fields of a reply that no model made."""
    return {"fast_answer": fast_answer} if fast_answer else {}


def chat_logprobs(logprobs: Iterable[TextLogprob]) -> dict[str, Any]:
    """Return log-probabilities as chat completions have them."""
    return {"content": [token_logprob(item) for item in logprobs], "refusal": None}


def token_logprob(item: TextLogprob) -> dict[str, Any]:
    """Return one token's log-probability and its rivals'."""
    return {
        **_token(item.token, item.logprob),
        "top_logprobs": [_token(token, logprob) for token, logprob in item.top],
    }


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    finite = logprob if math.isfinite(logprob) else LEAST_LOGPROB
    return {"token": token_text(token), "logprob": finite, "bytes": list(token)}


def token_text(token: bytes) -> str:
    """Return a token's text; one that is part of a character only is spelt as its bytes."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _head(opened: TurnOpened | TurnRecord, kind: str, service_tier: str | None) -> dict[str, Any]:
    head = {
        "id": request_ids.CHAT_PREFIX + opened.request_id,
        "object": kind,
        "created": opened.created,
        "model": opened.model,
        "system_fingerprint": None,
    }
    if service_tier is not None:
        head["service_tier"] = "default"
    return head
