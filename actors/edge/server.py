"""The HTTP server: hypercorn's protocols, with every connection contained.

As it comes, hypercorn's trio worker lets one connection end the whole process, waits for ever on a client
that stopped reading, upgrades cleartext connections to HTTP/2, and takes two framings of one body as two
requests. Here each connection is a task that cannot take another with it: whatever goes wrong in it ends
that socket, by reset.
"""

from __future__ import annotations

import logging
import resource
import socket
from typing import Any

import trio
from attrs import frozen
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from actors.edge.connection import Connection, Limits, abort

log = logging.getLogger(__name__)

SPARE_DESCRIPTORS = 128
"""Kept for mailboxes, databases and logs: an edge that is full of clients must still talk to the tree."""
MOST_DESCRIPTORS = 65_536
FIRST_WORDS = 0.5
"""Seconds that a client which was accepted just before the drain has for its first bytes: they are on their way."""
_LOOK = 0.01


@frozen
class ServerLimits:
    """Bounds of the server and its connections. Sizes are in bytes, times in seconds."""

    header_bytes: int = 32 * 1024
    headers: int = 100
    frame_bytes: int = 4 * 2**20
    """A websocket message."""
    idle: float = 30.0
    """Without a request, or while its head trickles in."""
    send: float = 120.0
    """For one write to a client that reads nothing; also what TCP itself waits for an acknowledgement."""
    unsent_bytes: int = 128 * 1024
    """What the kernel holds of a stream beyond what is on the wire."""
    linger_bytes: int = 128 * 2**20
    linger: float = 5.0
    """What is read and dropped of a refused body, so that the refusal arrives before the reset."""
    ping: float = 20.0
    """After this much silence a websocket is pinged; after as much again it is gone."""
    connections: int = 8192


class Server:
    """Serves one application on one listening socket, until `drain`."""

    def __init__(self, app: Any, limits: ServerLimits) -> None:
        self._app = ASGIWrapper(app)
        self._limits = limits
        self._config = _hypercorn_config(limits)
        self._worker = WorkerContext(None)
        self._accepting = trio.CancelScope()
        self._slots = trio.CapacityLimiter(min(limits.connections, descriptors() - SPARE_DESCRIPTORS))
        self._open: set[Connection] = set()
        self._quiet = trio.Event()
        self.accepted = 0
        self.contained = 0
        """Connections that ended in an exception of the server's own code."""

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._open)

    async def run(
        self, listener: trio.SocketListener, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept and serve. Returns when `drain` was called and every connection is gone.

        The descriptor in `listener` is closed here, which leaves the socket open for the others that hold it.
        Cancellation: connections are reset.
        """
        try:
            async with trio.open_nursery() as nursery:
                task_status.started()
                with self._accepting:
                    await trio.serve_listeners(self._serve, [listener], handler_nursery=nursery)
        finally:
            for connection in list(self._open):
                connection.abort()

    async def drain(self, seconds: float) -> bool:
        """Accept no more, and wait for the open requests for at most `seconds`. False: some are still open.

        Idle connections are closed at once, those of which nothing was heard yet after `FIRST_WORDS`; the others
        when their request is done.
        """
        self._accepting.cancel()
        await self._hear_the_last()
        await self._worker.terminated.set()
        with trio.move_on_after(seconds):
            while self._open:
                self._quiet = trio.Event()
                await self._quiet.wait()
        return not self._open

    async def _hear_the_last(self) -> None:
        with trio.move_on_after(FIRST_WORDS):
            await trio.sleep(_LOOK)  # who was accepted has a task by now
            while any(connection.is_fresh for connection in self._open):  # noqa: ASYNC110 - half a second at most
                await trio.sleep(_LOOK)

    def abort_all(self) -> None:
        """Reset every connection that is left."""
        for connection in list(self._open):
            connection.abort()

    async def _serve(self, stream: trio.SocketStream) -> None:
        self.accepted += 1
        connection = None
        try:
            self._slots.acquire_on_behalf_of_nowait(stream)
            _set_options(stream.socket, self._limits)
            connection = Connection(
                self._app, self._config, self._worker, stream, self._limits_of_connection()
            )
            self._open.add(connection)
            await connection.run()
        except trio.WouldBlock:
            log.warning("refused a connection: %d are open", self._slots.total_tokens)
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - one connection never ends another
            self._contain(error)
        finally:
            if connection is not None:
                self._open.discard(connection)
                self._slots.release_on_behalf_of(stream)
            abort(stream)
            if not self._open:
                self._quiet.set()

    def _limits_of_connection(self) -> Limits:
        limits = self._limits
        return Limits(
            limits.header_bytes, limits.headers, limits.send, limits.linger_bytes, limits.linger, limits.ping
        )

    def _contain(self, error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            cancelled, rest = error.split(trio.Cancelled)
            if rest is None:
                raise cancelled or error
            error = rest
        self.contained += 1
        log.warning("a connection was reset: %s", _kinds(error))


def _kinds(error: BaseException) -> str:
    """Name an exception without its message, which may quote a client."""
    if isinstance(error, BaseExceptionGroup):
        return ", ".join(_kinds(inner) for inner in error.exceptions)
    return type(error).__name__


def _set_options(sock: trio.socket.SocketType, limits: ServerLimits) -> None:
    if sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.send * 1000))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, limits.unsent_bytes)


def _hypercorn_config(limits: ServerLimits) -> Config:
    config = Config()
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = log
    config.keep_alive_timeout = limits.idle
    config.keep_alive_max_requests = 100_000
    config.h11_max_incomplete_size = limits.header_bytes
    config.websocket_max_message_size = limits.frame_bytes
    config.websocket_ping_interval = None  # the connection pings, and watches for the answer
    return config


def descriptors() -> int:
    """Raise this process's limit of descriptors as far as it may go, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def listener_of(descriptor: int) -> trio.SocketListener:
    """Make a listener of an inherited listening socket, on a descriptor of its own."""
    listening = socket.socket(fileno=socket.dup(descriptor))
    listening.setblocking(False)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listening))
