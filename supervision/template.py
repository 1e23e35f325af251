"""The template's side: `python -m supervision.template FD PARENT` loads the actor that FD's first report names.

Then it forks whenever it is asked to. It starts no thread and opens nothing that its forks would share, but the
line to its supervisor, which they close.
"""

from __future__ import annotations

import os
import socket
import sys

from supervision import prctl

if __name__ == "__main__":
    prctl.die_with_parent(int(sys.argv[2]))

import gc
import traceback
from contextlib import suppress
from typing import NoReturn

from supervision import control, process, wire

_DESCRIPTORS = 2
"""What comes with a request: the child's control descriptor and its log."""


def prepare(pattern: control.Pattern) -> None:
    """Do what need not be done by each incarnation anew. What fails here fails there as well, and is told there."""
    with suppress(Exception):
        cls = process.actor_class(pattern.actor)
        cls.prepare(wire.structure(pattern.settings, cls.Settings))


def beget() -> int:
    """Fork a child whose parent is the supervisor; returns its pid, and 0 in the child.

    It is forked twice: the process between ends at once, and the supervisor, a subreaper, inherits the child.
    """
    told, tell = os.pipe()
    between = os.fork()
    if between == 0:
        _fork_and_end(tell)
    os.close(tell)
    pid = int(os.read(told, 32)) if between else 0
    os.close(told)
    if between:
        os.waitpid(between, 0)
    return pid


def _fork_and_end(tell: int) -> None:
    """Return in the child alone."""
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)  # nothing told: the template ends of it, and the launch fails
    if pid:
        os.write(tell, str(pid).encode())
        os._exit(0)


def become(descriptors: list[int], parent: int) -> NoReturn:
    """Be a child: lead a session, write to its own log, live; and end without what ends an interpreter slowly."""
    status = 1
    try:
        os.setsid()
        raw, log = descriptors
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        status = process.main(raw, parent)
    except Exception:  # noqa: BLE001 - as an interpreter does with what nobody caught
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(descriptor: int, parent: int) -> int:
    """Fork on demand until the supervisor hangs up; returns the exit status."""
    line = socket.socket(fileno=descriptor)
    first = line.recv(control.MAX_REPORT)
    if not first:
        return 0
    pattern = control.decode(first)
    if not isinstance(pattern, control.Pattern):
        raise TypeError(f"the first report is {pattern!r}, not Pattern")
    prepare(pattern)
    gc.collect()
    gc.freeze()
    while True:
        word, descriptors, _, _ = socket.recv_fds(line, control.MAX_REPORT, _DESCRIPTORS)
        if not word:
            return 0
        pid = beget()
        if pid == 0:
            line.close()
            become(descriptors, parent)
        for each in descriptors:
            os.close(each)
        line.send(str(pid).encode())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
