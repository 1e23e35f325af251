"""`antiphon catalog`: build a catalog from approved rows, look into it, seal its decision log."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.failure import UsageFault
from store.catalog import FEATURES, Catalog, CatalogError
from store.catalog_build import BuildRefused, BuildReport, CatalogBuilder, open_source
from store.normalise import NORMALISER, key_of
from store.release import CATALOG, ReleaseError, check_version, read_pointer

SHOWN = 20
"""Problems a person is shown; `--json` has all of them."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon catalog`."""
    commands = subparsers.add_parser(
        "catalog", help="the reviewed answers: build, look up, count"
    ).add_subparsers(required=True, metavar="ACTION")
    building = commands.add_parser("build", help="make a catalog from rows in JSON Lines or Parquet")
    building.add_argument("rows", type=Path)
    building.add_argument(
        "--out", type=Path, help="the file to make; else <state>/catalogs/<name of the rows>.mdb"
    )
    building.add_argument("--keep-going", action="store_true", help="leave out rows that cannot go in")
    building.set_defaults(handler=build)
    getting = commands.add_parser("get", help="what the catalog has for a question")
    getting.add_argument("question")
    getting.set_defaults(handler=get)
    counting = commands.add_parser("stats", help="what is in a catalog")
    counting.set_defaults(handler=stats)
    sealing = commands.add_parser("seal", help="turn the days of the decision log that are over into Parquet")
    sealing.set_defaults(handler=seal)
    for command in (getting, counting):
        command.add_argument("--catalog", type=Path, help="a file; else that of the release")
        command.add_argument("--release", default="", help="a published version; else the active one")
    for command in (building, getting, counting, sealing):
        add_common(command)


def add_common(command: argparse.ArgumentParser) -> None:
    """Add the flags every command has."""
    command.add_argument("--state", type=Path, default=Path("var"), help="state directory (default: var)")
    command.add_argument("--json", action="store_true", help="print facts for machines")


def build(args: argparse.Namespace) -> int:
    """Build a catalog. Returns 1 when rows cannot go in."""
    if not args.rows.is_file():
        raise UsageFault(f"{args.rows}: no such file; it should have one JSON object a line, or be Parquet")
    out = args.out or args.state / "catalogs" / f"{args.rows.stem}.mdb"
    if out.exists():
        raise UsageFault(f"{out} exists: a catalog never changes; choose another name or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        report = build_with_progress(args.rows, out, keep_going=args.keep_going, quiet=args.json)
    except BuildRefused as refused:
        _print_report(refused.report, args.json, str(refused))
        return 1
    _print_report(report, args.json, f"{out}: {report.entries:,} entries under {report.keys:,} keys")
    return 0


def build_with_progress(rows: Path, out: Path, *, keep_going: bool, quiet: bool) -> BuildReport:
    """Build a catalog with a bar on the terminal. Raises `BuildRefused`; `UsageFault` without `pyarrow`."""
    try:
        source = open_source(rows)
    except ImportError as error:
        raise UsageFault(
            f"{rows} is Parquet, which needs pyarrow: pip install 'antiphon[parquet]'"
        ) from error
    with progress_bar("rows", quiet=quiet) as advance:
        return CatalogBuilder(source, advance).build(out, keep_going=keep_going)


@contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr that `advance(done, of)` moves; nothing when quiet or not on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of or None)


def _print_report(report: BuildReport, as_json: bool, headline: str) -> None:
    if as_json:
        print_json(attrs.asdict(report))
        return
    for problem in report.problems[:SHOWN]:
        print(f"row {problem.line}: {problem.kind}: {problem.text}")
    if len(report.problems) > SHOWN:
        print(f"… and {len(report.problems) - SHOWN} more; --json shows all")
    print(headline)


def get(args: argparse.Namespace) -> int:
    """Print the entry of a question. Returns 1 for a miss."""
    key = key_of(args.question)
    catalog = open_catalog(args)
    entry = catalog.find(key) if key else None
    catalog.close()
    if args.json:
        print_json(
            {
                "key": key.decode() if key else None,
                "entry": entry.name if entry else None,
                "answer": entry.answer if entry else None,
                "features": dict(zip(FEATURES, entry.features, strict=True)) if entry else None,
            }
        )
    elif entry is None:
        print("not in the catalog" + (f" as {key.decode()!r}" if key else ": no key can be made of it"))
    else:
        print(f"[{entry.name}]\n{entry.answer}")
    return int(entry is None)


def stats(args: argparse.Namespace) -> int:
    """Print what is in a catalog."""
    catalog = open_catalog(args)
    lengths = sorted(len(entry.answer.encode()) for _, entry in catalog.items())
    facts = {
        "entries": catalog.about.entries,
        "keys": catalog.about.keys,
        "answer_bytes_median": lengths[len(lengths) // 2],
        "answer_bytes_longest": lengths[-1],
        "features": list(catalog.about.features),
        "normaliser": NORMALISER.version,
        "normaliser_digest": catalog.about.normaliser,
    }
    catalog.close()
    print_facts(facts, args.json)
    return 0


def seal(args: argparse.Namespace) -> int:
    """Seal every closed day of decisions and ratings. Raises `UsageFault` for days that cannot be."""
    try:
        from store.feedback_seal import DayManifest, SealError, seal_closed_days  # noqa: PLC0415  optional
    except ImportError as error:
        raise UsageFault(
            "sealing writes Parquet, which needs pyarrow: pip install 'antiphon[parquet]'"
        ) from error
    root, now = args.state / "feedback", time.time()
    try:
        found = [*seal_closed_days(root, "decisions", now), *seal_closed_days(root, "ratings", now)]
    except OSError as error:
        raise UsageFault(f"{error.filename or root}: {error.strerror or error}") from error
    days = [day for day in found if isinstance(day, DayManifest)]
    if args.json:
        print_json([msgspec.to_builtins(day) for day in days])
    else:
        for day in days:
            kept = f", {day.damaged_lines:,} damaged lines left out" if day.damaged_lines else ""
            print(f"{day.kind} of {day.day}: {day.rows:,} rows{kept}")
        print(f"{len(days)} days sealed")
    if faults := [str(fault) for fault in found if isinstance(fault, SealError)]:
        raise UsageFault("; ".join(faults))
    return 0


def open_catalog(args: argparse.Namespace) -> Catalog:
    """Open the catalog that the flags name. Raises `UsageFault`."""
    try:
        return Catalog(args.catalog or _catalog_of(args.state / "releases", args.release))
    except (CatalogError, ReleaseError) as error:
        raise UsageFault(str(error)) from error


def _catalog_of(root: Path, version: str) -> Path:
    if version:
        return root / check_version(version) / CATALOG
    pointer = read_pointer(root)
    if pointer is None:
        raise UsageFault(f"no release is active in {root}: name one with --release, or a file with --catalog")
    return root / pointer.active.version / CATALOG


def print_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Print named facts, one a line, or as one JSON object."""
    if as_json:
        print_json(facts)
        return
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        print(f"{name:{width}}  {', '.join(value) if isinstance(value, list | tuple) else value}")


def print_json(value: Any) -> None:
    """Print facts for machines."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
