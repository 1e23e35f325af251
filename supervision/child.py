"""The contract between the supervisor's logic and whatever runs its children."""

from __future__ import annotations

from abc import ABC, abstractmethod

from supervision.control import Report
from supervision.errors import SupervisionError
from supervision.spec import ChildSpec
from supervision.tree import Tree


class LaunchFailed(SupervisionError):
    """A child could not even be begun. The text says why."""


class Incarnation(ABC):
    """One run of one child, from spawn to exit."""

    pid: int

    @abstractmethod
    async def report(self) -> Report:
        """Return the child's next report; waits for ever when it has hung up. Cancellation loses none."""

    @abstractmethod
    def reports_so_far(self) -> list[Report]:
        """Take the reports that have arrived, without waiting."""

    @abstractmethod
    async def exit_status(self) -> int:
        """Return how it ended when it has: its exit status, or minus the signal's number. Reaps it."""

    @abstractmethod
    def push(self, tree: Tree) -> None:
        """Send the newest tree. Never waits: a child that does not read gets the newest when it does."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask it to stop in order. No error when it is gone."""

    @abstractmethod
    def kill(self) -> None:
        """End it now. No error when it is gone."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held for an incarnation that has ended."""


class Launcher(ABC):
    """Begins incarnations."""

    @abstractmethod
    async def launch(self, spec: ChildSpec, epoch: int, tree: Tree) -> Incarnation:
        """Begin one. Raises `LaunchFailed`. Cancellation: nothing was begun, or it is killed."""
