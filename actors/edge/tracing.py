"""Lines in the log by which abuse is traced to a key and its end user: no one's text, and no one's name."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable

from attrs import frozen

from actors.protocol import ErrorBody, OpenTurn

log = logging.getLogger(__name__)

REJECTED = "content_policy_violation"
"""The code of a request that the safety policy refused."""
CUT_OFF = "content_filter"
"""The finish reason of a choice that it ended."""
MARK_LENGTH = 16


def mark(owner: str, label: str) -> str:
    """Return what stands for an end user in logs and journals: hex digits of SHA-256 over `owner NUL label`.

    The owner is part of it, so one label of two accounts is two marks; who knows the label can find the lines.
    """
    return hashlib.sha256(f"{owner}\0{label}".encode()).hexdigest()[:MARK_LENGTH]


def marks(owner: str, labels: Iterable[str]) -> str:
    """Return the marks of a request's labels, each once, with spaces between; "" without labels."""
    return " ".join(dict.fromkeys(mark(owner, label) for label in labels))


@frozen
class Trace:
    """Whose a turn is."""

    request_id: str
    """The request's own; a retry's differs from its turn's."""
    turn: str
    owner: str
    key_id: str
    end_user: str
    """The marks of its end user; "" when the client named none."""

    @classmethod
    def of(cls, opening: OpenTurn, turn: str = "") -> Trace:
        """Return the trace of a request; `turn` is the id of the turn that it got, if it is another."""
        return cls(
            opening.request_id, turn or opening.request_id, opening.owner, opening.key_id, opening.user
        )

    def opened(self) -> None:
        """Say that a turn began for an end user; nothing when the client named none."""
        if self.end_user:
            log.info("turn of an end user", extra={"fields": self._facts()})

    def refused(self, error: ErrorBody) -> None:
        """Say that the safety policy refused the request; nothing when the refusal has another reason."""
        if error.code == REJECTED:
            log.warning("the safety policy refused a request", extra={"fields": self._facts()})

    def cut_off(self, choices: Iterable[int]) -> None:
        """Say that the safety policy ended these choices of the reply."""
        facts = {**self._facts(), "choices": sorted(choices)}
        log.warning("the safety policy cut off a reply", extra={"fields": facts})

    def _facts(self) -> dict[str, object]:
        return {
            "request_id": self.request_id,
            "turn": self.turn,
            "owner": self.owner,
            "key_id": self.key_id,
            "end_user": self.end_user,
        }
