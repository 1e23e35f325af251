"""`POST /v1/feedback`: what a person thinks of a reply, kept to train and judge decision models by."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

import trio
from attrs import define, field, frozen

from actors.edge import request_ids
from actors.edge.errors import ApiError, invalid, not_found, overloaded, shown
from actors.edge.turns import Turns
from actors.edge.validation import Fields
from store.accounts import Identity
from store.feedback import RatingRow, RowLog

log = logging.getLogger(__name__)

Rating = Literal["up", "down", "regenerate"]
RATINGS: tuple[Rating, ...] = ("up", "down", "regenerate")
PREFIXES = ("", request_ids.CHAT_PREFIX, request_ids.RESPONSE_PREFIX)
"""A reply is named by its `x-request-id` or by its id, whichever the client kept."""
MAX_ID = 64


@frozen
class Opinion:
    """What somebody said of a reply."""

    request_id: str
    rating: Rating


def parse(body: dict[str, Any]) -> Opinion:
    """Read a feedback's JSON. Raises `ApiError`: 400 that names the field, 404 for an id that is none."""
    fields = Fields(body)
    named = fields.text("request_id", MAX_ID)
    if named is None:
        raise invalid("Missing required parameter: 'request_id'.", "request_id")
    rating = fields.choice("rating", RATINGS)
    if rating is None:
        raise invalid("Missing required parameter: 'rating'.", "rating")
    fields.done()
    found = next((bare for prefix in PREFIXES if (bare := request_ids.parse(named, prefix))), None)
    if found is None:
        raise _unknown(named)
    return Opinion(found, next(known for known in RATINGS if known == rating))


async def check(turns: Turns, opinion: Opinion, identity: Identity) -> None:
    """Ask the session hosts whether the turn is this owner's. Raises 404 when it is not, whoever's it is."""
    try:
        await turns.read(opinion.request_id, identity.account)
    except ApiError as error:
        raise _unknown(opinion.request_id) if error.body.status == 404 else error from None


def render(opinion: Opinion) -> dict[str, Any]:
    """Return the reply's JSON."""
    return {"object": "feedback", "request_id": opinion.request_id, "rating": opinion.rating}


def row_of(opinion: Opinion, identity: Identity) -> RatingRow:
    """Return what is kept."""
    return RatingRow(time.time(), opinion.request_id, identity.account, opinion.rating)


def _unknown(name: str) -> ApiError:
    return not_found(f"No request with id {shown(name)} was found.")


@define
class _Batch:
    rows: list[RatingRow] = field(factory=list)
    is_over: bool = False
    error: OSError | None = None


class Ratings:
    """Ratings of one edge on their way to the disk: what waits together is written, and flushed, together."""

    def __init__(self, rows: RowLog) -> None:
        self._rows = rows
        self._batch = _Batch()
        self._writing = trio.Lock()

    async def keep(self, row: RatingRow) -> None:
        """Return when the row is on the disk. Raises 503 when it cannot be: then it is not kept.

        Cancellation: the row may be kept, or not.
        """
        batch = self._batch
        batch.rows.append(row)
        async with self._writing:
            if not batch.is_over:
                self._batch = _Batch()
                await self._write(batch)
        if batch.error is not None:
            raise overloaded("The rating could not be kept: try again later.")

    async def _write(self, batch: _Batch) -> None:
        self._rows.add(batch.rows)
        taken = self._rows.take()
        try:
            await trio.to_thread.run_sync(lambda: self._rows.write(taken, flushed=True))
        except OSError as error:
            log.warning("%d ratings were not kept: %s", len(taken), error)
            batch.error = error
        finally:
            batch.is_over = True
