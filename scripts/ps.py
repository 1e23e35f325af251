"""`antiphon ps`: the tree as it stands."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import attrs
from rich.table import Column, Table
from rich.text import Text

from scripts import tables
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
        tables.show(_table(actors))
    return 0


def _table(actors: list[ActorStatus]) -> Table:
    table = tables.table(
        Column("name", no_wrap=True), "epoch", "pid", "state", "restarts", "mailbox", "MiB", "last error"
    )
    colours = {"up": "green", "starting": "yellow", "down": "red"}
    for a in actors:
        tables.add(
            table,
            a.name,
            a.epoch,
            a.pid or "",
            Text(a.state, colours[a.state]),
            a.restarts,
            a.mailbox,
            f"{a.rss_mib:.0f}",
            a.last_error,
        )
    return table
