"""Limits as the OpenAI wire tells them: `x-ratelimit-*` headers and the bodies of 429."""

from __future__ import annotations

from actors.protocol import ErrorBody
from store.limits import Denied, Gauge

Headers = tuple[tuple[str, str], ...]

_SECOND = 1_000_000_000
_MILLISECOND = 1_000_000


def duration(nanoseconds: int) -> str:
    """Write a duration as `12ms`, `1s`, `6m0s` or `1h0m0s`, rounded up, so that waiting so long is enough."""
    if 0 < nanoseconds < _SECOND:
        milliseconds = -(-nanoseconds // _MILLISECOND)
        return f"{milliseconds}ms" if milliseconds < 1000 else "1s"
    minutes, seconds = divmod(-(-nanoseconds // _SECOND), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def headers(gauge: Gauge) -> Headers:
    """Return limit, remaining and reset of both buckets; a bucket that sets no limit has no headers.

    Reset is the time until the bucket is full again.
    """
    found: list[tuple[str, str]] = []
    for what, bucket in (("requests", gauge.requests), ("tokens", gauge.tokens)):
        if bucket is not None:
            found += [
                (f"x-ratelimit-limit-{what}", str(bucket.limit)),
                (f"x-ratelimit-remaining-{what}", str(bucket.remaining)),
                (f"x-ratelimit-reset-{what}", duration(bucket.until_full)),
            ]
    return tuple(found)


def refusal(denied: Denied, model: str, tokens: int, shown: Headers) -> ErrorBody:
    """Return the error of a request that a limit stands against."""
    if denied.what == "budget":
        return ErrorBody(
            429,
            "insufficient_quota",
            f"You exceeded your current quota of {denied.limit} tokens. Waiting does not help: ask for more.",
            code="insufficient_quota",
            headers=(("x-should-retry", "false"), *shown),
        )
    if denied.what == "concurrency":
        text = f"Too many requests at once for {model}: limit {denied.limit}. Try again when one has ended."
        return _limited("requests", text, (("retry-after", "1"), *shown))
    if denied.wait is None:
        return _too_large(denied, model, tokens, shown)
    seconds = max(1, -(-denied.wait // _SECOND))
    text = (
        f"Rate limit reached for {model} on {denied.what} per minute: limit {denied.limit}."
        f" Try again in {duration(denied.wait)}."
    )
    return _limited(denied.what, text, (("retry-after", str(seconds)), *shown))


def _too_large(denied: Denied, model: str, tokens: int, shown: Headers) -> ErrorBody:
    amount = tokens if denied.what == "tokens" else 1
    text = (
        f"Request too large for {model} on {denied.what} per minute: limit {denied.limit},"
        f" requested {amount}. Waiting does not help: ask for fewer."
    )
    return _limited(denied.what, text, (("retry-after", "60"), ("x-should-retry", "false"), *shown))


def _limited(kind: str, text: str, shown: Headers) -> ErrorBody:
    return ErrorBody(429, kind, text, code="rate_limit_exceeded", headers=shown)
