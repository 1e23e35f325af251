"""The step that a fresh model takes before anyone asks for one: afterwards it is known what memory is left."""

from __future__ import annotations

import numpy as np

from gpu.kernels import Batch, SamplingBatch


def first_step() -> Batch:
    """Token 0 at position 0 in block 0, sampled greedily."""
    one, none = np.ones(1, np.float32), np.zeros(0, np.int32)
    zero, starts = np.zeros(1, np.int32), np.zeros(2, np.int32)
    sampling = SamplingBatch(
        temperature=one * 0,
        top_p=one,
        min_p=one * 0,
        top_k=zero,
        seed=np.zeros(1, np.uint64),
        position=zero,
        logprobs=zero - 1,
        repetition=one,
        presence=one * 0,
        frequency=one * 0,
        penalty_starts=starts,
        penalty_tokens=none,
        penalty_counts=none,
        bias_starts=starts,
        bias_tokens=none,
        bias_values=np.zeros(0, np.float32),
    )
    return Batch(zero, zero, zero, np.array([[0, 1, 0]], np.int32), zero[None], zero, sampling)
