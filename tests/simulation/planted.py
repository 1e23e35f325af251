"""Bugs to be planted, so that the simulation is seen to find what it is there to find.

Each is a context manager that breaks one thing, once in a run or every time, as a careless change might.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from actors import turn_choice
from actors.protocol import Allow, TokenChunk
from actors.turn_generation import Generation
from store import books
from store.books_spans import Positions
from store.journal import Journal
from store.journal_records import Acknowledged
from store.limits import Meter


@contextmanager
def skip_a_journal_write() -> Iterator[None]:
    """The tenth write of steps stays in memory: the file has a gap that only a successor can see."""
    append, count = Journal._append, 0

    def forgetful(journal: Journal, steps: bytes) -> None:
        nonlocal count
        count += 1
        if count != 10:
            append(journal, steps)

    with patch.object(Journal, "_append", forgetful):
        yield


@contextmanager
def drop_a_verdict() -> Iterator[None]:
    """The third piece of text is let out without asking a checker."""
    verdict, count = turn_choice.verdict, 0

    async def careless(host: Any, screen: Any, owner: str) -> Any:
        nonlocal count
        count += 1
        if count == 3 and screen.direction == "output":
            end = screen.start + len(screen.text)
            return Allow(screen.request_id, "output", screen.choice, end, "safety.0", "policy")
        return await verdict(host, screen, owner)

    with patch.object(turn_choice, "verdict", careless):
        yield


@contextmanager
def settle_twice() -> Iterator[None]:
    """The limiter counts a settlement that is repeated once more."""
    settle = Meter.settle

    def double(meter: Meter, request_id: str, used: int, now: int) -> Any:
        if request_id not in meter.open and used:
            for budget in meter.budgets.values():
                budget.spent += used
        return settle(meter, request_id, used, now)

    with patch.object(Meter, "settle", double):
        yield


@contextmanager
def charge_twice() -> Iterator[None]:
    """The books forget which positions they have charged already."""
    requests = books.Books._requests

    def blank(self: books.Books, connection: Any, ids: Any) -> Any:
        found = requests(self, connection, ids)
        for request in found.values():
            for choice in list(request.positions):
                request.positions[choice] = Positions()
        return found

    with patch.object(books.Books, "_requests", blank):
        yield


@contextmanager
def miss_a_gap_of_tokens() -> Iterator[None]:
    """A chunk from further ahead is taken as if nothing were missing before it."""
    offer = Generation.offer

    def trusting(generation: Generation, chunk: TokenChunk, sender: tuple[str, int]) -> Any:
        known = len(generation.tokens)
        if chunk.position > known:
            chunk = TokenChunk(
                chunk.generation,
                known,
                chunk.tokens,
                chunk.logprobs,
                chunk.finish,
                chunk.error,
                chunk.cached_tokens,
            )
        return offer(generation, chunk, sender)

    with patch.object(Generation, "offer", trusting):
        yield


@contextmanager
def acknowledge_too_early() -> Iterator[None]:
    """A turn's journal says that it is charged when it closes: nobody asks again if the host dies then."""
    write = Journal.write

    def early(journal: Journal, records: Any) -> None:
        batch = list(records)
        closes = [r.request_id for r in batch if type(r).__name__ == "Close"]
        write(journal, [*batch, *(Acknowledged(request_id, charged=True) for request_id in closes)])

    with patch.object(Journal, "write", early):
        yield


@contextmanager
def journal_after_letting_out() -> Iterator[None]:
    """Steps reach readers before the disk has them: the file lags one write behind."""
    append = Journal._append
    late: dict[int, bytes] = {}

    def lagging(journal: Journal, steps: bytes) -> None:
        before, late[id(journal)] = late.get(id(journal)), steps
        if before is not None:
            append(journal, before)

    with patch.object(Journal, "_append", lagging):
        yield


BUGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "skip_a_journal_write": skip_a_journal_write,
    "drop_a_verdict": drop_a_verdict,
    "settle_twice": settle_twice,
    "charge_twice": charge_twice,
    "miss_a_gap_of_tokens": miss_a_gap_of_tokens,
    "acknowledge_too_early": acknowledge_too_early,
    "journal_after_letting_out": journal_after_letting_out,
}
"""By name, for `--plant`."""
