"""The edge's side of every turn: opening, listening, attaching again, leaving."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from uuid import uuid4

import trio
from attrs import frozen

from actors.edge import hosts
from actors.edge.errors import ApiError, internal, not_found, overloaded
from actors.edge.tracing import Trace
from actors.edge.turn_reader import TurnReader
from actors.protocol import (
    Attach,
    CancelTurn,
    Consumed,
    ErrorBody,
    Leave,
    OpenTurn,
    ReadTurn,
    TurnEvents,
    TurnOpened,
    TurnRecord,
    TurnRefused,
)
from supervision.actor import Context
from supervision.errors import ActorDown, AskFailed, Busy, DeadlineExceeded, Refused

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.5
MOST_FRUITLESS = 1000
"""Attaches in a row that brought nothing, at most twice a second; then the client is told."""
ATTACH_SECONDS = 2.0
"""One try at attaching. A host answers that from its memory or its journal."""


@frozen
class Patience:
    """How long the edge waits for the session hosts, in seconds."""

    admission: float = 30.0
    """For the answer to `OpenTurn`, restarts of the host included."""
    host: float = 5.0
    """For a host that is down when a turn is to be opened on it."""
    reattach: float = 10.0
    """For a host that died with a stream open, before the client gets an error."""
    read: float = 5.0
    """For `ReadTurn` and `CancelTurn`."""


class Turns:
    """All turns that clients of this edge listen to.

    Owned by the edge's event loop: no method but the `async` ones waits, so no state here is ever half
    changed.
    """

    def __init__(self, context: Context, patience: Patience, window: int) -> None:
        self._context = context
        self._patience = patience
        self._window = window
        self._readers: dict[str, TurnReader] = {}
        self.reattached = 0
        self.broken = 0
        self.duplicates = 0
        """Events that came twice and were dropped, of readers that are closed."""

    # ---------------------------------------------------------------- the mailbox's side

    def on_events(self, message: TurnEvents) -> None:
        """Hand events to the reader they are for. Late ones, for a reader that is gone, are dropped."""
        reader = self._readers.get(message.reader or message.request_id)
        if reader is not None:
            reader.feed(message.events)

    def on_down(self, name: str) -> None:
        """A session host died: every reader of its turns attaches again."""
        for reader in self.readers():
            if reader.host == name:
                reader.lose_host()

    def readers(self) -> Iterator[TurnReader]:
        """Iterate over the open readers."""
        return iter(list(self._readers.values()))

    def end_all(self, error: ErrorBody) -> None:
        """End every stream with this error, as the edge stops."""
        for reader in self.readers():
            reader.break_off(error)

    # ---------------------------------------------------------------- opening

    async def open(self, request: OpenTurn, host: str) -> tuple[TurnOpened, TurnReader]:
        """Open a turn on `host` and listen to it. `close` the reader when its request ends.

        Repeats the ask while the host is restarting: the request id makes that the same turn. Raises
        `ApiError`: what the session refused with, or 503 when it did not answer in time. Cancellation: the
        host is told that the reader left, in case it had accepted.
        """
        reader = self._listen(request.request_id, request.request_id, request.owner, host)
        try:
            reply = await self._ask_open(request, host)
        except BaseException:
            self.close(reader)
            raise
        if isinstance(reply, TurnRefused):
            reader.host = ""  # nothing to leave there
            self.close(reader)
            Trace.of(request).refused(reply.error)
            raise ApiError(reply.error)
        reader.request_id = reply.request_id
        reader.trace = Trace.of(request, reply.request_id)
        reader.trace.opened()
        return reply, reader

    def _listen(self, name: str, request_id: str, owner: str, host: str) -> TurnReader:
        reader = self._readers[name] = TurnReader(name, request_id, owner, host, limit=self._window)
        return reader

    async def _ask_open(self, request: OpenTurn, host: str) -> TurnOpened | TurnRefused:
        give_up = trio.current_time() + self._patience.admission
        pause, refusals = FIRST_PAUSE, 0
        while True:
            await self._until_up(host)
            try:
                reply = await self._context.ask(
                    host, request, timeout=max(give_up - trio.current_time(), 0.001), owner=request.owner
                )
            except Busy:
                raise overloaded("The server is overloaded: try again in a moment.") from None
            except DeadlineExceeded:
                raise overloaded("The server did not accept the request in time.") from None
            except ActorDown:
                pass
            except Refused as error:
                refusals += 1
                if refusals > 2:
                    log.warning("OpenTurn refused by %s: %s", host, error.reason)
                    raise internal() from None
            else:
                return _expect(reply, TurnOpened)
            await self._context.pause(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
            if trio.current_time() >= give_up:
                raise overloaded("The server is restarting: try again in a moment.")

    async def _until_up(self, host: str) -> None:
        give_up = trio.current_time() + self._patience.host
        while not self._context.tree.epoch(host):
            if trio.current_time() >= give_up:
                raise overloaded("The server is starting: try again in a moment.")
            await self._context.pause(FIRST_PAUSE)

    # ---------------------------------------------------------------- listening

    async def attach(self, request_id: str, owner: str) -> tuple[TurnOpened, TurnReader]:
        """Listen to a turn that is there, from its first event. Raises 404 when this owner has none."""
        give_up = trio.current_time() + self._patience.read
        reader = self._listen(f"{self._context.name}/{uuid4()}", request_id, owner, "")
        try:
            while True:
                found, unsure = await self._try_attach(reader)
                if found is not None:
                    return found, reader
                await self._pause(request_id, give_up, unsure=unsure)
        except BaseException:
            self.close(reader)
            raise

    async def passed_on(self, reader: TurnReader, sequence: int) -> None:
        """The client's socket took everything up to `sequence`."""
        reader.passed = sequence
        await self._tell(reader.host, Consumed(reader.request_id, sequence, reader.name), reader.owner)

    def mend(self, reader: TurnReader) -> None:
        """Attach again in the background: events are missing, or none came for long (a tell can be lost)."""
        if not (reader.recovering or reader.ended):
            reader.recovering = True
            self._context.nursery.start_soon(self._recover, reader)

    async def _recover(self, reader: TurnReader) -> None:
        await self._slow_down(reader)
        give_up = trio.current_time() + self._patience.reattach
        pause, refusals = FIRST_PAUSE, 0
        while not reader.ended and self._is_open(reader):
            found, unsure = await self._try_attach(reader)
            if found is not None:
                self.reattached += 1
                break
            refusals += not unsure
            if refusals >= 3 or trio.current_time() >= give_up:
                self.broken += 1
                reader.break_off(overloaded("The reply was interrupted: ask for it again.").body)
                break
            await self._context.pause(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
        reader.recovering = False
        reader.wake()

    async def _slow_down(self, reader: TurnReader) -> None:
        """Wait the longer, the more attaches in a row brought nothing: a gap may be there for good."""
        reader.fruitless = reader.fruitless + 1 if reader.received == reader.attached_at else 0
        reader.attached_at = reader.received
        if reader.fruitless > MOST_FRUITLESS:
            self.broken += 1
            reader.break_off(overloaded("The reply cannot be read any further: ask for it again.").body)
        elif reader.fruitless:
            await trio.sleep(min(FIRST_PAUSE * 2 ** min(reader.fruitless, 10), LONGEST_PAUSE))

    async def _try_attach(self, reader: TurnReader) -> tuple[TurnOpened | None, bool]:
        """Ask every host that may have the turn. Second value: some did not answer, so it may be there."""
        order = hosts.for_request(self._context.tree, reader.request_id)
        unsure = not order
        for host in sorted(order, key=lambda name: name != reader.host):
            reader.missing = False
            attach = Attach(reader.request_id, reader.owner, reader.received, reader.name)
            try:
                reply = await self._context.ask(host, attach, timeout=ATTACH_SECONDS, owner=reader.owner)
            except AskFailed:
                unsure = True
                continue
            if isinstance(reply, TurnOpened):
                reader.host = host
                return reply, False
            unsure = unsure or not (isinstance(reply, TurnRefused) and reply.error.status == 404)
        reader.missing = True
        return None, unsure

    # ---------------------------------------------------------------- reading and ending

    async def read(self, request_id: str, owner: str) -> TurnRecord:
        """Return what is known of a turn. Raises `ApiError`: 404, or 503 while its host is restarting."""
        return _expect_record(await self._ask_any(ReadTurn(request_id, owner), request_id, owner))

    async def cancel(self, request_id: str, owner: str) -> None:
        """End a turn now. Raises `ApiError` as `read` does."""
        await self._ask_any(CancelTurn(request_id, owner), request_id, owner)

    async def _ask_any(self, message: ReadTurn | CancelTurn, request_id: str, owner: str) -> object:
        give_up = trio.current_time() + self._patience.read
        while True:
            unsure = False
            for host in hosts.for_request(self._context.tree, request_id):
                try:
                    reply = await self._context.ask(host, message, timeout=ATTACH_SECONDS, owner=owner)
                except AskFailed:
                    unsure = True
                    continue
                if not isinstance(reply, TurnRefused):
                    return reply
                if reply.error.status != 404:
                    raise ApiError(reply.error)
            await self._pause(request_id, give_up, unsure=unsure)

    async def _pause(self, request_id: str, give_up: float, *, unsure: bool) -> None:
        """Wait before the hosts are asked again. Raises 404 when all of them answered, 503 in the end."""
        if not unsure:
            raise not_found(f"Response with id 'resp_{request_id}' not found.")
        if trio.current_time() >= give_up:
            raise overloaded("The server is restarting: try again in a moment.")
        await self._context.pause(FIRST_PAUSE)

    def close(self, reader: TurnReader) -> None:
        """Stop listening; the session host is told, unless the client has the whole turn.

        Never waits, so it is safe in the `finally` of a cancelled request. Closing twice does nothing.
        """
        if self._readers.get(reader.name) is not reader:
            return
        del self._readers[reader.name]
        self.duplicates += reader.duplicates
        if reader.trace is not None and reader.cut_off:
            reader.trace.cut_off(reader.cut_off)
        whole = reader.ended and reader.broken is None and reader.passed >= reader.received
        if not whole and reader.host:
            leave = Leave(reader.request_id, reader.name)
            self._context.nursery.start_soon(self._tell, reader.host, leave, reader.owner)

    def _is_open(self, reader: TurnReader) -> bool:
        return self._readers.get(reader.name) is reader

    async def _tell(self, host: str, message: Consumed | Leave, owner: str) -> None:
        """Tell a host something that it may as well not hear."""
        try:
            await self._context.tell(host, message, owner=owner)
        except AskFailed as error:
            log.debug("%s to %s was not sent: %s", type(message).__name__, host, error.reason)


def _expect(reply: object, kind: type[TurnOpened]) -> TurnOpened | TurnRefused:
    if isinstance(reply, kind | TurnRefused):
        return reply
    log.error("expected %s, got %s", kind.__name__, type(reply).__name__)
    raise internal()


def _expect_record(reply: object) -> TurnRecord:
    if isinstance(reply, TurnRecord):
        return reply
    log.error("expected a TurnRecord, got %s", type(reply).__name__)
    raise internal()
