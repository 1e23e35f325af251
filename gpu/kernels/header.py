"""What every operation can read of the step at hand: one array of words at a fixed address."""

from __future__ import annotations

from typing import Final

from gpu.kernels.jit import inner
from gpu.kernels.simd import I64, Value, constant, emitter, load

ROWS: Final = 0
"""Tokens in the step."""
SAMPLES: Final = 1
TOKENS: Final = 2
"""From here on addresses of the batch's arrays, int32 unless said otherwise."""
POSITIONS: Final = 3
SLOTS: Final = 4
TABLES: Final = 5
TABLES_STRIDE: Final = 6
"""Bytes from one sequence's block table to the next."""
ITEMS: Final = 7
"""(sequence, first row, rows) of each of attention's tiles."""
LOGIT_ROWS: Final = 8
SCRATCH: Final = 9
SCRATCH_STRIDE: Final = 10
"""Bytes each thread has for itself."""
TEMPERATURE: Final = 11
TOP_P: Final = 12
MIN_P: Final = 13
TOP_K: Final = 14
SEED: Final = 15
"""uint64."""
POSITION: Final = 16
LOGPROBS: Final = 17
REPETITION: Final = 18
PRESENCE: Final = 19
FREQUENCY: Final = 20
PENALTY_STARTS: Final = 21
PENALTY_TOKENS: Final = 22
PENALTY_COUNTS: Final = 23
BIAS_STARTS: Final = 24
BIAS_TOKENS: Final = 25
BIAS_VALUES: Final = 26
HEADS_IN_BLOCK: Final = 27
"""Key heads of all layers: a block's keys and values lie together, so that a new one touches one place."""
WORDS: Final = 32

ONCE: Final = 0
"""Units an operation's chunks are counted in: one,"""
ROW_GROUPS: Final = 1
"""each `ROWS_IN_GROUP` rows,"""
TILES: Final = 2
"""each of attention's tiles,"""
DRAWS: Final = 3
"""each sample,"""
ANY_SAMPLE: Final = 4
"""and one if there is any sample."""
UNITS: Final = 5
ROWS_IN_GROUP: Final = 4


@emitter("ii", "int64")
def _word_at(b, header, index):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    at: Value = b.mul(index, constant(I64, 8))
    return load(b, header, at, I64)


@inner
def word(header, index):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """One word of the header."""
    return _word_at(header, index)
