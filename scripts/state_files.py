"""The databases of a state directory. When one cannot be used, one line says which, why and what to do."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import sqlalchemy as sa
from attrs import field, frozen

from scripts.failure import UsageFault
from store.books_schema import METADATA

_DAMAGED = frozenset(
    (
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_NOTADB,
    )
)
"""What SQLite says of a file that is not as we wrote it; anything else is the disk's or another program's."""
_PRIMARY = 0xFF
"""The bits of SQLite's primary code within an extended one."""


class Closing(Protocol):
    """Something to close."""

    def close(self) -> None:
        """Give back what it holds."""


T = TypeVar("T", bound=Closing)


@frozen
class StateFile:
    """A database by its name in the state directory, and what is lost with it.

    `reads` are queries that must work on those of its tables that are there.
    """

    name: str
    loss: str
    reads: Mapping[str, str] = field(factory=dict)


ACCOUNTS = StateFile("accounts.sqlite", "every key")
BOOKS = StateFile(
    "books.sqlite",
    "the record of every charge",
    {name: str(sa.select(table)) for name, table in METADATA.tables.items()},
)
LIMITER = StateFile("limiter.sqlite", "what accounts have used of their budgets")


@contextmanager
def opened(state: Path, file: StateFile, open_it: Callable[[Path], T]) -> Iterator[T]:
    """Open a database, and close it in the end. Raises `UsageFault`, also for what is found while it is open."""
    path = state / file.name
    try:
        try:
            database = open_it(path)
        except OSError as error:
            raise UsageFault(f"cannot write {path}: {error.strerror}; choose another --state") from error
        try:
            yield database
        finally:
            database.close()
    except sa.exc.SQLAlchemyError as error:
        raise UsageFault(_line(path, file, getattr(error, "orig", None) or error)) from error


def check(state: Path) -> None:
    """Look at the databases that only actors open, and change nothing. Raises `UsageFault`.

    Their first pages are read: what is damaged further on shows when it is used.
    """
    for file in (BOOKS, LIMITER):
        path = state / file.name
        if not path.exists():
            continue
        if not os.access(path, os.R_OK | os.W_OK):
            raise UsageFault(f"{path}: this user may not read and write it; give it back to this user")
        try:
            _look(path, file.reads)
        except sqlite3.Error as error:
            raise UsageFault(_line(path, file, error)) from error


def _look(path: Path, reads: Mapping[str, str]) -> None:
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in tables:
            if table in reads:
                database.execute(reads[table]).fetchone()


def _line(path: Path, file: StateFile, error: BaseException) -> str:
    says = (str(error).splitlines() or [type(error).__name__])[0]
    if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & _PRIMARY in _DAMAGED:
        return (
            f"{path} is damaged, or not Antiphon's ({says}): restore it,"
            f" or move it and its -wal and -shm away, which loses {file.loss}"
        )
    return (
        f"{path} cannot be used ({says}): see that this user may write it, that its disk has room"
        " and that no other program holds it"
    )
