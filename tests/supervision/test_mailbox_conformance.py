"""One suite for every mailbox: what `supervision.mailbox.Mailbox` promises."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial, wraps
from itertools import count
from typing import Any

import pytest
import trio
import trio.testing

from supervision import wire
from supervision.envelope import Envelope
from supervision.errors import ActorDown, DeadlineExceeded
from supervision.local import _Mouthpiece
from supervision.mailbox import Mailbox
from supervision.memory import Hub
from supervision.message import WhenFull
from supervision.nng import open_mailbox
from supervision.outbox import Outbox, OutboxClosed, OutboxFull
from supervision.runtime import Runtime
from supervision.tree import Member, Tree
from tests.supervision.echo import Echo, Hold, Item, Said, Say

Opener = Callable[..., Any]


@pytest.fixture(params=["memory", "nng"])
def opened(request, tmp_path_factory) -> Opener:
    """Opens mailboxes that can reach each other."""
    if request.param == "memory":
        hub = Hub(capacity=64)

        @asynccontextmanager
        async def in_memory(name: str) -> AsyncIterator[Mailbox]:
            yield hub.mailbox(name)
            hub.cut_off(name)

        return in_memory
    run_dir = tmp_path_factory.mktemp("r")
    return partial(open_mailbox, run_dir=run_dir, capacity=64)


def in_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test in real time; the limit is there for a broken mailbox only."""

    @wraps(test)
    def run(**kwargs: Any) -> None:
        async def limited() -> None:
            with trio.fail_after(20):
                await test(**kwargs)

        trio.run(limited)

    return run


def letter(number: int, size: int = 0) -> bytes:
    return wire.encode(Envelope(0, "b", 1, "a", 1, number, "Item", -1, "", "x" * size, None))


async def numbers(mailbox: Mailbox, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found += [envelope.correlation for envelope in wire.decode(await mailbox.receive())]
    return found


@in_time
async def test_messages_arrive_whole_and_in_order(opened):
    async with opened("a") as a, opened("b") as b, trio.open_nursery() as nursery:

        async def send():
            for number in range(2000):
                await a.outbox("b").put("Item", letter(number, size=number % 300), WhenFull.WAIT)

        nursery.start_soon(send)
        assert await numbers(b, 2000) == list(range(2000))


@in_time
async def test_a_queue_waits_for_a_peer_that_is_not_there_yet(opened):
    async with opened("a") as a:
        for number in range(3):
            await a.outbox("b").put("Item", letter(number), WhenFull.REFUSE)
        await trio.testing.wait_all_tasks_blocked()
        async with opened("b") as b:
            assert await numbers(b, 3) == [0, 1, 2]


@in_time
async def test_a_full_queue_refuses_waits_or_keeps_the_newest(opened):
    async with opened("a") as a:
        outbox = a.outbox("b")
        full = await fill(outbox)
        await outbox.put("Item", letter(1000), WhenFull.NEWEST)
        assert len(outbox) == 64
        with trio.move_on_after(0) as scope:
            await outbox.put("Item", letter(1001), WhenFull.WAIT)
        assert scope.cancelled_caught
        async with opened("b") as b, trio.open_nursery() as nursery:
            nursery.start_soon(outbox.put, "Item", letter(1002), WhenFull.WAIT)
            found = await numbers(b, full + 1)
        assert found == [*range(full - 1), 1000, 1002]


@in_time
async def test_what_was_queued_for_the_dead_never_reaches_the_successor(opened):
    async with opened("a") as a:
        for number in range(40):
            await a.outbox("b").put("Item", letter(number), WhenFull.REFUSE)
        await trio.testing.wait_all_tasks_blocked()
        assert a.forget("b") == 40
        async with opened("b") as b:
            await a.outbox("b").put("Item", letter(77), WhenFull.REFUSE)
            assert await numbers(b, 1) == [77]


@in_time
async def test_forgetting_wakes_who_waited_for_room(opened):
    async with opened("a") as a, trio.open_nursery() as nursery:
        outbox = a.outbox("b")

        async def wait_for_room():
            with pytest.raises(OutboxClosed):
                await outbox.put("Item", letter(0), WhenFull.WAIT)

        await fill(outbox)
        nursery.start_soon(wait_for_room)
        await trio.testing.wait_all_tasks_blocked()
        a.forget("b")


@in_time
async def test_a_slow_peer_holds_up_no_other(opened):
    async with opened("a") as a, opened("slow"), opened("b") as b, trio.open_nursery() as nursery:

        async def flood():
            while True:
                await a.outbox("slow").put("Item", letter(0, size=10_000), WhenFull.WAIT)

        nursery.start_soon(flood)
        await trio.testing.wait_all_tasks_blocked()
        await a.outbox("b").put("Item", letter(5), WhenFull.REFUSE)
        assert await numbers(b, 1) == [5]
        nursery.cancel_scope.cancel()


@in_time
async def test_cancelled_receives_lose_nothing(opened):
    async with opened("a") as a, opened("b") as b, trio.open_nursery() as nursery:

        async def send():
            for number in range(300):
                await a.outbox("b").put("Item", letter(number), WhenFull.WAIT)
                await trio.lowlevel.checkpoint()

        nursery.start_soon(send)
        found: list[int] = []
        while len(found) < 300:
            with trio.move_on_after(0.0001):
                found += await numbers(b, 1)
        assert found == list(range(300))


@in_time
async def test_the_largest_message_passes(opened):
    async with opened("a") as a, opened("b") as b:
        size = wire.MAX_MESSAGE - len(letter(1)) - 8
        await a.outbox("b").put("Item", letter(1, size=size), WhenFull.REFUSE)
        await a.outbox("b").put("Item", letter(2), WhenFull.REFUSE)
        assert await numbers(b, 2) == [1, 2]


@in_time
async def test_flush_returns_when_everything_has_left(opened):
    async with opened("a") as a, opened("b") as b, trio.open_nursery() as nursery:
        for number in range(50):
            await a.outbox("b").put("Item", letter(number), WhenFull.REFUSE)
        nursery.start_soon(numbers, b, 50)
        await a.flush()
        assert len(a.outbox("b")) == 0


async def fill(outbox: Outbox) -> int:
    """Puts numbered messages until none is taken, a frame on its way included; returns how many there are."""
    for number in count():
        if len(outbox) >= outbox.capacity:
            await trio.testing.wait_all_tasks_blocked()
        try:
            await outbox.put("Item", letter(number), WhenFull.REFUSE)
        except OutboxFull:
            return number
    raise AssertionError


@asynccontextmanager
async def pair(opened: Opener, **client_options: Any) -> AsyncIterator[tuple[Runtime, Runtime]]:
    """An echo and a client, alive on real mailboxes, with a tree that names both."""
    tree = Tree(1, {name: Member(name, epoch, "up") for name, epoch in (("echo", 4), ("test.0", 5))})
    async with AsyncExitStack() as stack:
        echo = Runtime(
            Echo(), await stack.enter_async_context(opened("echo")), name="echo", epoch=4, tree=tree
        )
        test = Runtime(
            _Mouthpiece(),
            await stack.enter_async_context(opened("test.0")),
            name="test.0",
            epoch=5,
            tree=tree,
        )
        nursery = await stack.enter_async_context(trio.open_nursery())
        await nursery.start(echo.run)
        await nursery.start(test.run)
        yield echo, test
        nursery.cancel_scope.cancel()


@in_time
async def test_asks_are_answered_whatever_their_order(opened):
    async with pair(opened) as (_, client), trio.open_nursery() as nursery:
        answers: dict[int, Said] = {}

        async def ask(number: int) -> None:
            answers[number] = await client.context.ask("echo", Say(f"n{number}", number), timeout=15)

        for number in range(60):
            nursery.start_soon(ask, number)
    assert answers == {number: Said(f"n{number}", number, 4) for number in range(60)}


@in_time
async def test_a_deadline_and_a_cancel_reach_the_actor(opened):
    async with pair(opened) as (echo, client):
        with pytest.raises(DeadlineExceeded):
            await client.context.ask("echo", Hold(1), timeout=0.05)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.context.ask, "echo", Hold(2), timeout=15))
            await client.context.ask("echo", Say("after Hold"), timeout=15)
            nursery.cancel_scope.cancel()
        await client.context.ask("echo", Say("after Cancel"), timeout=15)
        assert echo.actor.given_up == [1, 2]


@in_time
async def test_death_fails_the_asks_without_a_word_from_the_dead(opened):
    async with pair(opened) as (_, client), trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(ActorDown):
                await client.context.ask("echo", Hold(1), timeout=15)

        nursery.start_soon(ask)
        await client.context.ask("echo", Say("Hold is there"), timeout=15)
        client.push(Tree(2, {"echo": Member("echo", 4, "down")}))


@in_time
async def test_a_reply_passes_a_full_queue(opened):
    async with pair(opened) as (echo, client), trio.open_nursery() as nursery:
        nursery.start_soon(partial(client.context.ask, "echo", Hold(1), timeout=15))
        await client.context.ask("echo", Say("Hold is there"), timeout=15)
        outbox = echo.mailbox.outbox("test.0")
        for number in range(outbox.capacity):
            outbox.put_control("Item", letter(number))
        assert not outbox.offer("Item", letter(0))
        echo.context.answer(echo.actor.held.pop(1), Said("held", 1, 4))


@in_time
async def test_three_thousand_tells_arrive_in_order(opened):
    async with pair(opened) as (echo, client):
        for number in range(3000):
            await client.context.tell("echo", Item(number))
        await client.context.ask("echo", Say("end"), timeout=15)
        assert [item.number for item in echo.actor.seen[:-1]] == list(range(3000))
