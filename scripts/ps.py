"""`antiphon ps`: the tree as it stands."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts.failure import UsageFault
from supervision.status import ActorStatus, NotRunning, read_status


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon ps`."""
    parser = subparsers.add_parser(
        "ps", help="show the tree: name, epoch, pid, state, restarts, mailbox, memory"
    )
    parser.add_argument("--state", default="./var")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Print the tree, as a table or as JSON."""
    try:
        actors = read_status(Path(args.state))
    except NotRunning as error:
        raise UsageFault(
            f"nothing runs on {args.state}; start it with: antiphon serve --state {args.state}"
        ) from error
    if args.json:
        print(json.dumps({"actors": [attrs.asdict(a) for a in actors]}, indent=2))
    else:
        Console().print(_table(actors))
    return 0


def _table(actors: list[ActorStatus]) -> Table:
    table = Table(
        "name", "epoch", "pid", "state", "restarts", "mailbox", "MiB", "last error", box=None, pad_edge=False
    )
    colours = {"up": "green", "starting": "yellow", "down": "red"}
    for a in actors:
        cells: list[Any] = [
            a.name,
            a.epoch,
            a.pid or "",
            f"[{colours[a.state]}]{a.state}",
            a.restarts,
            a.mailbox,
            f"{a.rss_mib:.0f}",
            Text(a.last_error),  # as it is: `antiphon[gpu]` is no markup
        ]
        table.add_row(*[cell if isinstance(cell, Text) else str(cell) for cell in cells])
    return table
