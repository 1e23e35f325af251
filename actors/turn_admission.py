"""Admission: the first half of a turn's saga. Every actor asked must say yes before anything is begun."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import trio
from attrs import define, evolve, frozen

from actors.prompt import ModelText
from actors.protocol import (
    Allow,
    Block,
    ChatMessage,
    ErrorBody,
    Hit,
    LimitExceeded,
    OpenTurn,
    Release,
    Reserve,
    Reserved,
    Route,
    Routed,
    Screen,
    Settled,
    Unroutable,
)
from actors.turn_errors import INVALID, TurnError, invalid, unavailable
from actors.turn_host import Host, Unavailable
from actors.turn_lookup import look_up
from actors.turn_safety import verdict
from gpu.errors import BadRequest, TemplateError

A = TypeVar("A")

INLINE_CHARACTERS = 4096
"""A prompt up to here is tokenised in the event loop (a few milliseconds); a longer one in a thread."""
PREFIX_TOKENS = 64
"""Tokens that name a prompt's beginning to the router: four blocks of the engine."""
RELEASE_PATIENCE = 60.0
ROUTE_PAUSE = 0.03
"""Seconds between questions to a router that knows of no batcher yet."""


@frozen
class Admitted:
    """Everybody said yes. `opening.params.max_tokens` is what fits from here on."""

    opening: OpenTurn
    model: str
    prompt: tuple[int, ...]
    batcher: str
    allow: Allow
    headers: tuple[tuple[str, str], ...]
    hit: Hit | None


@define
class _Answers:
    route: Routed | TurnError | None = None
    allow: Allow | TurnError | None = None
    reserved: Reserved | TurnError | None = None
    hit: Hit | None = None


async def admit(host: Host, opening: OpenTurn) -> Admitted:
    """Return what the turn starts with, or raise `TurnError`; then nothing is held.

    Cancellation: what was reserved is released in a task of the host.
    """
    model = host.model_name(opening.model)
    text = host.models.get(model)
    if text is None:
        raise await _no_such_model(host, opening)
    prompt = await _tokenise(text, opening.messages)
    wanted, room = opening, host.rooms.get(model, text.context_length)
    opening = _fit(wanted, len(prompt), text, room)
    answers = _Answers()
    try:
        await _ask_all(host, opening, model, prompt, answers)
        if _learned_room(host, model, text, answers.route) < room:
            opening = _fit(wanted, len(prompt), text, host.rooms[model])
        hit = await _usable(host, opening, text, answers.hit)
        if hit is not None and _is_over_a_limit(answers.reserved):
            answers.reserved = await _answer_of(_reserve(host, opening, model, 0))  # all that an answer uses
        await trio.lowlevel.checkpoint_if_cancelled()  # whoever cancelled it does not want what it returns
    except BaseException:
        _release(host, opening)
        raise
    for answer in (answers.route, answers.allow, answers.reserved):
        if isinstance(answer, TurnError):
            if not isinstance(answers.reserved, TurnError) or answers.reserved.error.status == 503:
                _release(host, opening)
            raise answer
    routed, allow, reserved = answers.route, answers.allow, answers.reserved
    if not (isinstance(routed, Routed) and isinstance(allow, Allow) and isinstance(reserved, Reserved)):
        raise TypeError(f"admission of {opening.request_id} ended without its answers: {answers}")
    headers = reserved.headers
    if hit is not None:
        host.counters["fast_answers_served"] += 1
        headers = (*headers, ("x-antiphon-fast-answer", f"{hit.release}/{hit.entry}"))
    return Admitted(opening, model, tuple(prompt), routed.batcher, allow, headers, hit)


def _learned_room(host: Host, model: str, text: ModelText, route: Routed | TurnError | None) -> int:
    """Return the tokens that a request may have where it was routed to, and remember them for the next one."""
    if isinstance(route, Routed) and route.context_length:
        host.rooms[model] = min(text.context_length, route.context_length)
    return host.rooms.get(model, text.context_length)


async def _usable(host: Host, opening: OpenTurn, text: ModelText, hit: Hit | None) -> Hit | None:
    """Return the hit, unless the model could not have said it within the limit: it is served whole or not at all."""
    if hit is None or await _is_short_enough(text, hit.answer, opening.params.max_tokens):
        return hit
    host.counters["fast_answers_too_long"] += 1
    return None


def _is_over_a_limit(reserved: Reserved | TurnError | None) -> bool:
    return isinstance(reserved, TurnError) and reserved.error.status == 429


async def _is_short_enough(text: ModelText, answer: str, max_tokens: int) -> bool:
    if len(answer.encode()) <= max_tokens:
        return True  # a token is a byte at least
    if len(answer) <= INLINE_CHARACTERS:
        return text.count(answer) <= max_tokens
    return await trio.to_thread.run_sync(text.count, answer) <= max_tokens


async def _ask_all(host: Host, opening: OpenTurn, model: str, prompt: list[int], answers: _Answers) -> None:
    async def keep(name: str, question: Callable[[], Awaitable[object]]) -> None:
        setattr(answers, name, await _answer_of(question()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep, "route", lambda: _find_batcher(host, opening, model, prompt))
        nursery.start_soon(keep, "allow", lambda: _screen_input(host, opening))
        if opening.fast_answers:
            nursery.start_soon(keep, "hit", lambda: look_up(host, opening))
        tokens = len(prompt) + opening.params.max_tokens * opening.n
        await keep("reserved", lambda: _reserve(host, opening, model, tokens))  # first: it takes longest


async def _answer_of(question: Awaitable[A]) -> A | TurnError:
    try:
        return await question
    except TurnError as error:
        return error


async def _tokenise(text: ModelText, messages: Sequence[ChatMessage]) -> list[int]:
    try:
        if sum(len(m.content) for m in messages) <= INLINE_CHARACTERS:
            return text.encode(messages)
        return await trio.to_thread.run_sync(text.encode, messages)
    except BadRequest as error:
        raise invalid(error.text, error.param) from error
    except TemplateError as error:
        raise invalid(str(error), "messages") from error


def _fit(opening: OpenTurn, prompt_tokens: int, text: ModelText, context_length: int) -> OpenTurn:
    room, wanted = context_length - prompt_tokens, opening.params.max_tokens
    if max(wanted, 1) > room:
        asked = (
            f"{prompt_tokens} in the messages, {wanted} in the completion" if wanted else f"{prompt_tokens}"
        )
        raise invalid(
            f"This model's maximum context length is {context_length} tokens. However, you requested"
            f" {prompt_tokens + max(wanted, 1)} tokens ({asked}). Shorten the messages or the completion.",
            "messages",
            "context_length_exceeded",
        )
    beyond = [token for token, _ in opening.params.logit_bias if not 0 <= token < text.n_vocab]
    beyond_stops = [token for token in opening.params.stop_token_ids if not 0 <= token < text.n_vocab]
    if beyond or beyond_stops:
        raise invalid(
            f"Token id {(beyond or beyond_stops)[0]} is not in the vocabulary of {text.n_vocab} tokens.",
            "logit_bias" if beyond else "stop_token_ids",
        )
    if wanted:
        return opening
    params = evolve(opening.params, max_tokens=room)
    fitted: OpenTurn = evolve(opening, params=params)  # type: ignore[misc]  # @message makes it attrs
    return fitted


async def _no_such_model(host: Host, opening: OpenTurn) -> TurnError:
    """The router's words for it, or ours when it knows a model that this host has no tokenizer for."""
    try:
        await route(host, opening, opening.model, [])
    except TurnError as error:
        return error
    return TurnError(
        ErrorBody(
            404,
            INVALID,
            f"The model '{opening.model}' does not exist.",
            param="model",
            code="model_not_found",
        )
    )


async def route(
    host: Host, opening: OpenTurn, model: str, prompt: Sequence[int], avoid: tuple[str, ...] = ()
) -> Routed:
    """Ask the router for a batcher. Raises `TurnError`: 404, or 503."""
    prefix = hashlib.sha256(f"{opening.owner}\0{list(prompt[:PREFIX_TOKENS])}".encode()).hexdigest()
    message = Route(opening.request_id, opening.owner, model, len(prompt), prefix, avoid)
    reply: Routed | Unroutable = await _ask(host, "router", message, (Routed, Unroutable), opening)
    if isinstance(reply, Unroutable):
        raise TurnError(reply.error)
    return reply


async def _find_batcher(host: Host, opening: OpenTurn, model: str, prompt: Sequence[int]) -> Routed:
    """Route, and wait a little for a batcher that is just starting."""
    deadline = trio.current_time() + host.settings.admission_patience
    while True:
        try:
            return await route(host, opening, model, prompt)
        except TurnError as error:
            if error.error.status != 503 or trio.current_time() + ROUTE_PAUSE >= deadline:
                raise
        await host.context.pause(ROUTE_PAUSE)


async def _reserve(host: Host, opening: OpenTurn, model: str, tokens: int) -> Reserved:
    message = Reserve(opening.request_id, opening.owner, opening.key_id, model, tokens)
    reply: Reserved | LimitExceeded = await _ask(host, "limiter", message, (Reserved, LimitExceeded), opening)
    if isinstance(reply, LimitExceeded):
        raise TurnError(reply.error)
    return reply


async def _ask(host: Host, to: str, message: object, answer: tuple[type, ...], opening: OpenTurn) -> Any:
    try:
        return await host.ask_until(
            lambda: [to],
            message,
            answer,
            patience=host.settings.admission_patience,
            owner=opening.owner,
            accept=lambda reply: getattr(reply, "request_id", "") == opening.request_id,
        )
    except Unavailable as error:
        raise unavailable("The server is starting or overloaded. Try again later.") from error


async def _screen_input(host: Host, opening: OpenTurn) -> Allow:
    text = "\n".join(message.content for message in opening.messages)
    found = await verdict(host, Screen(opening.request_id, "input", 0, 0, text, "", True), opening.owner)
    if isinstance(found, Block):
        raise TurnError(
            ErrorBody(
                400,
                INVALID,
                f"The request was rejected by the safety policy (category: {found.category}).",
                param="messages",
                code="content_policy_violation",
                headers=(("x-should-retry", "false"),),
            )
        )
    return found


def _release(host: Host, opening: OpenTurn) -> None:
    host.context.nursery.start_soon(_release_patiently, host, opening)


async def _release_patiently(host: Host, opening: OpenTurn) -> None:
    """Give back what may be held. The limiter compares its reservations with live turns if this fails."""
    message = Release(opening.request_id, opening.owner)
    try:
        await host.ask_until(
            lambda: ["limiter"], message, Settled, patience=RELEASE_PATIENCE, owner=opening.owner
        )
    except Unavailable:
        host.counters["releases_given_up"] += 1
