"""`antiphon restart`: one edge after another drains and is started anew, so that nobody is refused."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

from scripts.config import seconds
from scripts.failure import UsageFault
from supervision.status import ActorStatus, NotRunning, read_status

PACE = 2.5
"""Seconds between two restarts at least: a group that restarts more than five times in ten is given up."""
_LOOK = 0.05


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon restart`."""
    parser = subparsers.add_parser("restart", help="restart the edges one after another, refusing nobody")
    parser.add_argument("--state", default="./var")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--patience",
        type=seconds,
        default=120.0,
        help="seconds an edge may take to drain and come back (default 120)",
    )
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Restart every edge. Raises `UsageFault` when nothing runs, or when one does not come back."""
    state = Path(args.state)
    took: dict[str, float] = {}
    for edge in _edges(state):
        began = time.monotonic()
        _restart(state, edge, args.patience)
        took[edge.name] = round(time.monotonic() - began, 2)
        if not args.json:
            print(f"{edge.name} drained and came back in {took[edge.name]:.1f} s", flush=True)
        time.sleep(max(0.0, PACE - took[edge.name]))
    if args.json:
        print(json.dumps({"restarted": took}))
    return 0


def _edges(state: Path) -> list[ActorStatus]:
    try:
        return [actor for actor in read_status(state) if actor.name.startswith("edge.")]
    except NotRunning as error:
        raise UsageFault(f"nothing runs on {state}; start it with: antiphon serve --state {state}") from error


def _restart(state: Path, edge: ActorStatus, patience: float) -> None:
    """Have it drain; return when its successor accepts. One that is down comes back by itself."""
    if edge.state == "up":
        os.kill(edge.pid, signal.SIGTERM)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if any(e.name == edge.name and e.epoch > edge.epoch and e.state == "up" for e in _edges(state)):
            return
        time.sleep(_LOOK)
    raise UsageFault(f"{edge.name} did not come back within {patience:g} s; look at: antiphon ps")
