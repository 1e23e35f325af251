"""`antiphon`: the one command. Each subcommand is a file of this room that adds its own parser."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from scripts.failure import UsageFault

COMMANDS = {
    "serve": "scripts.serve",
    "chat": "scripts.chat",
    "ps": "scripts.ps",
    "restart": "scripts.restart",
    "doctor": "scripts.doctor",
    "chaos": "scripts.chaos.command",
    "bench": "scripts.bench.command",
    "model": "scripts.model",
    "keys": "scripts.keys_cli",
    "ledger": "scripts.ledger_cli",
    "catalog": "scripts.catalog_cli",
    "release": "scripts.release_cli",
    "capacity": "scripts.capacity",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageFault(f"{message} (see: {self.prog} --help)")


class _Version(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        print(f"antiphon {metadata.version('antiphon')}")
        sys.exit(0)


def parser(chosen: str = "") -> argparse.ArgumentParser:
    """Return the parser of everything, or only of one subcommand, whose module alone is then imported."""
    top = _Parser(prog="antiphon", description="Chat serving on your own GPUs that does not lose a word.")
    top.add_argument("--version", action=_Version, nargs=0, help="show the version")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        if chosen in {"", name}:
            importlib.import_module(module).add_parser(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code; 2 with one line on stderr for what the caller can mend.

    Who reads the output may leave before its end, as `head` does: then 141, as the shell has it for SIGPIPE.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return 141


def discard_output() -> None:
    """Print to nowhere from now on: who read it has left, and the interpreter flushes once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = words[0] if words and words[0] in COMMANDS else ""
    try:
        args = parser(chosen).parse_args(words)
        code: int = args.handler(args)
    except UsageFault as fault:
        print(f"antiphon: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
