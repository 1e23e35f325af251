"""Paged attention against float64, and decoding against prefill bit for bit."""

import numpy as np
import pytest

from gpu.kernels import cuda_geometry as geometry
from gpu.model_config import ModelConfig
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


def config_of(paged):
    return ModelConfig(
        *("llama", 1, 32, 32, paged.heads, paged.kv_heads, paged.head_dim, 32, 4096, 1e-5, 1e4, "halves")
    )


def attend(kernel, paged, queries, spans, *, room=100):
    """Both kernels over one step, as the engine launches them: each takes the sequences that are its own."""
    config = config_of(paged)
    batch = batch_of([0] * len(queries), spans=spans, tables=paged.tables)
    pieces = geometry.place_pieces(batch, room)
    shape = geometry.step_shape(batch, pieces, 16)
    step = step_of(batch, pieces)
    heads, head_dim = np.int32(paged.heads), np.int32(paged.head_dim)
    out = Guarded(queries.shape, np.uint16)
    parts = Guarded((room, paged.heads, paged.head_dim), np.float32)
    tops = Guarded((room, paged.heads, 2), np.float32)
    scale = np.float32(np.log2(np.e) / paged.head_dim**0.5)
    common = (guarded(queries), paged.keys, paged.values, heads, np.int32(paged.kv_heads), scale)

    def start(launch, *arguments):
        function = kernel(launch.stem, launch.name)
        function.max_dynamic_shared_size_bytes = max(launch.shared, 48 << 10)
        function(launch.grid, launch.block, (step, *arguments), shared_mem=launch.shared)

    if shape.pieces:
        start(geometry.attention_decode(config, shape), *common, parts.array, tops.array)
        fold = geometry.attention_fold(config, shape)
        start(fold, parts.checked(), tops.checked(), heads, head_dim, out.array)
    if shape.prefill_rows:
        start(geometry.attention_prefill(config, shape), *common, out.array)
    return out.checked()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 128, 129, 300])
def test_decoding_at_lengths_across_block_edges(kernel, random, length):
    paged = Paged(random, [length], 6, 2, 64)
    queries = bf16(random.standard_normal((1, 6 * 64)))
    out = attend(kernel, paged, queries, [(0, 1, length - 1)])
    assert close(floats(out[0]), paged.exact(floats(queries[0]), 0, length - 1), TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (1, 1, 32), (7, 1, 96), (8, 2, 128), (17, 1, 32), (40, 2, 32)],
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
        alone = guarded(queries[position : position + 1])
        for room in (100, 0):  # without room for its pieces attention_prefill takes it
            assert (attend(kernel, paged, alone, [(0, 1, position)], room=room)[0] == whole[position]).all()


def test_a_large_score_early_or_late_does_not_overflow(kernel, random):
    paged = Paged(random, [200], 2, 1, 32)
    for key in (3, 180):
        paged.keys[paged.tables[0, key // 16], 0, key % 16] = bf16(np.full(32, 30.0))
    queries = bf16(np.full((1, 64), 20.0))
    out = attend(kernel, paged, queries, [(0, 1, 199)])
    assert close(floats(out[0]), paged.exact(floats(queries[0]), 0, 199), TOLERANCE)
