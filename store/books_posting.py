"""Posting: what a delivery adds to a request, worked out without a database."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from attrs import define, field, frozen

from store.books_spans import Positions
from store.prices import Price, Use, cost

REVENUE = "@revenue"
"""The account that every other one owes to."""


@frozen
class Delivery:
    """What a request received: positions [start, end) of each choice, as (choice, start, end).

    Raises `ValueError` for what cannot be a delivery: empty or negative spans, more cached than prompt
    tokens.
    """

    request_id: str
    account: str
    key_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    spans: tuple[tuple[int, int, int], ...]
    fast_answer: str = ""

    def __attrs_post_init__(self) -> None:
        if not self.request_id or not self.account or self.account.startswith("@"):
            raise ValueError(f"request {self.request_id!r}: no account {self.account!r} can be charged")
        if not 0 <= self.cached_tokens <= self.prompt_tokens:
            raise ValueError(
                f"request {self.request_id!r}: {self.cached_tokens} of {self.prompt_tokens} cached"
            )
        for choice, start, end in self.spans:
            if choice < 0 or not 0 <= start < end:
                raise ValueError(f"request {self.request_id!r}: no positions [{start}, {end}) of {choice}")


@define
class Request:
    """A request as the transaction at hand knows it; `row` is what `requests` will hold."""

    row: dict[str, Any]
    price: Price
    is_new: bool
    positions: defaultdict[int, Positions] = field(factory=lambda: defaultdict(Positions))

    def contradiction(self, delivery: Delivery) -> str:
        """Say what a later delivery states otherwise than the first; "" when they agree."""
        for name in ("account", "model", "fast_answer", "prompt_tokens", "cached_tokens"):
            mine, theirs = self.row[name], getattr(delivery, name)
            if mine != theirs:
                return f"{name}: {mine!r}, then {theirs!r}"
        return ""

    @property
    def use(self) -> Use:
        """What the request received so far."""
        row = self.row
        return Use(
            row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"], bool(row["fast_answer"])
        )


@define
class Batch:
    """The rows that one transaction will write."""

    at: int
    spans: list[dict[str, Any]] = field(factory=list)
    entries: list[dict[str, Any]] = field(factory=list)
    conflicts: dict[tuple[str, str], dict[str, Any]] = field(factory=dict)
    owed: defaultdict[str, int] = field(factory=lambda: defaultdict(int))

    def enter(self, request: Request, delivery: Delivery) -> int:
        """Enter one delivery; returns what it added."""
        contradiction = request.contradiction(delivery) if request.row["postings"] else ""
        if contradiction:
            self.note(delivery.request_id, contradiction)
            if request.row["account"] != delivery.account or request.row["model"] != delivery.model:
                return 0
        self._take_positions(request, delivery)
        added: int = cost(request.price, request.use) - request.row["micros"]
        if added or not request.row["postings"]:
            self._post(request.row, added)
        return added

    def note(self, request_id: str, what: str) -> None:
        """Keep a contradiction in sight of reconciling."""
        row = {"request_id": request_id, "what": what, "at": self.at}
        self.conflicts[request_id, what] = row

    def _take_positions(self, request: Request, delivery: Delivery) -> None:
        for choice, start, end in delivery.spans:
            for a, b in request.positions[choice].add(start, end):
                self.spans.append({"request_id": delivery.request_id, "choice": choice, "start": a, "end": b})
                request.row["completion_tokens"] += b - a

    def _post(self, row: dict[str, Any], micros: int) -> None:
        row["postings"] += 1
        row["micros"] += micros
        for account, amount in ((row["account"], micros), (REVENUE, -micros)):
            self.owed[account] += amount
            self.entries.append(
                {
                    "request_id": row["request_id"],
                    "posting": row["postings"],
                    "account": account,
                    "micros": amount,
                    "at": self.at,
                }
            )
