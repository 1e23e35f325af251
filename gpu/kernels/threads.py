"""Running a program: a list of operations, each cut into chunks that any thread may take.

An operation is done when all its chunks are; only then does a thread go on to the next. Nobody waits for a
thread that
has not come: one that arrives late finds earlier operations done and joins in. What a chunk computes does
not depend on
who takes it, so results do not depend on timing.

Each operation has two counters, tagged with the number of the launch they belong to: chunks handed out,
chunks done.
When a launch has ended, no counter has its tag any more: a thread that was asleep meanwhile leaves, before the
next batch changes what the operations mean.
"""

from __future__ import annotations

import os
import threading
from _thread import LockType, allocate_lock

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from gpu.kernels.jit import native
from gpu.kernels.simd import I32, I64, Value, at, call, emitter

OPERATION_WORDS = 4
"""A program's row: function, its arguments' address, which of the batch's units it counts, chunks per
unit."""
_COUNTER_BYTES = 128
"""Of an operation: two cache lines, one for each counter."""
_SPINS = 4096
"""Looks at a counter before the core is offered to others: some tens of microseconds."""


@emitter("i", "int64")
def _look(b: ir.IRBuilder, address: Value) -> Value:
    return b.load_atomic(at(b, address, 0, I64), "acquire", 8)


@emitter("iii", "int64")
def _exchange(b: ir.IRBuilder, address: Value, expected: Value, value: Value) -> Value:
    """1 if the word was `expected` and is `value` now."""
    pair = b.cmpxchg(at(b, address, 0, I64), expected, value, "acq_rel", "acquire")
    return b.zext(b.extract_value(pair, 1), I64)


@emitter("ii")
def _add(b: ir.IRBuilder, address: Value, value: Value) -> None:
    b.atomic_rmw("add", at(b, address, 0, I64), value, "acq_rel")


@emitter("i", "int64")
def _word(b: ir.IRBuilder, address: Value) -> Value:
    value = b.load(at(b, address, 0, I64))
    value.align = 8
    return value


@emitter("")
def _give_way(b: ir.IRBuilder) -> None:
    call(b, "sched_yield", I32)


@emitter("iiii")
def _call(b: ir.IRBuilder, function: Value, *args: Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
    b.call(b.inttoptr(function, ir.PointerType(kind)), args)


@native("int64(int64, int64, int64, int64, int64, int64, int64)")
def _run(program, first, last, units, counters, launch, thread):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Work through operations `first` to `last`; 1 if they are all done, 0 if this launch is over already."""
    tag = launch << 32
    for index in range(first, last):
        row = program + index * 8 * OPERATION_WORDS
        chunks = _word(units + 8 * _word(row + 16)) * _word(row + 24)
        taken = counters + index * _COUNTER_BYTES
        done = taken + 64
        while True:
            seen = _look(taken)
            if seen >> 32 != launch:
                return 0
            chunk = seen - tag
            if chunk >= chunks:
                break
            if _exchange(taken, seen, seen + 1):
                _call(_word(row), _word(row + 8), chunk, thread)
                _add(done, 1)
        spins = 0
        while True:
            seen = _look(done)
            if seen >> 32 != launch:
                return 0
            if seen - tag >= chunks:
                break
            spins += 1
            if spins > _SPINS:
                _give_way()
    return 1


Words = NDArray[np.int64]

NICENESS = 5
"""Of threads that compute: who only has a message to handle, or a process to start, goes first."""


def let_others_first() -> None:
    """Lower this thread's priority, and no other's: Linux schedules threads, whatever POSIX says of processes."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Crew:
    """The calling thread and `threads - 1` others, asleep between launches. `close` ends them."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._gates: list[LockType] = []
        self._helpers: list[threading.Thread] = []
        self._job: tuple[int, int, int, int, int, int] | None = None
        self._launch = 0
        self._nice: set[int] = set()
        for thread in range(1, threads):
            gate = allocate_lock()
            gate.acquire()
            helper = threading.Thread(
                target=self._help, args=(gate, thread), daemon=True, name=f"kernels-{thread}"
            )
            self._gates.append(gate)
            self._helpers.append(helper)
            helper.start()

    def run(self, program: Words, first: int, last: int, units: Words, counters: Words) -> None:
        """Run operations `first` to `last`; returns when all are done.

        `counters` is (operations, 16) words.
        """
        if threading.get_native_id() not in self._nice:
            self._nice.add(threading.get_native_id())
            let_others_first()
        self._launch = self._launch % 0x3FFFFFFF + 1
        counters[first:last, 0] = counters[first:last, 8] = self._launch << 32
        self._job = (program.ctypes.data, first, last, units.ctypes.data, counters.ctypes.data, self._launch)
        for gate in self._gates:
            if gate.locked():
                gate.release()
        _run(*self._job, 0)
        counters[first:last, 0] = counters[first:last, 8] = 0  # nobody is inside: every chunk is done

    def _help(self, gate: LockType, thread: int) -> None:
        let_others_first()
        while True:
            gate.acquire()
            job = self._job
            if job is None:
                return
            _run(*job, thread)

    def close(self) -> None:
        """End the other threads. Idempotent."""
        self._job = None
        for gate in self._gates:
            if gate.locked():
                gate.release()
        for helper in self._helpers:
            helper.join()
        self._gates, self._helpers = [], []
