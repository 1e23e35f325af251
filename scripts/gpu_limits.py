"""What a card can do at most, measured the same minute: how fast it copies, how fast it multiplies."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import frozen

COPY_BYTES = 2 << 30
MATRIX_SIDE = 8192
ROUNDS = 10


@frozen
class Limits:
    """Bytes a second, read and written both counted; operations a second, a multiplication and an addition two.

    None: it could not be measured.
    """

    bandwidth: float | None
    matrix_rate: float | None

    def seconds(self, bytes_moved: float, operations: float) -> float | None:
        """The least time for so much work: the longer of the two; None where either is not known."""
        if self.bandwidth is None or self.matrix_rate is None:
            return None
        return max(bytes_moved / self.bandwidth, operations / self.matrix_rate)


def measure_bandwidth(cupy: Any) -> float:
    """Bytes a second, read and written, of copying 2 GiB of random numbers."""
    source, target = (cupy.empty(COPY_BYTES, cupy.uint8) for _ in range(2))
    tile = np.random.default_rng(0).integers(0, 256, COPY_BYTES // 32, np.uint8)
    for begin in range(0, COPY_BYTES, tile.size):
        source[begin : begin + tile.size].set(tile)
    return 2 * COPY_BYTES / _median_seconds(cupy, lambda: cupy.copyto(target, source))


def measure_matrix_rate(cupy: Any) -> float:
    """Operations a second of multiplying two 8192 x 8192 matrices of random numbers.

    Raises `ImportError` where there is neither PyTorch nor cuBLAS.
    """
    return 2 * MATRIX_SIDE**3 / _median_seconds(cupy, _product(cupy))


def _product(cupy: Any) -> Callable[[], object]:
    """A product by whichever library is here: bf16 through PyTorch, or fp16, which runs at the same rate, through cuBLAS.

    Both work on CuPy's current stream. `cupy.dot` launches no kernel of CuPy's own here: those are compiled where they
    run, with CUDA's headers, which nobody has to have.
    """
    random = np.random.default_rng(1)
    sides = [random.standard_normal((MATRIX_SIDE, MATRIX_SIDE), np.float32) for _ in range(2)]
    torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    if torch is None or not torch.cuda.is_available():
        left, right = (cupy.asarray(side.astype(np.float16)) for side in sides)
        product = cupy.empty_like(left)
        return lambda: cupy.dot(left, right, out=product)
    left, right = (torch.from_numpy(side).to("cuda", torch.bfloat16) for side in sides)
    stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)

    def multiply() -> object:
        with torch.cuda.stream(stream):
            return torch.matmul(left, right)

    return multiply


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
