"""Arrays for kernel tests: bf16 as NumPy sees it, outputs that begin as NaN, and guards on both sides."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.kernels import Batch, SamplingBatch
from gpu.kernels.cuda_step import pack_step
from gpu.kernels.cuda_weights import bf16_bits

GUARD = 64


class Guarded:
    """An array full of NaN (all bits set) between two guards that nothing may write to."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.whole = np.full(size + 2 * GUARD, 0xFF, np.uint8)
        self.array: NDArray[Any] = self.whole[GUARD : GUARD + size].view(dtype).reshape(shape)

    def checked(self) -> NDArray[Any]:
        assert (self.whole[:GUARD] == 0xFF).all(), "written before the array"
        assert (self.whole[-GUARD:] == 0xFF).all(), "written behind the array"
        return self.array


def guarded(values: NDArray[Any]) -> NDArray[Any]:
    """A copy whose neighbours are NaN: a read past its ends shows in the result."""
    out = Guarded(values.shape, values.dtype)
    out.array[...] = values
    return out.array


def bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    return guarded(bf16_bits(np.asarray(values, np.float32)))


def floats(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def close(out: NDArray[Any], reference: NDArray[Any], tolerance: float) -> bool:
    """By norm, so that cancellation in one element does not count; NaN never passes."""
    error = np.linalg.norm(np.asarray(out, np.float64) - reference)
    return bool(error <= tolerance * (np.linalg.norm(reference) + 1e-9))


BF16_ERROR = 4e-3  # half a unit in the last of 8 bits, rounded up


def batch_of(
    tokens: Any,
    *,
    positions: Any = None,
    slots: Any = None,
    spans: Any = None,
    tables: Any = None,
    logit_rows: Any = (),
    **sampling: Any,
) -> Batch:
    """A batch with the fields a test cares for; one sequence from position 0 on unless told otherwise."""
    rows = len(tokens)

    def ints(values: Any) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    return Batch(
        ints(tokens),
        ints(range(rows) if positions is None else positions),
        ints(range(rows) if slots is None else slots),
        ints([(0, rows, 0)] if spans is None else spans).reshape(-1, 3),
        ints([[0]] if tables is None else tables),
        ints(logit_rows),
        sampling_of(len(logit_rows), **sampling),
    )


def sampling_of(samples: int, **given: Any) -> SamplingBatch:
    def column(name: str, neutral: float, dtype: Any) -> NDArray[Any]:
        return np.broadcast_to(np.asarray(given.get(name, neutral), dtype), (samples,)).copy()

    def ragged(name: str) -> tuple[NDArray[np.int32], list[tuple[Any, Any]]]:
        lists = given.get(name, [()] * samples)
        return np.cumsum([0, *map(len, lists)], dtype=np.int32), [pair for row in lists for pair in row]

    penalty_starts, penalties = ragged("penalties")
    bias_starts, biases = ragged("biases")
    return SamplingBatch(
        temperature=column("temperature", 0.0, np.float32),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        seed=column("seed", 0, np.uint64),
        position=column("position", 0, np.int32),
        logprobs=column("logprobs", -1, np.int32),
        repetition=column("repetition", 1.0, np.float32),
        presence=column("presence", 0.0, np.float32),
        frequency=column("frequency", 0.0, np.float32),
        penalty_starts=penalty_starts,
        penalty_tokens=np.array([token for token, _ in penalties], np.int32),
        penalty_counts=np.array([count for _, count in penalties], np.int32),
        bias_starts=bias_starts,
        bias_tokens=np.array([token for token, _ in biases], np.int32),
        bias_values=np.array([value for _, value in biases], np.float32),
    )


def step_words(batch: Batch, pieces: NDArray[np.int32]) -> int:
    """How many words `pack_step` writes."""
    return pack_step(batch, pieces, np.empty(1 << 20, np.int32))


def step_of(batch: Batch, pieces: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    if pieces is None:
        pieces = np.full(len(batch.sequences), -1, np.int32)
    out = Guarded((step_words(batch, pieces),), np.int32)
    pack_step(batch, pieces, out.array)
    return out.checked()
