"""Faults that only a process can do to itself, done on a signal, and only where ANTIPHON_CHAOS=1."""

from __future__ import annotations

import os
import random
import signal
import time
from types import FrameType

SPIN = signal.SIGUSR1
"""Loop for ever without yielding."""
CLOCK_STEP = signal.SIGUSR2
"""Step this process's wall clock by ±11 s or ±1 h, as an administrator or a time server might."""

STEPS = (11.0, -11.0, 3600.0, -3600.0)


def install() -> None:
    """Install the hooks when the environment asks for them."""
    if os.environ.get("ANTIPHON_CHAOS") == "1":
        signal.signal(SPIN, _spin)
        signal.signal(CLOCK_STEP, _step)


def _spin(_number: int, _frame: FrameType | None) -> None:
    while True:
        pass


def _step(_number: int, _frame: FrameType | None) -> None:
    real, step = time.time, random.choice(STEPS)  # noqa: S311 - any of them will do
    time.time = lambda: real() + step
