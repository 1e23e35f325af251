"""The breaker opens, probes and closes on the clock it is given."""

import pytest

from store.breaker import Breaker, BreakerSettings


@pytest.fixture
def breaker():
    return Breaker(BreakerSettings(failures=3, pause=1.0, longest_pause=3.0, probe_limit=5.0))


def fail(breaker, times, now=0.0):
    for _ in range(times):
        breaker.failed(now)


def test_it_opens_at_the_last_of_failures_in_a_row(breaker):
    fail(breaker, 2)
    assert breaker.leave(0.0) == "ask"
    fail(breaker, 1)
    assert (breaker.state, breaker.leave(0.0), breaker.opened) == ("open", "refuse", 1)


def test_a_success_between_failures_starts_the_count_again(breaker):
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.state == "closed"


def test_one_failure_is_enough_by_default():
    breaker = Breaker()
    breaker.failed(0.0)
    assert breaker.leave(0.1) == "refuse"


def test_after_the_pause_one_probe_goes_and_no_other(breaker):
    fail(breaker, 3)
    assert [breaker.leave(0.999), breaker.leave(1.0), breaker.leave(1.1)] == ["refuse", "probe", "refuse"]


def test_a_probe_that_succeeds_closes_it(breaker):
    fail(breaker, 3)
    breaker.leave(1.0)
    breaker.succeeded()
    assert breaker.leave(1.1) == "ask"
    fail(breaker, 3, now=2.0)
    assert breaker.leave(3.0) == "probe", "the pause is the first one again"


def test_each_probe_that_fails_doubles_the_pause_up_to_its_limit(breaker):
    fail(breaker, 3)
    now, pauses = 0.0, []
    for _ in range(4):
        opened = now
        while breaker.leave(now) != "probe":
            now += 0.5
        pauses.append(now - opened)
        breaker.failed(now)
    assert pauses == [1.0, 2.0, 3.0, 3.0]


def test_what_was_under_way_when_it_opened_counts_for_nothing(breaker):
    fail(breaker, 10)
    assert breaker.leave(1.0) == "probe"
    breaker.failed(1.0)
    breaker.succeeded()
    assert breaker.state == "open"


def test_a_probe_that_is_lost_counts_as_failed(breaker):
    fail(breaker, 3)
    assert breaker.leave(1.0) == "probe"
    assert breaker.leave(6.0) == "refuse"
    assert (breaker.state, breaker.leave(8.0)) == ("open", "probe")


def test_a_new_incarnation_starts_closed(breaker):
    fail(breaker, 3)
    breaker.reset()
    assert breaker.leave(0.0) == "ask"
