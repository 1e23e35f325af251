"""Accounts and their keys: who may ask, as whom, and within which limits.

A secret is 32 random bytes, so a fast hash keeps it: nobody can search that space. It is shown once, when
it is made. Creating and revoking write an audit row in the same transaction.

Many processes open one file: a command line writes, edges verify. A verifier keeps the keys in memory and
asks SQLite's `PRAGMA data_version` at each `verify` whether another connection has committed since (a few
microseconds, no I/O beyond the shared WAL index), so a revoked key is refused from the next request on. For
another database than SQLite it reads the keys again once they are `STALE_AFTER` old.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import sqlalchemy as sa
from attrs import field, frozen

from store.limits import Limits
from store.sqlite import open_engine, reader

STALE_AFTER = 0.5
"""Seconds the keys of a database without `data_version` are trusted for."""

_METADATA = sa.MetaData()
_KEYS = sa.Table(
    "keys",
    _METADATA,
    sa.Column("key_id", sa.String, primary_key=True),
    sa.Column("account", sa.String, nullable=False, index=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("hash", sa.String(64), nullable=False, unique=True),
    sa.Column("admin", sa.Boolean, nullable=False),
    sa.Column("fast_answers", sa.Boolean, nullable=False),
    sa.Column("read_only", sa.Boolean, nullable=False),
    sa.Column("requests_per_minute", sa.BigInteger),
    sa.Column("tokens_per_minute", sa.BigInteger),
    sa.Column("concurrency", sa.BigInteger),
    sa.Column("budget_tokens", sa.BigInteger),
    sa.Column("created", sa.BigInteger, nullable=False),
    sa.Column("revoked", sa.BigInteger),
)
_AUDIT = sa.Table(
    "audit",
    _METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("action", sa.String, nullable=False),
    sa.Column("account", sa.String, nullable=False),
    sa.Column("key_id", sa.String, nullable=False),
    sa.Column("by", sa.String, nullable=False),
)
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency", "budget_tokens")


class UnknownKey(LookupError):
    """No key has this id; `antiphon keys list` names those there are."""


@frozen
class Identity:
    """Who a proven key speaks for, and what it may do.

    `limits` None: the account shares the server's defaults.
    """

    account: str
    key_id: str
    admin: bool = False
    fast_answers: bool = True
    read_only: bool = False
    limits: Limits | None = None


@frozen
class Key:
    """A key as it is listed: everything but the secret, which nobody has. Times are Unix seconds."""

    identity: Identity
    name: str
    created: int
    revoked: int | None


@frozen
class AuditRow:
    """One act upon a key. `by` is the key or the program that did it."""

    at: int
    action: str
    account: str
    key_id: str
    by: str


@frozen
class _Known:
    """The live keys by the hash of their secret and by id, and what says that they are still so."""

    version: object
    by_hash: Mapping[str, Identity] = field(factory=dict)
    by_id: Mapping[str, Identity] = field(factory=dict)


class Accounts:
    """The accounts' file. Any thread may call any method; each is one unit of work."""

    def __init__(self, database: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open or make it. Raises `OSError` or SQLAlchemy's errors."""
        self._clock = clock
        self._engine = open_engine(database, synchronous="FULL")
        _METADATA.create_all(self._engine)
        self._lock = threading.Lock()
        self._reader = reader(self._engine)
        self._watcher = self._engine.raw_connection()
        self._known = _Known(version=None)

    def close(self) -> None:
        """Give back the file's descriptors."""
        self._watcher.close()
        self._engine.dispose()

    def create_key(
        self,
        account: str,
        name: str,
        *,
        admin: bool = False,
        fast_answers: bool = True,
        read_only: bool = False,
        limits: Limits | None = None,
        by: str = "cli",
    ) -> tuple[str, str]:
        """Make a key. Returns its id and its secret, which is shown this once and kept nowhere."""
        if not account or not name:
            raise ValueError("a key needs an account and a name")
        key_id, secret = f"key_{secrets.token_hex(8)}", f"ak-{secrets.token_urlsafe(32)}"
        row = {
            "key_id": key_id,
            "account": account,
            "name": name,
            "hash": _hash(secret),
            "admin": admin,
            "fast_answers": fast_answers,
            "read_only": read_only,
            "created": int(self._clock()),
            **{column: getattr(limits, column, None) for column in _LIMITS},
        }
        with self._engine.begin() as connection:
            connection.execute(sa.insert(_KEYS), row)
            self._audit(connection, "create", account, key_id, by)
        return key_id, secret

    def revoke(self, key_id: str, *, by: str = "cli") -> None:
        """Refuse the key from now on; repeating it changes nothing. Raises `UnknownKey`."""
        with self._engine.begin() as connection:
            found = connection.execute(sa.select(_KEYS).where(_KEYS.c.key_id == key_id)).one_or_none()
            if found is None:
                raise UnknownKey(f"no key {key_id!r}: `antiphon keys list` names those there are")
            if found.revoked is not None:
                return
            connection.execute(
                sa.update(_KEYS).where(_KEYS.c.key_id == key_id).values(revoked=int(self._clock()))
            )
            self._audit(connection, "revoke", found.account, key_id, by)

    def verify(self, secret: str) -> Identity | None:
        """Return who the secret speaks for, or None.

        Unknown or revoked. Microseconds while nothing changed.
        """
        return self._current().by_hash.get(_hash(secret))

    def limits_of(self, key_id: str) -> Limits | None:
        """Return a key's own limits; None when it shares its account's, or is not live.

        As quick as `verify`.
        """
        identity = self._current().by_id.get(key_id)
        return None if identity is None else identity.limits

    def list(self) -> list[Key]:
        """Return every key, revoked ones too, oldest first."""
        with self._reader.connect() as connection:
            rows = connection.execute(sa.select(_KEYS).order_by(_KEYS.c.created, _KEYS.c.key_id)).all()
        return [Key(_identity(row), row.name, row.created, row.revoked) for row in rows]

    def audit(self) -> list[AuditRow]:  # type: ignore[valid-type]  # `list` is a method above
        """Return the acts upon keys, oldest first."""
        columns = (_AUDIT.c.at, _AUDIT.c.action, _AUDIT.c.account, _AUDIT.c.key_id, _AUDIT.c.by)
        with self._reader.connect() as connection:
            rows = connection.execute(sa.select(*columns).order_by(_AUDIT.c.id)).all()
        return [AuditRow(*row) for row in rows]

    def _current(self) -> _Known:
        with self._lock:
            version = self._version()
            if version != self._known.version:
                live = self._live_keys()
                self._known = _Known(version, live, {i.key_id: i for i in live.values()})
            return self._known

    def _version(self) -> object:
        if self._engine.dialect.name != "sqlite":
            return int(time.monotonic() / STALE_AFTER)
        cursor = self._watcher.cursor()
        cursor.execute("PRAGMA data_version")
        return cursor.fetchone()

    def _live_keys(self) -> dict[str, Identity]:
        with self._reader.connect() as connection:
            rows = connection.execute(sa.select(_KEYS).where(_KEYS.c.revoked.is_(None))).all()
        return {row.hash: _identity(row) for row in rows}

    def _audit(self, connection: sa.Connection, action: str, account: str, key_id: str, by: str) -> None:
        row = {"at": int(self._clock()), "action": action, "account": account, "key_id": key_id, "by": by}
        connection.execute(sa.insert(_AUDIT), row)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _identity(row: sa.Row[tuple[object, ...]]) -> Identity:
    figures = {column: getattr(row, column) for column in _LIMITS}
    limits = Limits(**figures) if any(value is not None for value in figures.values()) else None
    return Identity(row.account, row.key_id, row.admin, row.fast_answers, row.read_only, limits)
