"""`antiphon bench NAME`: run one benchmark, print its rows, exit 1 when a floor is missed."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from types import ModuleType

from rich.console import Console

import scripts.bench
from scripts.bench import report
from scripts.failure import UsageFault


def benches() -> dict[str, ModuleType]:
    """Return the benchmarks by name: the modules of this package that have `NAME` and `run`."""
    found = {}
    for info in pkgutil.iter_modules(scripts.bench.__path__):
        if info.name in {"command", "report"}:
            continue
        module = importlib.import_module(f"scripts.bench.{info.name}")
        if hasattr(module, "NAME"):
            found[module.NAME] = module
    return found


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon bench`."""
    parser = subparsers.add_parser("bench", help="measure: antiphon bench NAME; without a name, list them")
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run a benchmark, or list them."""
    known = benches()
    if not args.name:
        for name, module in sorted(known.items()):
            print(f"{name:14} {(module.__doc__ or '').strip().splitlines()[0]}")
        return 0
    if args.name not in known:
        raise UsageFault(f"no benchmark {args.name!r}; known are {', '.join(sorted(known))}")
    rows = known[args.name].run()
    if args.json:
        print(report.as_json(rows))
    else:
        report.print_table(rows, Console())
    return report.exit_code(rows)
