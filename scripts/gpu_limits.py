"""What a card can do at most, measured the same minute: how fast it copies, how fast it multiplies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from attrs import frozen

COPY_BYTES = 2 << 30
MATRIX_SIDE = 8192
ROUNDS = 10


@frozen
class Limits:
    """Bytes a second, read and written both counted; operations a second, a multiplication and an addition two."""

    bandwidth: float
    matrix_rate: float

    def seconds(self, bytes_moved: float, operations: float) -> float:
        """The least time for so much work: the longer of the two."""
        return max(bytes_moved / self.bandwidth, operations / self.matrix_rate)


def measure_limits(cupy: Any) -> Limits:
    """Copy 2 GiB; multiply two 8192 x 8192 matrices of random halves (bf16 runs at the same rate)."""
    source = cupy.random.randint(0, 255, COPY_BYTES // 8, dtype=cupy.int64)
    target = cupy.empty_like(source)
    copying = _median_seconds(cupy, lambda: cupy.copyto(target, source))
    left, right = (
        cupy.random.standard_normal((MATRIX_SIDE, MATRIX_SIDE), dtype=cupy.float32).astype(cupy.float16)
        for _ in range(2)
    )
    product = cupy.empty_like(left)
    multiplying = _median_seconds(cupy, lambda: cupy.matmul(left, right, out=product))
    return Limits(2 * COPY_BYTES / copying, 2 * MATRIX_SIDE**3 / multiplying)


def _median_seconds(cupy: Any, work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(ROUNDS):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3)
    return statistics.median(times)
