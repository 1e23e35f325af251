"""What the limiter keeps is kept whole, and its file stays small without a commit ever waiting for a flush."""

import sqlite3

import pytest

from store.limits import Gauge, Limits, Reservation
from store.limits_state import Closed, Forgotten, Level, LimitsState, Opened, Spent

LIMITS = Limits(requests_per_minute=60, tokens_per_minute=None, concurrency=3)


def held(request_id: str) -> Reservation:
    return Reservation(request_id, "acme", "owner:acme", "m", 7, 0)


def level(requests: int) -> Level:
    return Level("owner:acme", "m", LIMITS, requests, None, 1000)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "limiter.sqlite"


def test_everything_comes_back_as_it_was_kept(path):
    state = LimitsState(path)
    state.write([Opened(held("a")), Opened(held("b")), level(59), level(58)])
    state.write([Closed("a", 1000), Closed("never", 900), Spent("owner:acme", 5), Spent("owner:acme", 9)])
    state.close()
    meter = LimitsState(path).read(now=10**10, wall=1000)
    assert meter.open == {"b": Reservation("b", "acme", "owner:acme", "m", 7, 10**10)}
    assert list(meter.closed) == ["never", "a"]
    assert meter.budget("owner:acme").spent == 9
    gauge: Gauge = meter.gauges["owner:acme", "m"]
    assert (gauge.limits, gauge.requests.remaining, gauge.tokens, gauge.running) == (LIMITS, 58, None, 1)


def test_what_is_forgotten_may_come_again(path):
    state = LimitsState(path)
    state.write([Opened(held("a")), Closed("a", 1000)])
    state.write([Forgotten(("a",))])
    assert state.read(0, 1000).closed == {}
    state.write([Opened(held("a"))])
    assert list(state.read(0, 1000).open) == ["a"]


def test_a_write_that_fails_keeps_nothing_of_it(path):
    state = LimitsState(path)
    with pytest.raises(sqlite3.IntegrityError):
        state.write([Opened(held("a")), Opened(held("a"))])
    assert state.read(0, 0).open == {}
    state.write([Opened(held("a"))])
    assert list(state.read(0, 0).open) == ["a"]


def test_a_checkpoint_keeps_everything_and_lets_the_log_be_written_over(path):
    state = LimitsState(path)
    sizes = []
    for number in range(2):
        while not state.checkpoint_due:
            state.write([Opened(held("a")), Closed("a", 1000)])
        sizes.append(path.with_name("limiter.sqlite-wal").stat().st_size)
        state.checkpoint()
        assert not state.checkpoint_due, number
    assert sizes[0] == sizes[1]
    state.close()
    assert list(LimitsState(path).read(0, 1000).closed) == ["a"]


def test_only_the_owner_of_the_process_reads_the_file(path):
    LimitsState(path)
    assert path.stat().st_mode & 0o777 == 0o600
