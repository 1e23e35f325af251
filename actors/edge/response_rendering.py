"""A turn's events as the typed events of `/v1/responses`, and a turn as a response object.

Sequence numbers are a function of the turn's own: what comes of the turn's event s has the numbers 8s to 8s
+ 7, and the opening, which comes of none, has 0 to 3. So an edge that takes a stream up again, wherever and
whenever, gives each wire event the number that it had. The numbers rise strictly; they have gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from actors.edge import request_ids, sse
from actors.edge.chat_rendering import fast_answer_mark, merged, token_logprob
from actors.edge.errors import error_object
from actors.protocol import (
    ChoiceDone,
    ErrorBody,
    TextDelta,
    TextLogprob,
    TurnDone,
    TurnEvent,
    TurnFailed,
    TurnRecord,
    Usage,
)

STRIDE = 8
BROKEN = STRIDE - 1
"""Added for an error of the edge itself: after everything that came of an event, before the next one."""
CANCELLED = "turn_cancelled"
"""The code of a turn's last error when its owner ended it."""


@frozen
class Shape:
    """What a response object says of its request, whatever became of it."""

    request_id: str
    model: str
    created: int
    background: bool = False
    store: bool = True
    metadata: tuple[tuple[str, str], ...] = ()
    echo: Mapping[str, Any] = field(factory=dict)
    service_tier: str | None = None

    @property
    def id(self) -> str:
        """The response's id on the wire."""
        return request_ids.RESPONSE_PREFIX + self.request_id

    @property
    def item_id(self) -> str:
        """The id of its one output message."""
        return request_ids.MESSAGE_PREFIX + self.request_id


@frozen
class State:
    """How far a response is."""

    status: str
    text: str | None = None
    """None: there is no output message yet."""
    logprobs: tuple[TextLogprob, ...] = ()
    finish_reason: str = ""
    usage: Usage | None = None
    error: ErrorBody | None = None
    fast_answer: str = ""


def shape_of(record: TurnRecord) -> Shape:
    """Return the shape of a turn as the journal has it."""
    return Shape(
        record.request_id,
        record.model,
        record.created,
        record.background,
        record.store,
        record.metadata,
        json.loads(record.echo) if record.echo else {},
    )


def state_of(record: TurnRecord) -> State:
    """Return the state of a turn as the journal has it."""
    finish = record.finish_reasons[0] if record.finish_reasons else ""
    ended = record.status != "in_progress"
    status = final_status(finish) if record.status == "completed" else record.status
    text = record.texts[0] if record.texts and (ended or record.texts[0]) else None
    return State(status, text, (), finish, record.usage if ended else None, record.error, record.fast_answer)


def final_status(finish_reason: str) -> str:
    """Return the status of a response that ended well: cut short is incomplete, as the wire has it."""
    return "completed" if finish_reason in {"", "stop"} else "incomplete"


def response_object(shape: Shape, state: State) -> dict[str, Any]:
    """Return the response object."""
    echo = shape.echo
    made: dict[str, Any] = {
        "id": shape.id,
        "object": "response",
        "created_at": shape.created,
        "status": state.status,
        "background": shape.background,
        "error": _error(state.error),
        "incomplete_details": _incomplete(state),
        "instructions": echo.get("instructions"),
        "max_output_tokens": echo.get("max_output_tokens"),
        "metadata": dict(shape.metadata),
        "model": shape.model,
        "output": [] if state.text is None else [_message(shape, state)],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": echo.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": echo.get("safety_identifier"),
        "service_tier": "default",
        "store": shape.store,
        "temperature": echo.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": echo.get("top_logprobs", 0),
        "top_p": echo.get("top_p"),
        "truncation": "disabled",
        "usage": None if state.usage is None else response_usage(state.usage, state.fast_answer),
        "user": echo.get("user"),
    }
    return made


def response_usage(usage: Usage, fast_answer: str = "") -> dict[str, Any]:
    """Return usage as responses have it."""
    return {
        **fast_answer_mark(fast_answer),
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseEvents:
    """Renders one streamed response. `opening`, then `render` as events come, to the last.

    `after` is the last sequence number that the client has: nothing up to it is said again.
    """

    def __init__(self, shape: Shape, *, after: int = -1, logprobs: bool = False) -> None:
        self._shape = shape
        self._after = after
        self._logprobs = logprobs
        self._texts: list[str] = []
        self._all_logprobs: list[TextLogprob] = []
        self._held: list[TextLogprob] = []
        self._finish_reason = ""
        self._sequence = 0

    def opening(self) -> list[bytes]:
        """Return the events before the first text."""
        created = response_object(self._shape, State("in_progress"))
        item = {**_message(self._shape, State("in_progress", "")), "content": []}
        return self._numbered(
            0,
            {"type": "response.created", "response": created},
            {"type": "response.in_progress", "response": created},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.content_part.added", **self._place(), "part": self._part("")},
        )

    def render(self, events: Iterable[TurnEvent]) -> list[bytes]:
        """Return the events for turn events that are here together; neighbouring texts become one delta."""
        fresh = [event for event in events if not self._is_known_text(event)]
        made: list[bytes] = []
        for event in merged(fresh):
            made += self._event(event)
        return made

    def broken(self, error: ErrorBody) -> list[bytes]:
        """Return the end of a stream that the edge gives up. The turn may go on: the client can resume."""
        body = {key: value for key, value in error_object(error).items() if key != "type"}
        return self._numbered(STRIDE * self._sequence + BROKEN, {"type": "error", **body})

    def _is_known_text(self, event: TurnEvent) -> bool:
        """Take in a text that the client has. Never merged with one that it has not."""
        if not isinstance(event, TextDelta) or STRIDE * event.sequence > self._after:
            return False
        self._take(event)
        return True

    def _take(self, event: TextDelta) -> None:
        self._sequence = event.sequence
        self._texts.append(event.text)
        self._all_logprobs += event.logprobs

    def _event(self, event: TurnEvent) -> list[bytes]:
        number = STRIDE * event.sequence
        self._sequence = event.sequence
        match event:
            case TextDelta():
                return self._delta(event)
            case ChoiceDone(finish_reason=reason):
                self._finish_reason = reason
                return self._numbered(number, *self._part_done())
            case TurnDone(usage=usage, fast_answer=fast_answer):
                status = final_status(self._finish_reason)
                return self._ending(number, status, usage=usage, fast_answer=fast_answer)
            case TurnFailed(error=error):
                status = "cancelled" if error.code == CANCELLED else "failed"
                return self._ending(number, status, error=error)

    def _delta(self, event: TextDelta) -> list[bytes]:
        self._take(event)
        self._held += event.logprobs
        if not event.text:
            return []
        shown = [token_logprob(item) for item in self._held] if self._logprobs else []
        self._held = []
        delta = {
            "type": "response.output_text.delta",
            **self._place(),
            "delta": event.text,
            "logprobs": shown,
        }
        return self._numbered(STRIDE * event.sequence, delta)

    def _part_done(self) -> Sequence[dict[str, Any]]:
        text = "".join(self._texts)
        part = self._part(text)
        state = State(final_status(self._finish_reason), text, tuple(self._all_logprobs))
        done = {
            "type": "response.output_text.done",
            **self._place(),
            "text": text,
            "logprobs": part["logprobs"],
        }
        return (
            done,
            {"type": "response.content_part.done", **self._place(), "part": part},
            {
                "type": "response.output_item.done",
                "output_index": 0,
                "item": _message(self._shape, self._shown(state)),
            },
        )

    def _ending(
        self,
        number: int,
        status: str,
        *,
        usage: Usage | None = None,
        error: ErrorBody | None = None,
        fast_answer: str = "",
    ) -> list[bytes]:
        state = State(
            status,
            "".join(self._texts),
            tuple(self._all_logprobs),
            self._finish_reason,
            usage,
            error,
            fast_answer,
        )
        final = {
            "type": "response.failed" if status == "cancelled" else f"response.{status}",
            "response": response_object(self._shape, self._shown(state)),
        }
        return self._numbered(number, final)

    def _shown(self, state: State) -> State:
        return state if self._logprobs else evolve(state, logprobs=())

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._shape.item_id, "output_index": 0, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return _text_part(text, self._all_logprobs if self._logprobs else ())

    def _numbered(self, first: int, *bodies: dict[str, Any]) -> list[bytes]:
        return [
            sse.encode({**body, "sequence_number": first + offset})
            for offset, body in enumerate(bodies)
            if first + offset > self._after
        ]


class ResponseStream:
    """`ResponseEvents` as the bytes of an event stream."""

    def __init__(self, events: ResponseEvents) -> None:
        self._events = events

    def opening(self) -> bytes:
        """Return the events before the first text."""
        return sse.events(self._events.opening())

    def render(self, events: Iterable[TurnEvent]) -> bytes:
        """Return the events for turn events that are here together."""
        return sse.events(self._events.render(events))

    def broken(self, error: ErrorBody) -> bytes:
        """Return the end of a stream that the edge gives up."""
        return sse.events(self._events.broken(error))


def _message(shape: Shape, state: State) -> dict[str, Any]:
    return {
        "id": shape.item_id,
        "type": "message",
        "role": "assistant",
        "status": "completed" if state.status == "completed" else _item_status(state.status),
        "content": [_text_part(state.text or "", state.logprobs)],
    }


def _item_status(status: str) -> str:
    return "in_progress" if status == "in_progress" else "incomplete"


def _text_part(text: str, logprobs: Iterable[TextLogprob]) -> dict[str, Any]:
    shown = [token_logprob(item) for item in logprobs]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": shown}


def _error(error: ErrorBody | None) -> dict[str, str] | None:
    return None if error is None else {"code": error.code or error.type, "message": error.message}


def _incomplete(state: State) -> dict[str, str] | None:
    if state.status != "incomplete":
        return None
    reason = "content_filter" if state.finish_reason == "content_filter" else "max_output_tokens"
    return {"reason": reason}
