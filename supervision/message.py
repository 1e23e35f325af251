"""The `@message` decorator: what a class must say to be sent between actors."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar, dataclass_transform

from attrs import frozen

T = TypeVar("T")


class WhenFull(Enum):
    """What a full mailbox means for a message."""

    REFUSE = "refuse"
    """`Busy`, at once."""
    WAIT = "wait"
    """Wait for room until the deadline."""
    NEWEST = "newest"
    """An older message of the same class to the same peer is replaced."""


@frozen
class Policy:
    """A message class's promises: may a caller repeat it after `ActorDown`, and what a full mailbox does."""

    kind: str
    repeatable: bool
    when_full: WhenFull


REGISTRY: dict[str, type] = {}
"""Every message class by its kind, which is the class's name. Unknown kinds are dead letters."""

KEEP_NEWEST: set[str] = set()
"""The kinds of which a full mailbox keeps the newest: looked up for each message."""


@dataclass_transform(frozen_default=True)
def message(*, repeatable: bool, when_full: WhenFull = WhenFull.REFUSE) -> Any:
    """Make a class a frozen attrs message of the system and register its kind.

    Raises `ValueError` when another class has the kind already.
    """

    def register(cls: type[T]) -> type[T]:
        made = frozen(cls)
        kind = made.__name__
        if kind in REGISTRY and REGISTRY[kind].__module__ != made.__module__:
            raise ValueError(f"message kind {kind!r} is defined twice: {REGISTRY[kind]} and {made}")
        setattr(made, "__policy__", Policy(kind, repeatable, when_full))  # noqa: B010 - not in the class's type
        REGISTRY[kind] = made
        if when_full is WhenFull.NEWEST:
            KEEP_NEWEST.add(kind)
        return made

    return register


def policy_of(value: Any) -> Policy:
    """Return the policy of a message or its class; `TypeError` for anything that was not declared one."""
    found = getattr(value, "__policy__", None)
    if not isinstance(found, Policy):
        raise TypeError(f"{value!r} is not a message: declare its class with @message")
    return found
