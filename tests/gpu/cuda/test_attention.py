"""Paged attention against float64, and decoding against prefill bit for bit."""

import numpy as np
import pytest

from tests.gpu.cuda.arrays import Guarded, batch_of, bf16, close, floats, guarded, step_of

pytestmark = pytest.mark.compiler

TOLERANCE = 8e-3  # the weights and the result are rounded to bf16


class Paged:
    """Sequences of random keys and values, scattered over a cache whose other slots are NaN."""

    def __init__(self, random, lengths, heads, kv_heads, head_dim):
        self.heads, self.kv_heads, self.head_dim, self.lengths = heads, kv_heads, head_dim, lengths
        needed = [-(-length // 16) for length in lengths]
        blocks = random.permutation(sum(needed) + 2)
        self.tables = np.full((len(lengths), max(needed) + 1), 2**30, np.int32)
        shape = (sum(needed) + 2, kv_heads, 16, head_dim)
        self.keys, self.values = (Guarded(shape, np.uint16).array for _ in range(2))
        for sequence, length in enumerate(lengths):
            for i in range(needed[sequence]):
                self.tables[sequence, i] = blocks[sum(needed[:sequence]) + i]
            at = np.arange(length)
            where = self.tables[sequence, at // 16], slice(None), at % 16
            for cache in (self.keys, self.values):
                cache[where] = bf16(random.standard_normal((length, kv_heads, head_dim)))

    def exact(self, queries, sequence, position):
        at = np.arange(position + 1)
        where = self.tables[sequence, at // 16], slice(None), at % 16
        group = self.heads // self.kv_heads
        q = queries.reshape(self.kv_heads, group, self.head_dim)
        scores = np.einsum("hgd,thd->hgt", q, floats(self.keys[where])) / self.head_dim**0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hgt,thd->hgd", weights, floats(self.values[where])).reshape(-1)


def attend(kernel, paged, queries, spans):
    """Both kernels over one step, as the engine launches them: each takes the sequences that are its own."""
    heads, kv_heads, head_dim = paged.heads, paged.kv_heads, paged.head_dim
    rows, group = len(queries), heads // kv_heads
    step = step_of(batch_of([0] * rows, spans=spans, tables=paged.tables))
    out = Guarded((rows, heads * head_dim), np.uint16)
    pieces = -(-max(paged.lengths) // 128) + 1
    parts, tops = (
        Guarded((rows, heads, pieces, head_dim), np.float32),
        Guarded((rows, heads, pieces, 2), np.float32),
    )
    common = (step, guarded(queries), paged.keys, paged.values, np.int32(heads), np.int32(kv_heads))
    scale = np.float32(1.4426950408889634 / head_dim**0.5)
    stage = 32 * (head_dim + (32 if head_dim % 64 == 0 else 0) + head_dim + 8) * 2
    decode = kernel("attention_decode", f"attention_decode_{head_dim}")
    decode.max_dynamic_shared_size_bytes = 2 * stage
    decode(
        (pieces, kv_heads * -(-group // 16), len(spans)),
        (32,),
        (*common, scale, np.int32(pieces), parts.array, tops.array),
        shared_mem=2 * stage,
    )
    kernel("attention_decode", "attention_fold")(
        (heads, len(spans)),
        (-(-head_dim // 32) * 32,),
        (
            step,
            parts.checked(),
            tops.checked(),
            np.int32(heads),
            np.int32(head_dim),
            np.int32(pieces),
            out.array,
        ),
    )
    prefill = kernel("attention_prefill", f"attention_prefill_{head_dim}")
    prefill.max_dynamic_shared_size_bytes = 2 * stage + 64 * head_dim * 4
    most = max(span[1] for span in spans)
    prefill(
        (-(-most * group // 64), kv_heads, len(spans)),
        (128,),
        (*common, scale, out.array),
        shared_mem=2 * stage + 64 * head_dim * 4,
    )
    return out.checked()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 128, 129, 300])
def test_decoding_at_lengths_across_block_edges(kernel, random, length):
    paged = Paged(random, [length], 6, 2, 64)
    queries = bf16(random.standard_normal((1, 6 * 64)))
    out = attend(kernel, paged, queries, [(0, 1, length - 1)])
    assert close(floats(out[0]), paged.exact(floats(queries[0]), 0, length - 1), TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (1, 1, 32), (7, 1, 96), (8, 2, 128), (17, 1, 32), (40, 2, 32), (2, 1, 256)],
)
def test_any_group_of_heads(kernel, random, heads, kv_heads, head_dim):
    lengths = [20, 139]
    paged = Paged(random, lengths, heads, kv_heads, head_dim)
    queries = bf16(random.standard_normal((4, heads * head_dim)))
    out = attend(kernel, paged, queries, [(0, 1, 19), (1, 3, 136)])
    for row, (sequence, position) in enumerate([(0, 19), (1, 136), (1, 137), (1, 138)]):
        assert close(floats(out[row]), paged.exact(floats(queries[row]), sequence, position), TOLERANCE)


def test_a_prompt_from_an_empty_prefix(kernel, random):
    paged = Paged(random, [45], 4, 2, 32)
    queries = bf16(random.standard_normal((45, 4 * 32)))
    out = attend(kernel, paged, queries, [(0, 45, 0)])
    for row in range(45):
        assert close(floats(out[row]), paged.exact(floats(queries[row]), 0, row), TOLERANCE)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 128)])
def test_a_token_is_the_same_bits_decoded_or_prefilled_however_it_was_cut(
    kernel, random, heads, kv_heads, head_dim
):
    length = 150
    paged = Paged(random, [length], heads, kv_heads, head_dim)
    queries = bf16(random.standard_normal((length, heads * head_dim)))
    whole = attend(kernel, paged, queries, [(0, length, 0)])
    tail = attend(kernel, paged, guarded(queries[127:]), [(0, length - 127, 127)])
    assert (tail == whole[127:]).all()
    for position in (0, 31, 127, 128, 149):
        alone = attend(kernel, paged, guarded(queries[position : position + 1]), [(0, 1, position)])
        assert (alone[0] == whole[position]).all()


def test_a_large_score_early_or_late_does_not_overflow(kernel, random):
    paged = Paged(random, [200], 2, 1, 32)
    for key in (3, 180):
        paged.keys[paged.tables[0, key // 16], 0, key % 16] = bf16(np.full(32, 30.0))
    queries = bf16(np.full((1, 64), 20.0))
    out = attend(kernel, paged, queries, [(0, 1, 199)])
    assert close(floats(out[0]), paged.exact(floats(queries[0]), 0, 199), TOLERANCE)
