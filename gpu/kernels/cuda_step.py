"""A step's input as one run of words: one copy to the card, and a captured graph needs no new arguments.

`step.cuh` is the other side: a header that says how many of each there are and where each array begins, then
the arrays of `Batch` one after the other.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gpu.blocks import BLOCK_SIZE
from gpu.errors import StepTooLarge
from gpu.kernels import Batch

Words = NDArray[np.int32]

COUNTS = ("rows", "sequences", "samples", "columns")
ARRAYS = (
    *("tokens", "positions", "slots", "spans", "pieces", "tables", "logit_rows"),
    *("temperature", "top_p", "min_p", "top_k", "seed", "position", "logprobs"),
    *("repetition", "presence", "frequency"),
    *("penalty_starts", "penalty_tokens", "penalty_counts", "bias_starts", "bias_tokens", "bias_values"),
)
HEADER_WORDS = len(COUNTS) + len(ARRAYS)


def pack_step(batch: Batch, pieces: Words, out: Words) -> int:
    """Write `batch` into `out` and return how many words it took. Raises `StepTooLarge`, writing nothing.

    `pieces`: where each sequence's parts begin in decode attention's workspace, or -1; see `cuda_geometry`.
    """
    columns = _used_columns(batch)
    parts = [_words(array) for array in _arrays(batch, pieces, columns)]
    needed = HEADER_WORDS + sum(part.size for part in parts)
    if needed > out.size:
        raise StepTooLarge(
            f"a step of {needed} words; room for {out.size}: lower the token budget or the batch"
        )
    counts = (len(batch.tokens), len(batch.sequences), len(batch.logit_rows), columns)
    places = accumulate((part.size for part in parts[:-1]), initial=HEADER_WORDS)
    out[:HEADER_WORDS] = (*counts, *places)
    np.concatenate(parts, out=out[HEADER_WORDS:needed])
    return needed


def _arrays(batch: Batch, pieces: Words, columns: int) -> tuple[NDArray[np.generic], ...]:
    """In the order of `ARRAYS`."""
    s = batch.sampling
    return (
        *(
            batch.tokens,
            batch.positions,
            batch.slots,
            batch.sequences,
            pieces,
            batch.tables[:, :columns],
            batch.logit_rows,
        ),
        *(s.temperature, s.top_p, s.min_p, s.top_k, s.seed, s.position, s.logprobs),
        *(s.repetition, s.presence, s.frequency),
        *(s.penalty_starts, s.penalty_tokens, s.penalty_counts, s.bias_starts, s.bias_tokens, s.bias_values),
    )


def _used_columns(batch: Batch) -> int:
    """Blocks of the longest sequence: a table is as wide as the longest context, and few sequences are so long."""
    ends = batch.sequences[:, 1] + batch.sequences[:, 2]
    return -(-int(ends.max(initial=0)) // BLOCK_SIZE)


def _words(array: NDArray[np.generic]) -> Words:
    return np.ascontiguousarray(array).reshape(-1).view(np.int32)
