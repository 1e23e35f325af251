"""A batcher with a small pool: what does not fit is refused before the turn begins, and what may fit is made to."""

from __future__ import annotations

from pathlib import Path

from tests.actors.small_tree import on_virtual_time, settle_down, small_tree


@on_virtual_time
async def test_a_request_without_a_limit_gets_what_the_pool_holds(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        small.books.context_length = 60
        reading = await small.say("hello")
        assert reading.text == "You said: hello"
        assert reading.reasons == ["stop"]
        reading = await small.say("hello", ignore_eos=True)
        assert reading.reasons == ["length"]
        assert reading.last.usage.prompt_tokens + reading.last.usage.completion_tokens == 60


@on_virtual_time
async def test_what_the_pool_cannot_hold_is_refused_before_it_begins(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        small.books.context_length = 60
        for fields in ({"max_tokens": 59}, {"text": "x" * 100}):
            refused = await small.say(fields.pop("text", "hello"), **fields)
            error = refused.refused.error
            assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
            assert "maximum context length is 60 tokens" in error.message
            await settle_down(small)
            assert small.books.reserved == {}


@on_virtual_time
async def test_a_batcher_that_comes_back_larger_is_believed(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        small.books.context_length = 60
        await small.say("hello")
        small.books.context_length = 1000
        await small.say("hello")
        reading = await small.say("hello", max_tokens=500)
        assert reading.text == "You said: hello"
