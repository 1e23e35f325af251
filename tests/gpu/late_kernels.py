"""Kernels that compute a step when it is finished: the host's as if they were a device's that overlaps."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from gpu.engine import Engine
from gpu.kernels import Batch, StepResult
from gpu.kernels.host import HostKernels, HostProgram


class LateKernels(HostKernels):
    """At most one step is under way; `started` is it."""

    overlaps = True
    started: tuple[HostProgram, Batch] | None = None

    def start(self, program: HostProgram, batch: Batch) -> tuple[HostProgram, Batch]:
        assert self.started is None, "two steps are under way"
        self.started = program, copy.deepcopy(batch)
        return self.started

    def finish(self, pending: tuple[HostProgram, Batch]) -> StepResult:
        assert pending is self.started
        self.started = None
        return super().finish(super().start(*pending))


def load_late(path: Path, **more) -> Engine:
    """An engine over `LateKernels`, in which what a block held is gone as soon as it is given back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu.engine.HostKernels", LateKernels)
        engine = Engine.load(path, **more)
    kernels, pool = engine.model.kernels, engine.pool
    cache = kernels._cache.reshape(pool.total, -1)
    allocate, release = pool.allocate, pool.release

    def allocate_when_quiet(count):
        assert kernels.started is None, "blocks are handed out while a step runs"
        return allocate(count)

    def release_and_spoil(blocks):
        release(blocks)
        cache[pool._free] = 0xFF

    pool.allocate, pool.release = allocate_when_quiet, release_and_spoil
    return engine
