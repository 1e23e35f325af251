"""`antiphon chaos`: drive real clients against a tree, break it by plan, and check that nothing was lost."""

from __future__ import annotations

import argparse
import importlib.util

from scripts.failure import UsageFault

CLIENTS = ("openai", "websockets")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon chaos`."""
    parser = subparsers.add_parser("chaos", help="break the tree by plan and prove that nothing is lost")
    parser.add_argument("--plan", default="kill-everything-once", help="a plan's name, or a .toml file")
    parser.add_argument(
        "--state", default="", help="hurt the tree that runs on this state (default: a tree of its own)"
    )
    parser.add_argument("--seed", type=int, default=0, help="0 draws one, and the report names it")
    parser.add_argument("--model", default="", help="the model of its own tree")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run a plan. Exit code 0 only if every planned fault fired and no invariant broke."""
    missing = [name for name in CLIENTS if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageFault(
            f"chaos drives real clients, and {', '.join(missing)} is missing: pip install 'antiphon[chaos]'"
        )
    from scripts.chaos.drive import run as drive  # noqa: PLC0415 - only now is it known to be importable

    return drive(args)
