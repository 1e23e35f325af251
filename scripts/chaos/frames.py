"""A proxy before one actor's mailbox that loses, delays, doubles, reorders and cuts the frames that pass.

It takes the place of the mailbox's socket file, so every peer that dials from then on speaks to it. The bytes are nng's
IPC transport: an 8-byte handshake each way, then per message one byte 0x01, a length of 8 bytes (big-endian), the payload.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from pathlib import Path

HANDSHAKE = 8
HEAD = struct.Struct(">BQ")
LONGEST_DELAY = 0.3


class FrameProxy:
    """One proxy on one mailbox. `counts` says how many frames met which fate."""

    def __init__(self, mailbox: Path, fates: tuple[str, ...], share: float, rng: random.Random) -> None:
        self.mailbox = mailbox
        self.real = mailbox.with_suffix(".real")
        self.fates = fates
        self.share = share
        self.rng = rng
        self.counts: dict[str, int] = dict.fromkeys((*fates, "passed"), 0)
        self._open: list[socket.socket] = []
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)

    def start(self) -> None:
        """Take the socket file's place. Raises `OSError` when it is not there."""
        self.mailbox.rename(self.real)
        self._listener.bind(str(self.mailbox))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """Give the place back (unless a new incarnation has taken it) and hang up on everyone, who then dial afresh."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self.real.rename(self.mailbox)
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self.real))
            except OSError:
                return
            self._open += [client, server]
            threading.Thread(target=self._pump, args=(client, server), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(65536):
                sink.sendall(block)

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        held: bytes | None = None
        try:
            server.sendall(_exactly(client, HANDSHAKE))
            while True:
                mark, length = HEAD.unpack(_exactly(client, HEAD.size))
                payload = _exactly(client, length)
                frames, held = self._fate(payload, held)
                for frame in frames:
                    server.sendall(HEAD.pack(mark, len(frame)) + frame)
        except (OSError, EOFError):
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)

    def _fate(self, payload: bytes, held: bytes | None) -> tuple[list[bytes], bytes | None]:
        """Return what is sent on now, and the frame held back to be overtaken by the next."""
        after = [] if held is None else [held]
        fate = self.rng.choice(self.fates) if self.rng.random() < self.share else "passed"
        if fate == "reorder" and held is not None:
            fate = "passed"
        self.counts[fate] += 1
        if fate == "reorder":
            return [], payload
        if fate == "delay":
            time.sleep(self.rng.uniform(0, LONGEST_DELAY))
        now = {
            "drop": [],
            "duplicate": [payload, payload],
            "truncate": [payload[: self.rng.randrange(len(payload) or 1)]],
        }.get(fate, [payload])
        return now + after, None


def _exactly(source: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        block = source.recv(count - len(parts))
        if not block:
            raise EOFError
        parts += block
    return bytes(parts)
