"""The behaviour: what an actor is, and what it may ask of the process that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import trio

    from supervision.tree import Tree


class Later:
    """Type of `LATER`."""


LATER = Later()
"""Returned by `on_message`: the reply comes later, through `Context.reply`."""


class Sender(NamedTuple):
    """Who sent the message at hand, and how to answer it. A named tuple, for one is made per message.

    `correlation` is 0 for a `tell`. `deadline` is on this process's `trio.current_time()`,
    `inf` for a `tell`.
    """

    name: str
    epoch: int
    correlation: int
    owner: str
    trace: str
    deadline: float


class Context(ABC):
    """An actor's window on the tree. One per incarnation; everything it does is done in the actor's name."""

    name: str
    epoch: int
    state_dir: Path
    """The installation's state directory; `state_dir / "run"` holds the sockets."""
    nursery: trio.Nursery
    """Tasks of the actor. An exception here ends the actor; a turn contains its own."""

    @property
    @abstractmethod
    def tree(self) -> Tree:
        """The newest tree the supervisor pushed."""

    @abstractmethod
    def file(self, name: str) -> int:
        """Return the descriptor that `ChildSpec.files` calls `name`; `KeyError` names those there are."""

    @abstractmethod
    async def tell(
        self, to: str, message: Any, *, to_epoch: int = 0, owner: str = "", trace: str = ""
    ) -> None:
        """Send at most once. `to_epoch` 0 means whatever incarnation the tree names now.

        Returns when the message is queued for the peer, not when it is delivered.
        Raises `ActorDown` when the peer is not up or has another epoch, `Busy` when the queue is full
        and the message's class says to refuse, `MessageTooLarge` for what no mailbox takes.
        Cancellation: either queued whole or not at all.
        """

    @abstractmethod
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
        """Send, and wait for the reply for at most `timeout` seconds.

        Raises `Busy`, `ActorDown`, `DeadlineExceeded` or `Refused`.
        Cancellation: the slot is dropped and the peer is sent `Cancel`; a late reply is counted and dropped.
        """

    @abstractmethod
    async def reply(self, to: Sender, message: Any) -> None:
        """Answer an ask whose `on_message` returned `LATER`. Never raises for a peer that is gone."""

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Sleep between two tries, but only until the next tree: it may say that who was asked is up again."""

    @abstractmethod
    def progress(self) -> None:
        """Move the heartbeat's progress counter: the actor did a piece of work.

        The runtime does this for each message handled; an actor that works outside `on_message`
        (a batcher stepping in a thread) calls it at each step.
        """

    @abstractmethod
    def busy(self, is_busy: bool) -> None:
        """Say whether work is waiting.

        Busy, or with messages in the mailbox, and without progress for `ChildSpec.watchdog` seconds means
        stuck: killed.
        """


class Actor:
    """A process that alone owns some state, has one mailbox, and reacts to messages.

    Subclasses name their settings class (frozen attrs) in `Settings`; the process structures it from the
    tree's data and calls `cls(settings)`. The life of an actor, in order: `on_start`, any number of
    `on_message` / `on_down`, one at a time in the actor's own task, `on_stop`.

    An exception out of any of them ends the incarnation (the supervisor starts the next); whoever was
    waiting for an answer gets `ActorDown` at once. State that must not die belongs in `store`.
    """

    Settings: ClassVar[type]
    context: Context

    @classmethod
    def prepare(cls, settings: Any) -> None:
        """Do once, for all incarnations on one host, what takes long and depends on the settings alone.

        It runs in the process they are forked from, after the module's import: keep what it makes in the module
        or the class, as a cache that an incarnation fills itself where this failed. Leave no thread running,
        nothing open that must not be shared, and let nobody depend on it. Default: nothing.
        """

    async def on_start(self) -> None:
        """Become ready: `self.context` is set. The tree calls the actor up when this returns."""

    async def on_message(self, message: Any, sender: Sender) -> Any:  # noqa: ARG002
        """React to one message. For an ask, return the reply, or `LATER`; for a tell, return None.

        Runs one at a time; anything long goes to a task in `self.context.nursery`.
        """
        return None

    async def on_cancel(self, sender: Sender) -> None:
        """The asker of a `LATER` gave up (its ask was cancelled or timed out). Default: nothing to undo."""

    async def on_down(self, name: str, epoch: int) -> None:
        """The supervisor says that incarnation `epoch` of `name` is gone. Called once per death, in order."""

    async def on_stop(self) -> None:
        """SIGTERM or orderly stop: drain, within the child's shutdown grace. Cancelled when it is over.

        Messages go on being handled while it runs, in the actor's own task, so that what is begun can
        finish; the actor ends when this returns.
        """
