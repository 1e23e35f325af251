"""The state directory as the supervisor owns it: one supervisor at a time, epochs that only rise."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from supervision.errors import SupervisionError

_DIGITS = 20
"""The epoch is written in place with this many digits: one write, so a kill leaves the old or the new."""


class StateInUse(SupervisionError):
    """Another supervisor runs on the state directory. The text names it and its process."""


class StateUnusable(SupervisionError):
    """The state directory cannot be written to. The text names the path and the reason."""


class Epochs:
    """The counter of incarnations, kept in the locked file: it goes on rising over supervisor restarts.

    Raises `StateUnusable` when the file holds something else.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        written = os.pread(descriptor, _DIGITS, 0)
        if not (written or b"0").isdigit():
            raise StateUnusable(
                "run/epoch holds no number: write one into it that is higher than any in logs/"
            )
        self._last = int(written or b"0")

    def next(self) -> int:
        """Return an epoch higher than any given before."""
        self._last += 1
        os.pwrite(self._descriptor, b"%0*d\n" % (_DIGITS, self._last), 0)
        return self._last


@contextmanager
def claim(state_dir: Path) -> Iterator[Epochs]:
    """Own the state directory: `run/` (private, stale sockets removed) and `logs/` are there.

    Raises `StateInUse` or `StateUnusable`. At the end the sockets are removed and the lock is given up.
    """
    run_dir = state_dir / "run"
    try:
        for made in (run_dir, state_dir / "logs"):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
            made.chmod(0o700)
        descriptor = os.open(run_dir / "epoch", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateUnusable(
            f"{error.filename or run_dir}: {error.strerror}; choose a state directory of your own"
        ) from error
    try:
        _lock(descriptor, state_dir)
        remove_sockets(run_dir)
        yield Epochs(descriptor)
        remove_sockets(run_dir)
    finally:
        os.close(descriptor)


def remove_sockets(run_dir: Path) -> None:
    """Remove every socket file: whoever listened there is gone."""
    for path in run_dir.iterdir():
        if path.is_socket():
            path.unlink(missing_ok=True)


def _lock(descriptor: int, state_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StateInUse(f"another supervisor runs on {state_dir}") from error
