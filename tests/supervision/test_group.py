"""Strategies, limits and order, on a virtual clock with children that are no processes."""

import random
from contextlib import asynccontextmanager
from itertools import count, pairwise
from typing import Any

import pytest
import trio
import trio.testing

from supervision.control import Beat
from supervision.group import Group
from supervision.roster import Roster
from supervision.spec import ChildSpec, SupervisorSpec
from supervision.supervisor import build
from supervision.unit import Exit
from tests.supervision.clock import virtual
from tests.supervision.fake_children import FakeLauncher

settled = trio.testing.wait_all_tasks_blocked


def child(name: str, **fields: Any) -> ChildSpec:
    return ChildSpec(name, "nowhere:Nobody", **fields)


def spec(strategy: str, *children: Any, **fields: Any) -> SupervisorSpec:
    return SupervisorSpec(fields.pop("name", "root"), strategy, children, **fields)


class Running:
    def __init__(self, launcher: FakeLauncher, roster: Roster, root: Group) -> None:
        self.launcher = launcher
        self.roster = roster
        self.root = root
        self.ready_at: list[float] = []
        self.end: Exit | None = None
        self.ended = trio.Event()

    async def live(self) -> None:
        self.end = await self.root.live(lambda: self.ready_at.append(trio.current_time()))
        self.ended.set()

    def states(self) -> dict[str, str]:
        return {name: entry.state for name, entry in self.roster.entries.items()}


@asynccontextmanager
async def running(tree: SupervisorSpec, lives: Any = None):
    """A tree that is alive; at the end it is stopped, and nothing may be left."""
    async with trio.open_nursery() as nursery:
        launcher = FakeLauncher(nursery, lives)
        epochs = count(1)
        roster = Roster(lambda: next(epochs))
        it = Running(launcher, roster, build(tree, launcher, roster, random.Random(0)))
        nursery.start_soon(it.live)
        await trio.sleep(1)
        yield it
        if it.end is None:
            it.root.stop()
        await trio.sleep(60)
        assert it.end is not None
        assert launcher.alive() == []
        assert all(run.closed for run in launcher.runs)
        nursery.cancel_scope.cancel()


@virtual
async def test_children_start_in_order_each_when_the_one_before_is_ready():
    async with running(spec("one_for_one", child("a"), child("b"), child("c"))) as it:
        assert [name for _, name in it.launcher.started] == ["a", "b", "c"]
        assert [at for at, _ in it.launcher.started] == pytest.approx([0, 0.1, 0.2])
        assert it.ready_at == pytest.approx([0.3])
        assert it.states() == {"a": "up", "b": "up", "c": "up"}


@virtual
async def test_children_stop_in_reverse_order_and_groups_inside_out():
    inner = spec("one_for_all", child("b"), child("c"), name="inner")
    order: list[str] = []
    async with running(spec("one_for_one", child("a"), inner, child("d"))) as it:
        for run in it.launcher.runs:
            original = run.terminate
            run.terminate = lambda run=run, original=original: (order.append(run.name), original())
        it.root.stop()
        await settled()
        assert order == ["d", "c", "b", "a"]
        assert it.end == Exit(failed=False, reason="root: stopped")
        assert set(it.states().values()) == {"down"}


@virtual
async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace():
    async with running(spec("one_for_one", child("a", grace=3)), {"a": ["deaf"]}) as it:
        began = trio.current_time()
        it.root.stop()
        await it.ended.wait()
        assert trio.current_time() - began == pytest.approx(3, abs=0.2)
        assert it.launcher.now("a").signals == ["TERM", "KILL"]


@pytest.mark.parametrize(
    ("strategy", "restarted"),
    [("one_for_one", ["b"]), ("rest_for_one", ["b", "c"]), ("one_for_all", ["a", "b", "c"])],
)
@virtual
async def test_a_death_restarts_what_the_strategy_says(strategy, restarted):
    async with running(spec(strategy, child("a"), child("b"), child("c"))) as it:
        before = {name: entry.epoch for name, entry in it.roster.entries.items()}
        it.launcher.now("b").end(-9)
        await trio.sleep(2)
        after = {name: entry.epoch for name, entry in it.roster.entries.items()}
        assert [name for name in after if after[name] > before[name]] == restarted
        assert [name for _, name in it.launcher.started[3:]] == restarted
        assert set(it.states().values()) == {"up"}
        assert it.roster.entries["b"].last_error == "killed by SIGKILL"
        assert it.roster.entries["b"].restarts == 1


@pytest.mark.parametrize(
    ("restart", "status", "comes_back"),
    [
        ("permanent", 0, True),
        ("permanent", 1, True),
        ("transient", 0, False),
        ("transient", -9, True),
        ("temporary", 1, False),
    ],
)
@virtual
async def test_a_child_comes_back_as_its_spec_says(restart, status, comes_back):
    async with running(spec("one_for_one", child("a", restart=restart))) as it:
        it.launcher.now("a").end(status)
        await trio.sleep(2)
        assert it.launcher.alive() == (["a"] if comes_back else [])


@virtual
async def test_a_temporary_child_that_falls_with_a_sibling_stays_down():
    tree = spec("one_for_all", child("a"), child("b", restart="temporary"))
    async with running(tree) as it:
        it.launcher.now("a").end(1)
        await trio.sleep(2)
        assert it.launcher.alive() == ["a"]


@virtual
async def test_everyone_is_pushed_a_death_at_once():
    async with running(spec("one_for_one", child("a"), child("b"))) as it:
        it.launcher.now("b").end(-9)
        began = trio.current_time()
        await settled()
        assert trio.current_time() == began
        trees = it.launcher.now("a").trees
        assert "down" in [tree.members["b"].state for tree in trees if "b" in tree.members]
        assert [tree.version for tree in trees] == sorted(tree.version for tree in trees)


@virtual
async def test_a_crash_at_start_backs_off_doubling_with_jitter():
    async with running(
        spec("one_for_one", child("a"), backoff=1, backoff_limit=3), {"a": [1, 1, 1, 1, 1]}
    ) as it:
        await trio.sleep(20)
        times = [at for at, _ in it.launcher.started]
        first, *gaps = [later - earlier - 0.1 for earlier, later in pairwise(times)]
        assert first == pytest.approx(0)
        for gap, most in zip(gaps, [1, 2, 3, 3], strict=True):
            assert most / 2 <= gap <= most
        assert len({round(gap / most, 3) for gap, most in zip(gaps, [1, 2, 3, 3], strict=True)}) == 4
        assert it.states() == {"a": "up"}


@virtual
async def test_a_later_child_waits_while_an_earlier_one_backs_off():
    async with running(
        spec("one_for_one", child("a"), child("b"), backoff=4, backoff_limit=4), {"a": [1, 1]}
    ) as it:
        assert [name for _, name in it.launcher.started] == ["a", "a"]
        await trio.sleep(10)
        assert [name for _, name in it.launcher.started] == ["a", "a", "a", "b"]


@virtual
async def test_the_first_restart_of_each_waits_for_nothing_though_others_were_restarted():
    tree = spec("one_for_one", child("a"), child("b"), backoff=5)
    async with running(tree) as it:
        for name in "ab":
            it.launcher.now(name).end(1)
            await trio.sleep(1)
        assert [name for _, name in it.launcher.started[2:]] == ["a", "b"]
        assert it.states() == {"a": "up", "b": "up"}


@virtual
async def test_too_many_restarts_stop_the_group_and_end_in_a_reason():
    tree = spec("one_for_one", child("a"), child("b"), intensity=3, window=30)
    async with running(tree, {"b": [7] * 9}) as it:
        await trio.sleep(20)
        assert it.end == Exit(
            failed=True, reason="b: ended with 7 (more than 3 restarts of root within 30 s)"
        )
        assert [name for _, name in it.launcher.started] == ["a", "b", "b", "b", "b"]
        assert it.launcher.now("a").signals == ["TERM"]


@virtual
async def test_restarts_outside_the_window_do_not_count():
    async with running(spec("one_for_one", child("a"), intensity=1, window=10)) as it:
        for _ in range(5):
            it.launcher.now("a").end(1)
            await trio.sleep(11)
        assert it.states() == {"a": "up"}


@virtual
async def test_a_child_that_was_never_ready_is_not_tried_for_ever_however_slowly_it_fails():
    tree = spec("one_for_one", child("a"), child("b", ready_within=20), intensity=3, window=10)
    async with running(tree, {"b": ["mute"] * 99}) as it:
        await trio.sleep(200)
        assert [name for _, name in it.launcher.started] == ["a", "b", "b", "b", "b"]
        assert it.end is not None
        assert it.end.failed
        assert it.end.reason.startswith("b: not ready within 20 s (more than 3 restarts of root within 6")


@virtual
async def test_a_group_that_was_never_ready_is_not_tried_for_ever_either():
    inner = spec("one_for_one", child("b", ready_within=20), name="inner", intensity=1, window=10)
    async with running(spec("one_for_one", child("a"), inner, intensity=1), {"b": ["mute"] * 99}) as it:
        await trio.sleep(200)
        assert it.end is not None
        assert it.end.failed
        assert [name for _, name in it.launcher.started].count("b") == 4


@virtual
async def test_slow_failures_before_a_child_was_ready_are_forgotten_once_it_is():
    tree = spec("one_for_one", child("a", ready_within=20), intensity=2, window=10)
    async with running(tree, {"a": ["mute", "mute"]}) as it:
        await trio.sleep(60)
        assert it.states() == {"a": "up"}
        for _ in range(5):
            it.launcher.now("a").end(1)
            await trio.sleep(11)
        assert it.states() == {"a": "up"}


@virtual
async def test_a_child_that_was_ready_once_may_fail_slowly_for_as_long_as_it_takes():
    async with running(
        spec("one_for_one", child("a", ready_within=20), intensity=2, window=10),
        {"a": ["well", *["mute"] * 9]},
    ) as it:
        it.launcher.now("a").end(1)
        await trio.sleep(250)
        assert it.states() == {"a": "up"}
        assert it.roster.entries["a"].restarts == 10


@virtual
async def test_a_failed_group_is_restarted_whole_by_the_group_above():
    inner = spec("one_for_one", child("b"), child("c"), name="inner", intensity=1, window=10)
    async with running(spec("rest_for_one", child("a"), inner, child("d"))) as it:
        it.launcher.now("c").end(1)
        await trio.sleep(2)
        it.launcher.now("c").end(1)
        await trio.sleep(2)
        assert [name for _, name in it.launcher.started[4:]] == ["c", "b", "c", "d"]
        assert set(it.states().values()) == {"up"}
        assert it.end is None


@virtual
async def test_a_failure_that_keeps_escalating_ends_the_root():
    inner = spec("one_for_one", child("b"), name="inner", intensity=1, window=60)
    tree = spec("one_for_one", child("a"), inner, intensity=1, window=60)
    async with running(tree, {"b": [3] * 9}) as it:
        await trio.sleep(30)
        assert it.end is not None
        assert it.end.failed
        assert "b: ended with 3" in it.end.reason
        assert "root" in it.end.reason
        assert [name for _, name in it.launcher.started].count("b") == 4


@virtual
async def test_a_stop_during_a_backoff_starts_nothing_more():
    async with running(spec("one_for_one", child("a"), backoff=50, backoff_limit=50), {"a": [1, 1]}) as it:
        it.root.stop()
        await trio.sleep(200)
        assert len(it.launcher.started) == 2


@virtual
async def test_a_stop_cancels_a_launch_that_takes_long_and_so_does_the_limit_of_readiness():
    async with running(spec("one_for_one", child("a", ready_within=30)), {"a": ["unborn", "unborn"]}) as it:
        await trio.sleep(40)
        assert it.roster.entries["a"].last_error == "not begun within 30 s"
        assert it.states() == {"a": "starting"}
        it.root.stop()
        await settled()
        assert it.end == Exit(failed=False, reason="root: stopped")
        assert it.states() == {"a": "down"}


@virtual
async def test_replicas_come_back_without_waiting_for_each_other():
    tree = spec("one_for_one", child("a"), child("b"), backoff=0.01)
    async with running(tree, {"a": ["well", "mute"]}) as it:
        it.launcher.now("a").end(1)
        await trio.sleep(0.5)
        it.launcher.now("b").end(1)
        await trio.sleep(1)
        assert it.states() == {"a": "starting", "b": "up"}


@virtual
async def test_a_child_that_is_not_ready_in_time_is_killed_and_counted():
    async with running(spec("one_for_one", child("a", ready_within=5)), {"a": ["mute"]}) as it:
        await trio.sleep(10)
        assert it.launcher.runs[0].signals == ["KILL"]
        assert it.roster.entries["a"].last_error == "not ready within 5 s"
        assert it.states() == {"a": "up"}


@virtual
async def test_a_child_that_cannot_be_launched_counts_as_a_crash():
    async with running(spec("one_for_one", child("a")), {"a": ["no launch"]}) as it:
        assert it.states() == {"a": "up"}
        assert it.roster.entries["a"].restarts == 1
        assert it.roster.entries["a"].last_error == "no such program"


@virtual
async def test_a_child_that_falls_silent_is_killed_after_two_missed_beats():
    async with running(spec("one_for_one", child("a"))) as it:
        first = it.launcher.now("a")
        first.say = lambda _: None
        began = trio.current_time()
        await first.exit_status()
        await settled()
        assert trio.current_time() - began <= 2.5
        assert it.roster.entries["a"].last_error.startswith("no heartbeat for 2.5")


@virtual
async def test_a_child_that_is_busy_without_progress_is_killed_by_the_watchdog():
    async with running(spec("one_for_one", child("a", watchdog=4))) as it:
        first = it.launcher.now("a")
        say, first.say = first.say, lambda _: None
        for progress in (1, 2, 3, 3, 3, 3, 3, 3, 3):
            say(Beat(progress, busy=True, depth=5))
            await settled()
            if first.status is None:
                assert it.roster.entries["a"].depth == 5
            await trio.sleep(1)
        assert first.signals == ["KILL"]
        assert it.roster.entries["a"].last_error == "busy without progress for 4.0 s"


@virtual
async def test_cancelling_the_tree_kills_and_clears_everything():
    async with trio.open_nursery() as nursery:
        launcher = FakeLauncher(nursery)
        roster = Roster(iter(range(1, 99)).__next__)
        root = build(spec("one_for_one", child("a"), child("b")), launcher, roster, random.Random(0))
        with trio.move_on_after(1):
            await root.live(lambda: None)
        assert launcher.alive() == []
        assert [run.signals for run in launcher.runs] == [["KILL"], ["KILL"]]
        nursery.cancel_scope.cancel()


def test_two_children_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two children are called 'a'"):
        build(spec("one_for_one", child("a"), child("a")), None, Roster(lambda: 1), random.Random(0))
