"""The limiter: what each owner may still use, and what is held for the turns that run.

Decisions are made in memory, one at a time (`store.limits`), and answered when they are on disk
(`store.limits_state`), so a killed limiter comes back with every reservation it had granted. What a session
never settles is found by the sweep: a reservation is dropped only when every session host is up, every one
has answered, and none runs its turn.

A key with limits of its own is a scope of its own; all other keys of an account share the account's scope.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import trio
from attrs import frozen

from actors.group_commit import GroupCommit
from actors.limits_wire import headers, refusal
from actors.protocol import (
    LimitExceeded,
    LiveTurnList,
    LiveTurns,
    Metrics,
    OpenReservations,
    ReadMetrics,
    Release,
    ReservationList,
    Reserve,
    Reserved,
    Settle,
    Settled,
)
from actors.turn_errors import overloaded
from store.accounts import Accounts
from store.limits import Denied, Gauge, Limits, Meter, Reservation
from store.limits_state import Change, Closed, Forgotten, Level, LimitsState, Opened, Spent
from supervision.actor import LATER, Actor, Sender
from supervision.errors import AskFailed

log = logging.getLogger(__name__)

_ASK_SESSION = 5.0
"""Seconds a session host has to say which turns it runs."""
_IDS_A_MESSAGE = 1000
_UPKEEP_EVERY = 1.0
_REMEMBER_CLOSED = 600 * 1_000_000_000
"""Nanoseconds for which a closed request is not held for again, should its `Reserve` come late."""
_ENDED = overloaded("This request was ended before it began. Ask again.")
"""Whoever admits a request again after its end must not run it: it would hold nothing."""


@frozen
class LimiterSettings:
    """Limits of an owner without limits of its own, per model; None sets none.

    `state` is a path, `accounts` a path or a database's URL; "" is `limiter.sqlite` and `accounts.sqlite`
    in the state directory. `sweep_every` and `sweep_after` are seconds: how often, and from what age on, open
    reservations are held against the sessions' live turns.
    """

    requests_per_minute: int | None = 60_000
    tokens_per_minute: int | None = 100_000_000
    concurrency: int | None = 2_000
    budget_tokens: int | None = None
    state: str = ""
    accounts: str = ""
    sweep_every: float = 5.0
    sweep_after: float = 10.0


@frozen
class _Act:
    """A decision that is made, waiting to be on disk before it is told."""

    changes: tuple[Change, ...]
    reply: Any
    sender: Sender | None


class Limiter(Actor):
    """Answers `Reserve`, `Settle`, `Release` and `OpenReservations`."""

    Settings: ClassVar[type] = LimiterSettings
    wall: Callable[[], float] = staticmethod(time.time)
    """Unix seconds; read only for what is kept across restarts."""

    def __init__(self, settings: LimiterSettings) -> None:
        self._settings = settings
        self._defaults = Limits(
            settings.requests_per_minute,
            settings.tokens_per_minute,
            settings.concurrency,
            settings.budget_tokens,
        )
        self._meter = Meter()
        self._state: LimitsState
        self._accounts: Accounts
        self._writer: GroupCommit[_Act, None] = GroupCommit(self._write, self._tell, in_thread=False)
        self._restored: frozenset[str] = frozenset()
        self._counts: Counter[str] = Counter()

    async def on_start(self) -> None:
        """Read what the last incarnation kept."""
        await trio.to_thread.run_sync(self._open)
        self._meter = await trio.to_thread.run_sync(self._state.read, self._now(), self._wall_ms())
        self._restored = frozenset(self._meter.open)
        self.context.nursery.start_soon(self._writer.run)
        self.context.nursery.start_soon(self._sweep_for_ever)
        self.context.nursery.start_soon(self._upkeep)

    async def on_message(self, message: Any, sender: Sender) -> Any:
        """Decide now; answer when it is kept."""
        match message:
            case Reserve():
                return self._reserve(message, sender)
            case Settle():
                return self._close(message.request_id, message.owner, message.tokens, sender)
            case Release():
                return self._close(message.request_id, message.owner, 0, sender)
            case OpenReservations():
                return ReservationList(tuple(self._meter.open))
            case ReadMetrics():
                return Metrics(self._metrics())
        return None

    async def on_stop(self) -> None:
        """Keep what was decided."""
        await self._writer.drained()
        self._state.close()
        self._accounts.close()

    def _open(self) -> None:
        state_dir = self.context.state_dir
        self._state = LimitsState(self._settings.state or Path(state_dir) / "limiter.sqlite")
        self._accounts = Accounts(self._settings.accounts or Path(state_dir) / "accounts.sqlite")

    def _reserve(self, message: Reserve, sender: Sender) -> Any:
        scope, limits = self._scope(message)
        now = self._now()
        wanted = Reservation(message.request_id, message.owner, scope, message.model, message.tokens, now)
        is_new = not self._meter.knows(message.request_id)
        if not is_new and message.request_id not in self._meter.open:
            return LimitExceeded(message.request_id, _ENDED)
        denied = self._meter.reserve(wanted, limits)
        gauge = self._meter.gauge(scope, message.model, limits, now)
        if denied is not None:
            return self._deny(message, denied, gauge)
        self._counts["reserved"] += is_new
        changes = (Opened(wanted), self._level(wanted, gauge)) if is_new else ()
        return self._submit(_Act(changes, Reserved(message.request_id, headers(gauge)), sender))

    def _deny(self, message: Reserve, denied: Denied, gauge: Gauge) -> LimitExceeded:
        self._counts[f"denied {denied.what}"] += 1
        error = refusal(denied, message.model, message.tokens, headers(gauge))
        return LimitExceeded(message.request_id, error)

    def _close(self, request_id: str, owner: str, used: int, sender: Sender | None) -> Any:
        held = self._meter.open.get(request_id)
        if held is not None and held.owner != owner:
            log.error("reservation of another owner", extra={"fields": {"request_id": request_id}})
            self._counts["foreign"] += 1
            return Settled(request_id, known=False)
        self._meter.settle(request_id, used, self._now())
        changes: tuple[Change, ...] = (Closed(request_id, self._wall_ms()),)
        if held is not None:
            gauge = self._meter.gauges[held.scope, held.model]
            spent = Spent(held.scope, self._meter.budget(held.scope).spent)
            changes = (*changes, self._level(held, gauge), spent)
        self._counts["closed"] += held is not None
        return self._submit(_Act(changes, Settled(request_id, held is not None), sender))

    def _scope(self, message: Reserve) -> tuple[str, Limits]:
        own = self._accounts.limits_of(message.key_id)
        if own is None:
            return f"owner:{message.owner}", self._defaults
        return f"key:{message.key_id}", own.over(self._defaults)

    def _level(self, held: Reservation, gauge: Gauge) -> Level:
        return Level.of(held.scope, held.model, gauge, self._wall_ms())

    def _submit(self, act: _Act) -> Any:
        self._writer.submit(act)
        self.context.busy(True)
        return LATER if act.sender is not None and act.sender.correlation else None

    def _write(self, acts: Sequence[_Act]) -> list[None]:
        self._state.write([change for act in acts for change in act.changes])
        return [None] * len(acts)

    async def _tell(self, act: _Act, _: None) -> None:
        self.context.progress()
        self.context.busy(self._writer.waiting > 0)
        if act.sender is not None:
            await self.context.reply(act.sender, act.reply)

    async def _upkeep(self) -> None:
        while True:
            await trio.sleep(_UPKEEP_EVERY)
            try:
                if self._state.checkpoint_due:
                    await trio.to_thread.run_sync(self._state.checkpoint)
            except sqlite3.Error:
                log.exception("the limiter's file takes no checkpoint just now")

    async def _sweep_for_ever(self) -> None:
        while True:
            await trio.sleep(self._settings.sweep_every)
            await self._sweep()

    async def _sweep(self) -> None:
        now = self._now()
        aged = set(self._meter.older_than(round(self._settings.sweep_after * 1e9), now))
        suspects = [r for r in self._meter.open if r in aged or r in self._restored]
        if suspects:
            live = await self._live_turns(suspects)
            if live is not None:
                for request_id in suspects:
                    self._drop(request_id, live)
        forgotten = self._meter.forget(now - _REMEMBER_CLOSED, now)
        if forgotten:
            self._submit(_Act((Forgotten(tuple(forgotten)),), None, None))

    def _drop(self, request_id: str, live: frozenset[str]) -> None:
        held = self._meter.open.get(request_id)
        if held is None or request_id in live:
            return
        facts = {"request_id": request_id, "tokens": held.tokens}
        log.warning("reservation nobody runs", extra={"fields": facts})
        self._counts["swept"] += 1
        self._close(request_id, held.owner, 0, None)

    async def _live_turns(self, suspects: list[str]) -> frozenset[str] | None:
        """Ask every session host; None when one is not up, did not answer, or came or went meanwhile."""
        before = self._sessions()
        if not before or any(state != "up" for _, _, state in before):
            return None
        live: set[str] = set()
        for name, _, _ in before:
            for start in range(0, len(suspects), _IDS_A_MESSAGE):
                question = LiveTurns(tuple(suspects[start : start + _IDS_A_MESSAGE]))
                try:
                    answer = await self.context.ask(name, question, timeout=_ASK_SESSION)
                except AskFailed:
                    return None
                if not isinstance(answer, LiveTurnList):
                    return None
                live.update(answer.request_ids)
        return frozenset(live) if self._sessions() == before else None

    def _sessions(self) -> list[tuple[str, int, str]]:
        return sorted(
            (m.name, m.epoch, m.state)
            for m in self.context.tree.members.values()
            if m.name.rpartition(".")[0] == "session"
        )

    def _now(self) -> int:
        return round(trio.current_time() * 1e9)

    def _wall_ms(self) -> int:
        return round(self.wall() * 1000)

    def _metrics(self) -> tuple[str, ...]:
        counts = [
            f'antiphon_limiter_events_total{{event="{name}"}} {count}'
            for name, count in sorted(self._counts.items())
        ]
        held = sum(reservation.tokens for reservation in self._meter.open.values())
        return (
            f"antiphon_limiter_open_reservations {len(self._meter.open)}",
            f"antiphon_limiter_held_tokens {held}",
            *counts,
        )
