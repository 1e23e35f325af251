"""The tables of the books.

`entries` and `spans` only ever grow, and a unique wall stands before each double: the same posting to the
same account, the same position of the same choice. `requests` and `balances` are sums over them, kept in
the same transaction; reconciling recomputes them.
"""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData()

PRICES = sa.Table(
    "prices",
    METADATA,
    sa.Column("model", sa.String, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("prompt", sa.BigInteger, nullable=False),
    sa.Column("cached", sa.BigInteger, nullable=False),
    sa.Column("completion", sa.BigInteger, nullable=False),
    sa.Column("fast_answer", sa.BigInteger, nullable=False),
    sa.Column("at", sa.BigInteger, nullable=False),
)

REQUESTS = sa.Table(
    "requests",
    METADATA,
    sa.Column("request_id", sa.String, primary_key=True),
    sa.Column("account", sa.String, nullable=False, index=True),
    sa.Column("key_id", sa.String, nullable=False),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("price_model", sa.String, nullable=False),
    sa.Column("price_version", sa.Integer, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("fast_answer", sa.String, nullable=False),
    sa.Column("micros", sa.BigInteger, nullable=False),
    sa.Column("postings", sa.Integer, nullable=False),
    sa.Column("at", sa.BigInteger, nullable=False),
)

SPANS = sa.Table(
    "spans",
    METADATA,
    sa.Column("request_id", sa.String, primary_key=True),
    sa.Column("choice", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("start", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("end", sa.BigInteger, nullable=False),
    sa.CheckConstraint('"start" >= 0 AND "end" > "start"', name="span_is_not_empty"),
    sqlite_with_rowid=False,
)

ENTRIES = sa.Table(
    "entries",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("request_id", sa.String, nullable=False),
    sa.Column("posting", sa.Integer, nullable=False),
    sa.Column("account", sa.String, nullable=False, index=True),
    sa.Column("micros", sa.BigInteger, nullable=False),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("request_id", "posting", "account", name="posting_is_entered_once"),
)

BALANCES = sa.Table(
    "balances",
    METADATA,
    sa.Column("account", sa.String, primary_key=True),
    sa.Column("micros", sa.BigInteger, nullable=False),
)

WAIVED = sa.Table(
    "waived",
    METADATA,
    sa.Column("request_id", sa.String, primary_key=True),
    sa.Column("account", sa.String, nullable=False),
    sa.Column("at", sa.BigInteger, nullable=False),
)
"""Requests that failed before anything was let out: nothing is owed for them."""

CONFLICTS = sa.Table(
    "conflicts",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("request_id", sa.String, nullable=False),
    sa.Column("what", sa.String, nullable=False),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("request_id", "what", name="conflict_is_noted_once"),
)

WITNESS = sa.Table(
    "witness",
    METADATA,
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("request_id", sa.String, nullable=False, index=True),
    sa.Column("choice", sa.Integer, nullable=False),
    sa.Column("account", sa.String, nullable=False),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("start", sa.BigInteger, nullable=False),
    sa.Column("end", sa.BigInteger, nullable=False),
    sa.Column("at", sa.BigInteger, nullable=False),
)
