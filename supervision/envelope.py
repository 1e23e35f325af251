"""What travels between mailboxes: one message and where it is going."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    Body = Any
else:
    Body = msgspec.Raw


class Role:
    """What an envelope is to the one who gets it. Plain numbers: an enumeration's cost more to compare."""

    TELL: Final = 0
    ASK: Final = 1
    REPLY: Final = 2
    REFUSAL: Final = 3
    """An ask that will get no reply: `kind` is the refusal's code, `body` the reason in words."""
    CANCEL: Final = 4
    """The asker of `correlation` gave up."""


class Envelope(NamedTuple):
    """A message with its address. A named tuple, not an attrs class: one is made and read per message.

    `correlation` is 0 for a tell, else the asker's number for the ask, never used again in its
    incarnation. `budget_ms` is what is left of the ask's deadline, -1 for none. `body` is the message on
    its way out, and still packed on its way in, until it is wanted.
    """

    role: int
    to: str
    to_epoch: int
    sender: str
    sender_epoch: int
    correlation: int
    kind: str
    budget_ms: int
    owner: str
    trace: str
    body: Body
