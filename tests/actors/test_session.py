from __future__ import annotations

from pathlib import Path

from actors.protocol import TurnDone, Usage
from tests.actors.small_tree import on_virtual_time, small_tree


@on_virtual_time
async def test_a_turn_streams_its_reply_and_is_settled_and_charged_once(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        reading = await small.say("bonjour, été")
        golden = "You said: bonjour, été"
        assert reading.text == golden
        assert reading.reasons == ["stop"]
        tokens = len(golden.encode())
        assert reading.last == TurnDone(len(reading.events), Usage(reading.opened.prompt_tokens, tokens))
        assert small.books.reserved == {}
        assert small.books.settled == {"turn-1": reading.opened.prompt_tokens + tokens}
        assert small.books.tokens_of("turn-1") == {0: tokens}
