"""A step's input as words."""

import numpy as np
import pytest

from gpu.errors import StepTooLarge
from gpu.kernels.cuda_step import ARRAYS, COUNTS, HEADER_WORDS, pack_step
from tests.gpu.cuda.arrays import batch_of

BATCH = batch_of(
    [5, 6, 7],
    spans=[(0, 2, 15), (2, 1, 3)],
    tables=[[4, 9, 99, 99], [2, 99, 99, 99]],
    logit_rows=[1, 2],
    seed=[2**63 + 5, 7],
    biases=[[(3, -np.inf)], []],
    penalties=[[], [(8, 2), (9, 0)]],
)
PIECES = np.array([-1, 0], np.int32)
NEEDED = HEADER_WORDS + 3 * 3 + 2 * 3 + 2 + 2 * 2 + 2 + 2 * (9 + 2) + (3 + 2 * 2) + (3 + 2 * 1)
"""Tokens, spans, pieces, tables of two columns, samples, what is set for each of them, penalties, biases."""


def read(words, name, size, dtype=np.int32):
    at = words[len(COUNTS) + ARRAYS.index(name)]
    return words[at : at + size].view(dtype).tolist()


def test_the_header_says_where_everything_is():
    words = np.zeros(500, np.int32)
    taken = pack_step(BATCH, PIECES, words)
    assert taken == NEEDED
    assert not words[taken:].any()
    assert words[:4].tolist() == [3, 2, 2, 2]
    assert words[len(COUNTS)] == HEADER_WORDS
    assert read(words, "tokens", 3) == [5, 6, 7]
    assert read(words, "spans", 6) == [0, 2, 15, 2, 1, 3]
    assert read(words, "pieces", 2) == [-1, 0]
    assert read(words, "seed", 4, np.uint64) == [2**63 + 5, 7]
    assert read(words, "penalty_starts", 3) == [0, 0, 2]
    assert read(words, "penalty_counts", 2) == [2, 0]
    assert read(words, "bias_values", 1, np.float32) == [-np.inf]


def test_tables_are_cut_to_the_longest_sequence():
    words = np.zeros(500, np.int32)
    pack_step(BATCH, PIECES, words)
    assert read(words, "tables", 4) == [4, 9, 2, 99]


def test_a_step_that_does_not_fit_writes_nothing():
    words = np.zeros(NEEDED - 1, np.int32)
    with pytest.raises(StepTooLarge, match="token budget"):
        pack_step(BATCH, PIECES, words)
    assert not words.any()
