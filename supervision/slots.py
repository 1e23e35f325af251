"""Asks in flight: each waits in a slot for its reply, its peer's death or its deadline."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

import outcome
import trio

from supervision.errors import AskFailed


class Alarms:
    """Calls functions at given times, from one task.

    Cheaper than a cancel scope per ask: most alarms are called off long before they are due, and cost
    one heap entry.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._live: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        self._scope: trio.CancelScope | None = None

    def set(self, at: float, call: Callable[[], None]) -> int:
        """Have `call` called at `at`; returns the number to call it off by. `inf` is never."""
        number = next(self._numbers)
        if at < math.inf:
            self._live[number] = call
            heapq.heappush(self._heap, (at, number))
            if self._scope is not None and at < self._scope.deadline:
                self._scope.deadline = at
        return number

    def call_off(self, number: int) -> None:
        """Forget an alarm; one that rang already is no error."""
        if self._live.pop(number, None) is not None and len(self._heap) > 2 * len(self._live) + 1024:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)

    async def run(self) -> None:
        """Ring the alarms, for ever."""
        while True:
            self._ring(trio.current_time())
            with trio.CancelScope(deadline=self._heap[0][0] if self._heap else math.inf) as self._scope:
                await trio.sleep_forever()

    def _ring(self, now: float) -> None:
        heap = self._heap
        while heap and (heap[0][0] <= now or heap[0][1] not in self._live):
            call = self._live.pop(heapq.heappop(heap)[1], None)
            if call is not None:
                call()


class Slot:
    """One ask in flight. Resolved once; what comes after is late."""

    __slots__ = ("alarm", "correlation", "epoch", "peer", "result", "task")

    def __init__(self, correlation: int, peer: str, epoch: int) -> None:
        self.correlation = correlation
        self.peer = peer
        self.epoch = epoch
        self.alarm = 0
        self.result: outcome.Outcome[Any] | None = None
        self.task: trio.lowlevel.Task | None = None

    async def wait(self) -> Any:
        """Return the reply or raise the failure. Cancellation: the caller drops the slot."""
        if self.result is None:
            self.task = trio.lowlevel.current_task()
            return await trio.lowlevel.wait_task_rescheduled(self._abort)
        return self.result.unwrap()

    def _abort(self, _: Any) -> trio.lowlevel.Abort:
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def resolve(self, result: outcome.Outcome[Any]) -> None:
        """Hand the result over and wake who waits."""
        self.result = result
        if self.task is not None:
            task, self.task = self.task, None
            trio.lowlevel.reschedule(task, result)


class Slots:
    """The slots of one incarnation. A correlation id is never reused.

    `on_first` is called when the first of them opens: from now on replies are waited for.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._open: dict[int, Slot] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def next_correlation(self) -> int:
        """Return a number no ask of this incarnation has had."""
        return next(self._numbers)

    def open(self, correlation: int, peer: str, epoch: int) -> Slot:
        """Open the slot of an ask that was just queued."""
        slot = self._open[correlation] = Slot(correlation, peer, epoch)
        if len(self._open) == 1:
            self._on_first()
        return slot

    def drop(self, slot: Slot) -> bool:
        """Forget a slot; False when it was resolved already."""
        return self._open.pop(slot.correlation, None) is not None

    def claim(self, correlation: int, peer: str, epoch: int | None) -> Slot | None:
        """Take the slot that waits for exactly this ask of exactly this peer; None: the reply is late.

        `epoch` None is any: a successor may say that it will not answer for its predecessor.
        """
        slot = self._open.get(correlation)
        if slot is None or slot.peer != peer or (epoch is not None and slot.epoch != epoch):
            return None
        del self._open[correlation]
        return slot

    def fail_peer(self, peer: str, epoch: int, failure: Callable[[], AskFailed]) -> list[Slot]:
        """Fail every ask to an incarnation that is gone."""
        lost = [slot for slot in self._open.values() if slot.peer == peer and slot.epoch == epoch]
        for slot in lost:
            del self._open[slot.correlation]
            slot.resolve(outcome.Error(failure()))
        return lost
