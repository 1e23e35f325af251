"""Answers from the catalog inside a turn: at once, checked, free of tokens, and never in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio

from actors.protocol import (
    Declined,
    ErrorBody,
    Hit,
    Lookup,
    ReadMetrics,
    ReadTurn,
    TextDelta,
    TurnDone,
    Usage,
)
from store.answer import pack_answer
from supervision.actor import LATER, Actor, Sender
from tests.actors.small_tree import Nothing, on_virtual_time, small_tree

ANSWER = "The capital of France is Paris. " * 10


class Catalog(Actor):
    """Answers one question, after `delay` seconds."""

    Settings: ClassVar[type] = Nothing

    def __init__(self, delay: float = 0.0, answer: str = ANSWER) -> None:
        self.delay = delay
        self.answer = answer
        self.asked = 0

    async def on_message(self, message: Any, sender: Sender) -> Any:
        if not isinstance(message, Lookup):
            return None
        self.asked += 1
        self.context.nursery.start_soon(self._answer, message, sender)
        return LATER

    async def _answer(self, message: Lookup, sender: Sender) -> None:
        await trio.sleep(self.delay)
        if message.text == "capital?":
            packed = pack_answer(self.answer, 100)
            hit = Hit(message.request_id, "2026-08", "france", packed, 0.9, 0.5, 1.0, "policy")
            await self.context.reply(sender, hit)
        else:
            miss = Declined(message.request_id, "miss", "2026-08", "", 0.0, 0.5, 1.0, "policy")
            await self.context.reply(sender, miss)


@on_virtual_time
async def test_an_answer_of_the_catalog_streams_and_costs_no_tokens(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.tree.start("fast_answer.0", Catalog())
        began = trio.current_time()
        reading = await small.say("capital?", fast_answers=True)
        assert trio.current_time() - began < 0.3
        assert reading.text == ANSWER
        assert len([e for e in reading.events if isinstance(e, TextDelta)]) == 1
        assert reading.headers["x-antiphon-fast-answer"] == "2026-08/france"
        assert reading.last == TurnDone(len(reading.events), Usage(0, 0), "2026-08/france")
        await trio.sleep(1)
        (charge,) = small.books.charges["turn-1"]
        assert (charge.fast_answer, charge.spans, charge.prompt_tokens) == ("2026-08/france", (), 0)
        assert small.books.reserved == {}
        assert small.books.settled == {"turn-1": 0}
        assert small.books.witnessed == {}
        record = await small.edge.ask("session.0", ReadTurn("turn-1", "acme"), timeout=5)
        assert (record.status, record.texts, record.usage) == ("completed", (ANSWER,), Usage(0, 0))
        assert record.fast_answer == "2026-08/france"


@on_virtual_time
async def test_an_answer_may_be_given_at_a_readable_pace(tmp_path: Path) -> None:
    pace = 50.0
    async with small_tree(tmp_path, fast_answer_pace=pace) as small:
        await small.tree.start("fast_answer.0", Catalog())
        began = trio.current_time()
        reading = await small.say("capital?", fast_answers=True)
        seconds = trio.current_time() - began
        assert reading.text == ANSWER
        deltas = [e.text for e in reading.events if isinstance(e, TextDelta)]
        assert {len(text) for text in deltas[:-1]} == {5}
        assert seconds == pytest.approx(len(ANSWER) / pace, abs=0.3)
        began = trio.current_time()
        await small.say("capital?", fast_answers=True, stream=False)
        assert trio.current_time() - began < 0.3, "nobody watches a reply that is not streamed"


@on_virtual_time
async def test_an_answer_cut_off_by_a_kill_goes_on_where_it_was(tmp_path: Path) -> None:
    async with small_tree(tmp_path, fast_answer_pace=50.0) as small:
        await small.tree.start("fast_answer.0", Catalog())
        reading = small.reader(small.opening("capital?", fast_answers=True))
        await reading.open()
        with trio.move_on_after(0.5):
            await reading.finish()
        assert 0 < len(reading.text) < len(ANSWER)
        await small.restart("session.0")
        await reading.finish()
        assert reading.text == ANSWER


@on_virtual_time
async def test_a_hit_needs_no_tokens_of_an_owner_who_has_none_left(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.tree.start("fast_answer.0", Catalog())
        small.books.refusal = ErrorBody(429, "tokens", "limit 10", code="rate_limit_exceeded")
        small.books.tokens_left = 10
        reading = await small.say("capital?", fast_answers=True)
        assert (reading.text, small.books.settled) == (ANSWER, {"turn-1": 0})
        refused = await small.say("weather?", fast_answers=True)
        assert refused.refused.error.status == 429
        small.books.tokens_left = -1
        refused = await small.say("capital?", fast_answers=True)
        assert refused.refused.error.status == 429
        assert small.books.reserved == {}


@on_virtual_time
async def test_the_figures_tell_served_from_late_and_not_asked(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        catalog = Catalog()
        await small.tree.start("fast_answer.0", catalog)
        await small.say("capital?", fast_answers=True)
        await small.say("weather?", fast_answers=True)
        catalog.delay = 1.0
        await small.say("capital?", fast_answers=True)
        await small.say("capital?", fast_answers=True)
        found = (await small.edge.ask("session.0", ReadMetrics(), timeout=5)).lines
        for name in ("served", "not_in_time", "not_asked"):
            assert f'antiphon_session_fast_answers_{name}_total{{actor="session.0"}} 1' in found
        assert 'antiphon_session_fast_answer_breakers_opened_total{actor="session.0"} 1' in found


@on_virtual_time
async def test_an_answer_longer_than_the_reply_may_be_is_left_to_the_model(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.tree.start("fast_answer.0", Catalog())
        size = len(ANSWER)  # the scripted tokenizer has a token for each byte
        cut = await small.say("capital?", fast_answers=True, max_tokens=size - 1)
        assert (cut.text, cut.last.fast_answer) == ("You said: capital?", "")
        assert "x-antiphon-fast-answer" not in cut.headers
        whole = await small.say("capital?", fast_answers=True, max_tokens=size)
        assert (whole.text, whole.last.fast_answer) == (ANSWER, "2026-08/france")


@on_virtual_time
async def test_text_with_many_bytes_a_character_is_counted_in_tokens(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.tree.start("fast_answer.0", Catalog(answer="é" * 40))
        for limit, wanted in ((79, ""), (80, "2026-08/france")):
            reading = await small.say("capital?", fast_answers=True, max_tokens=limit)
            assert reading.last.fast_answer == wanted


@on_virtual_time
async def test_the_catalog_is_asked_only_when_the_request_takes_part(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        catalog = Catalog()
        await small.tree.start("fast_answer.0", catalog)
        assert (await small.say("capital?")).text == "You said: capital?"
        assert catalog.asked == 0


@on_virtual_time
async def test_a_miss_takes_the_normal_path(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.tree.start("fast_answer.0", Catalog())
        reading = await small.say("weather?", fast_answers=True)
        assert reading.text == "You said: weather?"
        assert "x-antiphon-fast-answer" not in reading.headers
        assert reading.last.fast_answer == ""


@on_virtual_time
async def test_a_slow_catalog_costs_one_turn_its_limit_and_the_next_nothing(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        catalog = Catalog(delay=1.0)
        await small.tree.start("fast_answer.0", catalog)
        waits = []
        for _ in range(2):
            began = trio.current_time()
            reading = small.reader(small.opening("capital?", fast_answers=True))
            await reading.open()
            waits.append(trio.current_time() - began)
            await reading.finish()
            assert reading.text == "You said: capital?"
        assert 0.14 <= waits[0] <= 0.16
        assert waits[1] < 0.01


@on_virtual_time
async def test_a_catalog_that_recovers_is_probed_and_used_again(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        catalog = Catalog(delay=1.0)
        await small.tree.start("fast_answer.0", catalog)
        await small.say("capital?", fast_answers=True)
        catalog.delay = 0.0
        await trio.sleep(5)
        probing = await small.say("capital?", fast_answers=True)
        assert probing.last.fast_answer == ""
        assert (await small.say("capital?", fast_answers=True)).last.fast_answer == "2026-08/france"


@on_virtual_time
async def test_without_a_catalog_nobody_waits(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        began = trio.current_time()
        reading = small.reader(small.opening("capital?", fast_answers=True))
        await reading.open()
        assert trio.current_time() - began < 0.01


@on_virtual_time
async def test_an_answer_is_checked_like_any_text(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.tree.start("fast_answer.0", Catalog(answer="eat the forbidden fruit now"))
        reading = await small.say("capital?", fast_answers=True)
        assert "forbidden" not in reading.text
        assert reading.reasons == ["content_filter"]


@on_virtual_time
async def test_an_answer_that_was_begun_is_finished_by_the_next_incarnation(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.tree.start("fast_answer.0", Catalog())
        await small.tree.kill("safety.0")
        await small.start("safety.0")
        reading = small.reader(small.opening("capital?", fast_answers=True))
        await reading.open()
        await small.restart("session.0")
        await small.tree.kill("fast_answer.0")
        await reading.finish()
        assert reading.text == ANSWER
        assert reading.last.fast_answer == "2026-08/france"
        await trio.sleep(5)
        assert small.books.reserved == {}
