"""A reader takes each event once and in order, whatever arrives."""

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.edge.turn_reader import TurnReader
from actors.protocol import TextDelta, TurnDone, Usage
from tests.actors.edge.harness import reply_events

EVENTS = reply_events(["one two three four five", "six seven eight"])


def drain(reader: TurnReader) -> list:
    return list(trio.run(reader.next, 0))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, len(EVENTS)), st.integers(0, len(EVENTS)), st.booleans()), max_size=30),
    st.integers(1, 20),
)
def test_what_is_passed_on_is_always_a_gapless_prefix(deliveries, limit):
    reader = TurnReader("r", "r", "acme", "session.0", limit=limit)
    passed = []
    for start, end, drains in deliveries:
        reader.feed(tuple(EVENTS[start:end]))
        if drains:
            passed += drain(reader)
    while not reader.ended:
        passed += drain(reader)
        reader.feed(tuple(EVENTS[reader.received :]))
    passed += drain(reader)
    assert passed == EVENTS


def test_a_gap_asks_to_attach_again_and_a_duplicate_does_not():
    reader = TurnReader("r", "r", "acme", "session.0")
    reader.feed(tuple(EVENTS[:2]))
    reader.feed(tuple(EVENTS[:2]))
    assert (reader.missing, reader.duplicates) == (False, 2)
    reader.feed(tuple(EVENTS[3:]))
    assert reader.missing
    assert reader.received == 2


def test_text_that_skips_characters_is_a_gap_though_its_number_is_next():
    reader = TurnReader("r", "r", "acme", "session.0")
    reader.feed((TextDelta(1, 0, 0, "ab"), TextDelta(2, 0, 3, "d")))
    assert reader.missing
    assert reader.received == 1


def test_text_that_overlaps_is_cut():
    reader = TurnReader("r", "r", "acme", "session.0")
    reader.feed((TextDelta(1, 0, 0, "ab"), TextDelta(2, 0, 1, "bcd"), TurnDone(3, Usage(1, 2))))
    assert [e.text for e in drain(reader)[:2]] == ["ab", "cd"]


def test_nothing_is_taken_after_the_end():
    reader = TurnReader("r", "r", "acme", "session.0")
    reader.feed(tuple(EVENTS))
    reader.feed((TextDelta(len(EVENTS) + 1, 0, 0, "more"),))
    reader.lose_host()
    assert drain(reader) == EVENTS
    assert not reader.missing
