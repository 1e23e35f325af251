"""What can become of a message that gets no reply, as exceptions."""


class SupervisionError(Exception):
    """Base of everything the spine raises."""


class CannotGoOn(SupervisionError):
    """An actor ends itself, for its supervisor to start it anew. Logs and `antiphon ps` show its words: quote no user."""


class AskFailed(SupervisionError):
    """An `ask` ended without a reply. `peer` is the actor that was asked."""

    def __init__(self, peer: str, reason: str = "") -> None:
        super().__init__(f"{peer}: {reason or type(self).__name__}")
        self.peer = peer
        self.reason = reason


class Busy(AskFailed):
    """The peer's mailbox, or our queue towards it, is full. Nothing was done."""


class ActorDown(AskFailed):
    """The peer is down, or came back with another epoch. What it had begun is unknown."""


class DeadlineExceeded(AskFailed):
    """The time ran out. The peer was told to cancel; what it had begun is unknown."""


class Refused(AskFailed):
    """The peer would not take the message: stale epoch, unknown kind or field. Nothing was done."""


class StaleEpoch(Refused, ActorDown):
    """The peer is another incarnation than the one addressed. Nothing was done."""
