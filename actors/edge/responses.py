"""The second face of a turn: `POST /v1/responses` and `response.create` frames, from JSON to `OpenTurn`."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from actors.edge.chat_completions import (
    MAX_CONTENT,
    MAX_MESSAGES,
    ROLES,
    Bounds,
    Models,
    TurnRequest,
    text_of,
)
from actors.edge.errors import invalid, shown
from actors.edge.sampling import (
    take_end_user,
    take_max_tokens,
    take_metadata,
    take_sampling,
    take_service_fields,
)
from actors.edge.validation import Fields
from actors.protocol import ChatMessage

LOGPROBS = "message.output_text.logprobs"
PART_TYPES = ("input_text", "output_text", "text")


@frozen
class Resume:
    """What the query of `GET /v1/responses/{id}` asks for."""

    stream: bool
    starting_after: int


def parse(body: dict[str, Any], models: Models, bounds: Bounds) -> TurnRequest:
    """Read a response's JSON. Raises `ApiError` 400 or 404 that names the field."""
    fields = Fields(body)
    given = {name: body[name] for name in ECHOED if body.get(name) is not None}
    echo = {"temperature": 1.0, "top_p": 1.0, **given}
    model = models.find(fields)
    messages = _instructions(fields) + _input(fields)
    max_tokens = take_max_tokens(fields, "max_output_tokens", model)
    if (max_tokens or 0) > bounds.generated:
        raise fields.refuse("max_output_tokens", f"must be at most {bounds.generated}")
    params, extras = take_sampling(fields, model, max_tokens=max_tokens, logprobs=_logprobs(fields))
    stream = fields.flag("stream") or False
    store = _store(fields, background=body.get("background") is True)
    request = TurnRequest(
        model=model,
        messages=messages,
        params=params,
        extras=extras,
        stream=stream,
        background=fields.flag("background") or False,
        store=store,
        is_private=not store,
        prompt_cache_key=fields.text("prompt_cache_key", 512) or "",
        metadata=take_metadata(fields),
        end_user=take_end_user(fields),
        service_tier=take_service_fields(fields),
        echo=echo,
    )
    _stream_options(fields, stream)
    _refuse_unserved(fields)
    fields.done()
    return request


ECHOED = (
    "instructions",
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_logprobs",
    "user",
    "safety_identifier",
    "prompt_cache_key",
)
"""Fields that the response object repeats."""


def parse_resume(query: dict[str, str]) -> Resume:
    """Read the query of a GET: `stream` and `starting_after`."""
    left = dict(query)
    stream = left.pop("stream", "false").lower()
    after = left.pop("starting_after", None)
    obfuscation = left.pop("include_obfuscation", "false").lower()
    for name in left:
        raise invalid(f"Unrecognized query parameter: {shown(name)}.", name if name.isascii() else "")
    if stream not in {"true", "false"}:
        raise invalid("stream must be true or false.", "stream")
    if obfuscation != "false":
        raise invalid("include_obfuscation is not supported by this server.", "include_obfuscation")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) <= 18):
        raise invalid("starting_after must be a sequence number.", "starting_after")
    if after is not None and stream == "false":
        raise invalid("starting_after needs stream=true.", "starting_after")
    return Resume(stream == "true", -1 if after is None else int(after))


def _instructions(fields: Fields) -> tuple[ChatMessage, ...]:
    text = fields.text("instructions", MAX_CONTENT)
    return (ChatMessage("system", text),) if text else ()


def _input(fields: Fields) -> tuple[ChatMessage, ...]:
    value = fields.take("input")
    if value is None:
        raise invalid("Missing required parameter: 'input'.", "input")
    if isinstance(value, str):
        return (ChatMessage("user", value),)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise fields.refuse("input", f"must be a string or an array of 1 to {MAX_MESSAGES} messages")
    return tuple(_item(item, f"input[{index}]") for index, item in enumerate(value))


def _item(item: Any, path: str) -> ChatMessage:
    if not isinstance(item, dict):
        raise invalid(f"{path} must be an object, not {shown(item)}.", path)
    fields = Fields(item, path)
    fields.unsupported("type", "message")
    role = fields.take("role")
    if not isinstance(role, str) or role not in ROLES:
        raise fields.refuse("role", f"{shown(role)} is not served: use one of {', '.join(ROLES)}")
    content = text_of(fields, PART_TYPES)
    for name in ("id", "status", "phase"):  # of an output item that is sent back as input
        fields.text(name, 256)
    fields.done()
    return ChatMessage(ROLES[role], content)


def _logprobs(fields: Fields) -> int:
    include = fields.array("include", 16) or []
    for item in include:
        if item != LOGPROBS:
            raise fields.refuse("include", f"{shown(item)} is not supported by this server")
    top = fields.integer("top_logprobs", 0, 20)
    if top and not include:
        raise fields.refuse("top_logprobs", f"needs include to have {LOGPROBS!r}")
    return (top or 0) if include else -1


def _store(fields: Fields, *, background: bool) -> bool:
    store = fields.flag("store")
    if store is False and background:
        raise fields.refuse("store", "a background response must be stored")
    return store is not False


def _stream_options(fields: Fields, stream: bool) -> None:
    options = fields.mapping("stream_options")
    if options is None:
        return
    if not stream:
        raise fields.refuse("stream_options", "is only allowed when stream is true")
    inner = Fields(options, "stream_options")
    inner.unsupported("include_obfuscation", False)
    inner.done()


def _refuse_unserved(fields: Fields) -> None:
    """Fields of the wire that are not served: fine where they change nothing, refused otherwise."""
    fields.unsupported("tools", [])
    fields.unsupported("tool_choice", "none", "auto")
    fields.unsupported("parallel_tool_calls", True, False)
    fields.unsupported("truncation", "disabled")
    fields.unsupported("reasoning", {}, {"effort": "none"}, {"effort": None})
    fields.unsupported("text", {}, {"format": {"type": "text"}})
    fields.unsupported("context_management", [])
    for name in (
        "previous_response_id",
        "conversation",
        "prompt",
        "max_tool_calls",
        "image",
        "access_programs",
        "background_options",
    ):
        fields.unsupported(name)
