"""Fast answers: reviewed answers to common questions, from the release that is active.

A replica has no state but the release it has open. It looks a question up, scores what it finds, and answers
or declines with a reason; it is never the only way to a reply. It follows the pointer file: a new release
is checked, mapped and probed in a thread while the old one answers, and takes over between two messages.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import trio
from attrs import field, frozen
from attrs.validators import ge, gt, le

from actors.protocol import Declined, Hit, LookedUp, Lookup, LookupMany, Metrics, ReadMetrics
from store.decision import inputs_of
from store.decision_policy import Policy
from store.feedback import SECONDS_A_DAY, DecisionRow, RowLog
from store.normalise import key_of
from store.recent import Recent
from store.release import POINTER, OpenRelease, Pointer, ReleaseError, open_release, read_pointer
from supervision.actor import Actor, Sender

log = logging.getLogger("antiphon.fast_answer")

WRITE_EVERY = 0.5
"""Seconds between writes of decision rows: what a kill may cost the log, never a reply."""
REMEMBERED, LONGEST_REMEMBERED = 4096, 256
"""Texts of a generation, and characters of one: the head of the traffic needs no second look."""
RETRY_AFTER = 30.0
"""Seconds until a release that was refused is looked at again, if the pointer stays."""


@frozen
class FastAnswerSettings:
    """What a replica must know. All replicas of an installation have the same."""

    release_root: str
    """The directory of releases and their pointer."""
    feedback_root: str = ""
    """Where decisions are logged; "" logs none."""
    explore: float = field(default=0.0, validator=[ge(0.0), le(1.0)])
    """Share of owners whose answers are decided by a coin, for the decision model to learn from."""
    salt: str = ""
    """Draws the slice; another salt is another slice."""
    follow_every: float = field(default=0.25, validator=gt(0.0))
    """Seconds between looks at the pointer."""


class Outcome(NamedTuple):
    """What becomes of one lookup: `LookedUp` by rows. A tuple, so that rows turn into columns at once."""

    reason: str
    """"" is a hit."""
    entry: str = ""
    packed: bytes = b""
    """As in `Hit`."""
    score: float = 0.0
    propensity: float = 1.0
    arm: str = "policy"
    inputs: tuple[float, ...] = ()
    found: bytes = b""
    """The entry's answer, served or not."""


_SENT = 6
"""Fields of an outcome that its asker gets."""
NO_RELEASE = Outcome("no_release")
TOO_LONG = Outcome("too_long")
MISS = Outcome("miss")


class FastAnswer(Actor):
    """One replica. Up once the active release answers its probe, or once there is none to open."""

    Settings = FastAnswerSettings

    def __init__(self, settings: FastAnswerSettings) -> None:
        self._settings = settings
        self._root = Path(settings.release_root)
        self._release: OpenRelease | None = None
        self._policy = Policy(1.0)
        self._active: Pointer | None = None
        self._seen: tuple[int, int] | None = None
        self._look_again = 0.0
        self._rows: RowLog | None = None
        self._recent: Recent[str, Outcome] = Recent(REMEMBERED, LONGEST_REMEMBERED)
        self._today = 0
        self._decided: Counter[str] = Counter()
        """Lookups by reason; "" is a hit."""
        self.counters: Counter[str] = Counter()

    async def on_start(self) -> None:
        """Open the active release. One that is refused leaves the replica up, declining."""
        if self._settings.feedback_root:
            writer = f"{self.context.name}-{self.context.epoch}"
            self._rows = RowLog(Path(self._settings.feedback_root), "decisions", writer)
            self.context.nursery.start_soon(self._keep_writing, self._rows)
        await self.refresh()
        self.context.nursery.start_soon(self._follow)

    async def on_message(self, message: Any, sender: Sender) -> Any:
        """Answer lookups. Nothing is awaited once they have begun, so no message sees two releases."""
        if isinstance(message, Lookup):
            return self._look_up(message, sender)
        if isinstance(message, LookupMany):
            await trio.lowlevel.checkpoint()  # what the message before found goes out now, not with this
            return self._look_up_many(message)
        return self._metrics() if isinstance(message, ReadMetrics) else None

    async def on_stop(self) -> None:
        """Write what is left of the decisions."""
        if self._rows is not None:
            await self._write(self._rows)

    async def refresh(self) -> None:
        """Open the release the pointer names, if it is another, and let it take over.

        A release that is refused changes nothing: the one that answers goes on. Cancellation: likewise.
        """
        seen = self._signature()
        if seen == self._seen and trio.current_time() < self._look_again:
            return
        self._seen, self._look_again = seen, float("inf")
        try:
            pointer = await trio.to_thread.run_sync(read_pointer, self._root)
            if pointer is not None and (self._active is None or pointer.active != self._active.active):
                opened = await trio.to_thread.run_sync(open_release, self._root, pointer.active)
                self._take_over(opened)
            self._active = pointer or self._active
        except ReleaseError as error:
            self.counters["refused_releases"] += 1
            self._look_again = trio.current_time() + RETRY_AFTER
            log.error("release refused: %s; %s", error, self._serving())  # noqa: TRY400 - the text is the cause

    def _take_over(self, opened: OpenRelease) -> None:
        old, self._release = self._release, opened
        self._recent.clear()
        self._policy = Policy(opened.threshold.threshold, self._settings.explore, self._settings.salt)
        if old is not None:
            old.close()
        self.counters["swaps"] += 1
        log.info("release %s answers: %d questions", opened.version, opened.manifest.keys)

    def _serving(self) -> str:
        return f"release {self._release.version} goes on" if self._release else "no release answers"

    def _signature(self) -> tuple[int, int] | None:
        try:
            found = (self._root / POINTER).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    async def _follow(self) -> None:
        while True:
            await trio.sleep(self._settings.follow_every)
            await self.refresh()

    def _look_up(self, message: Lookup, sender: Sender) -> Hit | Declined:
        if sender.owner and sender.owner != message.owner:
            self._decided["mismatch"] += 1
            return Declined(message.request_id, "mismatch", "", "", 0.0, 0.0, 1.0, "policy")
        rows = None if message.is_probe else self._rows
        (outcome,) = self._outcomes((message.request_id,), (message.owner,), (message.text,), rows)
        release = self._release.version if self._release else ""
        threshold = self._policy.threshold
        reason, entry, packed, score, propensity, arm, _, _ = outcome
        if reason:
            return Declined(message.request_id, reason, release, entry, score, threshold, propensity, arm)
        return Hit(message.request_id, release, entry, packed, score, threshold, propensity, arm)

    def _look_up_many(self, message: LookupMany) -> LookedUp:
        outcomes = self._outcomes(message.request_ids, message.owners, message.texts, self._rows)
        release = self._release.version if self._release else ""
        columns = list(zip(*outcomes, strict=True)) or [()] * len(Outcome._fields)
        return LookedUp(release, self._policy.threshold, *columns[:_SENT])

    def _outcomes(
        self, request_ids: Sequence[str], owners: Sequence[str], texts: Sequence[str], rows: RowLog | None
    ) -> list[Outcome]:
        """Decide every lookup of a batch, and log it."""
        now = time.time()
        if self._release is None:
            outcomes = [NO_RELEASE] * len(texts)
        else:
            outcomes = self._judged(self._release, texts, int(now // SECONDS_A_DAY))
            if self._policy.explore:
                outcomes = [self._drawn(one, owner) for one, owner in zip(outcomes, owners, strict=True)]
        self._decided.update([outcome[0] for outcome in outcomes])
        if rows is not None:
            self._log(rows, now, request_ids, owners, outcomes)
        return outcomes

    def _judged(self, release: OpenRelease, texts: Sequence[str], today: int) -> list[Outcome]:
        """Decide each text by its score alone. What was asked lately is remembered, the rest scored at once."""
        if today != self._today:
            self._recent.clear()
            self._today = today
        recent = self._recent.get_many(texts)
        fresh = [text for text, outcome in zip(texts, recent, strict=True) if outcome is None]
        keys = [key_of(text) for text in fresh]
        entries = release.catalog.find_many(keys)
        rows = [
            inputs_of(entry.features, text, key, today)
            for text, key, entry in zip(fresh, keys, entries, strict=True)
            if key and entry
        ]
        scored = zip(rows, release.scorer.score(rows), strict=True)
        threshold = self._policy.threshold
        made: list[Outcome] = []
        for key, entry in zip(keys, entries, strict=True):
            if entry is None:
                made.append(MISS if key else TOO_LONG)
                continue
            inputs, score = next(scored)
            reason, served = ("", entry.packed) if score >= threshold else ("below_threshold", b"")
            row = (reason, entry.name, served, score, 1.0, "policy", inputs, entry.packed)
            made.append(tuple.__new__(Outcome, row))  # what `Outcome(…)` comes to, in half the time
        self._recent.put_many(fresh, made)
        rest = iter(made)
        return [outcome or next(rest) for outcome in recent]

    def _drawn(self, outcome: Outcome, owner: str) -> Outcome:
        """Decide a found entry again, for one owner: a coin may have the word."""
        if not outcome.entry:
            return outcome
        decision = self._policy.decide(outcome.score, owner, outcome.entry)
        if decision.serve:
            reason, served = "", outcome.found
        else:
            reason, served = "exploration" if decision.arm == "explore" else "below_threshold", b""
        return outcome._replace(
            reason=reason, packed=served, propensity=decision.propensity, arm=decision.arm
        )

    def _log(
        self,
        rows: RowLog,
        now: float,
        request_ids: Sequence[str],
        owners: Sequence[str],
        outcomes: Sequence[Outcome],
    ) -> None:
        version = self._release.version if self._release else ""
        threshold = self._policy.threshold
        rows.add(
            [
                DecisionRow(
                    now,
                    request_id,
                    owner,
                    version,
                    entry,
                    inputs,
                    score,
                    threshold,
                    arm,
                    "decline" if reason else "serve",
                    reason,
                    propensity,
                )
                for request_id, owner, (reason, entry, _, score, propensity, arm, inputs, _) in zip(
                    request_ids, owners, outcomes, strict=True
                )
            ]
        )

    async def _keep_writing(self, rows: RowLog) -> None:
        while True:
            await trio.sleep(WRITE_EVERY)
            await self._write(rows)

    async def _write(self, rows: RowLog) -> None:
        taken = rows.take()
        if not taken:
            return
        try:
            await trio.to_thread.run_sync(rows.write, taken)
        except OSError as error:
            self.counters["lost_rows"] += len(taken)
            log.warning("%d decisions were not logged: %s", len(taken), error)

    def _metrics(self) -> Metrics:
        name = self.context.name
        lines = [
            f'antiphon_fast_answer_lookups_total{{actor="{name}",outcome="{outcome or "hit"}"}} {count}'
            for outcome, count in sorted(self._decided.items())
        ]
        lines += [
            f'antiphon_fast_answer_{what}_total{{actor="{name}"}} {count}'
            for what, count in sorted(self.counters.items())
        ]
        if self._release is not None:
            label = f'actor="{name}",release="{self._release.version}"'
            lines.append(f"antiphon_fast_answer_entries{{{label}}} {self._release.manifest.entries}")
        return Metrics(tuple(lines))
