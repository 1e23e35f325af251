"""Tables for people: nothing is cut off, whatever the width of the terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

UNBOUNDED = 100_000
"""Columns where no terminal bounds them: a line stays a line for `grep`, and in a file."""


def table(*columns: str | Column) -> Table:
    """Return an empty table whose cells fold where they do not fit."""
    made = Table(box=None, pad_edge=False)
    for column in columns:
        one = column if isinstance(column, Column) else Column(column)
        made.add_column(one.header, overflow="fold", no_wrap=one.no_wrap)
    return made


def add(rows: Table, *cells: object) -> None:
    """Add a row of what is shown as it is: `antiphon[gpu]` is no markup."""
    rows.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))


def show(rows: Table) -> None:
    """Print it to standard output."""
    Console(width=None if sys.stdout.isatty() else UNBOUNDED).print(rows)
