from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.bell import Bell


def test_a_ring_before_the_wait_is_not_lost_and_counts_once() -> None:
    async def main() -> None:
        bell = Bell()
        bell.ring()
        bell.ring()
        await bell.wait()
        with trio.move_on_after(1) as second:
            await bell.wait()
        assert second.cancelled_caught

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_cancelled_wait_leaves_the_ring() -> None:
    async def main() -> None:
        bell = Bell()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bell.wait)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        bell.ring()
        with trio.fail_after(1):
            await bell.wait()

    trio.run(main, clock=MockClock(autojump_threshold=0))
