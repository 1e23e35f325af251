"""Coming back: retries, idempotency keys and attaching mean one turn, one generation, one charge."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from actors.protocol import OpenTurn, ReadTurn, TurnDone, TurnRefused
from tests.actors.small_tree import Reading, SmallTree, on_virtual_time, script_of, small_tree

TEXT = "one and the same reply " * 5


async def same_again(small: SmallTree, first: Reading, **fields: object) -> Reading:
    """Send the same request once more, as another HTTP request of another edge."""
    opening = small.opening("go", **fields)
    return small.reader(opening, small.tree.client(f"edge.{opening.request_id}"))


async def one_turn_was_charged(small: SmallTree) -> None:
    await trio.sleep(5)
    assert list(small.books.charges) == ["turn-1"]
    assert len(small.books.charges["turn-1"]) == 1
    assert small.books.reserved == {}


@on_virtual_time
async def test_an_idempotency_key_attaches_to_the_live_turn(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        key = {"idempotency_key": "k", "body_digest": "d"}
        first = small.reader(small.opening("go", **key))
        await first.open()
        await trio.sleep(0.1)
        second = await same_again(small, first, **key)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.finish)
            nursery.start_soon(second.run)
        assert second.opened.replayed
        assert not first.opened.replayed
        assert second.opened.request_id == "turn-1"
        assert second.opened.created == first.opened.created
        assert first.text == second.text == TEXT
        await one_turn_was_charged(small)


@on_virtual_time
async def test_an_idempotency_key_replays_the_finished_turn(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        key = {"idempotency_key": "k", "body_digest": "d", "temperature": 1.0, "seed": 3}
        first = await small.say("go", **key)
        await trio.sleep(1000)
        await small.restart("session.0")
        second = await same_again(small, first, **key)
        await second.run()
        assert second.events == first.events
        assert second.opened.replayed
        await one_turn_was_charged(small)


@on_virtual_time
async def test_two_requests_with_one_key_at_the_same_instant_are_one_turn(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        key = {"idempotency_key": "k", "body_digest": "d"}
        first = small.reader(small.opening("go", **key))
        second = await same_again(small, first, **key)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.run)
            nursery.start_soon(second.run)
        assert first.request_id == second.request_id
        assert first.events == second.events
        assert sorted([first.opened.replayed, second.opened.replayed]) == [False, True]
        await trio.sleep(5)
        assert len(small.books.charges) == 1


@on_virtual_time
async def test_a_key_with_another_body_is_refused_for_good(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        first = await small.say("go", idempotency_key="k", body_digest="d")
        second = await same_again(small, first, idempotency_key="k", body_digest="other")
        await second.run()
        assert isinstance(second.refused, TurnRefused)
        assert second.refused.error.status == 400
        assert ("x-should-retry", "false") in second.refused.error.headers
        await one_turn_was_charged(small)


@on_virtual_time
async def test_a_key_belongs_to_its_owner(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        first = await small.say("go", idempotency_key="k", body_digest="d")
        second = await same_again(small, first, idempotency_key="k", body_digest="other", owner="globex")
        await second.run()
        assert second.opened.request_id == second.opening.request_id
        assert not second.opened.replayed


@pytest.mark.parametrize("fields", [{"idempotency_key": "k"}, {"is_retry": True}])
@on_virtual_time
async def test_a_repetition_is_of_one_api_key(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        first = await small.say("go", body_digest="d", **fields)
        other = await same_again(small, first, body_digest="d", key_id="key-2", **fields)
        await other.run()
        assert not other.opened.replayed
        for key_id, mine in (("key-1", first), ("key-2", other)):
            again = await same_again(small, first, body_digest="d", key_id=key_id, **fields)
            await again.run()
            assert again.opened.replayed
            assert again.request_id == mine.request_id
        await trio.sleep(5)
        assert {name: charge.key_id for name, (charge,) in small.books.charges.items()} == {
            first.request_id: "key-1",
            other.request_id: "key-2",
        }


@pytest.mark.parametrize("fields", [{"idempotency_key": "k"}, {"is_retry": True}])
@on_virtual_time
async def test_two_api_keys_at_the_same_instant_are_two_turns(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        first = small.reader(small.opening("go", body_digest="d", **fields))
        other = await same_again(small, first, body_digest="d", key_id="key-2", **fields)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.run)
            nursery.start_soon(other.run)
        assert [first.opened.replayed, other.opened.replayed] == [False, False]


@on_virtual_time
async def test_another_api_keys_body_is_no_mismatch(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        first = await small.say("go", idempotency_key="k", body_digest="d")
        other = await same_again(small, first, idempotency_key="k", body_digest="other", key_id="key-2")
        await other.run()
        assert other.refused is None
        assert not other.opened.replayed


@pytest.mark.parametrize("fields", [{"idempotency_key": "k"}, {"is_retry": True}])
@on_virtual_time
async def test_in_a_journal_of_before_the_opening_says_which_api_key_it_was(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        first = await small.say("go", body_digest="d", **fields)
        await trio.sleep(1)
        await small.tree.kill("session.0")
        with closing(sqlite3.connect(tmp_path / "journal" / "session.0.sqlite")) as db:
            db.execute("ALTER TABLE turns DROP COLUMN key_id")
        await small.start("session.0")
        for key_id, replayed in (("key-1", True), ("key-2", False)):
            again = await same_again(small, first, body_digest="d", key_id=key_id, **fields)
            await again.run()
            assert again.opened.replayed is replayed


@on_virtual_time
async def test_the_sdks_retry_gets_the_turn_that_is_there(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        first = await small.say("go", body_digest="d")
        second = await same_again(small, first, body_digest="d", is_retry=True)
        await second.run()
        assert second.events == first.events
        assert second.opened.replayed
        await one_turn_was_charged(small)


@on_virtual_time
async def test_five_requests_that_are_no_retries_are_five_turns(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        readings = [await small.say("go", body_digest="d") for _ in range(5)]
        assert len({reading.opened.request_id for reading in readings}) == 5
        await trio.sleep(5)
        assert len(small.books.charges) == 5


@on_virtual_time
async def test_a_retry_of_a_turn_that_was_broken_off_begins_anew(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        first = await small.say("go", body_digest="d", deadline=0.2)
        second = await same_again(small, first, body_digest="d", is_retry=True)
        await second.run()
        assert not second.opened.replayed
        assert isinstance(second.last, TurnDone)
        assert second.text == TEXT


@on_virtual_time
async def test_the_same_request_id_attaches_wherever_the_turn_is(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT)) as small:
        reading = small.reader(small.opening("go"))
        for pause in (0.0, 0.1, 5.0):
            await reading.open()
            assert reading.opened.request_id == "turn-1"
            await trio.sleep(pause)
        await reading.finish()
        assert reading.text == TEXT
        await one_turn_was_charged(small)


@on_virtual_time
async def test_a_finished_turn_is_forgotten_after_its_retention(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(TEXT), retention=-1.0) as small:
        await small.say("go", idempotency_key="k", body_digest="d")
        await trio.sleep(5)
        opening: OpenTurn = small.opening("go", idempotency_key="k", body_digest="d")
        again = small.reader(opening)
        await again.run()
        assert not again.opened.replayed


@on_virtual_time
async def test_a_turn_says_whether_it_is_to_be_stored(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        for store in (True, False):
            reading = await small.say("hello", store=store)
            record = await small.edge.ask("session.0", ReadTurn(reading.request_id, "acme"), timeout=5)
            assert record.store is store


@on_virtual_time
async def test_a_turn_is_read_with_what_its_face_repeats(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        reading = await small.say("hello", echo='{"temperature": 0}')
        await small.restart("session.0")
        record = await small.edge.ask("session.0", ReadTurn(reading.request_id, "acme"), timeout=5)
        assert record.echo == '{"temperature": 0}'


@on_virtual_time
async def test_a_turn_that_is_not_stored_still_answers_a_retry_with_its_key(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        first = await small.say("hello", store=False, idempotency_key="k", body_digest="d")
        again = await small.say("hello", store=False, idempotency_key="k", body_digest="d")
        assert again.opened is not None
        assert again.opened.replayed
        assert (again.request_id, again.text) == (first.request_id, first.text)
