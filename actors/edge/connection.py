"""One client's connection: hypercorn's HTTP/1.1 and websocket protocols on a socket with bounds."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import h11
import trio
from attrs import frozen
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.ws_stream import ASGIWebsocketState, Handshake, WSStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState, H11SendableEvent
from hypercorn.utils import parse_socket_addr
from wsproto.events import Ping

from actors.edge import request_ids
from actors.edge.errors import ApiError, encode, invalid
from actors.protocol import ErrorBody

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with a timeout of 0: closing sends a reset and keeps nothing."""

_LAST_WORDS = 1.0
"""Seconds that the rest of a refused body is read for when the server stops."""

ID = b"x-request-id"
TOO_LONG = 431
"""What h11 hints at when a part of a request does not end."""


@frozen
class Limits:
    """Bounds of one connection; see `ServerLimits`."""

    header_bytes: int
    headers: int
    send: float
    linger_bytes: int
    linger: float
    ping: float


class Connection(TCPServer):
    """A connection that ends by itself, whatever its client does: reads, writes and silence are bounded."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        stream: trio.SocketStream,
        limits: Limits,
    ) -> None:
        super().__init__(app, config, context, {}, cast("Any", stream))
        self.stream: trio.SocketStream  # type: ignore[assignment]  # in the clear: TLS ends before us
        self.protocol: GuardedH11  # type: ignore[assignment]  # never HTTP/2
        self._limits = limits
        self.is_fresh = True
        """Its client has not said anything yet."""
        self._lingering = False
        self._reading = trio.CancelScope()

    async def run(self) -> None:
        """Serve the connection to its end. Any exception that comes out means: reset the socket."""
        sock = self.stream.socket
        try:
            client = parse_socket_addr(sock.family, sock.getpeername())
            server = parse_socket_addr(sock.family, sock.getsockname())
        except OSError:
            return  # gone before it began
        async with TaskGroup() as task_group:
            self._task_group = task_group
            self.protocol = GuardedH11(
                self.app,
                self.config,
                self.context,
                task_group,
                ConnectionState({}),
                False,
                client,
                server,
                self.protocol_send,
                self._limits,
            )
            await self.protocol.initiate()
            await self.idle_task.restart(task_group, self._idle_timeout)
            await self._read_data()
            await self.idle_task.stop()
        await self.stream.aclose()

    def abort(self) -> None:
        """Reset the socket; whoever waits on it goes on with `ClosedResourceError`."""
        abort(self.stream)

    async def protocol_send(self, event: Event) -> None:
        """Hypercorn's way out: bytes, the end of the connection, or a change between idle and busy."""
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Closed):
            await self._end()
            await self.protocol.handle(Closed())
        elif isinstance(event, Updated):
            if event.idle:
                await self.idle_task.restart(self._task_group, self._idle_timeout)
            else:
                await self.idle_task.stop()

    async def _send(self, data: bytes) -> None:
        """Send within the deadline. Shielded, for half a chunk is no chunk; `abort` ends it all the same."""
        async with self.send_lock:
            try:
                with trio.move_on_after(self._limits.send, shield=True) as scope:
                    await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
                await self.protocol.handle(Closed())  # busy: `_end` is at it, nothing can follow
                return
            if scope.cancelled_caught:
                self.abort()
                await self.protocol.handle(Closed())

    async def _end(self) -> None:
        """Say that no more comes, and read on for a while: closing on unread bytes recalls what was sent."""
        self._lingering = True
        self._reading.deadline = trio.current_time() + self._patience()
        # Shielded: by now the request's task may be cancelled, as its request is over. This does not wait.
        with (
            suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError),
            trio.CancelScope(shield=True),
        ):
            await self.stream.send_eof()

    def _patience(self) -> float:
        if self.protocol.has_read_all:
            return 0.0
        return _LAST_WORDS if self.context.terminated.is_set() else self._limits.linger

    async def _read_data(self) -> None:
        with self._reading:
            while not self._lingering:
                data = await self._receive()
                if data is None or self._lingering:
                    break
                self.is_fresh = False
                await self.protocol.handle(RawData(data))
                if not data:
                    break
            if self._lingering:
                await self._drop_the_rest()
        await self.protocol.handle(Closed())

    async def _receive(self) -> bytes | None:
        """Return what came, b"" at the end; None when the connection is lost or a websocket fell silent."""
        silences = 0
        while silences < 2:
            with trio.move_on_after(self._limits.ping):
                try:
                    return bytes(await self.stream.receive_some(MAX_RECV))
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    return None
            if self.protocol.is_websocket:
                silences += 1
                await self.protocol.ping()
        return None

    async def _drop_the_rest(self) -> None:
        left = self._limits.linger_bytes
        while left > 0:
            try:
                data = await self.stream.receive_some(MAX_RECV)
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                return
            if not data:
                return
            left -= len(data)

    async def _initiate_server_close(self) -> None:
        await self.protocol.handle(Closed())
        await self.stream.aclose()


class GuardedH11(H11Protocol):
    """HTTP/1.1 and websockets, and nothing else: no cleartext HTTP/2, no two framings of one body."""

    def __init__(self, *args: Any) -> None:
        *rest, limits = args
        super().__init__(*rest)
        self._limits: Limits = limits

    @property
    def is_websocket(self) -> bool:
        """The connection was upgraded."""
        return isinstance(self.stream, WSStream) and self.stream.state is ASGIWebsocketState.CONNECTED

    @property
    def has_read_all(self) -> bool:
        """The client said all of its request: nothing of it is unread."""
        return self.connection.their_state in {h11.DONE, h11.MUST_CLOSE, h11.CLOSED}

    @property
    def _is_head(self) -> bool:
        """The request at hand is a HEAD: its answer has no content."""
        return getattr(self.connection, "_request_method", None) == b"HEAD"

    async def ping(self) -> None:
        """Ask a silent websocket for a sign of life."""
        if isinstance(self.stream, WSStream):
            await self.stream._send_wsproto_event(Ping())  # noqa: SLF001 - hypercorn has no public way

    async def stream_send(self, event: StreamEvent) -> None:
        """Hypercorn's way from a stream to the wire: what it answers by itself gets a request id too."""
        if isinstance(event, Response) and all(name.lower() != ID for name, _ in event.headers):
            event = replace(event, headers=[*event.headers, _new_id()])
        await super().stream_send(event)

    async def _check_protocol(self, event: h11.Request) -> None:
        """Take no part in an upgrade to HTTP/2: a server may pass over the offer."""

    async def _create_stream(self, request: h11.Request) -> None:
        try:
            self._check(request)
        except ApiError as error:
            await self._refuse(error.body)
        else:
            await super()._create_stream(_without_compression(request))

    def _check(self, request: h11.Request) -> None:
        names = [name for name, _ in request.headers]
        size = len(request.target) + sum(len(n) + len(v) + 4 for n, v in request.headers)
        if request.http_version not in {b"1.0", b"1.1"}:
            raise ApiError(ErrorBody(505, "invalid_request_error", "Only HTTP/1.1 is served here."))
        if b"transfer-encoding" in names and b"content-length" in names:
            raise invalid("A request has Content-Length or Transfer-Encoding, not both.")
        if size > self._limits.header_bytes:
            raise too_long(self._head_is_too_long(f" It has {size}."))
        if len(names) > self._limits.headers:
            raise too_long(f"The request has {len(names)} headers; at most {self._limits.headers} are read.")
        if _asks_for_websocket(request):
            self._check_upgrade(request)

    def _check_upgrade(self, request: h11.Request) -> None:
        if self.connection.trailing_data[0]:
            raise invalid("Bytes after an upgrade request must wait for its answer.")
        if not Handshake(list(request.headers), request.http_version.decode()).is_valid():
            raise invalid("A websocket is asked for in HTTP/1.1, with a Sec-WebSocket-Key, for version 13.")

    def _head_is_too_long(self, more: str = "") -> str:
        limit = self._limits.header_bytes
        return f"The request's head (its first line and headers) must have at most {limit} bytes.{more}"

    async def _refuse(self, body: ErrorBody) -> None:
        await self._answer(body)
        await self.send(Closed())

    async def _send_error_response(self, status_code: int) -> None:
        """Answer what is not HTTP, or goes on for too long, with a body that says so."""
        error = "The request is not valid HTTP/1.1."
        if status_code == TOO_LONG and self.stream is None:
            error = self._head_is_too_long()
        elif status_code == TOO_LONG:
            limit = self._limits.header_bytes
            error = f"The head of a chunk, or the trailers, must have at most {limit} bytes."
        await self._answer(ErrorBody(status_code, "invalid_request_error", error))

    async def _answer(self, body: ErrorBody) -> None:
        data = encode(body)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
            (b"connection", b"close"),
            _new_id(),
        ]
        response = h11.Response(
            status_code=body.status, headers=list(chain(headers, self.config.response_headers("h11")))
        )
        content = () if self._is_head else (h11.Data(data=data),)
        events: tuple[H11SendableEvent, ...] = (response, *content, h11.EndOfMessage())
        # In one piece: between two, the request's own task could answer, and neither answer would be whole.
        written = b"".join(self.connection.send(event) or b"" for event in events)
        await self.send(RawData(data=written))


def too_long(message: str) -> ApiError:
    """431: the head of the request is more than is read of one."""
    return ApiError(ErrorBody(TOO_LONG, "invalid_request_error", message))


def _new_id() -> tuple[bytes, bytes]:
    return (ID, request_ids.mint("").encode())


def _asks_for_websocket(request: h11.Request) -> bool:
    kinds = [v.strip().lower() for n, v in request.headers if n == b"upgrade"]
    tokens = [t.strip().lower() for n, v in request.headers if n == b"connection" for t in v.split(b",")]
    return request.method == b"GET" and b"websocket" in kinds and b"upgrade" in tokens


def _without_compression(request: h11.Request) -> h11.Request:
    """Drop the offer of compressed websocket frames: 64 KiB of those may be 64 MiB of text."""
    headers = [(n, v) for n, v in request.headers if n != b"sec-websocket-extensions"]
    return h11.Request(
        method=request.method, target=request.target, headers=headers, http_version=request.http_version
    )


def abort(stream: trio.SocketStream) -> None:
    """Close a socket by reset if it is still open; whoever waits on it gets `ClosedResourceError`."""
    if stream.socket.fileno() < 0:
        return
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    stream.socket.close()
