"""Children as real processes: forked by the template of their kind, each leading a session of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import trio

from supervision import control, orphans
from supervision.child import Incarnation, Launcher, LaunchFailed
from supervision.nng import PathTooLong, socket_path
from supervision.spec import ChildSpec
from supervision.templates import Forked, Template, Templates
from supervision.tree import Tree

MAX_LOG = 16 * 1024 * 1024
"""Bytes after which an actor's log is put aside as `<actor>.log.1` at its next start."""

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's import would start threads, and what forks must have none. No actor multiplies matrices with it."""


class ProcessLauncher(Launcher):
    """Keeps the templates (`python -m supervision.template`) of a state directory's children, and launches from them."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._environment = {**_ONE_THREAD, **os.environ, "PYTHONPATH": _import_path()}
        self.spawned: set[int] = set()
        self.running: set[int] = set()
        self.templates = Templates(self._spawn_template, self.running.discard)

    async def launch(self, spec: ChildSpec, epoch: int, tree: Tree) -> Incarnation:
        """Have the template of its kind beget it, and tell it who it is."""
        await trio.lowlevel.checkpoint()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            socket_path(self._state_dir / "run", spec.name).unlink(missing_ok=True)
            birth = control.encode(self._birth(spec, epoch, tree))
            with open_log(self._state_dir, spec.name) as log:
                pid = await self.templates.of(spec).beget(theirs, log.fileno())
            self._begun(pid)
            with suppress(BrokenPipeError, ConnectionResetError):  # it died just now: its exit status tells
                ours.send(birth)
            return ProcessIncarnation(Forked(pid), ours, self)
        except (OSError, PathTooLong, control.ReportTooLarge) as error:
            ours.close()
            raise LaunchFailed(f"cannot start: {error}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def _begun(self, pid: int) -> None:
        self.spawned.add(pid)
        self.running.add(pid)

    def _birth(self, spec: ChildSpec, epoch: int, tree: Tree) -> control.Birth:
        return control.Birth(
            name=spec.name,
            epoch=epoch,
            actor=spec.actor,
            state_dir=str(self._state_dir),
            grace=spec.grace,
            heartbeat=spec.heartbeat,
            tree=tree,
            settings=spec.settings,
            files=spec.files,
        )

    def _spawn_template(self, spec: ChildSpec) -> Template:
        # In this thread and not through trio's own, which would end idle, and PDEATHSIG go by the thread.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-m", "supervision.template", str(theirs.fileno()), str(os.getpid())]
        try:
            ours.send(control.encode(control.Pattern(spec.actor, spec.settings)))
            ours.setblocking(False)
            with open_log(self._state_dir, spec.name) as log:
                child = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(), *spec.files.values()),
                    start_new_session=True,
                    env=self._environment,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._begun(child.pid)
        return Template(child, ours)

    def look_after_orphans(self) -> int:
        """Reap what dead children left behind; returns how many are left to look at."""
        return orphans.reap(frozenset(self.spawned), frozenset(self.running))


class ProcessIncarnation(Incarnation):
    """A child process and our end of its control descriptor."""

    def __init__(self, child: Forked, ours: socket.socket, launcher: ProcessLauncher) -> None:
        self.pid = child.pid
        self._child = child
        self._raw = ours
        self._socket = trio.socket.from_stdlib_socket(ours)
        self._pidfd = os.pidfd_open(child.pid)
        self._launcher = launcher
        self._unsent: bytes | None = None

    async def report(self) -> control.Report:
        """Return the next report."""
        try:
            data = await self._socket.recv(control.MAX_REPORT)
        except ConnectionResetError:
            data = b""
        if not data:
            await trio.sleep_forever()
        self._send_unsent()
        return control.decode(data)

    def reports_so_far(self) -> list[control.Report]:
        """Take what has arrived."""
        found = []
        with suppress(BlockingIOError, ConnectionResetError):
            while data := self._raw.recv(control.MAX_REPORT):
                found.append(control.decode(data))
        return found

    async def exit_status(self) -> int:
        """Wait for the end, then clear away what the process leaves: its group, its descriptors."""
        if self._child.returncode is None:
            await trio.lowlevel.wait_readable(self._pidfd)
            orphans.end_group(self.pid)
            self._child.wait()
            self._launcher.running.discard(self.pid)
            self._launcher.look_after_orphans()
        return self._child.wait()

    def push(self, tree: Tree) -> None:
        """Send the tree now, or keep the newest for when the child reads again."""
        self._unsent = control.encode(control.Push(tree))
        self._send_unsent()

    def _send_unsent(self) -> None:
        if self._unsent is None:
            return
        try:
            self._raw.send(self._unsent)
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            pass  # it is dying; its exit says the rest
        self._unsent = None

    def terminate(self) -> None:
        """SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the control descriptor and the pidfd."""
        self._socket.close()
        os.close(self._pidfd)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


def open_log(state_dir: Path, name: str) -> BinaryIO:
    """Open an actor's log to append to it, after putting a large one aside."""
    path = state_dir / "logs" / f"{name}.log"
    with suppress(FileNotFoundError):
        if path.stat().st_size > MAX_LOG:
            path.replace(path.with_suffix(".log.1"))
    return path.open("ab")


def _import_path() -> str:
    """Return where children find what we can import: our own path, the source tree included."""
    here = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join(
        dict.fromkeys([here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    )
