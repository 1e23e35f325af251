"""Token buckets, places and budgets: what a scope may still use. Pure: the time is given in, nothing waits.

A scope is an owner, or a key that has limits of its own. Per scope and model there is a bucket of requests, a
bucket of tokens and a number of places; per scope there is a budget of tokens, which only grows smaller.

A bucket holds up to a minute's worth and fills evenly. It is kept in whole units of 1/60,000,000,000 of a
token, so that a nanosecond's refill is a whole number and no time is lost to rounding. Times are monotonic
nanoseconds.
"""

from __future__ import annotations

from itertools import takewhile

from attrs import astuple, define, field, frozen

MINUTE = 60_000_000_000
"""Nanoseconds; and the units one token is kept in."""


@frozen
class Limits:
    """What a scope may use; None sets no limit.

    `budget_tokens` counts prompt and reply tokens of all models for ever: once it is used, waiting does not
    help.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    budget_tokens: int | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "concurrency", "budget_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative: {value}")

    def over(self, defaults: Limits) -> Limits:
        """Return these limits, with the defaults where they set none."""
        return Limits(
            *(
                mine if mine is not None else theirs
                for mine, theirs in zip(astuple(self), astuple(defaults), strict=True)
            )
        )


@define
class Bucket:
    """Holds at most `limit`, filling from empty in a minute. `level` is in units, `at` in nanoseconds."""

    limit: int
    level: int
    at: int

    @classmethod
    def full(cls, limit: int, now: int) -> Bucket:
        """Return a bucket that nothing was taken from."""
        return cls(limit, limit * MINUTE, now)

    def refill(self, now: int) -> None:
        """Let the time since the last call flow in. A clock that went back adds nothing."""
        self.level = min(self.limit * MINUTE, self.level + max(0, now - self.at) * self.limit)
        self.at = max(self.at, now)

    def take(self, amount: int) -> None:
        """Take out; below zero is possible only through `Gauge.settle`, and is made up by waiting."""
        self.level -= amount * MINUTE

    def give_back(self, amount: int) -> None:
        """Put back what was taken and not used, never over the brim."""
        self.level = min(self.limit * MINUTE, self.level + amount * MINUTE)

    @property
    def remaining(self) -> int:
        """Whole tokens that are there now."""
        return max(0, self.level // MINUTE)

    def wait_for(self, amount: int) -> int | None:
        """Nanoseconds until `amount` is there, 0 when it is; None when the bucket will never hold it."""
        missing = amount * MINUTE - self.level
        if missing <= 0:
            return 0
        if amount > self.limit:
            return None
        return -(-missing // self.limit)

    @property
    def until_full(self) -> int:
        """Nanoseconds until the bucket is full again; 0 for one that holds nothing."""
        missing = self.limit * MINUTE - self.level
        return -(-missing // self.limit) if self.limit else 0


@frozen
class Denied:
    """Which limit is in the way: requests, tokens, concurrency or budget.

    `wait` is in nanoseconds; None: waiting does not help, for the amount is over the limit itself.
    """

    what: str
    limit: int
    wait: int | None = None


@define
class Gauge:
    """One scope's use of one model."""

    limits: Limits
    requests: Bucket | None
    tokens: Bucket | None
    running: int = 0

    @classmethod
    def fresh(cls, limits: Limits, now: int) -> Gauge:
        """Return a gauge that shows no use yet."""

        def bucket(limit: int | None) -> Bucket | None:
            return None if limit is None else Bucket.full(limit, now)

        return cls(limits, bucket(limits.requests_per_minute), bucket(limits.tokens_per_minute))

    def refill(self, now: int) -> None:
        """Let time flow into both buckets."""
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.refill(now)

    def denies(self, tokens: int) -> Denied | None:
        """Say what stands against one more request of so many tokens; nothing is taken."""
        for what, bucket, amount in (("requests", self.requests, 1), ("tokens", self.tokens, tokens)):
            wait = 0 if bucket is None else bucket.wait_for(amount)
            if bucket is not None and wait != 0:
                return Denied(what, bucket.limit, wait)
        if self.limits.concurrency is not None and self.running >= self.limits.concurrency:
            return Denied("concurrency", self.limits.concurrency)
        return None

    def take(self, tokens: int) -> None:
        """Take a request and its tokens out of the buckets."""
        if self.requests is not None:
            self.requests.take(1)
        if self.tokens is not None:
            self.tokens.take(tokens)

    def settle(self, held: int, used: int) -> None:
        """Give back the place and the tokens that were not used.

        The request stays counted: failed ones count.
        """
        if self.tokens is not None:
            self.tokens.take(used)
            self.tokens.give_back(held)
        self.running -= 1

    @property
    def is_idle(self) -> bool:
        """Say whether the gauge shows no use, so that a fresh one would say the same."""
        return self.running == 0 and all(b is None or not b.until_full for b in (self.requests, self.tokens))


@define
class Budget:
    """The tokens a scope has used and holds, over all models."""

    spent: int = 0
    held: int = 0

    def denies(self, tokens: int, limit: int | None) -> Denied | None:
        """Say whether so many more would go over the limit."""
        if limit is not None and self.spent + self.held + tokens > limit:
            return Denied("budget", limit)
        return None

    def settle(self, held: int, used: int) -> None:
        """Turn what was held into what was used."""
        self.held -= held
        self.spent += used


@frozen
class Reservation:
    """What a request holds. `since` is when it was made, in monotonic nanoseconds."""

    request_id: str
    owner: str
    scope: str
    model: str
    tokens: int
    since: int


@define
class Meter:
    """All gauges, budgets and reservations: what the limiter knows, without its disk and its mailbox.

    Every call is idempotent by request: a second `reserve` holds nothing more, a second `settle` gives
    nothing back.
    """

    open: dict[str, Reservation] = field(factory=dict)
    closed: dict[str, int] = field(factory=dict)
    """When a request was closed, oldest first: what keeps a late repetition from holding again."""
    gauges: dict[tuple[str, str], Gauge] = field(factory=dict)
    budgets: dict[str, Budget] = field(factory=dict)

    def gauge(self, scope: str, model: str, limits: Limits, now: int) -> Gauge:
        """Return the gauge of a scope and model, refilled to `now`.

        Limits that changed start a fresh bucket.
        """
        gauge = self.gauges.get((scope, model))
        if gauge is None or gauge.limits != limits:
            running = 0 if gauge is None else gauge.running
            gauge = self.gauges[scope, model] = Gauge.fresh(limits, now)
            gauge.running = running
        gauge.refill(now)
        return gauge

    def budget(self, scope: str) -> Budget:
        """Return the budget of a scope."""
        return self.budgets.setdefault(scope, Budget())

    def reserve(self, wanted: Reservation, limits: Limits) -> Denied | None:
        """Hold what a request may use, or say what is in the way; all of it is held, or nothing."""
        if self.knows(wanted.request_id):
            return None
        gauge = self.gauge(wanted.scope, wanted.model, limits, wanted.since)
        budget = self.budget(wanted.scope)
        denied = budget.denies(wanted.tokens, limits.budget_tokens) or gauge.denies(wanted.tokens)
        if denied is None:
            self.hold(wanted, gauge)
            gauge.take(wanted.tokens)
        return denied

    def knows(self, request_id: str) -> bool:
        """Say whether a request holds something, or did."""
        return request_id in self.open or request_id in self.closed

    def hold(self, reservation: Reservation, gauge: Gauge) -> None:
        """Count a reservation as open: its place and its part of the budget."""
        gauge.running += 1
        self.budget(reservation.scope).held += reservation.tokens
        self.open[reservation.request_id] = reservation

    def settle(self, request_id: str, used: int, now: int) -> Reservation | None:
        """Close a reservation; returns it, or None when none was open under this request."""
        reservation = self.open.pop(request_id, None)
        self.closed.setdefault(request_id, now)
        if reservation is None:
            return None
        gauge = self.gauges[reservation.scope, reservation.model]
        gauge.refill(now)
        gauge.settle(reservation.tokens, used)
        self.budget(reservation.scope).settle(reservation.tokens, used)
        return reservation

    def older_than(self, age: int, now: int) -> list[str]:
        """Return the requests whose reservations have been open for `age` nanoseconds."""
        return [r.request_id for r in self.open.values() if now - r.since >= age]

    def forget(self, closed_before: int, now: int) -> list[str]:
        """Drop what no longer matters.

        Full, unused gauges, and requests closed before; returns those requests.
        """
        for key, gauge in list(self.gauges.items()):
            gauge.refill(now)
            if gauge.is_idle:
                del self.gauges[key]
        old = [r for r, _ in takewhile(lambda item: item[1] < closed_before, self.closed.items())]
        for request_id in old:
            del self.closed[request_id]
        return old
