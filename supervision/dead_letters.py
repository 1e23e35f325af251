"""What becomes of messages nobody will read: counted by reason, and logged without their text."""

from __future__ import annotations

import logging
from collections import Counter

from supervision.envelope import Envelope

LOG = logging.getLogger("supervision.dead_letters")

_LOGGED_EACH = 20
"""Dead letters of one reason that are logged one by one; past it at powers of two: a flood logs little."""


class DeadLetters:
    """Counts by reason: `late`, `stale`, `unknown`, `malformed`, `expired`, `full`, `down`, `frame`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, reason: str, envelope: Envelope | None = None, count: int = 1) -> None:
        """Count `count` dead letters; the envelope's address, never its body, goes to the log."""
        self.counts[reason] += count
        total = self.counts[reason]
        if total > _LOGGED_EACH and total & (total - 1):
            return
        extra: dict[str, object] = {"reason": reason, "total": total}
        if envelope is not None:
            extra |= {
                "kind": envelope.kind,
                "peer": envelope.sender,
                "peer_epoch": envelope.sender_epoch,
                "correlation": envelope.correlation,
                "trace": envelope.trace,
            }
        LOG.info("dead letter", extra={"fields": extra})
