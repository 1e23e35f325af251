"""Buckets keep their arithmetic exactly, whatever the order of events and whatever the clock does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.limits import MINUTE, Bucket, Denied, Limits, Meter, Reservation

SECOND = MINUTE // 60
LIMITS = Limits(requests_per_minute=5, tokens_per_minute=100, concurrency=3, budget_tokens=1000)


def wanted(request_id: str, tokens: int, now: int = 0) -> Reservation:
    return Reservation(request_id, "acme", "acme", "m", tokens, now)


def test_a_bucket_fills_evenly_in_a_minute():
    bucket = Bucket.full(60, 0)
    bucket.take(60)
    bucket.refill(SECOND)
    assert (bucket.remaining, bucket.until_full, bucket.wait_for(3)) == (1, 59 * SECOND, 2 * SECOND)


@pytest.mark.parametrize("step", [-11 * SECOND, -3600 * SECOND])
def test_a_clock_that_goes_back_neither_gives_nor_takes(step):
    bucket = Bucket.full(60, 3600 * SECOND)
    bucket.take(10)
    bucket.refill(3600 * SECOND + step)
    bucket.refill(3600 * SECOND)
    assert bucket.remaining == 50


@given(st.lists(st.integers(0, 10**11), max_size=30))
def test_refilling_in_steps_equals_refilling_at_once(steps):
    often, once = Bucket(7, 0, 0), Bucket(7, 0, 0)
    now = 0
    for step in steps:
        now += step
        often.refill(now)
    once.refill(now)
    assert often.level == once.level


def test_five_requests_of_40_tokens_under_100_a_minute_admit_two():
    meter = Meter()
    limits = Limits(tokens_per_minute=100)
    denied = [meter.reserve(wanted(f"r{i}", 40), limits) for i in range(5)]
    assert [d is None for d in denied] == [True, True, False, False, False]
    assert denied[2] == Denied("tokens", 100, 12 * SECOND)


def test_a_request_over_the_whole_limit_is_denied_for_good():
    assert Meter().reserve(wanted("r", 101), Limits(tokens_per_minute=100)) == Denied("tokens", 100, None)


def test_a_budget_nearly_spent_admits_one_of_eight():
    meter = Meter()
    limits = Limits(budget_tokens=100)
    admitted = [meter.reserve(wanted(f"r{i}", 60), limits) is None for i in range(8)]
    assert admitted.count(True) == 1


def test_places_are_given_back_by_settling():
    meter = Meter()
    limits = Limits(concurrency=1)
    assert meter.reserve(wanted("a", 1), limits) is None
    assert meter.reserve(wanted("b", 1), limits) == Denied("concurrency", 1)
    meter.settle("a", 1, 0)
    assert meter.reserve(wanted("b", 1), limits) is None


def test_a_denied_request_takes_nothing():
    meter = Meter()
    limits = Limits(requests_per_minute=10, tokens_per_minute=10, concurrency=1)
    meter.reserve(wanted("a", 5), limits)
    meter.reserve(wanted("b", 5), limits)
    gauge = meter.gauge("acme", "m", limits, 0)
    assert (gauge.requests.remaining, gauge.tokens.remaining, gauge.running) == (9, 5, 1)


EVENTS = st.lists(
    st.tuples(st.sampled_from("rsx"), st.integers(0, 7), st.integers(0, 60), st.integers(0, 20 * SECOND)),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_what_is_held_and_spent_adds_up(events):
    meter = Meter()
    now, held, spent, done = 0, {}, 0, set()
    for kind, number, tokens, pause in events:
        now += pause
        name = f"r{number}"
        if kind == "r":
            denied = meter.reserve(wanted(name, tokens, now), LIMITS)
            if denied is None and name not in done and name not in held:
                held[name] = tokens
        else:
            used = tokens if kind == "s" else 0
            closed = meter.settle(name, used, now)
            assert (closed is not None) == (name in held)
            if held.pop(name, None) is not None:
                spent += used
            done.add(name)
        budget = meter.budget("acme")
        assert (set(meter.open), budget.held, budget.spent) == (set(held), sum(held.values()), spent)
        gauge = meter.gauge("acme", "m", LIMITS, now)
        assert gauge.running == len(held) <= 3
        assert gauge.tokens.level <= 100 * MINUTE
        assert budget.spent + budget.held <= 1000 + sum(60 for _ in events)


def test_what_is_full_and_unused_is_forgotten():
    meter = Meter()
    meter.reserve(wanted("a", 50), LIMITS)
    meter.settle("a", 50, 0)
    assert meter.forget(0, SECOND) == []
    assert meter.gauges
    assert meter.forget(MINUTE, MINUTE) == ["a"]
    assert not meter.gauges


def test_own_limits_stand_over_the_defaults():
    assert Limits(concurrency=0).over(LIMITS) == Limits(5, 100, 0, 1000)
    with pytest.raises(ValueError, match="concurrency"):
        Limits(concurrency=-1)
