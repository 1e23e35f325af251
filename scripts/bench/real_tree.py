"""The real tree with the real model, as a bench's other processes meet it: over HTTP, from its own state."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts import credentials
from supervision.status import NotRunning, read_status

PATIENCE = 120.0


@contextmanager
def real_tree(base: Path) -> Iterator[Path]:
    """Serve from a new state directory, with every default, until the block ends."""
    state = base / "var"
    command = [sys.executable, "-m", "scripts.cli", "serve", "--state", str(state), "--port", "0"]
    with (base / "serve.log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: running.poll() is not None or _is_up(state), "the tree is up")
        if running.poll() is not None:
            raise RuntimeError((base / "serve.log").read_text(encoding="utf-8"))
        yield state
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(PATIENCE)


def _is_up(state: Path) -> bool:
    try:
        actors = read_status(state)
    except NotRunning:
        return False
    return (
        bool(actors) and all(actor.state == "up" for actor in actors) and credentials.path_of(state).exists()
    )


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition. Raises `RuntimeError` that names it after `PATIENCE` seconds."""
    give_up = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up:
            raise RuntimeError(f"waited {PATIENCE:.0f} s until {what}")
        time.sleep(0.05)
