"""Attaching again, against a host that answers and then says nothing."""

import trio
from trio.testing import MockClock

from actors.edge.turns import MOST_FRUITLESS, Patience, Turns
from actors.protocol import TextDelta, TurnOpened
from supervision.tree import Member, Tree

REQUEST = "01a22db1-9128-7000-91bd-de2d22a9c422"


class Silent:
    """A context whose session host accepts every attach and sends no event."""

    def __init__(self, nursery):
        self.name = "edge.0"
        self.nursery = nursery
        self.tree = Tree(1, {"session.0": Member("session.0", 1, "up")})
        self.asked = []

    async def ask(self, *_, **__):
        await trio.lowlevel.checkpoint()
        self.asked.append(trio.current_time())
        return TurnOpened(REQUEST, "m", 0, 0)


async def attach(turns, reader, times):
    for _ in range(times):
        reader.recovering = True
        await turns._recover(reader)


def with_turns(test):
    def run():
        async def body():
            async with trio.open_nursery() as nursery:
                context = Silent(nursery)
                turns = Turns(context, Patience(), 100)
                await test(context, turns, turns._listen(REQUEST, REQUEST, "acme", "session.0"))

        trio.run(body, clock=MockClock(autojump_threshold=0))

    run.__name__ = test.__name__
    return run


@with_turns
async def test_attaches_that_bring_nothing_come_ever_more_slowly(context, turns, reader):
    await attach(turns, reader, 12)
    gaps = [b - a for a, b in zip(context.asked, context.asked[1:], strict=False)]
    assert gaps[0] < 0.1
    assert gaps[-1] > 0.49
    assert not reader.ended


@with_turns
async def test_an_event_makes_the_next_attach_quick_again(context, turns, reader):
    await attach(turns, reader, 12)
    reader.feed((TextDelta(1, 0, 0, "x"),))
    before = trio.current_time()
    await attach(turns, reader, 1)
    assert context.asked[-1] - before < 0.01


@with_turns
async def test_a_gap_that_stays_ends_the_reader_with_an_error(context, turns, reader):
    await attach(turns, reader, MOST_FRUITLESS + 2)
    assert reader.ended
    assert reader.broken is not None
