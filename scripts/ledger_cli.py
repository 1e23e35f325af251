"""`antiphon ledger`: read the books, and hold them against the engine's own count."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

from attrs import asdict, fields
from rich.table import Column, Table

from scripts import state_files, tables
from scripts.config import seconds
from scripts.failure import UsageFault
from store.books import Balance, Books, Entry
from store.books_posting import REVENUE
from store.books_reconcile import Report, reconcile

_PAGE = 5000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon ledger balance|entries|reconcile|export`."""
    parser = subparsers.add_parser("ledger", help="read the books, check them, export them")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    balance = _add(actions, "balance", "what each account owes, in micro-units")
    balance.add_argument("--account", help="only this one")
    balance.set_defaults(handler=show_balance)
    entries = _add(actions, "entries", "the newest entries")
    entries.add_argument("--account", help="only this account's")
    entries.add_argument("--request", help="only this request's")
    entries.add_argument("--limit", type=int, default=50, help="how many at most (default 50)")
    entries.set_defaults(handler=show_entries)
    check = _add(
        actions, "reconcile", "compare the books with themselves and with the engine's count; 1 on drift"
    )
    check.add_argument(
        "--grace",
        type=seconds,
        default=60.0,
        help="seconds within which a request may still settle (default 60)",
    )
    check.set_defaults(handler=show_reconciled)
    export = _add(actions, "export", "every entry as CSV, or with --json one JSON object a line")
    export.add_argument("--output", help="a file to write (default: standard output)")
    export.set_defaults(handler=export_entries)


def show_balance(args: argparse.Namespace) -> int:
    """Print balances; the revenue account mirrors the sum of the others."""
    with _books(args) as books:
        balances = books.balances(args.account)
    if args.json:
        print(json.dumps({"balances": [asdict(b) for b in balances]}, indent=2))
    else:
        tables.show(_balance_table(balances))
    return 0


def show_entries(args: argparse.Namespace) -> int:
    """Print the newest entries, oldest of them first."""
    with _books(args) as books:
        entries = books.newest_entries(args.limit, account=args.account, request_id=args.request)
    if args.json:
        print(json.dumps({"entries": [asdict(e) for e in entries]}, indent=2))
        return 0
    table = tables.table("id", Column("request", no_wrap=True), "posting", "account", "micros")
    for e in entries:
        tables.add(table, e.id, e.request_id, e.posting, e.account, e.micros)
    tables.show(table)
    return 0


def show_reconciled(args: argparse.Namespace) -> int:
    """Print every disagreement. Returns 1 when there is one."""
    before = time.time_ns() // 1_000_000 - round(args.grace * 1000)
    with _books(args) as books:
        report = reconcile(books, settled_before=before)
    if args.json:
        print(json.dumps({**asdict(report), "agrees": not report.drifts}, indent=2))
    else:
        _print_report(report)
    return 1 if report.drifts else 0


def export_entries(args: argparse.Namespace) -> int:
    """Write every entry."""
    with _books(args) as books, _output(args.output) as out:
        if args.json:
            for entry in _every(books):
                out.write(json.dumps(asdict(entry)) + "\n")
        else:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow([f.name for f in fields(Entry)])
            writer.writerows(asdict(entry).values() for entry in _every(books))
    return 0


def _add(actions: Any, name: str, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=about)
    parser.add_argument("--state", default="./var", help="state directory (default ./var)")
    parser.add_argument("--json", action="store_true", help="print facts for a program")
    return parser


def _books(args: argparse.Namespace) -> AbstractContextManager[Books]:
    state, file = Path(args.state), state_files.BOOKS
    if not (state / file.name).exists():
        raise UsageFault(f"no books in {args.state}; they begin with: antiphon serve --state {args.state}")
    return state_files.opened(state, file, Books)


@contextmanager
def _output(name: str | None) -> Iterator[TextIO]:
    if name is None:
        yield sys.stdout
        return
    try:
        file = Path(name).open("w", encoding="utf-8", newline="")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageFault(f"cannot write {name}: {error.strerror}") from error
    with file:
        yield file


def _every(books: Books) -> Iterator[Entry]:
    after = 0
    while page := books.entries(after=after, limit=_PAGE):
        yield from page
        after = page[-1].id


def _balance_table(balances: list[Balance]) -> Table:
    table = tables.table("account", "micros", "requests", "prompt tokens", "completion tokens")
    for b in balances:
        figures = (b.requests, b.prompt_tokens, b.completion_tokens) if b.account != REVENUE else ("", "", "")
        tables.add(table, b.account, b.micros, *figures)
    return table


def _print_report(report: Report) -> None:
    for drift in report.drifts:
        print(f"{drift.kind}: {drift.about}: {drift.what}")
    verdict = f"{len(report.drifts)} disagreements" if report.drifts else "the books agree"
    print(
        f"{verdict}: {report.requests} requests, {report.micros} micros,"
        f" {report.charged_tokens} tokens charged, {report.witnessed_tokens} generated,"
        f" {report.undelivered_tokens} of them past the end of a reply"
    )
