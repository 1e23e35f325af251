"""Coming back: which earlier turn a request means, so that nothing is generated or charged twice."""

from __future__ import annotations

import trio
from attrs import define, field

from actors.protocol import ErrorBody, OpenTurn
from actors.turn_errors import INVALID
from actors.turn_host import Host
from actors.turn_journal import key_id_of
from store.journal_records import Turn
from supervision.actor import Sender

MISMATCH = ErrorBody(
    400,
    INVALID,
    "This Idempotency-Key was used before with another request body. Use a new key for a new request.",
    param="Idempotency-Key",
    code="idempotency_key_mismatch",
    headers=(("x-should-retry", "false"),),
)
_REPLAYED = ("in_progress", "completed")
"""A turn that failed, or was broken off, is not what a retry wants: it begins anew."""


@define(eq=False)
class Asker:
    """Somebody who waits for a turn to open."""

    sender: Sender
    reader: str
    replayed: bool


@define(eq=False)
class Admission:
    """A turn that is being admitted, and everybody who waits for it."""

    opening: OpenTurn
    askers: list[Asker] = field(factory=list)
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    is_opening: bool = False
    """Everybody said yes: its opening is on its way to the journal."""


@define
class Earlier:
    """What is known of the turns before: those being admitted here, and the journal's."""

    host: Host
    admissions: dict[str, Admission] = field(factory=dict)

    def find(self, opening: OpenTurn, now: float) -> Admission | Turn | ErrorBody | None:
        """Return the turn that this request comes back to; an error when its key belongs to another body.

        Only turns of the same API key count: two keys of one account know nothing of each other's.
        `now` is Unix seconds. None: it is a new turn.
        """
        if opening.idempotency_key:
            return self._by_key(opening)
        if opening.is_retry and opening.body_digest:
            return self._by_body(opening, now)
        return None

    def _by_key(self, opening: OpenTurn) -> Admission | Turn | ErrorBody | None:
        key = opening.idempotency_key
        for admission in self._admitting(opening):
            if admission.opening.idempotency_key == key:
                same = admission.opening.body_digest == opening.body_digest
                return admission if same else MISMATCH
        turn = self.host.journal.by_idempotency_key(opening.owner, opening.key_id, key)
        if turn is None or key_id_of(turn.opening) != opening.key_id:
            return None
        if turn.opening.body_digest != opening.body_digest:
            return MISMATCH
        return turn if turn.status in _REPLAYED else None

    def _by_body(self, opening: OpenTurn, now: float) -> Admission | Turn | None:
        for admission in self._admitting(opening):
            if admission.opening.body_digest == opening.body_digest:
                return admission
        since = now - self.host.settings.retry_window
        turn = self.host.journal.by_body(opening.owner, opening.key_id, opening.body_digest, since)
        if turn is None or key_id_of(turn.opening) != opening.key_id:
            return None
        return turn if turn.status in _REPLAYED else None

    def _admitting(self, asked: OpenTurn) -> list[Admission]:
        by = (asked.owner, asked.key_id)
        return [a for a in self.admissions.values() if (a.opening.owner, a.opening.key_id) == by]
