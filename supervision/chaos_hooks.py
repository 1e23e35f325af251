"""Faults that only a process can do to itself, done when asked for, and only where ANTIPHON_CHAOS=1."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from types import FrameType

from supervision import chaos_disk

SPIN = signal.SIGUSR1
"""Loop for ever without yielding."""
CLOCK_STEP = signal.SIGUSR2
"""Step this process's wall clock by ±11 s or ±1 h, as an administrator or a time server might."""

STEPS = (11.0, -11.0, 3600.0, -3600.0)


def is_on() -> bool:
    """Whether this process may be broken from outside."""
    return os.environ.get("ANTIPHON_CHAOS") == "1"


def install(state_dir: Path) -> None:
    """Install the hooks when the environment asks for them."""
    if is_on():
        chaos_disk.install(state_dir)
        signal.signal(SPIN, _spin)
        signal.signal(CLOCK_STEP, _step)


def die() -> None:
    """End this process as a fault in native code would, where that is allowed."""
    if is_on():
        os.kill(os.getpid(), signal.SIGKILL)


def _spin(_number: int, _frame: FrameType | None) -> None:
    while True:
        pass


def _step(_number: int, _frame: FrameType | None) -> None:
    real, step = time.time, random.choice(STEPS)  # noqa: S311 - any of them will do
    time.time = lambda: real() + step
