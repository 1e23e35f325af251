"""What a group is made of: something that is started, becomes ready, ends, and can be stopped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from attrs import frozen

from supervision.spec import Restart


@frozen
class Exit:
    """How a unit's run ended. `failed` is false after an orderly stop or a clean exit."""

    failed: bool
    reason: str = ""


class Unit(ABC):
    """A child, or a group of units, as its group sees it."""

    name: str
    restart: Restart

    @abstractmethod
    async def live(self, ready: Callable[[], None]) -> Exit:
        """Run once, from start to end; `ready` is called when it is up. May be called again afterwards.

        Cancellation: everything it started is killed and reaped before it returns.
        """

    @abstractmethod
    def stop(self) -> None:
        """Have the run at hand, or the next when there is none, end in order; `live` returns when it has."""
