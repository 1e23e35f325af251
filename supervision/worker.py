"""A leaf of the tree: one child process, watched through one incarnation."""

from __future__ import annotations

import signal
from collections.abc import Callable

import trio

from supervision.child import Incarnation, Launcher, LaunchFailed
from supervision.control import Beat, Dying, Ready
from supervision.roster import Roster
from supervision.spec import ChildSpec
from supervision.unit import Exit, Unit
from supervision.vigil import Vigil

_LATE = 0.5
"""Seconds by which a look at a child may be late before the watcher blames itself."""


class Worker(Unit):
    """Runs a `ChildSpec`: launch, readiness, heartbeat, stop, kill."""

    def __init__(self, spec: ChildSpec, launcher: Launcher, roster: Roster) -> None:
        self.name = spec.name
        self.restart = spec.restart
        self._spec = spec
        self._launcher = launcher
        self._roster = roster
        self._stopping = trio.Event()
        self._launching = trio.CancelScope()
        self._why = ""

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        self._stopping.set()
        self._launching.cancel()

    async def live(self, ready: Callable[[], None]) -> Exit:
        """Run one incarnation."""
        try:
            return await self._live(ready)
        finally:
            self._stopping, self._why = trio.Event(), ""

    async def _live(self, ready: Callable[[], None]) -> Exit:
        epoch = self._roster.begin(self.name)
        incarnation: Incarnation | None = None
        with trio.move_on_after(self._spec.ready_within) as self._launching:
            try:
                incarnation = await self._launcher.launch(self._spec, epoch, self._roster.tree)
            except LaunchFailed as error:
                self._why = str(error)
        if incarnation is None:
            return self._conclude_launch()
        try:
            status = await self._attend(incarnation, ready)
        except BaseException:
            await self._abandon(incarnation)
            raise
        else:
            return self._conclude(status)
        finally:
            incarnation.close()

    async def _attend(self, incarnation: Incarnation, ready: Callable[[], None]) -> int:
        self._roster.launched(self.name, incarnation)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, incarnation, ready)
            nursery.start_soon(self._stop_when_told, incarnation)
            status = await incarnation.exit_status()
            for report in incarnation.reports_so_far():
                self._note(report)
            nursery.cancel_scope.cancel()
        return status

    async def _abandon(self, incarnation: Incarnation) -> None:
        incarnation.kill()
        with trio.CancelScope(shield=True):
            await incarnation.exit_status()
        self._roster.down(self.name, "killed with its supervisor")

    def _conclude_launch(self) -> Exit:
        """Nothing was begun: it could not be, or took too long, or was not wanted any more."""
        if self._stopping.is_set():
            self._roster.down(self.name, "")
            return Exit(failed=False, reason=f"{self.name}: stopped")
        reason = self._why or f"not begun within {self._spec.ready_within:g} s"
        self._roster.down(self.name, reason)
        return Exit(failed=True, reason=f"{self.name}: {reason}")

    def _conclude(self, status: int) -> Exit:
        if self._stopping.is_set():
            self._roster.down(self.name, "")
            return Exit(failed=False, reason=f"{self.name}: stopped")
        reason = self._why or describe(status)
        failed = status != 0
        self._roster.down(self.name, reason if failed else "")
        return Exit(failed, f"{self.name}: {reason}")

    async def _watch(self, incarnation: Incarnation, ready: Callable[[], None]) -> None:
        if not await self._become_ready(incarnation):
            self._condemn(incarnation, f"not ready within {self._spec.ready_within:g} s")
            return
        if not self._stopping.is_set():
            self._roster.up(self.name)
            ready()
        vigil = Vigil(self._spec.heartbeat, self._spec.watchdog, trio.current_time())
        while True:
            verdict = await self._look(incarnation, vigil)
            if verdict and not self._stopping.is_set():
                self._condemn(incarnation, verdict)
                return

    async def _become_ready(self, incarnation: Incarnation) -> bool:
        with trio.move_on_after(self._spec.ready_within):
            while True:
                report = await incarnation.report()
                if isinstance(report, Ready):
                    return True
                self._note(report)
        return False

    async def _look(self, incarnation: Incarnation, vigil: Vigil) -> str:
        """Wait for a report until the vigil's deadline; returns why the child must die, or ""."""
        deadline = vigil.deadline
        with trio.move_on_at(deadline):
            report = await incarnation.report()
            self._note(report)
            if isinstance(report, Beat):
                vigil.beat(trio.current_time(), report.progress, busy=report.busy)
                self._roster.entries[self.name].depth = report.depth
            return vigil.verdict(trio.current_time())
        now = trio.current_time()
        if now > deadline + _LATE:
            vigil.forgive(now)
        return vigil.verdict(now)

    def _note(self, report: object) -> None:
        if isinstance(report, Dying):
            self._why = report.reason

    def _condemn(self, incarnation: Incarnation, why: str) -> None:
        self._why = why
        incarnation.kill()

    async def _stop_when_told(self, incarnation: Incarnation) -> None:
        await self._stopping.wait()
        incarnation.terminate()
        await trio.sleep(self._spec.grace)
        incarnation.kill()


def describe(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
