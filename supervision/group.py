"""A group of units: ordered start, one strategy, restarts within limits, reverse stop."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import trio
from attrs import frozen

from supervision.intensity import RestartBudget
from supervision.spec import SupervisorSpec
from supervision.strategy import affected, comes_back
from supervision.unit import Exit, Unit


@frozen
class _Up:
    unit: Unit
    run: int


@frozen
class _Gone:
    unit: Unit
    run: int
    exit: Exit


@frozen
class _Due:
    units: tuple[Unit, ...]


@frozen
class _Stop:
    pass


class Group(Unit):
    """Runs its units as `SupervisorSpec` says. One task owns all of this state; the rest sends it events.

    Each start of a unit has a run number, so that news of a run that was ended meanwhile is not taken for
    news of the next.
    """

    restart = "permanent"

    def __init__(self, spec: SupervisorSpec, units: Iterable[Unit], rng: random.Random) -> None:
        self.name = spec.name
        self._spec = spec
        self._units = list(units)
        self._rng = rng
        self._begin()

    def _begin(self) -> None:
        spec = self._spec
        self._budget = RestartBudget(spec.intensity, spec.window, spec.backoff, spec.backoff_limit, self._rng)
        self._tell, self._events = trio.open_memory_channel[_Up | _Gone | _Due | _Stop](math.inf)
        self._runs = 0
        self._alive: dict[Unit, int] = {}
        self._over: dict[Unit, trio.Event] = {}
        self._up: set[Unit] = set()
        self._waiting: set[Unit] = set(self._units)
        self._backing_off: set[Unit] = set()
        self._was_ready = False

    def stop(self) -> None:
        """Stop the units in reverse order."""
        self._tell.send_nowait(_Stop())

    async def live(self, ready: Callable[[], None]) -> Exit:
        """Run until stopped, or until the restarts are too many: then the failure is the caller's."""
        try:
            async with trio.open_nursery() as nursery:
                end = await self._rule(nursery, ready)
                nursery.cancel_scope.cancel()
        finally:
            self._begin()
        return end

    async def _rule(self, nursery: trio.Nursery, ready: Callable[[], None]) -> Exit:
        while True:
            self._start_due(nursery)
            self._announce(ready)
            event = await self._events.receive()
            if isinstance(event, _Stop):
                await self._halt(self._units)
                return Exit(failed=False, reason=f"{self.name}: stopped")
            if isinstance(event, _Due):
                due = self._backing_off.intersection(event.units)
                self._backing_off -= due
                self._waiting |= due
            elif self._alive.get(event.unit) != event.run:
                continue
            elif isinstance(event, _Up):
                self._up.add(event.unit)
                self._budget.prove(event.unit.name)
            else:
                end = await self._bury(event, nursery)
                if end is not None:
                    return end

    async def _bury(self, gone: _Gone, nursery: trio.Nursery) -> Exit | None:
        """A unit ended by itself: leave it, restart what is affected, or give up and say why."""
        del self._alive[gone.unit]
        self._up.discard(gone.unit)
        if not comes_back(gone.unit.restart, failed=gone.exit.failed):
            return None
        delay = self._budget.spend(trio.current_time(), gone.unit.name)
        hit = affected(self._spec.strategy, self._units, gone.unit)
        if delay is None:
            await self._halt(self._units)
            return Exit(failed=True, reason=self._surrender(gone.exit))
        running = [unit for unit in hit if unit in self._alive]
        await self._halt(running)
        back = tuple(
            unit for unit in hit if unit is gone.unit or (unit in running and unit.restart != "temporary")
        )
        self._backing_off |= set(back)
        nursery.start_soon(self._back_off, delay, back)
        return None

    def _surrender(self, last: Exit) -> str:
        span = self._budget.span(trio.current_time())
        return f"{last.reason} (more than {self._spec.intensity} restarts of {self.name} within {round(span, 1):g} s)"

    def _start_due(self, nursery: trio.Nursery) -> None:
        """Start what may be: in order, each when those before it are up; later on, one-for-ones at once."""
        if self._spec.strategy == "one_for_one" and self._was_ready:
            for unit in self._in_order(self._waiting):
                self._start(unit, nursery)
            return
        if len(self._up) < len(self._alive):
            return
        first = next(iter(self._in_order(self._waiting | self._backing_off)), None)
        if first in self._waiting:
            self._start(first, nursery)

    def _in_order(self, units: set[Unit]) -> list[Unit]:
        return [unit for unit in self._units if unit in units]

    def _start(self, unit: Unit, nursery: trio.Nursery) -> None:
        self._waiting.discard(unit)
        self._runs += 1
        self._alive[unit] = self._runs
        self._over[unit] = trio.Event()
        nursery.start_soon(self._run, unit, self._runs, self._over[unit])

    async def _run(self, unit: Unit, run: int, over: trio.Event) -> None:
        try:
            end = await unit.live(lambda: self._tell.send_nowait(_Up(unit, run)))
        finally:
            over.set()
        self._tell.send_nowait(_Gone(unit, run, end))

    def _announce(self, ready: Callable[[], None]) -> None:
        if not (self._was_ready or self._waiting or self._backing_off) and len(self._up) == len(self._alive):
            self._was_ready = True
            ready()

    async def _back_off(self, delay: float, units: tuple[Unit, ...]) -> None:
        await trio.sleep(delay)
        self._tell.send_nowait(_Due(units))

    async def _halt(self, units: Iterable[Unit]) -> None:
        """Stop the running ones among `units`, the last started first, one after the other."""
        for unit in reversed(list(units)):
            if self._alive.pop(unit, None) is not None:
                self._up.discard(unit)
                if not self._over[unit].is_set():
                    unit.stop()
                await self._over[unit].wait()
