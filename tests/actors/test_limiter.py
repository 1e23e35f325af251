"""The limiter as sessions see it: exact headers, nothing held for ever, nothing forgotten by dying."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.limiter import Limiter, LimiterSettings
from actors.limits_wire import duration
from actors.protocol import (
    LimitExceeded,
    LiveTurnList,
    LiveTurns,
    OpenReservations,
    ReadMetrics,
    Release,
    Reserve,
    Reserved,
    Settle,
    Settled,
)
from store.accounts import Accounts
from store.limits import Limits, Reservation
from store.limits_state import Opened
from supervision.errors import ActorDown
from supervision.local import LocalTree

SETTINGS = LimiterSettings(requests_per_minute=60, tokens_per_minute=600, concurrency=3)


class Bench:
    """A limiter in a tree, on a clock that only moves when told, with a wall clock of its own."""

    def __init__(self, tree, path, clock):
        self.tree, self.path, self.clock, self.wall = tree, path, clock, 1_700_000_000.0

    async def start(self, settings=SETTINGS):
        limiter = Limiter(settings)
        limiter.wall = lambda: self.wall
        await self.tree.restart("limiter", limiter)
        return limiter

    async def pass_time(self, seconds):
        await wait_all_tasks_blocked()  # whoever sleeps has begun to
        self.wall += seconds
        self.clock.jump(seconds)
        await wait_all_tasks_blocked()


def with_limiter(test):
    def run(tmp_path):
        async def body():
            async with LocalTree(state_dir=tmp_path) as tree:
                await test(Bench(tree, tmp_path, clock))

        clock = MockClock()
        trio.run(body, clock=clock)

    run.__name__ = test.__name__
    return run


def reserve(request_id="r", tokens=100, owner="acme", key_id="k") -> Reserve:
    return Reserve(request_id, owner, key_id, "m", tokens)


async def ask(client, message):
    return await client.ask("limiter", message, timeout=30)


async def open_reservations(client):
    return set((await ask(client, OpenReservations())).request_ids)


@with_limiter
async def test_a_reservation_tells_what_is_left_and_when_it_is_full_again(bench):
    await bench.start()
    client = bench.tree.client("test.0")
    assert await ask(client, reserve()) == Reserved(
        "r",
        (
            ("x-ratelimit-limit-requests", "60"),
            ("x-ratelimit-remaining-requests", "59"),
            ("x-ratelimit-reset-requests", "1s"),
            ("x-ratelimit-limit-tokens", "600"),
            ("x-ratelimit-remaining-tokens", "500"),
            ("x-ratelimit-reset-tokens", "10s"),
        ),
    )


@with_limiter
async def test_repeating_holds_once_and_closes_once(bench):
    await bench.start()
    client = bench.tree.client("test.0")
    first = await ask(client, reserve())
    assert await ask(client, reserve()) == first
    assert await ask(client, Settle("r", "acme", 40)) == Settled("r", known=True)
    assert await ask(client, Settle("r", "acme", 40)) == Settled("r", known=False)
    assert await ask(client, Release("r", "acme")) == Settled("r", known=False)
    other = dict((await ask(client, reserve("s", tokens=60))).headers)
    assert other["x-ratelimit-remaining-tokens"] == "500"
    assert await open_reservations(client) == {"s"}


@with_limiter
async def test_a_request_that_was_closed_is_not_run_without_a_reservation(bench):
    await bench.start()
    client = bench.tree.client("test.0")
    await ask(client, reserve())
    await ask(client, Release("r", "acme"))
    again = await ask(client, reserve())
    assert isinstance(again, LimitExceeded)
    assert again.error.status == 503
    assert await open_reservations(client) == set()


@with_limiter
async def test_rate_refusals_say_how_long_to_wait(bench):
    await bench.start()
    client = bench.tree.client("test.0")
    await ask(client, reserve("a", 595))
    refused = await ask(client, reserve("b", 20))
    assert isinstance(refused, LimitExceeded)
    error = refused.error
    assert (error.status, error.type, error.code, error.param) == (429, "tokens", "rate_limit_exceeded", "")
    headers = dict(error.headers)
    assert headers["retry-after"] == "2"
    assert headers["x-ratelimit-remaining-tokens"] == "5"
    assert "x-should-retry" not in headers
    await bench.pass_time(2)
    assert isinstance(await ask(client, reserve("b", 20)), Reserved)


@with_limiter
async def test_concurrency_frees_as_soon_as_a_turn_ends(bench):
    await bench.start()
    client = bench.tree.client("test.0")
    for name in "abc":
        assert isinstance(await ask(client, reserve(name, 1)), Reserved)
    error = (await ask(client, reserve("d", 1))).error
    assert (error.type, error.code, dict(error.headers)["retry-after"]) == (
        "requests",
        "rate_limit_exceeded",
        "1",
    )
    await ask(client, Release("a", "acme"))
    assert isinstance(await ask(client, reserve("d", 1)), Reserved)


@with_limiter
async def test_a_spent_budget_is_not_worth_retrying_and_survives_a_kill(bench):
    await bench.start(LimiterSettings(budget_tokens=150))
    client = bench.tree.client("test.0")
    await ask(client, reserve("a", 100))
    await ask(client, Settle("a", "acme", 90))
    await bench.start(LimiterSettings(budget_tokens=150))
    error = (await ask(client, reserve("b", 61))).error
    assert (error.status, error.type, error.code) == (429, "insufficient_quota", "insufficient_quota")
    headers = dict(error.headers)
    assert headers["x-should-retry"] == "false"
    assert "retry-after" not in headers
    assert isinstance(await ask(client, reserve("c", 60)), Reserved)


@with_limiter
async def test_eight_at_once_on_a_budget_for_one_admit_one(bench):
    await bench.start(LimiterSettings(budget_tokens=100))
    client = bench.tree.client("test.0")
    answers = []

    async def try_one(number):
        answers.append(await ask(client, reserve(f"r{number}", 60)))

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(try_one, number)
    assert [type(a) for a in answers].count(Reserved) == 1


@with_limiter
async def test_a_killed_limiter_forgets_nothing(bench):
    await bench.start()
    client = bench.tree.client("test.0")
    for name in "abc":
        await ask(client, reserve(name, 150))
    await ask(client, Settle("c", "acme", 150))
    await bench.start()
    assert await open_reservations(client) == {"a", "b"}
    error = (await ask(client, reserve("d", 400))).error
    assert dict(error.headers)["x-ratelimit-remaining-tokens"] == "150"
    assert await ask(client, Settle("c", "acme", 150)) == Settled("c", known=False)
    assert await ask(client, Settle("a", "acme", 0)) == Settled("a", known=True)


@with_limiter
async def test_what_the_disk_did_not_take_was_never_promised(bench):
    limiter = await bench.start()
    client = bench.tree.client("test.0")
    await ask(client, reserve("a"))
    limiter._state.write([Opened(Reservation("b", "acme", "owner:acme", "m", 1, 0))])  # so that it fails
    with pytest.raises(ActorDown):
        await ask(client, reserve("b"))
    assert "UNIQUE" in str(await bench.tree.crash_of("limiter"))
    await bench.start()
    assert isinstance(await ask(client, reserve("c")), Reserved)
    assert await open_reservations(client) == {"a", "b", "c"}


@pytest.mark.parametrize(("step", "remaining"), [(-3600, "100"), (-11, "100"), (3, "130"), (3600, "600")])
def test_a_step_of_the_wall_clock_across_a_restart_gives_at_most_one_full_bucket(tmp_path, step, remaining):
    async def stepped(bench):
        await bench.start()
        client = bench.tree.client("test.0")
        await ask(client, reserve("a", 500))
        await ask(client, Settle("a", "acme", 500))
        bench.wall += step
        await bench.start()
        headers = dict((await ask(client, reserve("b", 0))).headers)
        assert headers["x-ratelimit-remaining-tokens"] == remaining

    with_limiter(stepped)(tmp_path)


@with_limiter
async def test_a_step_of_the_wall_clock_changes_nothing_while_running(bench):
    await bench.start()
    client = bench.tree.client("test.0")
    await ask(client, reserve("a", 500))
    bench.wall += 3600
    assert dict((await ask(client, reserve("b", 0))).headers)["x-ratelimit-remaining-tokens"] == "100"


@with_limiter
async def test_what_no_session_runs_is_dropped_and_what_one_runs_is_kept(bench):
    await bench.start()
    session = bench.tree.client("session.0")
    for name in "ab":
        await ask(session, reserve(name))
    await bench.pass_time(10)
    question, sender = await session.receive()
    assert question == LiveTurns(("a", "b"))
    await session.reply(sender, LiveTurnList(("a",)))
    await wait_all_tasks_blocked()
    assert await open_reservations(session) == {"a"}
    lines = (await ask(session, ReadMetrics())).lines
    assert 'antiphon_limiter_events_total{event="swept"} 1' in lines


@with_limiter
async def test_nothing_is_dropped_while_a_session_is_down(bench):
    await bench.start()
    session = bench.tree.client("session.0")
    bench.tree.client("session.1")
    await ask(session, reserve("a"))
    await bench.tree.kill("session.1")
    await bench.pass_time(60)
    assert session.received() == []
    assert await open_reservations(session) == {"a"}


@with_limiter
async def test_nothing_is_dropped_when_a_session_dies_while_it_is_asked(bench):
    await bench.start()
    session = bench.tree.client("session.0")
    other = bench.tree.client("session.1")
    await ask(session, reserve("a"))
    await bench.pass_time(10)
    _, sender = await session.receive()
    await session.reply(sender, LiveTurnList(()))
    await other.receive()
    await bench.tree.kill("session.1")
    await wait_all_tasks_blocked()
    assert await open_reservations(session) == {"a"}


@with_limiter
async def test_after_its_own_restart_the_limiter_asks_without_waiting_for_age(bench):
    await bench.start()
    session = bench.tree.client("session.0")
    await ask(session, reserve("a"))
    await bench.start()
    await bench.pass_time(5)
    question, sender = await session.receive()
    assert question == LiveTurns(("a",))
    await session.reply(sender, LiveTurnList(()))
    await wait_all_tasks_blocked()
    assert await open_reservations(session) == set()


@with_limiter
async def test_nobody_closes_another_owner_s_reservation(bench):
    await bench.start()
    client = bench.tree.client("test.0")
    await ask(client, reserve("a"))
    assert await ask(client, Settle("a", "thief", 0)) == Settled("a", known=False)
    assert await open_reservations(client) == {"a"}


@with_limiter
async def test_a_key_with_limits_of_its_own_is_a_scope_of_its_own(bench):
    accounts = Accounts(bench.path / "accounts.sqlite")
    key_id, _ = accounts.create_key("acme", "small", limits=Limits(tokens_per_minute=50))
    accounts.close()
    await bench.start()
    client = bench.tree.client("test.0")
    error = (await ask(client, reserve("a", 51, key_id=key_id))).error
    headers = dict(error.headers)
    assert (headers["x-should-retry"], headers["x-ratelimit-limit-tokens"]) == ("false", "50")
    assert isinstance(await ask(client, reserve("b", 51)), Reserved)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (12_000_000, "12ms"),
        (999_000_001, "1s"),
        (1_000_000_000, "1s"),
        (1_000_000_001, "2s"),
        (60_000_000_000, "1m0s"),
        (360_000_000_000, "6m0s"),
        (3_600_000_000_000, "1h0m0s"),
    ],
)
def test_durations_are_written_as_clients_read_them(nanoseconds, text):
    assert duration(nanoseconds) == text
