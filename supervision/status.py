"""What `antiphon ps` asks the supervisor: one JSON line over a unix socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Literal

import attrs
import trio
from attrs import frozen

from supervision import wire
from supervision.errors import SupervisionError
from supervision.roster import Entry, Roster

_PAGE_KIB = 4
_TIMEOUT = 5.0
"""Seconds a supervisor may take to answer; its loop does nothing long."""


class NotRunning(SupervisionError):
    """No supervisor answers on the state directory."""


@frozen
class ActorStatus:
    """One actor's facts. `pid` is 0 and `rss_mib` 0.0 while it is down; `last_error` "" when it had none."""

    name: str
    epoch: int
    pid: int
    state: Literal["starting", "up", "down"]
    restarts: int
    mailbox: int
    rss_mib: float
    last_error: str


def read_status(state_dir: Path) -> list[ActorStatus]:
    """Ask the supervisor of `state_dir` for its actors, in the tree's order. Raises `NotRunning`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT)
            connection.connect(str(socket_path(state_dir)))
            with connection.makefile("rb") as answer:
                line = answer.readline()
        return [wire.structure(actor, ActorStatus) for actor in json.loads(line)["actors"]]
    except (OSError, ValueError) as error:
        raise NotRunning(f"no supervisor answers on {state_dir}: {error}") from error


def socket_path(state_dir: Path) -> Path:
    """Return where the supervisor listens."""
    return state_dir / "run" / "supervisor.sock"


async def serve_status(roster: Roster, state_dir: Path) -> None:
    """Answer everyone who connects, for ever, with the state of the moment."""

    async def answer(stream: trio.SocketStream) -> None:
        with trio.move_on_after(_TIMEOUT):
            try:
                await stream.send_all(status_line(roster))
            except trio.BrokenResourceError:
                return

    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await listening.bind(str(socket_path(state_dir)))
    listening.listen()
    await trio.serve_listeners(answer, [trio.SocketListener(listening)])


def status_line(roster: Roster) -> bytes:
    """Return the answer: `{"actors": […]}` and a line's end."""
    actors = [attrs.asdict(status_of(entry)) for entry in roster.entries.values()]
    return json.dumps({"actors": actors}).encode() + b"\n"


def status_of(entry: Entry) -> ActorStatus:
    """Return an entry's facts, its memory read at this moment."""
    pid = entry.incarnation.pid if entry.incarnation is not None else 0
    return ActorStatus(
        name=entry.name,
        epoch=entry.epoch,
        pid=pid,
        state=entry.state,
        restarts=max(0, entry.restarts),
        mailbox=entry.depth,
        rss_mib=_rss_mib(pid) if pid else 0.0,
        last_error=entry.last_error,
    )


def _rss_mib(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return round(pages * _PAGE_KIB / 1024, 1)
