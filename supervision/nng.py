"""The real mailbox: an nng `Pull0` to be written to, a `Push0` towards each peer, through their descriptors.

Sockets are tried without blocking and waited for on nng's pollable descriptors; pynng's own `asend` and
`arecv` cost several times more, and a cancelled `asend` leaks its message. They are tried through its library
handle, for its `recv` and `send` raise when there is nothing to do, once for every message of a quiet actor.
Each socket has one owner task.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pynng
import trio
from attrs import define, field
from pynng import ffi, lib
from pynng.exceptions import check_err

from supervision import wire
from supervision.errors import SupervisionError
from supervision.mailbox import Mailbox
from supervision.outbox import CAPACITY, Outbox, OutboxClosed

T = TypeVar("T")

_POLL = 0.25
"""Seconds after which a socket is tried though its descriptor said nothing: nng can miss an edge."""

_RECONNECT_MS = (20, 200)
"""How soon a peer that is not there, or went away, is dialled again; nng's own first try comes after 1 s."""

MAX_PATH = 107
"""Bytes of a unix socket's path, a limit of the kernel."""

_THREADS = 2
"""Task threads of nng, which would start two per core and more; ours only move bytes between sockets."""


class PathTooLong(SupervisionError):
    """The state directory's path leaves no room for a socket's name."""


def limit_threads() -> None:
    """Cap nng's threads. Has an effect only before the process opens its first nng socket."""
    for parameter, threads in (
        (lib.NNG_INIT_NUM_TASK_THREADS, _THREADS),
        (lib.NNG_INIT_MAX_TASK_THREADS, _THREADS),
        (lib.NNG_INIT_NUM_EXPIRE_THREADS, 1),
        (lib.NNG_INIT_MAX_EXPIRE_THREADS, 1),
        (lib.NNG_INIT_NUM_POLLER_THREADS, 1),
        (lib.NNG_INIT_MAX_POLLER_THREADS, 1),
        (lib.NNG_INIT_NUM_RESOLVER_THREADS, 1),
    ):
        lib.nng_init_set_parameter(parameter, threads)


limit_threads()


def socket_path(run_dir: Path, name: str) -> Path:
    """Return where the mailbox of `name` is. Raises `PathTooLong` with what to do."""
    path = run_dir / f"{name}.ipc"
    length = len(os.fsencode(path))
    if length > MAX_PATH:
        raise PathTooLong(
            f"{path} has {length} bytes where {MAX_PATH} is the limit: choose a shorter state directory"
        )
    return path


@define
class _Peer:
    outbox: Outbox
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    in_hand: int = 0
    """Messages taken from the outbox and not yet handed to nng."""
    sent: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)


@asynccontextmanager
async def open_mailbox(name: str, run_dir: Path, capacity: int = CAPACITY) -> AsyncIterator[NngMailbox]:
    """Listen as `name` in `run_dir`, a private directory; at the end hang up and remove the socket."""
    path = socket_path(run_dir, name)
    with suppress(FileNotFoundError):
        path.unlink()
    with pynng.Pull0(recv_max_size=wire.MAX_FRAME) as pull:
        pull.listen(f"ipc://{path}")
        path.chmod(0o600)
        async with trio.open_nursery() as nursery:
            yield NngMailbox(name, run_dir, pull, nursery, capacity)
            nursery.cancel_scope.cancel()


class NngMailbox(Mailbox):
    """A mailbox on unix sockets; made by `open_mailbox`."""

    def __init__(
        self, name: str, run_dir: Path, pull: pynng.Pull0, nursery: trio.Nursery, capacity: int
    ) -> None:
        self.name = name
        self._run_dir = run_dir
        self._inlet = _Inlet(pull)
        self._nursery = nursery
        self._capacity = capacity
        self._peers: dict[str, _Peer] = {}

    def outbox(self, to: str) -> Outbox:
        """Return the queue towards `to`; its first use starts the task that dials and owns the socket."""
        peer = self._peers.get(to)
        if peer is None:
            address = f"ipc://{socket_path(self._run_dir, to)}"
            peer = self._peers[to] = _Peer(Outbox(to, self._capacity))
            self._nursery.start_soon(self._write, peer, address)
        return peer.outbox

    async def receive(self) -> bytes:
        """Return the next frame."""
        await trio.lowlevel.checkpoint()
        while (frame := self._inlet.take()) is None:
            with trio.move_on_after(_POLL):
                await trio.lowlevel.wait_readable(self._inlet.descriptor)
        return frame

    def forget(self, to: str) -> int:
        """Drop what is queued for `to` and close the socket towards it."""
        peer = self._peers.pop(to, None)
        if peer is None:
            return 0
        peer.scope.cancel()
        return peer.outbox.close() + peer.in_hand

    async def flush(self) -> None:
        """Return when nng has taken everything."""
        for peer in list(self._peers.values()):
            await peer.outbox.drained()
            while peer.in_hand:
                await peer.sent.park()

    async def _write(self, peer: _Peer, address: str) -> None:
        least, most = _RECONNECT_MS
        with peer.scope, suppress(OutboxClosed), pynng.Push0() as push:
            push.reconnect_time_min, push.reconnect_time_max = least, most
            push.dial(address, block=False)
            outlet = _Outlet(push)
            while True:
                await peer.outbox.wait()
                messages = peer.outbox.take()
                peer.in_hand = len(messages)
                frame = wire.frame(messages)
                while not outlet.give(frame):
                    with trio.move_on_after(_POLL):
                        await trio.lowlevel.wait_readable(outlet.descriptor)
                peer.in_hand = 0
                peer.sent.unpark_all()


class _Inlet:
    """A socket's receiving side."""

    def __init__(self, socket: pynng.Pull0) -> None:
        self.descriptor: int = socket.recv_fd
        self._socket = socket
        self._data, self._size = ffi.new("char **"), ffi.new("size_t *")

    def take(self) -> bytes | None:
        """Return a frame that is here, or None. Raises as pynng does."""
        data, size = self._data, self._size
        error = lib.nng_recv(self._socket.socket, data, size, lib.NNG_FLAG_ALLOC | lib.NNG_FLAG_NONBLOCK)
        if error:
            return _again(error, None)
        frame: bytes = ffi.unpack(data[0], size[0])
        lib.nng_free(data[0], size[0])
        return frame


class _Outlet:
    """A socket's sending side."""

    def __init__(self, socket: pynng.Push0) -> None:
        self.descriptor: int = socket.send_fd
        self._socket = socket

    def give(self, frame: bytes) -> bool:
        """Hand a frame over; False: there is no room. Raises as pynng does."""
        error = lib.nng_send(self._socket.socket, frame, len(frame), lib.NNG_FLAG_NONBLOCK)
        return True if not error else _again(error, False)


def _again(error: int, answer: T) -> T:
    """Answer that a socket should be tried again, if that is all the error says."""
    if error != lib.NNG_EAGAIN:
        check_err(error)
    return answer
