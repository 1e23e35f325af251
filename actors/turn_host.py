"""What the turns of one session host share, and how they ask until it works."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import trio
from attrs import define, field, frozen

from actors.breakers import LookupBreakers
from actors.prompt import ModelText
from actors.protocol import CancelGeneration, GenerationCancelled
from actors.turn_journal import JournalWriter
from store.journal import Journal
from supervision.actor import Context
from supervision.errors import ActorDown, AskFailed

log = logging.getLogger(__name__)
T = TypeVar("T")

_PAUSE_FIRST = 0.01
_PAUSE_LAST = 0.25
"""Seconds between rounds of asking, doubled from first to last: a restart takes a few tenths."""


@frozen
class SessionSettings:
    """Durations in seconds. `models` maps names to files or directories, `aliases` other names to them."""

    models: Mapping[str, str]
    aliases: Mapping[str, str] = field(factory=dict)
    journal: str = ""
    """Path of the journal; "" is `journal/<actor's name>.sqlite` under the state directory."""
    tokenizer: Literal["model", "bytes"] = "model"
    """`bytes` is the scripted engine's: one token for each byte of UTF-8."""
    disconnect_grace: float = 10.0
    window_bytes: int = 256 * 1024
    """Bytes of events that may be on their way to a reader that has not said it consumed them."""
    fast_answer_within: float = 0.15
    """What a turn may lose to the catalog is 200 ms; the rest of it is the clock's and the scheduler's."""
    fast_answer_pace: float = 0.0
    """Characters a second of a catalog's answer that is streamed; 0 gives it at once."""
    ask_timeout: float = 2.0
    """One ask to limiter, router or books."""
    admission_patience: float = 5.0
    """How long admission waits for an actor that is down before it refuses with 503."""
    safety_timeout: float = 2.0
    """One ask to a checker; then the next one is asked."""
    safety_patience: float = 8.0
    """How long text waits for a checker before the turn fails."""
    batcher_patience: float = 60.0
    """How long a turn waits for a batcher to be up; loading a model takes a while."""
    generate_timeout: float = 30.0
    """One ask to a batcher, which answers between two steps."""
    silence: float = 15.0
    """A batcher that has said nothing of a generation for this long is asked again."""
    settle_first: float = 0.25
    """How long the last event waits for the limiter, so that a caller who asks again finds its place free."""
    retention: float = 86400.0
    """How long a finished turn can be read."""
    retry_window: float = 600.0
    """How long after its end a turn answers an SDK's retry."""
    max_turns: int = 4096
    """Turns at once; more are refused with 503."""


class Unavailable(Exception):
    """Nobody gave the answer in time; `reasons` says what became of the last asks."""

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        super().__init__(f"{what} is unavailable: {'; '.join(reasons) or 'none is up'}")


@define
class Host:
    """Made once by the session actor; every turn holds it."""

    context: Context
    settings: SessionSettings
    journal: Journal
    writer: JournalWriter
    models: Mapping[str, ModelText]
    breakers: LookupBreakers
    counters: Counter[str] = field(factory=Counter)
    rooms: dict[str, int] = field(factory=dict)
    """Tokens that a request may have, by model: as the batcher that was routed to last had room for."""
    quarantine: trio.Lock = field(factory=trio.Lock)
    """Held by the one generation that is under suspicion of killing batchers, until it gives a token."""

    def model_name(self, name: str) -> str:
        """Return the model that a request's `model` means: an alias's target, or the name itself."""
        return self.settings.aliases.get(name, name)

    async def ask_until(
        self,
        candidates: Callable[[], Sequence[str]],
        message: Any,
        answer: type[T] | tuple[type[T], ...],
        *,
        patience: float,
        owner: str,
        timeout: float | None = None,
        accept: Callable[[T], bool] = lambda _: True,
        max_deaths: int = 0,
    ) -> T:
        """Ask the candidates in turn, again and again, until one gives an acceptable answer.

        Only for messages that may be repeated. Raises `Unavailable` when `patience` seconds have passed, or
        `max_deaths` (0: any number) of those asked died of it. Cancellation: what was asked is unknown.
        """
        deadline = trio.current_time() + patience
        pause, deaths = _PAUSE_FIRST, 0
        while True:
            reasons = []
            for name in candidates():
                within = min(timeout or self.settings.ask_timeout, max(0.01, deadline - trio.current_time()))
                was_up = self.context.tree.epoch(name) > 0
                try:
                    reply = await self.context.ask(name, message, timeout=within, owner=owner)
                except AskFailed as error:
                    deaths += was_up and isinstance(error, ActorDown)
                    reasons.append(str(error))
                else:
                    if isinstance(reply, answer) and accept(reply):
                        return reply
                    self.counters["bad_replies"] += 1
                    reasons.append(f"{name} answered {type(reply).__name__}, which does not fit")
                if max_deaths and deaths >= max_deaths:
                    raise Unavailable(type(message).__name__, reasons)
            if trio.current_time() + pause >= deadline:
                raise Unavailable(type(message).__name__, reasons)
            await self.context.pause(pause)
            pause = min(2 * pause, _PAUSE_LAST)

    def cancel_generation(self, generation: str, batcher: str, epoch: int, owner: str) -> None:
        """Have a batcher stop a generation, in a task of the host: until it says so, or is gone."""
        self.context.nursery.start_soon(self.stop_generation, generation, batcher, epoch, owner)

    async def stop_generation(self, generation: str, batcher: str, epoch: int, owner: str) -> None:
        """Return when the generation holds no slot any more: stopped, or its batcher is gone."""
        pause = _PAUSE_FIRST
        while self.context.tree.epoch(batcher) == epoch:
            try:
                reply = await self.context.ask(
                    batcher,
                    CancelGeneration(generation),
                    timeout=self.settings.generate_timeout,
                    to_epoch=epoch,
                    owner=owner,
                )
            except AskFailed as error:
                log.info("cancelling %s: %s", generation, error)
            else:
                if isinstance(reply, GenerationCancelled):
                    return
            await self.context.pause(pause)
            pause = min(2 * pause, _PAUSE_LAST)
