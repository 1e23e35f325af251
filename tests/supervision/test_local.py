import random

import pytest
import trio
import trio.testing

from supervision.errors import ActorDown, Busy, DeadlineExceeded, Refused, StaleEpoch
from supervision.local import LocalTree
from supervision.memory import Hub, SeededFaults
from supervision.runtime import Runtime
from tests.supervision.clock import virtual
from tests.supervision.echo import Echo, Fall, Fell, Hold, Item, LetGo, Level, Nap, Said, Say


@virtual
async def test_an_ask_gets_its_reply():
    async with LocalTree() as tree:
        epoch = await tree.start("echo", Echo())
        client = tree.client("test.0")
        assert await client.ask("echo", Say("hi", 7), timeout=5) == Said("hi", 7, epoch)


@virtual
async def test_tells_arrive_in_order():
    async with LocalTree() as tree:
        echo = Echo()
        await tree.start("echo", echo)
        client = tree.client("test.0")
        for number in range(3000):
            await client.tell("echo", Item(number))
        await client.ask("echo", Say("end"), timeout=5)
        assert [item.number for item in echo.seen[:-1]] == list(range(3000))


@virtual
async def test_a_late_reply_answers_the_ask_it_was_held_for():
    async with LocalTree() as tree:
        await tree.start("echo", Echo())
        client = tree.client("test.0")
        answers = []

        async def ask(number):
            answers.append(await client.ask("echo", Hold(number), timeout=5))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 1)
            nursery.start_soon(ask, 2)
            await trio.testing.wait_all_tasks_blocked()
            await client.tell("echo", LetGo(2))
            await trio.testing.wait_all_tasks_blocked()
            await client.tell("echo", LetGo(1))
        assert [said.number for said in answers] == [2, 1]


@virtual
async def test_a_deadline_ends_the_ask_and_tells_the_actor():
    async with LocalTree() as tree:
        echo = Echo()
        await tree.start("echo", echo)
        client = tree.client("test.0")
        with pytest.raises(DeadlineExceeded):
            await client.ask("echo", Hold(1), timeout=2.5)
        assert trio.current_time() == pytest.approx(2.5, abs=0.01)
        await trio.testing.wait_all_tasks_blocked()
        assert echo.given_up == [1]
        assert len(tree.context("echo").pending) == 0


@virtual
async def test_cancelling_an_ask_drops_its_slot_and_tells_the_actor_once():
    async with LocalTree() as tree:
        echo = Echo()
        await tree.start("echo", echo)
        client = tree.client("test.0")
        with trio.move_on_after(1):
            await client.ask("echo", Hold(1), timeout=10)
        await trio.sleep(20)
        assert echo.given_up == [1]
        assert len(tree.context("test.0").slots) == 0


@virtual
async def test_an_ask_cancelled_before_it_was_begun_is_never_begun():
    async with LocalTree() as tree:
        echo = Echo()
        await tree.start("echo", echo)
        client = tree.client("test.0")
        await client.tell("echo", Nap(3))
        with trio.move_on_after(1):
            await client.ask("echo", Say("never"), timeout=10)
        await trio.sleep(5)
        assert echo.seen == [Nap(3)]


@virtual
async def test_an_ask_whose_time_is_up_is_not_begun_even_when_the_cancel_is_lost():
    async with LocalTree() as tree:
        echo = Echo()
        await tree.start("echo", echo)
        client = tree.client("test.0")
        await client.tell("echo", Nap(3))
        await trio.testing.wait_all_tasks_blocked()
        tree.hub.fault = lambda envelope: [] if envelope.kind == "" else [0.0]
        with pytest.raises(DeadlineExceeded):
            await client.ask("echo", Say("never"), timeout=1)
        await trio.sleep(5)
        assert echo.seen == [Nap(3)]
        assert tree.context("echo").dead_letters.counts["expired"] == 1


@virtual
async def test_a_held_ask_is_given_up_at_its_deadline_even_when_the_cancel_is_lost():
    async with LocalTree() as tree:
        echo = Echo()
        await tree.start("echo", echo)
        client = tree.client("test.0")
        tree.hub.fault = lambda envelope: [] if envelope.kind == "" else [0.0]
        with pytest.raises(DeadlineExceeded):
            await client.ask("echo", Hold(4), timeout=1)
        await trio.sleep(1)
        assert echo.given_up == [4]


@virtual
async def test_a_kill_fails_the_asks_at_once_and_is_told_to_everyone():
    async with LocalTree() as tree:
        epoch = await tree.start("echo", Echo())
        client = tree.client("test.0")
        other = Echo()
        await tree.start("other", other)
        async with trio.open_nursery() as nursery:

            async def ask():
                with pytest.raises(ActorDown):
                    await client.ask("echo", Hold(1), timeout=60)

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            await tree.kill("echo")
        assert trio.current_time() < 1
        await trio.testing.wait_all_tasks_blocked()
        assert client.downs == [("echo", epoch)]
        assert other.downs == [("echo", epoch)]
        with pytest.raises(ActorDown):
            await client.tell("echo", Say("anyone?"))


@virtual
async def test_a_successor_has_a_higher_epoch_and_gets_nothing_meant_for_its_predecessor():
    async with LocalTree() as tree:
        first = await tree.start("echo", Echo())
        client = tree.client("test.0")
        await client.tell("echo", Nap(60))
        await trio.testing.wait_all_tasks_blocked()
        for number in range(200):
            await client.tell("echo", Item(number))
        successor = Echo()
        second = await tree.restart("echo", successor)
        assert second > first
        assert (await client.ask("echo", Say("hi"), timeout=5)).epoch == second
        assert successor.seen == [Say("hi")]
        with pytest.raises(ActorDown):
            await client.ask("echo", Say("hi"), to_epoch=first, timeout=5)


@virtual
async def test_a_stale_epoch_is_refused_with_an_answer():
    async with LocalTree() as tree:
        await tree.start("echo", Echo())
        client = tree.client("test.0")
        tree.context("echo").epoch += 100
        with pytest.raises(StaleEpoch):
            await client.ask("echo", Say("hi"), timeout=5)
        assert tree.context("echo").dead_letters.counts["stale"] == 1


@virtual
async def test_words_of_a_dead_incarnation_are_dead_letters():
    async with LocalTree() as tree:
        echo = Echo()
        await tree.start("echo", echo)
        old = tree.client("test.0")
        tree.hub.fault = lambda _: [1.0]
        await old.tell("echo", Say("from the grave"))
        await trio.testing.wait_all_tasks_blocked()
        await tree.kill("test.0")
        await trio.sleep(2)
        assert echo.seen == []
        assert tree.context("echo").dead_letters.counts["stale"] == 1


@virtual
async def test_an_unknown_kind_and_an_unknown_field_are_refused_by_name():
    async with LocalTree() as tree:
        echo = Echo()
        await tree.start("echo", echo)
        client = tree.client("test.0")

        class Alien(Say):
            pass

        class Policy:
            kind = "Alien"

        alien = Alien("hi")
        from supervision import message

        object.__setattr__(alien, "__class__", Alien)
        Alien.__policy__ = message.Policy("Alien", True, message.WhenFull.REFUSE)
        with pytest.raises(Refused, match="unknown kind 'Alien'"):
            await client.ask("echo", alien, timeout=5)
        Alien.__policy__ = message.Policy("Hold", True, message.WhenFull.REFUSE)
        with pytest.raises(Refused, match="unknown field 'text' in Hold"):
            await client.ask("echo", alien, timeout=5)
        assert echo.seen == []


@virtual
async def test_a_full_mailbox_refuses_an_ask_with_busy_and_keeps_the_newest():
    async with LocalTree() as tree:
        echo = Echo()
        await tree.start("echo", echo, capacity=4)
        client = tree.client("test.0")
        await client.tell("echo", Nap(10))
        await trio.testing.wait_all_tasks_blocked()
        for number in range(8):
            await client.tell("echo", Level(number))
        with pytest.raises(Busy):
            await client.ask("echo", Say("hi"), timeout=5)
        await trio.sleep(20)
        assert [level.number for level in echo.seen[1:]] == [0, 1, 2, 7]


@virtual
async def test_an_ask_that_waits_for_room_gets_it():
    async with LocalTree() as tree:
        await tree.start("echo", Echo(), capacity=1)
        client = tree.client("test.0")
        await client.tell("echo", Nap(3))
        await trio.testing.wait_all_tasks_blocked()
        await client.tell("echo", Say("fills it"))
        assert await client.ask("echo", Item(1), timeout=5) is None
        assert 3 <= trio.current_time() < 3.5


@virtual
async def test_a_crash_is_a_death_with_a_reason():
    async with LocalTree() as tree:
        await tree.start("echo", Echo())
        client = tree.client("test.0")
        with pytest.raises(ActorDown):
            await client.ask("echo", Fall("over"), timeout=5)
        assert isinstance(await tree.crash_of("echo"), Fell)


def test_a_crash_nobody_asked_about_fails_the_test():
    @virtual
    async def careless():
        async with LocalTree() as tree:
            await tree.start("echo", Echo())
            client = tree.client("test.0")
            await client.tell("echo", Fall("over"))
            await trio.testing.wait_all_tasks_blocked()

    with pytest.raises(ExceptionGroup) as caught:
        careless()
    assert caught.group_contains(Fell)


@virtual
async def test_messages_are_handled_while_an_actor_drains():
    class Draining(Echo):
        spoken_to = trio.Event()

        async def on_message(self, message, sender):
            self.spoken_to.set()
            return await super().on_message(message, sender)

        async def on_stop(self):
            await self.spoken_to.wait()

    async with LocalTree() as tree:
        await tree.start("echo", Draining())
        client = tree.client("test.0")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tree.stop, "echo")
            await trio.sleep(1)
            assert (await client.ask("echo", Say("last"), timeout=5)).text == "last"
        assert client.tree.epoch("echo") == 0


@virtual
async def test_a_drain_is_cut_at_the_end_of_its_grace():
    class Endless(Echo):
        async def on_stop(self):
            await trio.sleep_forever()

    async with LocalTree() as tree:
        await tree.start("echo", Endless())
        await tree.stop("echo", grace=2)
        assert 2 <= trio.current_time() < 3.1


@pytest.mark.parametrize("seed", range(4))
@virtual
async def test_no_reply_is_ever_paired_with_anothers_request(seed):
    rng = random.Random(seed)
    async with LocalTree() as tree:
        await tree.start("echo", Echo())
        client = tree.client("test.0")
        tree.hub.fault = SeededFaults(rng, repeat=0.1, delay=0.5, at_most=0.02)
        wrong = []
        cancelled = 0

        async def ask(number):
            nonlocal cancelled
            with trio.move_on_after(rng.uniform(0, 0.03)) as scope:
                said = await client.ask("echo", Say(f"n{number}", number), timeout=1)
                if (said.text, said.number) != (f"n{number}", number):
                    wrong.append((number, said))
            cancelled += scope.cancelled_caught

        async with trio.open_nursery() as nursery:
            for number in range(500):
                nursery.start_soon(ask, number)
                if number % 10 == 0:
                    await trio.sleep(0.001)
        assert wrong == []
        assert 50 < cancelled < 500
        assert len(tree.context("test.0").slots) == 0
        tree.hub.fault = None
        assert (await client.ask("echo", Say("after"), timeout=1)).text == "after"


@virtual
async def test_an_actor_told_to_stop_while_it_starts_stops_at_once():
    class Slow(Echo):
        async def on_start(self):
            await trio.sleep(60)

    hub, actor = Hub(), Slow()
    runtime = Runtime(actor, hub.mailbox("slow"), name="slow", epoch=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runtime.run)
        await trio.sleep(1)
        runtime.stop(grace=5)
    assert trio.current_time() == pytest.approx(1, abs=0.01)
    assert not runtime.ready.is_set()
    assert not actor.stopped


@virtual
async def test_a_pause_ends_when_the_tree_changes_and_else_at_its_end():
    async with LocalTree() as tree:
        await tree.start("echo", Echo())
        client = tree.client("test.0")
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        await client.context.pause(2)
        assert trio.current_time() == began + 2
        await tree.kill("echo")
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.context.pause, 60)
            await trio.testing.wait_all_tasks_blocked()
            await tree.start("echo", Echo())
        assert trio.current_time() == began + 2
        assert client.tree.epoch("echo")
