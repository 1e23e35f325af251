"""The sending half of an actor's process: tells, asks and their slots, replies, the tree as it is known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import outcome
import trio
from attrs import define

from supervision import wire
from supervision.actor import Context, Sender
from supervision.dead_letters import DeadLetters
from supervision.envelope import Envelope, Role
from supervision.errors import ActorDown, AskFailed, Busy, DeadlineExceeded, Refused, StaleEpoch
from supervision.inbox import GaveUp, Inbox
from supervision.mailbox import Mailbox
from supervision.message import WhenFull, policy_of
from supervision.outbox import OutboxClosed, OutboxFull
from supervision.pending import Pending
from supervision.slots import Alarms, Slot, Slots
from supervision.tree import Tree

_REPLIES_AHEAD = 8
"""Replies go past a full queue, for they are awaited; at this many times its capacity they are dropped."""

_RETRY_FIRST = 0.005
_RETRY_LAST = 0.1
"""Seconds between tries of an ask that waits for room in a peer's mailbox, doubled from first to last."""

REFUSALS: Mapping[str, type[AskFailed]] = {
    "busy": Busy,
    "stale": StaleEpoch,
    "refused": Refused,
    "expired": DeadlineExceeded,
}
"""What a refusal's code means to the asker."""


@define
class Pulse:
    """What the heartbeat reports: pieces of work done, whether work waits, messages in the mailbox."""

    progress: int = 0
    busy: bool = False
    depth: int = 0


class ActorContext(Context):
    """The `Context` of a real process or of a local tree; the runtime feeds it what comes in."""

    def __init__(
        self,
        mailbox: Mailbox,
        inbox: Inbox,
        *,
        name: str,
        epoch: int,
        tree: Tree,
        state_dir: Path,
        files: Mapping[str, int],
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.state_dir = state_dir
        self.pulse = Pulse()
        self.dead_letters = DeadLetters()
        self.alarms = Alarms()
        self.slots = Slots(inbox.wake_reader)
        self.pending = Pending(self.alarms, lambda sender: inbox.put(GaveUp(sender)))
        self._tree = tree
        self._newer_tree = trio.Event()
        self._files = files
        self._mailbox = mailbox
        self._addressed: dict[str, int] = {}

    @property
    def tree(self) -> Tree:
        """The newest tree."""
        return self._tree

    def file(self, name: str) -> int:
        """Return the descriptor that the tree's data calls `name`."""
        if name not in self._files:
            raise KeyError(f"{self.name} has no file {name!r}, only {sorted(self._files)}")
        return self._files[name]

    async def tell(
        self, to: str, message: Any, *, to_epoch: int = 0, owner: str = "", trace: str = ""
    ) -> None:
        """Send at most once."""
        policy = policy_of(message)
        epoch = self._address(to, to_epoch)
        data = wire.encode(
            Envelope(Role.TELL, to, epoch, self.name, self.epoch, 0, policy.kind, -1, owner, trace, message)
        )
        if not self._offer(to, epoch, policy.kind, data):
            await self._put(to, policy.kind, data, policy.when_full)

    async def ask(
        self,
        to: str,
        message: Any,
        *,
        timeout: float,
        to_epoch: int = 0,
        owner: str = "",
        trace: str = "",
    ) -> Any:
        """Send, and wait for the reply."""
        deadline = trio.current_time() + timeout
        pause = _RETRY_FIRST
        while True:
            try:
                return await self._ask_once(to, to_epoch, message, deadline, owner, trace)
            except Busy:
                waits = policy_of(message).when_full is WhenFull.WAIT
                if not waits or trio.current_time() + pause >= deadline:
                    raise
            await trio.sleep(pause)
            pause = min(2 * pause, _RETRY_LAST)

    async def _ask_once(
        self, to: str, to_epoch: int, message: Any, deadline: float, owner: str, trace: str
    ) -> Any:
        policy = policy_of(message)
        epoch = self._address(to, to_epoch)
        correlation = self.slots.next_correlation()
        budget = max(0, round((deadline - trio.current_time()) * 1000)) if deadline < math.inf else -1
        data = wire.encode(
            Envelope(
                Role.ASK,
                to,
                epoch,
                self.name,
                self.epoch,
                correlation,
                policy.kind,
                budget,
                owner,
                trace,
                message,
            )
        )
        if not self._offer(to, epoch, policy.kind, data):
            await self._put(to, policy.kind, data, policy.when_full, deadline)
        slot = self.slots.open(correlation, to, epoch)
        slot.alarm = self.alarms.set(deadline, lambda: self._time_out(slot))
        try:
            return await slot.wait()
        except trio.Cancelled:
            if self.slots.drop(slot):
                self._send_cancel(slot)
            raise
        finally:
            self.alarms.call_off(slot.alarm)

    async def reply(self, to: Sender, message: Any) -> None:
        """Answer an ask whose `on_message` returned `LATER`."""
        self.answer(to, message)

    def answer(self, to: Sender, message: Any) -> None:
        """Queue a reply. Never waits: a reply is awaited, so it passes a full queue."""
        if not to.correlation or not self.pending.close(to):
            return
        kind = policy_of(message).kind if message is not None else ""
        try:
            self._post(Role.REPLY, to.name, to.epoch, to.correlation, kind, message)
        except wire.MessageTooLarge as error:
            self.refuse(to.name, to.epoch, to.correlation, "refused", str(error))

    def refuse(self, to: str, to_epoch: int, correlation: int, code: str, reason: str) -> None:
        """Answer an ask that gets no reply; `code` is a key of `REFUSALS`."""
        self._post(Role.REFUSAL, to, to_epoch, correlation, code, reason)

    async def pause(self, seconds: float) -> None:
        """Sleep, but only until the next tree."""
        with trio.move_on_after(seconds):
            await self._newer_tree.wait()

    def progress(self) -> None:
        """Move the progress counter."""
        self.pulse.progress += 1

    def busy(self, is_busy: bool) -> None:
        """Say whether work is waiting."""
        self.pulse.busy = is_busy

    def take_reply(self, envelope: Envelope) -> None:
        """Give a reply to the ask that waits for it; no one waiting is a late reply."""
        slot = self._claim(envelope, envelope.sender_epoch)
        if slot is None:
            return
        try:
            body = wire.open_body(envelope.kind, envelope.body)
        except wire.WireError as error:
            slot.resolve(outcome.Error(Refused(envelope.sender, f"its reply: {error}")))
        else:
            slot.resolve(outcome.Value(body))

    def take_refusal(self, envelope: Envelope) -> None:
        """Fail the ask that was refused."""
        slot = self._claim(envelope, None if envelope.kind == "stale" else envelope.sender_epoch)
        if slot is not None:
            failure = REFUSALS.get(envelope.kind, Refused)
            slot.resolve(outcome.Error(failure(envelope.sender, wire.open_text(envelope.body))))

    def _claim(self, envelope: Envelope, epoch: int | None) -> Slot | None:
        slot = None
        if envelope.to_epoch == self.epoch:
            slot = self.slots.claim(envelope.correlation, envelope.sender, epoch)
        if slot is None:
            self.dead_letters.note("late", envelope)
        return slot

    def push(self, tree: Tree) -> list[tuple[str, int]]:
        """Take a newer tree. Returns the (name, epoch) of each incarnation that is gone, in the tree's order.

        Their asks fail with `ActorDown` and what was queued for them is dropped.
        """
        if tree.version <= self._tree.version:
            return []
        before, self._tree = self._tree, tree
        self._newer_tree.set()
        self._newer_tree = trio.Event()
        gone = [
            (member.name, member.epoch)
            for member in before.members.values()
            if member.state != "down"
            and member.name != self.name
            and not _lives(tree, member.name, member.epoch)
        ]
        for name, epoch in gone:
            self._lose(name, epoch)
        return gone

    def is_stale(self, sender: str, epoch: int) -> bool:
        """Whether the tree says that this incarnation of `sender` is gone."""
        member = self._tree.members.get(sender)
        if member is None:
            return False
        return member.epoch > epoch or (member.epoch == epoch and member.state == "down")

    def _lose(self, name: str, epoch: int) -> None:
        self.pending.lose(name, epoch)
        self.slots.fail_peer(name, epoch, lambda: ActorDown(name, f"epoch {epoch} is gone"))
        if self._addressed.get(name, epoch) <= epoch:
            dropped = self._mailbox.forget(name)
            self._addressed.pop(name, None)
            if dropped:
                self.dead_letters.note("down", count=dropped)

    def _address(self, to: str, to_epoch: int) -> int:
        epoch = self._tree.epoch(to)
        if not epoch:
            raise ActorDown(to, "not up")
        if to_epoch and to_epoch != epoch:
            raise ActorDown(to, f"epoch {to_epoch} is gone, {epoch} is up")
        return epoch

    def _offer(self, to: str, epoch: int, kind: str, data: bytes) -> bool:
        self._addressed[to] = epoch
        return self._mailbox.outbox(to).offer(kind, data)

    async def _put(
        self, to: str, kind: str, data: bytes, when_full: WhenFull, deadline: float = math.inf
    ) -> None:
        outbox = self._mailbox.outbox(to)
        try:
            with trio.move_on_at(deadline) as scope:
                await outbox.put(kind, data, when_full)
        except OutboxFull:
            raise Busy(to, f"{outbox.capacity} messages wait for it here") from None
        except OutboxClosed:
            raise ActorDown(to, "went down while its queue was full") from None
        if scope.cancelled_caught:
            raise DeadlineExceeded(to, "its queue stayed full")

    def _post(self, role: int, to: str, to_epoch: int, correlation: int, kind: str, body: Any) -> None:
        """Queue what may not wait, for a peer that may be gone."""
        if self.is_stale(to, to_epoch):
            return
        data = wire.encode(
            Envelope(role, to, to_epoch, self.name, self.epoch, correlation, kind, -1, "", "", body)
        )
        outbox = self._mailbox.outbox(to)
        if len(outbox) >= _REPLIES_AHEAD * outbox.capacity:
            self.dead_letters.note("full")
            return
        self._addressed[to] = to_epoch
        try:
            outbox.put_control(kind, data)
        except OutboxClosed:
            self.dead_letters.note("down")

    def _time_out(self, slot: Slot) -> None:
        if self.slots.drop(slot):
            slot.resolve(outcome.Error(DeadlineExceeded(slot.peer, "no reply in time")))
            self._send_cancel(slot)

    def _send_cancel(self, slot: Slot) -> None:
        self._post(Role.CANCEL, slot.peer, slot.epoch, slot.correlation, "", None)


def _lives(tree: Tree, name: str, epoch: int) -> bool:
    member = tree.members.get(name)
    return member is not None and member.epoch == epoch and member.state != "down"
