"""A live turn: from its journalled opening to its last event. What goes wrong in it ends here."""

from __future__ import annotations

import logging
import time

import trio
from attrs import evolve

from actors.bell import Bell
from actors.protocol import (
    Allow,
    ErrorBody,
    TurnDone,
    TurnEvent,
    TurnFailed,
    TurnStatus,
)
from actors.stop_strings import StopStrings
from actors.turn_admission import Admitted, route
from actors.turn_choice import Choice
from actors.turn_errors import SERVER_ERROR, TurnError, first_error
from actors.turn_generation import Generation, Job
from actors.turn_host import Host
from actors.turn_journal import decode_event, encode, event_record
from actors.turn_reader import Reader
from actors.turn_settlement import Settlement, Settling, settlement_of
from actors.turn_text import ChoiceText
from store.journal_records import Close, History, Verdict

log = logging.getLogger(__name__)

CANCELLED = ErrorBody(499, "cancelled", "The turn was cancelled.", code="turn_cancelled")
ABANDONED = ErrorBody(499, "cancelled", "The reader went away, so the turn was ended.", code="turn_abandoned")
TOO_LATE = ErrorBody(504, SERVER_ERROR, "The turn did not end within its deadline.", code="deadline_exceeded")
BROKEN = ErrorBody(500, SERVER_ERROR, "The server failed on this turn.")


class Turn:
    """One turn on its host. `run` is its life; the session hands it tokens, readers, deaths and cancels."""

    def __init__(self, host: Host, admitted: Admitted, created: float) -> None:
        self.host = host
        self.admitted = admitted
        self.created = created
        self.readers: dict[str, Reader] = {}
        self.over = trio.Event()
        """Set when the last event is in the journal."""
        self.is_settling = False
        """The last event is kept back for a moment, so that it finds the limiter's place free."""
        self._sequence = 0
        self._scope = trio.CancelScope()
        self._ending: tuple[TurnStatus, ErrorBody] | None = None
        self._readers_changed = Bell()
        opening = admitted.opening
        self._model = host.models[admitted.model]
        self.choices = [self._make_choice(index) for index in range(opening.n)]

    @property
    def request_id(self) -> str:
        """The turn's name."""
        return self.admitted.opening.request_id

    @property
    def owner(self) -> str:
        """Whose it is."""
        return self.admitted.opening.owner

    def _make_choice(self, index: int) -> Choice:
        opening = self.admitted.opening
        text = ChoiceText(
            opening.request_id,
            index,
            self._model.detokenizer(),
            StopStrings(opening.stop, opening.include_stop),
            self._model.token_bytes,
        )
        job = Job(
            opening.request_id,
            index,
            opening.owner,
            self.admitted.model,
            self.admitted.prompt,
            opening.params,
            self.admitted.allow,
            opening.prompt_cache_key,
            opening.priority,
        )
        generation = Generation(self.host, job, self.admitted.batcher, self._reroute)
        pace = self.host.settings.fast_answer_pace if opening.stream else 0.0
        return Choice(self.host, self, text, generation, self.admitted.hit, pace)

    async def _reroute(self, avoid: tuple[str, ...]) -> str:
        admitted = self.admitted
        routed = await route(self.host, admitted.opening, admitted.model, admitted.prompt, avoid)
        return routed.batcher

    def recall(self, history: History) -> None:
        """Take up what the journal has of the turn, before `run`: a restarted host goes on from there."""
        self._sequence = len(history.events)
        events = [decode_event(record) for record in history.events]
        for index, choice in enumerate(self.choices):
            choice.recall([chunk for chunk in history.chunks if chunk.choice == index], events)

    # ------------------------------------------------------------------ what comes in

    def attach(self, reader: Reader) -> None:
        """Have another reader hear the turn. One that has the same name is replaced."""
        old = self.readers.pop(reader.name, None)
        if old is not None:
            old.leave()
        self.readers[reader.name] = reader
        self._readers_changed.ring()

    def detach(self, reader: Reader) -> None:
        """A reader is gone."""
        if self.readers.get(reader.name) is reader:
            del self.readers[reader.name]
            self._readers_changed.ring()

    def stop(self, status: TurnStatus, error: ErrorBody) -> None:
        """End the turn now. What is out is kept and billed. No-op when it has ended, or is ending."""
        if self._ending is None:
            self._ending = (status, error)
            self._scope.cancel()

    def batcher_down(self, name: str, epoch: int) -> None:
        """An incarnation of an actor is gone."""
        for choice in self.choices:
            choice.generation.batcher_down(name, epoch)

    # ------------------------------------------------------------------ its life

    async def run(self) -> None:
        """Bring the reply about, end the turn exactly once, and settle it.

        No error of the turn leaves here. Cancellation: the journal has what is needed to go on.
        """
        status, last = await self._bring_about()
        for choice in self.choices:
            choice.generation.stop()
        await self._end(status, last)

    async def _bring_about(self) -> tuple[TurnStatus, TurnEvent]:
        opening = self.admitted.opening
        self._scope.deadline = trio.current_time() + max(0.0, self.created + opening.deadline - time.time())
        try:
            with self._scope:
                await self._reply()
                return "completed", self._done()
        except Exception as group:  # noqa: BLE001 - a bug in one turn ends that turn
            return "failed", TurnFailed(0, self._explain(first_error(group)))
        status, error = self._ending or ("failed", TOO_LATE)
        return status, TurnFailed(0, error)

    async def _reply(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_readers)
            async with trio.open_nursery() as choices:
                for choice in self.choices:
                    choices.start_soon(choice.run)
            nursery.cancel_scope.cancel()

    def _done(self) -> TurnDone:
        settlement = self._settlement("completed")
        return TurnDone(0, settlement.usage, settlement.fast_answer)

    def _explain(self, error: BaseException) -> ErrorBody:
        if isinstance(error, TurnError):
            return error.error
        self.host.counters["turn_bugs"] += 1
        log.error("turn %s failed", self.request_id, exc_info=error)
        return BROKEN

    async def _watch_readers(self) -> None:
        """End the turn when nobody has listened for the grace, unless it runs in the background."""
        if self.admitted.opening.background:
            return
        while True:
            if self.readers:
                await self._readers_changed.wait()
                continue
            with trio.move_on_after(self.host.settings.disconnect_grace) as grace:
                await self._readers_changed.wait()
            if grace.cancelled_caught and not self.readers:
                self.host.counters["turns_abandoned"] += 1
                self.stop("incomplete", ABANDONED)

    # ------------------------------------------------------------------ what goes out

    async def emit(
        self, *events: TurnEvent, verdict: Allow | None = None, close: Close | None = None
    ) -> None:
        """Journal events, numbered in order, with the verdict that covers them; then readers hear of them.

        Cancellation: they are journalled and heard all the same.
        """
        numbered = [evolve(event, sequence=self._next_sequence()) for event in events]
        records = [event_record(self.request_id, event) for event in numbered]
        verdicts = [Verdict(self.request_id, verdict.choice, encode(verdict))] if verdict else []
        closes = [close] if close else []
        await self.host.writer.commit(*verdicts, *records, *closes, then=self._tell_readers)

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _tell_readers(self) -> None:
        for reader in self.readers.values():
            reader.news()

    # ------------------------------------------------------------------ its end

    async def _end(self, status: TurnStatus, last: TurnEvent) -> None:
        error = encode(last.error) if isinstance(last, TurnFailed) else b""
        self.host.counters[f"turns_{status}"] += 1
        self.is_settling = True
        await self.emit(last, close=Close(self.request_id, status, time.time(), error))
        self.over.set()
        settling = Settling(self.host, self._settlement(status), settled=False, charged=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(settling.run)
            with trio.move_on_after(self.host.settings.settle_first):
                await settling.settled.wait()
            self.is_settling = False
            self._tell_readers()

    def _settlement(self, status: TurnStatus) -> Settlement:
        admitted = self.admitted
        generations = [choice.generation for choice in self.choices]
        return settlement_of(
            admitted.opening,
            admitted.model,
            len(admitted.prompt),
            [len(generation.tokens) for generation in generations],
            generations[0].cached_tokens,
            status,
            admitted.hit,
        )
