"""Processes that children leave behind: ended and reaped, for the supervisor is their subreaper."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from attrs import frozen

_PROC = Path("/proc")


@frozen
class _Process:
    pid: int
    state: str
    parent: int
    group: int
    session: int


def end_group(leader: int) -> None:
    """Kill what is left of a dead child's process group. Call it before the leader is reaped."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def reap(actors: frozenset[int], running: frozenset[int]) -> int:
    """Look after adopted descendants of `actors` (pids of all children ever, each leader of its session).

    The dead are reaped; the live are killed when their actor is not `running` any more. Returns how many
    were seen, so that a caller can come back until there are none.
    """
    me = os.getpid()
    seen = 0
    for process in _processes():
        adopted = process.parent == me and process.pid not in actors
        if adopted and actors & {process.group, process.session}:
            seen += 1
            if not running & {process.group, process.session}:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    return seen


def _processes() -> Iterator[_Process]:
    for pid in _my_children():
        with suppress(OSError, ValueError, IndexError):
            # the command's name may hold anything, but what follows its last bracket is fields
            stat = (_PROC / pid / "stat").read_text(encoding="utf-8", errors="replace")
            fields = stat.rpartition(") ")[2].split()
            yield _Process(int(pid), fields[0], int(fields[1]), int(fields[2]), int(fields[3]))


def _my_children() -> list[str]:
    """Return their pids, or those of all processes where the kernel keeps no such list."""
    try:
        return [
            pid for task in (_PROC / "self/task").iterdir() for pid in (task / "children").read_text().split()
        ]
    except OSError:
        return [entry.name for entry in _PROC.iterdir() if entry.name.isdigit()]
