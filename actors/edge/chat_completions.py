"""`POST /v1/chat/completions`: from a request's JSON to an `OpenTurn`. Every field is honoured or refused."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from actors.edge.errors import invalid, model_not_found, shown
from actors.edge.sampling import (
    Extras,
    ModelInfo,
    take_end_user,
    take_max_tokens,
    take_metadata,
    take_sampling,
    take_service_fields,
)
from actors.edge.validation import Fields
from actors.protocol import ChatMessage
from gpu.sampling_params import SamplingParams

MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_CONTENT = 8 * 2**20
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles that the templates know, and what they are called there."""


@frozen
class Bounds:
    """What one request may ask for at most, beyond its model's own bounds."""

    choices: int = MAX_CHOICES
    generated: int = 262_144
    """Tokens over all choices."""


@frozen
class TurnRequest:
    """A request that was read and found good: everything of an `OpenTurn` that the client decides."""

    model: ModelInfo
    messages: tuple[ChatMessage, ...]
    params: SamplingParams
    extras: Extras
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    background: bool = False
    store: bool = True
    is_private: bool = False
    """The client said `"store": false`: no row on it is kept either, so the catalog is not asked."""
    prompt_cache_key: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    end_user: tuple[str, ...] = ()
    """What the client calls its end user, under either of the wire's names."""
    service_tier: str | None = None
    echo: dict[str, Any] = field(factory=dict)
    """Fields that the reply repeats as they were sent."""

    @property
    def answerable_at_once(self) -> bool:
        """A first question without context or wishes of its own: what the catalog may answer."""
        first = self.messages[0]
        single = len(self.messages) == 1 and first.role == "user" and not first.name
        plain = self.n == 1 and self.extras.is_default and not self.is_private
        return self.extras.fast_answers == "auto" and single and plain


class Models:
    """The models that are served, by name and alias."""

    def __init__(self, models: tuple[ModelInfo, ...]) -> None:
        self.all = models
        self._by_name = {name: m for m in models for name in (m.name, *m.aliases)}

    def find(self, fields: Fields) -> ModelInfo:
        """Take `model`. Raises 400 when it is missing or not a name, 404 when no model has it."""
        name = fields.text("model", 256)
        if not name:
            raise invalid("You must provide a model parameter.", "model")
        return self.get(name)

    def listed(self) -> list[dict[str, Any]]:
        """Return what `/v1/models` says: one entry for each name, aliases included."""
        return [
            {"id": name, "object": "model", "created": m.created, "owned_by": m.owned_by}
            for m in self.all
            for name in (m.name, *m.aliases)
        ]

    def get(self, name: str) -> ModelInfo:
        """Return the model with this name or alias, or raise 404."""
        found = self._by_name.get(name)
        if found is None:
            raise model_not_found(name)
        return found


def parse(body: dict[str, Any], models: Models, bounds: Bounds) -> TurnRequest:
    """Read a chat completion's JSON. Raises `ApiError` 400 or 404 that names the field."""
    fields = Fields(body)
    messages = take_messages(fields)
    model = models.find(fields)
    max_tokens = _max_tokens(fields, model)
    params, extras = take_sampling(fields, model, max_tokens=max_tokens, logprobs=_logprobs(fields))
    n = fields.integer("n", 1, min(MAX_CHOICES, bounds.choices)) or 1
    if n * params.max_tokens > bounds.generated:
        raise fields.refuse("n", f"n times max tokens must be at most {bounds.generated}")
    stream = fields.flag("stream") or False
    store, metadata = fields.flag("store"), take_metadata(fields)
    if metadata and not store:
        raise fields.refuse("metadata", 'metadata is kept with a stored completion: it needs "store": true')
    request = TurnRequest(
        model=model,
        messages=messages,
        params=params,
        extras=extras,
        n=n,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        store=store or False,
        is_private=store is False,
        prompt_cache_key=fields.text("prompt_cache_key", 512) or "",
        metadata=metadata,
        end_user=take_end_user(fields),
        service_tier=take_service_fields(fields),
    )
    _refuse_unserved(fields)
    fields.done()
    return request


def take_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """Take `messages`: at least one, each with a role that the template knows and text content."""
    items = fields.array("messages", MAX_MESSAGES)
    if items is None:
        raise invalid("Missing required parameter: 'messages'.", "messages")
    if not items:
        raise invalid("messages must have at least one message.", "messages")
    return tuple(read_message(item, f"messages[{index}]") for index, item in enumerate(items))


def read_message(item: Any, path: str) -> ChatMessage:
    """Read one message; its parts are joined to one text."""
    if not isinstance(item, dict):
        raise invalid(f"{path} must be an object, not {shown(item)}.", path)
    fields = Fields(item, path)
    role = fields.take("role")
    if not isinstance(role, str) or role not in ROLES:
        allowed = ", ".join(ROLES)
        raise fields.refuse("role", f"{shown(role)} is not served: use one of {allowed}")
    content = text_of(fields, ("text",))
    if role == "assistant":
        for name in ("refusal", "audio", "function_call"):
            fields.unsupported(name)
        fields.unsupported("tool_calls", [])
        fields.unsupported("annotations", [])
    message = ChatMessage(ROLES[role], content, fields.text("name", 64) or "")
    fields.done()
    return message


def text_of(fields: Fields, part_types: tuple[str, ...]) -> str:
    """Take `content`: a string, or parts of text."""
    content = fields.take("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise fields.refuse("content", "must be a string or a non-empty array of text parts")
    return "".join(_part(part, fields.name(f"content[{i}]"), part_types) for i, part in enumerate(content))


def _part(part: Any, path: str, part_types: tuple[str, ...]) -> str:
    if not isinstance(part, dict):
        raise invalid(f"{path} must be an object, not {shown(part)}.", path)
    fields = Fields(part, path)
    kind = fields.take("type")
    if kind not in part_types:
        raise fields.refuse("type", f"only text parts are served, not {shown(kind)}")
    text = fields.text("text", MAX_CONTENT)
    if text is None:
        raise fields.refuse("text", "is missing")
    fields.unsupported("annotations", [])
    fields.unsupported("logprobs", [])
    fields.done()
    return text


def _max_tokens(fields: Fields, model: ModelInfo) -> int | None:
    new = take_max_tokens(fields, "max_completion_tokens", model)
    old = take_max_tokens(fields, "max_tokens", model)
    if new is not None and old is not None and new != old:
        raise fields.refuse("max_tokens", "says another number than max_completion_tokens, its new name")
    return old if new is None else new


def _logprobs(fields: Fields) -> int:
    wanted = fields.flag("logprobs") or False
    top = fields.integer("top_logprobs", 0, 20)
    if top is not None and not wanted:
        raise fields.refuse("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else -1


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.mapping("stream_options")
    if options is None:
        return False
    if not stream:
        raise fields.refuse("stream_options", "is only allowed when stream is true")
    inner = Fields(options, "stream_options")
    wanted = inner.flag("include_usage") or False
    inner.unsupported("include_obfuscation", False)
    inner.done()
    return wanted


def _refuse_unserved(fields: Fields) -> None:
    """Fields of the wire that are not served: fine where they change nothing, refused otherwise."""
    fields.unsupported("tools", [])
    fields.unsupported("functions", [])
    fields.unsupported("tool_choice", "none", "auto")
    fields.unsupported("function_call", "none", "auto")
    fields.unsupported("parallel_tool_calls", True, False)
    fields.unsupported("response_format", {"type": "text"})
    fields.unsupported("modalities", ["text"])
    fields.unsupported("reasoning_effort", "none")
    fields.unsupported("verbosity", "medium")
    for field_ in ("audio", "prediction", "web_search_options"):
        fields.unsupported(field_)
