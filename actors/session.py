"""The session host: owns the turns of its conversations, each a task that contains its own failures.

Messages are handled one at a time, and quickly: what takes time is a task of a turn. The journal is written
by one task for all turns. A successor reads it in `on_start` and goes on where this incarnation was.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import trio

from actors.breakers import LookupBreakers
from actors.prompt import FileModelText, ModelText
from actors.protocol import (
    Attach,
    CancelTurn,
    Consumed,
    ErrorBody,
    Leave,
    LiveTurnList,
    LiveTurns,
    Metrics,
    OpenTurn,
    ReadMetrics,
    ReadTurn,
    Tokens,
    TurnCancelled,
    TurnEvents,
    TurnFailed,
    TurnOpened,
    TurnRefused,
    TurnStatus,
)
from actors.scripted_engine import BytesText
from actors.turn import BROKEN, CANCELLED, Turn
from actors.turn_admission import admit
from actors.turn_errors import TurnError, first_error, not_found, unavailable
from actors.turn_host import Host, SessionSettings
from actors.turn_journal import JournalWriter, encode, event_record
from actors.turn_reader import Reader
from actors.turn_record import (
    admitted_of,
    opened_of,
    record_of,
    row_of,
    settlement_of_history,
    settlement_of_rows,
)
from actors.turn_returns import Admission, Asker, Earlier
from actors.turn_settlement import Settlement, Settling
from actors.turn_tokens import TokenInlet
from store import journal_records
from store.journal import Journal, JournalError
from supervision.actor import LATER, Actor, Later, Sender
from supervision.errors import AskFailed

log = logging.getLogger(__name__)

UPKEEP_EVERY = 1.0
_LAST_WORDS = 0.02
"""Seconds between looks at who still hears a turn, when the host stops."""
MAX_EXPLAINED = 1024
"""Requests remembered whose failure is in the log already: who asks again is counted, not logged."""

_Request = OpenTurn | Attach | CancelTurn | ReadTurn


class Session(Actor):
    """Answers `OpenTurn`, `Attach`, `CancelTurn`, `ReadTurn`; takes `Tokens`; sends `TurnEvents`."""

    Settings: ClassVar[type] = SessionSettings

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings
        self._host: Host
        self._earlier: Earlier
        self._turns: dict[str, Turn] = {}
        self._settling: set[str] = set()
        """Turns of an earlier incarnation that had ended and still owe."""
        self._readers: dict[tuple[str, str], Reader] = {}
        self._explained: set[str] = set()
        self._inlet: TokenInlet
        self._is_stopping = False

    # ------------------------------------------------------------------ life

    @classmethod
    def prepare(cls, settings: SessionSettings) -> None:
        """Read the tokenizers."""
        if settings.tokenizer == "model":
            for path in settings.models.values():
                FileModelText.load(path)

    async def on_start(self) -> None:
        """Load the tokenizers, open the journal and take up every turn in it."""
        settings, context = self._settings, self.context
        path = settings.journal or context.state_dir / "journal" / f"{context.name}.sqlite"
        journal = Journal(Path(path))
        writer = JournalWriter(journal)
        models = await self._load_models()
        self._host = Host(context, settings, journal, writer, models, LookupBreakers(), Counter())
        self._earlier = Earlier(self._host)
        self._inlet = TokenInlet(self._host, self._turns)
        context.nursery.start_soon(writer.run)
        context.nursery.start_soon(self._upkeep)
        for history in journal.unfinished():
            self._take_up(history)

    async def _load_models(self) -> dict[str, ModelText]:
        if self._settings.tokenizer == "bytes":
            return {name: BytesText() for name in self._settings.models}
        return {
            name: await trio.to_thread.run_sync(FileModelText.load, path)
            for name, path in self._settings.models.items()
        }

    def _take_up(self, history: journal_records.History) -> None:
        request_id = history.turn.opening.request_id
        if history.turn.finished is not None:
            self._settling.add(request_id)
            self.context.nursery.start_soon(self._settle, history, history.turn.status)
            return
        self._host.counters["turns_resumed"] += 1
        try:
            turn = self._resumed(history)
        except Exception:
            log.exception("turn %s cannot be resumed", request_id)
            self._host.counters["turns_set_aside"] += 1
            self._settling.add(request_id)
            self.context.nursery.start_soon(self._give_up, history)
            return
        self._turns[request_id] = turn
        self.context.nursery.start_soon(self._live, turn)

    def _resumed(self, history: journal_records.History) -> Turn:
        self._must_be_whole(history)
        turn = Turn(self._host, admitted_of(history.turn), history.turn.opening.created)
        turn.recall(history)
        return turn

    async def _give_up(self, history: journal_records.History) -> None:
        """End a turn that this incarnation cannot go on with.

        Its model is gone, it breaks our code, or its rows do not decode: so only what is certain is read.
        """
        request_id = history.turn.opening.request_id
        last = TurnFailed(max((e.sequence for e in history.events), default=0) + 1, BROKEN)
        close = journal_records.Close(request_id, "failed", time.time(), encode(BROKEN))
        await self._host.writer.commit(event_record(request_id, last), close)
        for key, reader in self._readers.items():
            if key[0] == request_id:
                reader.news()
        await self._settle(history, "failed")

    async def _settle(self, history: journal_records.History, status: str) -> None:
        turn, request_id = history.turn, history.turn.opening.request_id
        try:
            settlement = self._owed(history, cast("TurnStatus", status))
            await Settling(self._host, settlement, settled=turn.settled, charged=turn.charged).run()
        except Exception:
            self._host.counters["turn_bugs"] += 1
            log.exception("turn %s could not be settled; the next incarnation tries again", request_id)
        else:
            self._settling.discard(request_id)

    def _owed(self, history: journal_records.History, status: TurnStatus) -> Settlement:
        try:
            self._must_be_whole(history)
            return settlement_of_history(history, status)
        except Exception:
            log.exception("turn %s is settled by what can be read of it", history.turn.opening.request_id)
            self._host.counters["turns_settled_by_rows"] += 1
            return settlement_of_rows(history, status)

    def _must_be_whole(self, history: journal_records.History) -> None:
        if history.is_damaged:
            raise JournalError(f"{self._host.journal.path}: rows of the turn do not decode")

    async def on_stop(self) -> None:
        """Take no new turns; let those that are heard end. The rest goes on in the next incarnation."""
        self._is_stopping = True
        while heard := [turn for turn in self._turns.values() if turn.readers]:
            await heard[0].over.wait()
            await trio.sleep(_LAST_WORDS)

    async def _upkeep(self) -> None:
        journal = self._host.journal
        while True:
            await trio.sleep(UPKEEP_EVERY)
            try:
                if journal.checkpoint_due:
                    await trio.to_thread.run_sync(journal.checkpoint)
                journal.forget(time.time() - self._settings.retention)
            except JournalError:
                log.exception("%s", self.context.name)

    # ------------------------------------------------------------------ messages

    async def on_message(self, message: Any, sender: Sender) -> Any:
        """React to one message. What goes wrong with one request is told to its asker, and ends nothing else.

        Not so with `Tokens`: what was not written here of them, only a successor gets again.
        """
        match message:
            case Tokens():
                self._inlet.take(message, (sender.name, sender.epoch))
            case Consumed() | Leave():
                self._take_word(message)
            case OpenTurn() | Attach() | CancelTurn() | ReadTurn():
                try:
                    return self._serve(message, sender)
                except Exception as error:  # noqa: BLE001 - the asker repeats it: it would end every incarnation
                    self._explain(message.request_id, error)
                    return TurnRefused(BROKEN)
            case LiveTurns():
                live = {*self._turns, *self._settling, *self._earlier.admissions}
                return LiveTurnList(tuple(i for i in message.request_ids if i in live))
            case ReadMetrics():
                return Metrics(self._metrics())
        return None

    def _serve(self, message: _Request, sender: Sender) -> Any:
        match message:
            case OpenTurn():
                return self._open(message, sender)
            case Attach():
                return self._attach(message, sender)
            case CancelTurn():
                return self._cancel(message, sender)
            case ReadTurn():
                history = self._host.journal.history(message.owner, message.request_id)
                return record_of(history) if history else TurnRefused(not_found(message.request_id))

    def _explain(self, request_id: str, error: Exception) -> None:
        """Count a request that failed, and say why in the log, once for each turn."""
        self._host.counters["requests_failed"] += 1
        if request_id in self._explained:
            return
        if len(self._explained) >= MAX_EXPLAINED:
            self._explained.clear()
        self._explained.add(request_id)
        log.error("a request for turn %s failed", request_id, exc_info=error)

    def _take_word(self, message: Consumed | Leave) -> None:
        reader = self._readers.get((message.request_id, message.reader or message.request_id))
        if reader is None:
            return
        if isinstance(message, Consumed):
            reader.consumed(message.through)
        else:
            reader.leave()

    async def on_cancel(self, sender: Sender) -> None:
        """The edge no longer waits for its answer."""
        self._forget_askers(lambda asker: asker.sender == sender)

    async def on_down(self, name: str, epoch: int) -> None:
        """A batcher's turns go elsewhere, an edge's readers are gone."""
        for turn in self._turns.values():
            turn.batcher_down(name, epoch)
        for reader in list(self._readers.values()):
            if reader.edge == (name, epoch):
                reader.leave()
        self._forget_askers(lambda asker: (asker.sender.name, asker.sender.epoch) == (name, epoch))

    def _forget_askers(self, is_gone: Callable[[Asker], bool]) -> None:
        """Some askers are gone; a turn that is not open yet is dropped with its last one."""
        for request_id, admission in list(self._earlier.admissions.items()):
            admission.askers = [asker for asker in admission.askers if not is_gone(asker)]
            if not admission.askers and not admission.is_opening:
                del self._earlier.admissions[request_id]
                admission.scope.cancel()

    # ------------------------------------------------------------------ opening

    def _open(self, opening: OpenTurn, sender: Sender) -> TurnRefused | Later | TurnOpened:
        request_id, journal = opening.request_id, self._host.journal
        waiting = self._earlier.admissions.get(request_id)
        if waiting is not None and waiting.opening.owner == opening.owner:
            waiting.askers.append(Asker(sender, request_id, replayed=False))
            return LATER
        if waiting is not None or journal.taken(request_id):
            turn = journal.turn(opening.owner, request_id)
            return (
                self._join(turn, sender, request_id, 0, replayed=False)
                if turn
                else TurnRefused(not_found(request_id))
            )
        earlier = self._earlier.find(opening, time.time())
        return self._begin(opening, sender) if earlier is None else self._return(opening, earlier, sender)

    def _return(
        self, opening: OpenTurn, earlier: Admission | journal_records.Turn | ErrorBody, sender: Sender
    ) -> TurnRefused | Later | TurnOpened:
        """Answer a request that comes back to an earlier one."""
        if isinstance(earlier, ErrorBody):
            return TurnRefused(earlier)
        self._host.counters["turns_replayed"] += 1
        if isinstance(earlier, Admission):
            earlier.askers.append(Asker(sender, opening.request_id, replayed=True))
            return LATER
        return self._join(earlier, sender, opening.request_id, 0, replayed=True)

    def _begin(self, opening: OpenTurn, sender: Sender) -> TurnRefused | Later:
        open_here = len(self._turns) + len(self._earlier.admissions)
        if self._is_stopping or self._host.writer.stalled or open_here >= self._settings.max_turns:
            return TurnRefused(unavailable("This server takes no more turns just now. Try again.").error)
        admission = Admission(opening, [Asker(sender, opening.request_id, replayed=False)])
        self._earlier.admissions[opening.request_id] = admission
        self.context.nursery.start_soon(self._admit, admission)
        return LATER

    async def _admit(self, admission: Admission) -> None:
        request_id = admission.opening.request_id
        try:
            with admission.scope:
                admitted = await admit(self._host, admission.opening)
            if admission.scope.cancelled_caught:
                return
            turn = Turn(self._host, admitted, time.time())
            row = journal_records.Turn(row_of(admitted, turn.created))
        except Exception as group:  # noqa: BLE001 - a bug in one turn ends that turn
            self._earlier.admissions.pop(request_id, None)
            await self._refuse(admission, first_error(group))
            return
        admission.is_opening = True
        await self._host.writer.commit(row.opening, then=partial(self._opened, turn))
        for asker in admission.askers:
            await self.context.reply(asker.sender, opened_of(row, after=0, replayed=asker.replayed))
            self._listen(row, asker.sender, asker.reader, 0)
        await trio.lowlevel.checkpoint()  # the replies leave before the work begins
        await self._live(turn)

    def _opened(self, turn: Turn) -> None:
        """The opening is in the journal: from now on the turn is found there, and nowhere else."""
        del self._earlier.admissions[turn.request_id]
        self._turns[turn.request_id] = turn

    async def _refuse(self, admission: Admission, error: BaseException) -> None:
        if not isinstance(error, TurnError):
            self._host.counters["turn_bugs"] += 1
            log.error("turn %s failed at its opening", admission.opening.request_id, exc_info=error)
        body = error.error if isinstance(error, TurnError) else BROKEN
        self._host.counters["turns_refused"] += 1
        for asker in admission.askers:
            await self.context.reply(asker.sender, TurnRefused(body))

    async def _live(self, turn: Turn) -> None:
        try:
            await turn.run()
        except Exception:
            self._host.counters["turn_bugs"] += 1
            log.exception("turn %s could not be ended; the next incarnation tries again", turn.request_id)
        finally:
            self._turns.pop(turn.request_id, None)

    # ------------------------------------------------------------------ coming back

    def _attach(self, message: Attach, sender: Sender) -> Any:
        turn = self._host.journal.turn(message.owner, message.request_id)
        if turn is None:
            return TurnRefused(not_found(message.request_id))
        reader = message.reader or message.request_id
        return self._join(turn, sender, reader, message.after, replayed=True)

    def _join(
        self, turn: journal_records.Turn, sender: Sender, reader: str, after: int, *, replayed: bool
    ) -> TurnOpened:
        """Return the reply, and have the reader hear the turn after it: its task begins later."""
        self._listen(turn, sender, reader, after)
        return opened_of(turn, after=after, replayed=replayed)

    def _listen(self, turn: journal_records.Turn, sender: Sender, name: str, after: int) -> None:
        row = turn.opening
        key = (row.request_id, name)
        old = self._readers.pop(key, None)
        if old is not None:
            old.leave()
        if turn.finished is not None and not self._host.journal.events(row.owner, row.request_id, after):
            return  # it has heard all of it, and would wait here for ever
        live = self._turns.get(row.request_id)
        edge = (sender.name, sender.epoch)
        reader = Reader(
            self._host,
            row.owner,
            row.request_id,
            name,
            edge,
            after,
            lambda: live is not None and live.is_settling,
        )
        self._readers[key] = reader
        if live is not None:
            live.attach(reader)
        self.context.nursery.start_soon(self._read, reader, live)

    async def _read(self, reader: Reader, live: Turn | None) -> None:
        try:
            await reader.run()
        except Exception as error:  # noqa: BLE001 - one reader's fault, who would come back to the next incarnation
            self._explain(reader.request_id, error)
            await self._break_off(reader)
        finally:
            if self._readers.get((reader.request_id, reader.name)) is reader:
                del self._readers[reader.request_id, reader.name]
            if live is not None:
                live.detach(reader)

    async def _break_off(self, reader: Reader) -> None:
        """Tell a reader that it hears no more, in place of its next event. One that is not reached asks again."""
        name, epoch = reader.edge
        last = TurnEvents(reader.request_id, (TurnFailed(reader.sent + 1, BROKEN),), (), reader.name)
        try:
            await self.context.tell(name, last, to_epoch=epoch, owner=reader.owner)
        except AskFailed as error:
            log.info("reader %s of turn %s was not told: %s", reader.name, reader.request_id, error)

    def _cancel(self, message: CancelTurn, sender: Sender) -> Any:
        turn = self._turns.get(message.request_id)
        if turn is not None and turn.owner == message.owner:
            turn.stop("cancelled", CANCELLED)
            self.context.nursery.start_soon(self._confirm_cancel, turn, sender)
            return LATER
        if self._host.journal.turn(message.owner, message.request_id) is None:
            return TurnRefused(not_found(message.request_id))
        return TurnCancelled(message.request_id)

    async def _confirm_cancel(self, turn: Turn, sender: Sender) -> None:
        await turn.over.wait()
        await self.context.reply(sender, TurnCancelled(turn.request_id))

    # ------------------------------------------------------------------ figures

    def _metrics(self) -> tuple[str, ...]:
        name = self.context.name
        gauges = {
            "turns_open": len(self._turns),
            "turns_being_admitted": len(self._earlier.admissions),
            "readers": len(self._readers),
        }
        lines = [f'antiphon_session_{key}{{actor="{name}"}} {value}' for key, value in sorted(gauges.items())]
        counters = {"safety_check_skipped": 0, **self._host.counters}
        lines += [
            f'antiphon_session_{key}_total{{actor="{name}"}} {value}'
            for key, value in sorted(counters.items())
        ]
        return tuple(lines)
