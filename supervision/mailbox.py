"""The mailbox contract: how frames get from one actor to another."""

from __future__ import annotations

from abc import ABC, abstractmethod

from supervision.outbox import Outbox


class Mailbox(ABC):
    """One actor's post: an inlet for frames, and a bounded queue towards each peer.

    What an implementation promises, and the conformance suite checks:

    - messages of one sender to one receiver arrive in order, at most once, whole or not at all;
    - a queue keeps what it took while its peer is not there yet, up to its capacity;
    - a slow peer holds up nobody but those who write to it;
    - after `forget` nothing queued before it arrives at the peer's successor;
    - a frame that is too large for the receiver never leaves (the codec measures each message first).

    Nothing an outbox took counts as delivered.
    """

    name: str

    @abstractmethod
    def outbox(self, to: str) -> Outbox:
        """Return the queue towards `to`, made at first use; dialling happens behind it."""

    @abstractmethod
    async def receive(self) -> bytes:
        """Return the next frame. One task calls this. Cancellation: no frame is lost."""

    @abstractmethod
    def forget(self, to: str) -> int:
        """Drop what is queued for a peer that is gone, and hang up. Returns how many messages that cost."""

    @abstractmethod
    async def flush(self) -> None:
        """Return when every queue is handed over. Cancellation: some of it may be left."""
