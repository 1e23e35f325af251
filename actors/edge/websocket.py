"""The websocket at `/v1/responses`: `response.create` frames in, typed events out, one after another."""

from __future__ import annotations

import logging
from typing import Any

import trio
from attrs import evolve
from quart import g, websocket
from werkzeug.datastructures import Headers

from actors.edge import request_ids, responses
from actors.edge.errors import ApiError, error_object, internal, invalid, shown
from actors.edge.opening import host_of, open_turn_message, read_call
from actors.edge.response_rendering import ResponseEvents, Shape
from actors.edge.services import Services
from actors.edge.sse import encode
from actors.edge.streaming import Listener
from actors.edge.validation import parse_object

log = logging.getLogger(__name__)

PATH = "/v1/responses"
GOING_AWAY = 1001
UNSERVED = ("stream", "background")
"""Fields of the HTTP face that mean nothing in a frame."""


async def converse(services: Services) -> None:
    """Serve one connection: each frame is a request of its own, proved, limited and billed by itself.

    Frames that come while a response is on its way wait their turn. A frame that is refused gets one
    `error` event, and the connection goes on. The answer to the upgrade has an `x-request-id`, and so has
    each frame's error; a frame's response has its id. Raises `ApiError` before the upgrade when the key is
    not good. Cancellation (the client is gone): the turn at hand is left.
    """
    services.identities.prove(websocket.headers, writes=True)
    await websocket.accept(Headers({"x-request-id": g.request_id}))
    while (frame := await _next_frame(services)) is not None:
        g.request_id = request_ids.mint("")
        raw = frame.encode("utf-8", "surrogatepass") if isinstance(frame, str) else bytes(frame)
        try:
            await _respond(services, raw)
        except ApiError as error:
            await _send_error(error)
        except Exception as error:  # noqa: BLE001 - one frame's fault does not end the connection
            log.warning("websocket frame %s failed: %s", g.request_id, type(error).__name__)
            await _send_error(internal())
    await websocket.close(GOING_AWAY, "the server is restarting")


async def _next_frame(services: Services) -> str | bytes | None:
    """Wait for a frame; None when the edge stops first."""
    found: str | bytes | None = None
    async with trio.open_nursery() as nursery:

        async def stop_waiting() -> None:
            await services.draining.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(stop_waiting)
        found = await websocket.receive()
        nursery.cancel_scope.cancel()
    return found


async def _respond(services: Services, raw: bytes) -> None:
    identity = services.identities.prove(websocket.headers, writes=True)
    body = _unwrap(parse_object(raw))
    asked = evolve(responses.parse(body, services.models, services.bounds), stream=True)
    call = evolve(read_call(identity, PATH, raw, websocket.headers), is_retry=False, idempotency_key="")
    host = host_of(services.context.tree, call)
    message = open_turn_message(call, asked, host, "responses", services.turn_seconds)
    g.request_id = message.request_id
    opened, reader = await services.turns.open(message, host)
    try:
        shape = Shape(
            opened.request_id,
            opened.model,
            opened.created,
            metadata=asked.metadata,
            store=asked.store,
            echo=asked.echo,
        )
        events = ResponseEvents(shape, logprobs=asked.params.logprobs >= 0)
        await _send_all(Listener(services.turns, reader), events, services.keepalive)
    finally:
        services.turns.close(reader)


def _unwrap(frame: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `response.create` frame: beside its type, or under `response`."""
    kind = frame.pop("type", None)
    if kind != "response.create":
        raise invalid(f"Frames must have the type 'response.create', not {shown(kind)}.", "type")
    event_id = frame.pop("event_id", None)
    if event_id is not None and not isinstance(event_id, str):
        raise invalid("event_id must be a string.", "event_id")
    body = frame.pop("response") if len(frame) == 1 and isinstance(frame.get("response"), dict) else frame
    for name in UNSERVED:
        if body.get(name) is not None:
            raise invalid(f"{name} is not allowed in a frame.", name)
    return dict(body)


async def _send_all(listener: Listener, events: ResponseEvents, keepalive: float) -> None:
    await _send(events.opening())
    reader = listener.reader
    while not (reader.ended and reader.drained):
        await _send(events.render(await listener.wait(keepalive)))
    if reader.broken is not None:
        await _send(events.broken(reader.broken))
    await listener.wait(0)


async def _send(items: list[bytes]) -> None:
    for item in items:
        await websocket.send(item.decode())
    if not items:
        await trio.lowlevel.checkpoint()


async def _send_error(error: ApiError) -> None:
    """Say why a frame was refused, as the HTTP face would: the same object, its status, its headers."""
    body = error.body
    headers = {"x-request-id": g.request_id, **dict(body.headers)}
    event = {"type": "error", "status": body.status, "error": error_object(body), "headers": headers}
    await _send([encode({**event, "sequence_number": 0, **_flat(error)})])


def _flat(error: ApiError) -> dict[str, str | None]:
    return {"code": error.body.code or None, "message": error.body.message, "param": error.body.param or None}
