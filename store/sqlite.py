"""Opening a database: SQLite with the durability its file needs, or another by URL.

SQLite runs in WAL mode, so readers never wait for the writer, and transactions begin as what they are: a
writer's with `BEGIN IMMEDIATE`, so that what it read is still so when it writes; a `reader`'s with `BEGIN`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.pool import QueuePool

BUSY_MS = 5000
"""How long a writer waits for another process's transaction before it is an error."""


def url_of(database: str | Path) -> URL:
    """Return a database's URL; a plain path is an SQLite file."""
    text = str(database)
    return make_url(text) if "://" in text else URL.create("sqlite", database=text)


def open_engine(database: str | Path, *, synchronous: Literal["FULL", "NORMAL"]) -> Engine:
    """Open a database, making the SQLite file (0600) and its directory when they are missing.

    `synchronous` FULL: a commit survives power loss. NORMAL: it survives any kill, and power loss may cost
    the last ones, never the file. Another database keeps its own setting. Raises `OSError` or SQLAlchemy's
    errors.
    """
    url = url_of(database)
    if url.get_backend_name() != "sqlite":
        return create_engine(url)
    if url.database is None:
        raise ValueError(f"{database}: an SQLite URL needs a file")
    path = Path(url.database)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    engine = create_engine(url, poolclass=QueuePool, pool_size=4, connect_args={"check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself: `_begin` does
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        statement = connection.get_execution_options().get("antiphon_begin", "BEGIN IMMEDIATE")
        connection.exec_driver_sql(statement)

    return engine


def reader(engine: Engine) -> Engine:
    """Return the same engine for transactions that only read: they wait for nobody and see one moment."""
    return engine.execution_options(antiphon_begin="BEGIN")
