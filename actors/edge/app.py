"""The Quart application: routes, and what every reply has in common."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any, cast

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart import Response, g, has_request_context, request, websocket
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge, RequestTimeout

from actors.edge import chat_completions, feedback, moderations, request_ids, responses, sse
from actors.edge.chat_rendering import ChatStream, Gathered, completion, stored_completion
from actors.edge.errors import (
    ApiError,
    encode,
    internal,
    invalid,
    method_not_allowed,
    not_found,
    shown,
    timed_out,
    too_large,
)
from actors.edge.metrics import gather as gather_metrics
from actors.edge.opening import Call, check_label, host_of, open_turn_message, read_call
from actors.edge.response_rendering import (
    ResponseEvents,
    ResponseStream,
    Shape,
    State,
    final_status,
    response_object,
    shape_of,
    state_of,
)
from actors.edge.services import Services
from actors.edge.streaming import EventStream, Listener, Renderer
from actors.edge.turn_reader import TurnReader
from actors.edge.validation import parse_object
from actors.edge.websocket import converse
from actors.protocol import ErrorBody, Metrics, OpenTurn, TurnOpened, TurnRecord
from store.accounts import Identity

log = logging.getLogger(__name__)

PARSE_INLINE = 16 * 1024
"""Bodies up to this size are parsed on the event loop: it takes less than a hand-over to a thread."""
EXITS = "antiphon.exits"
"""Where a request's clean-up is kept in its ASGI scope: functions that do not wait."""
NO_RETRY = {400, 401, 403, 404, 413}


class EdgeConnection(TrioASGIHTTPConnection):
    """One request. However it ends (finished, failed, its client gone) its clean-up runs."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Handle the request."""
        exits: list[Callable[[], None]] = []
        cast("dict[str, Any]", self.scope)[EXITS] = exits
        try:
            await super().__call__(receive, send)
        finally:
            for leave in exits:
                leave()


class EdgeApp(QuartTrio):
    """A Quart application whose requests clean up after themselves."""

    asgi_http_class = EdgeConnection


def create_app(services: Services, gauges: Callable[[], dict[str, float]]) -> QuartTrio:
    """Make the application. `gauges` are the server's, for `/metrics`."""
    app = EdgeApp("actors.edge", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = services.body_bytes
    app.config["BODY_TIMEOUT"] = services.body_seconds
    app.config["RESPONSE_TIMEOUT"] = None
    handlers = Handlers(services, gauges)
    app.before_request(handlers.begin)
    app.before_websocket(handlers.begin_socket)
    app.after_request(handlers.finish)
    app.register_error_handler(ApiError, handlers.api_error)
    app.register_error_handler(HTTPException, handlers.http_error)
    app.register_error_handler(Exception, handlers.bug)
    app.post("/v1/chat/completions")(handlers.chat_completion)
    app.get("/v1/chat/completions/<completion_id>")(handlers.get_chat_completion)
    app.post("/v1/responses")(handlers.create_response)
    app.get("/v1/responses/<response_id>")(handlers.get_response)
    app.post("/v1/responses/<response_id>/cancel")(handlers.cancel_response)
    app.post("/v1/moderations")(handlers.moderation)
    app.post("/v1/feedback")(handlers.rate)
    app.get("/v1/models")(handlers.list_models)
    app.get("/v1/models/<path:name>")(handlers.get_model)
    app.get("/health/live")(handlers.live)
    app.get("/health/ready")(handlers.ready)
    app.get("/metrics")(handlers.metrics)
    app.websocket("/v1/responses")(handlers.socket)
    return app


class Handlers:
    """The routes. Each reads, validates, asks the tree, and renders; an `ApiError` anywhere is the reply."""

    def __init__(self, services: Services, gauges: Callable[[], dict[str, float]]) -> None:
        self._services = services
        self._gauges = gauges

    # ---------------------------------------------------------------- every reply

    async def begin(self) -> None:
        """Name the request."""
        g.request_id = request_ids.mint("")
        check_label(request.headers)

    async def begin_socket(self) -> None:
        """Name the request for an upgrade. Each frame gets a name of its own."""
        g.request_id = request_ids.mint("")
        check_label(websocket.headers)

    async def finish(self, response: Response) -> Response:
        """Put the request's id on the reply and count it."""
        response.headers["x-request-id"] = g.get("request_id", "")
        route = request.url_rule.rule if request.url_rule else "none"
        self._services.figures.count("requests_total", route=route, status=str(response.status_code))
        return response

    async def api_error(self, error: ApiError) -> Response:
        """Render an error."""
        body = error.body
        response = _json(encode(body), body.status)
        response.headers["x-request-id"] = g.get("request_id", "") or request_ids.mint("")
        for name, value in body.headers:
            response.headers[name] = value
        if body.status in NO_RETRY:
            response.headers.setdefault("x-should-retry", "false")
        return response

    async def http_error(self, error: HTTPException) -> Response:
        """Render what the framework refused."""
        if isinstance(error, RequestEntityTooLarge):
            limit = self._services.body_bytes
            return await self.api_error(too_large(f"The body must have at most {limit} bytes."))
        if isinstance(error, RequestTimeout):
            return await self.api_error(timed_out("The body did not arrive in time."))
        where = f"{request.method} {shown(request.path)}" if has_request_context() else "websocket"
        if error.code == 404:
            return await self.api_error(not_found(f"Unknown request URL: {where}."))
        if isinstance(error, MethodNotAllowed):
            allowed = error.valid_methods or ()
            return await self.api_error(method_not_allowed(f"Not allowed here: {where}.", allowed))
        status = error.code if error.code is not None and error.code >= 400 else 500
        return await self.api_error(ApiError(ErrorBody(status, "invalid_request_error", error.name)))

    async def bug(self, error: Exception) -> Response:
        """Render our own fault. The log has where it happened and no message, which may quote a client."""
        if isinstance(error, ApiError):
            return await self.api_error(error)
        frames = "".join(traceback.format_tb(error.__traceback__))
        log.error("request %s failed: %s\n%s", g.get("request_id", ""), type(error).__name__, frames)
        return await self.api_error(internal())

    # ---------------------------------------------------------------- turns

    async def chat_completion(self) -> Response:
        """`POST /v1/chat/completions`."""
        services = self._services
        call, body = await self._read_call()
        asked = chat_completions.parse(body, services.models, services.bounds)
        message = self._message(call, asked, "chat")
        opened, listener = await self._open(message)
        logprobs = asked.params.logprobs >= 0
        if asked.stream:
            stream = ChatStream(
                opened,
                n=asked.n,
                include_usage=asked.include_usage,
                logprobs=logprobs,
                service_tier=asked.service_tier,
            )
            return self._stream(opened, listener, stream)
        gathered = await self._gather(listener, asked.n)
        made = completion(opened, gathered, logprobs=logprobs, service_tier=asked.service_tier)
        return _json(sse.encode(made), 200, opened.headers)

    async def get_chat_completion(self, completion_id: str) -> Response:
        """`GET /v1/chat/completions/{id}`: a finished turn that was to be stored. Costs nothing."""
        identity = self._prove()
        for name in request.args:
            raise invalid(f"Unrecognized query parameter: {shown(name)}.", name if name.isascii() else "")
        record = await self._completed(completion_id, identity)
        return _json(sse.encode(stored_completion(record)), 200)

    async def create_response(self) -> Response:
        """`POST /v1/responses`."""
        services = self._services
        call, body = await self._read_call()
        asked = responses.parse(body, services.models, services.bounds)
        opened, listener = await self._open(self._message(call, asked, "responses"))
        shape = shape_for(opened, asked)
        logprobs = asked.params.logprobs >= 0
        if asked.stream:
            return self._stream(opened, listener, ResponseStream(ResponseEvents(shape, logprobs=logprobs)))
        if asked.background:
            made = response_object(shape, State("in_progress"))
            return _json(sse.encode(made), 200, opened.headers)
        gathered = await self._gather(listener, 1)
        choice = gathered.choices[0]
        state = State(
            final_status(choice.finish_reason),
            choice.text,
            tuple(choice.logprobs) if logprobs else (),
            choice.finish_reason,
            gathered.usage,
            fast_answer=gathered.fast_answer,
        )
        return _json(sse.encode(response_object(shape, state)), 200, opened.headers)

    async def get_response(self, response_id: str) -> Response:
        """`GET /v1/responses/{id}`, and its stream from any sequence number on. Costs nothing.

        A turn that is not to be stored is there until it ends, so that its stream can be taken up again.
        """
        identity = self._prove()
        asked = responses.parse_resume(request.args.to_dict())
        request_id = _turn_id(response_id)
        record = await self._shown(request_id, identity)
        if not asked.stream:
            return _json(sse.encode(response_object(shape_of(record), state_of(record))), 200)
        opened, reader = await self._services.turns.attach(request_id, identity.account)
        self._at_exit(reader)
        events = ResponseEvents(shape_of(record), after=asked.starting_after)
        return self._stream(opened, Listener(self._services.turns, reader), ResponseStream(events))

    async def cancel_response(self, response_id: str) -> Response:
        """`POST /v1/responses/{id}/cancel`: what was generated is kept, and billed."""
        identity = self._prove(writes=True)
        request_id = _turn_id(response_id)
        await self._shown(request_id, identity)
        await self._services.turns.cancel(request_id, identity.account)
        record = await self._services.turns.read(request_id, identity.account)
        return _json(sse.encode(response_object(shape_of(record), state_of(record))), 200)

    async def socket(self) -> None:
        """The websocket at `/v1/responses`."""
        await converse(self._services)

    def _message(self, call: Call, asked: chat_completions.TurnRequest, face: Any) -> OpenTurn:
        services = self._services
        host = host_of(services.context.tree, call)
        message = open_turn_message(call, asked, host, face, services.turn_seconds)
        g.request_id = message.request_id
        g.host = host
        return message

    async def _open(self, message: OpenTurn) -> tuple[TurnOpened, Listener]:
        opened, reader = await self._services.turns.open(message, g.host)
        g.request_id = opened.request_id  # of the turn that it came back to: the reply is known by that name
        self._at_exit(reader)
        return opened, Listener(self._services.turns, reader)

    def _at_exit(self, reader: TurnReader) -> None:
        turns = self._services.turns
        cast("dict[str, Any]", request.scope)[EXITS].append(lambda: turns.close(reader))

    def _stream(self, opened: TurnOpened, listener: Listener, renderer: Renderer) -> Response:
        body = EventStream(listener, renderer, self._services.keepalive)
        response = Response(body, 200, {**sse.HEADERS, **dict(opened.headers)})
        response.timeout = None
        return response

    async def _gather(self, listener: Listener, n: int) -> Gathered:
        gathered = Gathered(n)
        while not (listener.reader.ended and listener.reader.drained):
            gathered.take(await listener.wait(self._services.keepalive))
        await listener.wait(0)
        error = gathered.error or listener.reader.broken
        if error is not None:
            raise ApiError(error)
        return gathered

    async def _shown(self, request_id: str, identity: Identity) -> TurnRecord:
        record = await self._services.turns.read(request_id, identity.account)
        if not record.store and record.status != "in_progress":
            raise not_found(f"Response with id 'resp_{request_id}' not found.")
        return record

    async def _completed(self, completion_id: str, identity: Identity) -> TurnRecord:
        missing = not_found(f"Chat completion with id {shown(completion_id)} not found.")
        request_id = request_ids.parse(completion_id, request_ids.CHAT_PREFIX)
        if request_id is None:
            raise missing
        try:
            record = await self._services.turns.read(request_id, identity.account)
        except ApiError as error:
            raise missing if error.body.status == 404 else error from None
        if not record.store or record.status != "completed":
            raise missing
        return record

    # ---------------------------------------------------------------- reading a request

    async def _read_call(self) -> tuple[Call, dict[str, Any]]:
        identity = self._prove(writes=True)
        raw = await self._body()
        return read_call(identity, request.path, raw, request.headers), await _parse(raw)

    def _prove(self, *, writes: bool = False, admin: bool = False) -> Identity:
        return self._services.identities.prove(request.headers, writes=writes, admin=admin)

    async def _body(self) -> bytes:
        kind = request.mimetype
        if kind != "application/json":
            raise invalid(f"The Content-Type must be application/json, not {shown(kind)}.")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise invalid("The body must not be compressed.")
        return cast("bytes", await request.get_data(cache=False, as_text=False))

    # ---------------------------------------------------------------- the rest

    async def moderation(self) -> Response:
        """`POST /v1/moderations`."""
        identity = self._prove(writes=True)
        question = moderations.parse(await _parse(await self._body()))
        answer = await moderations.ask(self._services.context, question, identity.account)
        return _json(sse.encode(moderations.render(answer)), 200)

    async def rate(self) -> Response:
        """`POST /v1/feedback`: thumbs up, thumbs down or a wish for another reply, of a turn of the asker's."""
        services = self._services
        identity = self._prove(writes=True)
        opinion = feedback.parse(await _parse(await self._body()))
        await feedback.check(services.turns, opinion, identity)
        await services.ratings.keep(feedback.row_of(opinion, identity))
        services.figures.count("ratings_total", rating=opinion.rating)
        return _json(sse.encode(feedback.render(opinion)), 200)

    async def list_models(self) -> Response:
        """`GET /v1/models`: every name that a request may use."""
        self._prove()
        return _json(sse.encode({"object": "list", "data": self._services.models.listed()}), 200)

    async def get_model(self, name: str) -> Response:
        """`GET /v1/models/{name}`."""
        self._prove()
        self._services.models.get(name)
        found = next(m for m in self._services.models.listed() if m["id"] == name)
        return _json(sse.encode(found), 200)

    async def live(self) -> Response:
        """`GET /health/live`: this process answers."""
        return _json(b'{"status":"live"}', 200)

    async def ready(self) -> Response:
        """`GET /health/ready`: every kind of actor that a turn needs is up, and answers."""
        missing = await self._services.readiness.missing()
        if missing:
            return _json(sse.encode({"status": "not ready", "missing": missing}), 503)
        return _json(b'{"status":"ready"}', 200)

    async def metrics(self) -> Response:
        """`GET /metrics`: the figures of every actor. They name accounts at most, and no one's text."""
        services = self._services
        if services.metrics_need_admin:
            self._prove(admin=True)
        own = services.figures.lines(self._gauges())
        text = await gather_metrics(services.context, own)
        return Response(text, 200, content_type=Metrics.content_type)


def shape_for(opened: TurnOpened, asked: chat_completions.TurnRequest) -> Shape:
    """Return what the response object says of a turn that was just opened."""
    return Shape(
        opened.request_id,
        opened.model,
        opened.created,
        asked.background,
        asked.store,
        asked.metadata,
        asked.echo,
        asked.service_tier,
    )


async def _parse(raw: bytes) -> dict[str, Any]:
    if len(raw) <= PARSE_INLINE:
        return parse_object(raw)
    return await trio.to_thread.run_sync(parse_object, raw)


def _turn_id(response_id: str) -> str:
    found = request_ids.parse(response_id, request_ids.RESPONSE_PREFIX)
    if found is None:
        raise not_found(f"Response with id {shown(response_id)} not found.")
    return found


def _json(data: bytes, status: int, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    return Response(data, status, dict(headers), content_type="application/json")
