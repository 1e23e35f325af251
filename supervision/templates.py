"""Templates, as the supervisor sees them: processes that have loaded an actor, and fork into its incarnations.

An interpreter's start and its imports are most of what a restart would take. A template has them behind it, and
whatever else `Actor.prepare` does once for all. It has one thread, no trio, no mailbox, no epoch and no state, so
that a fork of it is sound, and each fork has only itself to open. Children of one kind share a template.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec
import trio

from supervision import control
from supervision.spec import ChildSpec


class TemplateGone(OSError):
    """The template ended before it had forked. The text says how."""


class Template:
    """One template process, and our end of the line to it."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        self.process = process
        self._line = line
        self._turn = trio.Lock()

    async def beget(self, control_end: socket.socket, log: int) -> int:
        """Have it fork a child that holds these descriptors; returns the child's pid. Our child, not its.

        Raises `TemplateGone`. Cancellation: the template is killed, and with it the only knowledge of a child
        that may just have begun; that child reads no birth and ends.
        """
        async with self._turn:
            try:
                socket.send_fds(self._line, [b"child"], [control_end.fileno(), log])
                await trio.lowlevel.wait_readable(self._line)
                pid = self._line.recv(control.MAX_REPORT)
            except trio.Cancelled:
                self.process.kill()
                raise
            except OSError as error:
                raise self._obituary() from error
        if not pid:
            raise self._obituary()
        return int(pid)

    def end(self) -> None:
        """Kill and reap it."""
        self.process.kill()
        self.process.wait()
        self._line.close()

    def _obituary(self) -> TemplateGone:
        self.process.kill()
        status = self.process.wait()
        return TemplateGone(f"its template ended with status {status}; its log may say why")


class Templates:
    """A template for each kind of child: actor, settings, files. Used by the supervisor's own thread alone."""

    def __init__(self, spawn: Callable[[ChildSpec], Template], gone: Callable[[int], None]) -> None:
        self._spawn = spawn
        self._gone = gone
        self._by_kind: dict[bytes, Template] = {}

    def warm(self, specs: Iterable[ChildSpec]) -> None:
        """Begin the template of each, all at once: they load beside each other."""
        for spec in specs:
            with suppress(OSError):  # no process to be had now: the launch tries again, and says so
                self.of(spec)

    def of(self, spec: ChildSpec) -> Template:
        """Return the template of this kind of child, a new one when there is none or it has died.

        Raises `OSError` when there is no process or descriptor to be had.
        """
        kind = msgspec.msgpack.encode((spec.actor, spec.settings, spec.files))
        found = self._by_kind.get(kind)
        if found is not None and found.process.poll() is not None:
            self._bury(self._by_kind.pop(kind))
            found = None
        if found is None:
            found = self._by_kind[kind] = self._spawn(spec)
        return found

    def dismiss(self) -> None:
        """End every template."""
        while self._by_kind:
            self._bury(self._by_kind.popitem()[1])

    def _bury(self, template: Template) -> None:
        template.end()
        self._gone(template.process.pid)


class Forked:
    """A child that a template begot. The template's own child has ended by then, so it is ours to reap."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Reap it, and return its exit status, or minus the signal's number."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode
