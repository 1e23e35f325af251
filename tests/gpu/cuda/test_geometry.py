"""How a step is laid out on a card."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.errors import ModelError
from gpu.kernels import cuda_geometry as geometry
from gpu.kernels.cuda_geometry import StepShape
from gpu.model_config import ModelConfig
from tests.gpu.cuda.arrays import batch_of

LLAMA_8B = ModelConfig("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 1e-5, 5e5, "halves")
MOST_SHARED = 99 << 10  # an L4's, the least of all cards from 8.0 on


def decoding(positions):
    return batch_of(
        [0] * len(positions),
        spans=[(row, 1, position) for row, position in enumerate(positions)],
        tables=[[0]] * len(positions),
        logit_rows=range(len(positions)),
    )


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2000)), min_size=1, max_size=12), st.integers(0, 40)
)
def test_pieces_never_overlap_and_never_leave_the_workspace(spans, room):
    firsts = np.cumsum([0] + [rows for rows, _ in spans])
    batch = batch_of(
        [0] * int(firsts[-1]),
        spans=[(first, rows, start) for first, (rows, start) in zip(firsts, spans, strict=False)],
        tables=[[0]] * len(spans),
    )
    taken = set()
    for begin, (rows, start) in zip(geometry.place_pieces(batch, room), spans, strict=True):
        if begin < 0:
            continue
        assert rows == 1
        pieces = set(range(begin, begin + start // 128 + 1))
        assert not pieces & taken
        assert max(pieces) < room
        taken |= pieces


def test_one_sequence_at_full_length_always_finds_room():
    room = geometry.workspace_pieces(256, 131072, 32 * 130 * 4, limit=1)
    assert geometry.place_pieces(decoding([131071]), room).tolist() == [0]


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (3, 4), (9, 16), (33, 48), (129, 192), (200, 200)])
def test_decoding_steps_share_a_bucket(rows, bucket):
    batch = decoding([5] * rows)
    shape = geometry.step_shape(batch, geometry.place_pieces(batch, 1000), 200)
    assert shape == StepShape(bucket, bucket, bucket, 1, 0)


def test_the_pieces_of_a_decoding_step_are_rounded_up_to_a_power_of_two():
    batch = decoding([100, 600, 130])
    assert geometry.step_shape(batch, geometry.place_pieces(batch, 1000), 8).pieces == 8


def test_a_mixed_step_is_laid_out_as_it_is():
    batch = batch_of([0] * 8, spans=[(0, 1, 300), (1, 7, 0)], tables=[[0]] * 2, logit_rows=[0])
    shape = geometry.step_shape(batch, geometry.place_pieces(batch, 10), 64)
    assert shape == StepShape(8, 2, 1, 3, 7)


def test_a_sequence_that_finds_no_room_is_laid_out_for_prefill():
    batch = decoding([100, 600])
    pieces = geometry.place_pieces(batch, 2)
    assert pieces.tolist() == [0, -1]
    assert geometry.step_shape(batch, pieces, 64) == StepShape(2, 2, 2, 1, 1)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 64, 65, 300])
@pytest.mark.parametrize("columns", [32, 576, 4096, 14336])
def test_every_row_and_token_of_a_linear_layer_has_a_block(tokens, columns):
    launch = geometry.linear_decode("bf16", 1000, columns, tokens)
    tiles = int(launch.name.rsplit("_", 1)[1])
    assert launch.grid[0] * 16 >= 1000
    assert launch.grid[1] * tiles * 8 >= tokens
    assert 32 <= launch.block[0] <= 256
    assert launch.shared <= MOST_SHARED


def test_no_block_asks_for_more_shared_memory_than_any_card_has():
    shape = StepShape(256, 256, 256, 32, 4096)
    for layout in (geometry.attention_decode, geometry.attention_prefill, geometry.rope_kv):
        assert layout(LLAMA_8B, shape).shared <= MOST_SHARED
    assert geometry.linear_prefill("bf16", 4096, 4096).shared <= MOST_SHARED


def test_the_cache_takes_what_is_left_and_says_so_when_nothing_is():
    block = geometry.block_bytes(LLAMA_8B)
    assert block == 32 * 2 * 16 * 8 * 128 * 2
    assert geometry.cache_blocks(LLAMA_8B, 10 * block + 50, 1000) == 10
    with pytest.raises(ModelError, match="quantised"):
        geometry.cache_blocks(LLAMA_8B, block - 1, 0)


def test_a_model_without_an_instance_is_refused_by_name():
    with pytest.raises(ModelError, match="heads of 80"):
        geometry.check_shape(ModelConfig("llama", 1, 320, 640, 4, 4, 80, 99, 99, 1e-5, 1e4, "halves"))
    with pytest.raises(ModelError, match="feed_forward 100"):
        geometry.check_shape(ModelConfig("llama", 1, 256, 100, 4, 4, 64, 99, 99, 1e-5, 1e4, "halves"))
