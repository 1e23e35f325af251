"""The loop that makes an `Actor` live on a `Mailbox`: it sorts what comes in and calls the behaviour."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import trio

from supervision import wire
from supervision.actor import LATER, Actor, Sender
from supervision.context import ActorContext
from supervision.envelope import Envelope, Role
from supervision.inbox import CAPACITY, Arrived, Down, Inbox
from supervision.mailbox import Mailbox
from supervision.tree import Tree

_TURN = 64
"""Messages handled before the actor's task yields, so that its sockets are served."""

_FLUSH = 1.0
"""Seconds the last words of an actor that stopped in order may take to leave."""


class Runtime:
    """One incarnation of one actor. `push` and `stop` are called from the same trio loop.

    The inbox is bounded: asks past its capacity are refused with `Busy`; tells stay with their senders,
    for the mailbox is left unread, unless the actor itself waits for a reply.
    """

    def __init__(
        self,
        actor: Actor,
        mailbox: Mailbox,
        *,
        name: str,
        epoch: int,
        tree: Tree | None = None,
        state_dir: Path = Path(),
        files: Mapping[str, int] | None = None,
        capacity: int = CAPACITY,
    ) -> None:
        self.actor = actor
        self.mailbox = mailbox
        self.inbox = Inbox(capacity)
        self.context = ActorContext(
            mailbox,
            self.inbox,
            name=name,
            epoch=epoch,
            tree=tree or Tree(),
            state_dir=state_dir,
            files=files or {},
        )
        self.ready = trio.Event()
        self._starting = trio.CancelScope()
        self._grace = math.inf
        self._stopping = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Live: started when `on_start` returns, over when `on_stop` does.

        An exception of the behaviour, or of a task in its nursery, comes out in an `ExceptionGroup`.
        Cancellation: the incarnation ends where it stands, as if killed; `on_stop` is not called.
        """
        self.actor.context = self.context
        async with trio.open_nursery() as spine:
            spine.start_soon(self._read)
            spine.start_soon(self.context.alarms.run)
            async with trio.open_nursery() as nursery:
                self.context.nursery = nursery
                with self._starting:
                    await self.actor.on_start()
                if not self._starting.cancelled_caught:
                    self.ready.set()
                    task_status.started()
                    nursery.start_soon(self._work)
                    await self._drain()
                nursery.cancel_scope.cancel()
            with trio.move_on_after(min(_FLUSH, self._grace)):
                await self.mailbox.flush()
            spine.cancel_scope.cancel()

    async def _drain(self) -> None:
        await self._stopping.wait()
        with trio.move_on_after(self._grace):
            await self.actor.on_stop()

    def stop(self, grace: float) -> None:
        """Begin the orderly stop: cancel an `on_start` that still runs, or give `on_stop` `grace` seconds."""
        self._grace = min(self._grace, grace)
        self._starting.cancel()
        self._stopping.set()

    def push(self, tree: Tree) -> None:
        """Take the supervisor's newest tree; an older one is ignored."""
        for name, epoch in self.context.push(tree):
            self.inbox.put(Down(name, epoch))

    @property
    def depth(self) -> int:
        """Messages waiting for the actor."""
        return len(self.inbox)

    async def _read(self) -> None:
        inbox, slots = self.inbox, self.context.slots
        while True:
            await inbox.wait_room(must_read=len(slots) > 0)
            data = await self.mailbox.receive()
            try:
                envelopes = wire.decode(data)
            except wire.MalformedFrame:
                self.context.dead_letters.note("frame")
                continue
            for envelope in envelopes:
                self._sort(envelope)

    def _sort(self, envelope: Envelope) -> None:
        role = envelope.role
        if role <= Role.ASK:
            self._accept(envelope)
        elif role == Role.REPLY:
            self.context.take_reply(envelope)
        elif role == Role.REFUSAL:
            self.context.take_refusal(envelope)
        else:
            self._cancel(envelope)

    def _accept(self, envelope: Envelope) -> None:
        context, inbox = self.context, self.inbox
        if envelope.to_epoch != context.epoch or envelope.to != context.name:
            self._turn_away(envelope, "stale", f"{context.name} is at epoch {context.epoch}")
        elif context.is_stale(envelope.sender, envelope.sender_epoch):
            context.dead_letters.note("stale", envelope)
        else:
            budget = envelope.budget_ms
            deadline = math.inf if budget < 0 else trio.current_time() + budget / 1000
            if not inbox.accept(Arrived(envelope, deadline)):
                self._bounce(envelope)

    def _bounce(self, envelope: Envelope) -> None:
        if envelope.correlation:
            self._refuse(envelope, "busy", f"{len(self.inbox)} messages wait for it")
        else:
            self.context.dead_letters.note("full", envelope)

    def _turn_away(self, envelope: Envelope, code: str, reason: str) -> None:
        self.context.dead_letters.note(code, envelope)
        self._refuse(envelope, "stale" if code == "stale" else "refused", reason)

    def _refuse(self, envelope: Envelope, code: str, reason: str) -> None:
        if envelope.correlation:
            self.context.refuse(envelope.sender, envelope.sender_epoch, envelope.correlation, code, reason)

    def _cancel(self, envelope: Envelope) -> None:
        key = (envelope.sender, envelope.sender_epoch, envelope.correlation)
        if not self.context.pending.cancel(key):
            self.inbox.withdraw(*key)

    async def _work(self) -> None:
        inbox, pulse = self.inbox, self.context.pulse
        while True:
            await inbox.wait()
            for _ in range(_TURN):
                item = inbox.take()
                if item is None:
                    break
                if isinstance(item, Arrived):
                    await self._open(item)
                elif isinstance(item, Down):
                    await self.actor.on_down(item.name, item.epoch)
                else:
                    await self.actor.on_cancel(item.sender)
                pulse.progress += 1
            await trio.lowlevel.checkpoint()

    async def _open(self, arrived: Arrived) -> None:
        envelope, deadline = arrived
        if deadline < math.inf and trio.current_time() >= deadline:
            self.context.dead_letters.note("expired", envelope)
            return
        try:
            message = wire.open_body(envelope.kind, envelope.body)
        except wire.WireError as error:
            code = "unknown" if isinstance(error, wire.UnknownKind) else "malformed"
            self._turn_away(envelope, code, str(error))
            return
        sender = Sender(
            envelope.sender,
            envelope.sender_epoch,
            envelope.correlation,
            envelope.owner,
            envelope.trace,
            deadline,
        )
        if envelope.correlation:
            await self._answer(message, sender)
        else:
            await self.actor.on_message(message, sender)

    async def _answer(self, message: object, sender: Sender) -> None:
        context = self.context
        context.pending.begin(sender)
        answer = await self.actor.on_message(message, sender)
        if answer is LATER:
            context.pending.defer(sender)
        else:
            context.answer(sender, answer)
