"""Tokens on their way from batchers to choices: one step's chunks of all turns in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from attrs import define, field

from actors.protocol import CancelGeneration, TokenChunk, Tokens
from actors.turn import Turn
from actors.turn_choice import Choice
from actors.turn_host import Host
from store.journal_records import Chunk
from supervision.errors import AskFailed

log = logging.getLogger(__name__)

MAX_DISOWNED = 1024
"""Generations remembered of which a batcher was told, once, that nobody wants them."""

_Incarnation = tuple[str, int]


@define
class TokenInlet:
    """Takes `Tokens` for the turns of a host."""

    host: Host
    turns: Mapping[str, Turn]
    _disowned: set[tuple[str, int, str]] = field(factory=set)

    def take(self, message: Tokens, batcher: _Incarnation) -> None:
        """Have what is new journalled; after the commit each choice gets its own."""
        taken: list[tuple[Choice, Chunk]] = []
        for chunk in message.chunks:
            choice = self._choice(chunk.generation)
            row = choice.generation.offer(chunk, batcher) if choice else None
            if choice is not None and row is not None:
                taken.append((choice, row))
            elif choice is None or not choice.generation.is_at(batcher):
                self._disown(chunk, batcher)
        if taken:
            self.host.writer.add(*(row for _, row in taken), then=partial(_hand_out, taken))

    def _choice(self, generation: str) -> Choice | None:
        request_id, _, index = generation.rpartition("/")
        turn = self.turns.get(request_id)
        if turn is None or not index.isdecimal() or int(index) >= len(turn.choices):
            return None
        return turn.choices[int(index)]

    def _disown(self, chunk: TokenChunk, batcher: _Incarnation) -> None:
        """A batcher works on what nobody wants from it: tell it, once."""
        key = (*batcher, chunk.generation)
        if chunk.finish or key in self._disowned:
            return
        if len(self._disowned) >= MAX_DISOWNED:
            self._disowned.clear()
        self._disowned.add(key)
        self.host.context.nursery.start_soon(self._tell_unwanted, chunk.generation, batcher)

    async def _tell_unwanted(self, generation: str, batcher: _Incarnation) -> None:
        name, epoch = batcher
        try:
            await self.host.context.tell(name, CancelGeneration(generation), to_epoch=epoch)
        except AskFailed as error:
            log.info("%s is not wanted of %s, which cannot be told: %s", generation, name, error)


def _hand_out(taken: list[tuple[Choice, Chunk]]) -> None:
    for choice, row in taken:
        choice.take(row)
