"""Fused residual and RMSNorm against float64."""

import numpy as np
import pytest

from tests.gpu.cuda.arrays import BF16_ERROR, Guarded, batch_of, bf16, close, floats, guarded, step_of

pytestmark = pytest.mark.compiler


def run(kernel, hidden, delta, weight, rows_of_grid):
    rows, width = hidden.shape
    out = Guarded(hidden.shape, np.uint16)
    hidden = guarded(hidden)
    kernel("add_norm", "add_norm")(
        (rows_of_grid,),
        (256,),
        (step_of(batch_of([0] * rows)), hidden, delta, weight, out.array, np.int32(width), np.float32(1e-5)),
        shared_mem=128,
    )
    return hidden, floats(out.checked())


@pytest.mark.parametrize(("rows", "width"), [(1, 32), (3, 576), (2, 2080), (5, 257)])
def test_adds_the_delta_and_norms(kernel, random, rows, width):
    hidden = random.standard_normal((rows, width)).astype(np.float32)
    delta, weight = bf16(random.standard_normal((rows, width))), random.random(width, np.float32)
    after, out = run(kernel, hidden, delta, weight, rows)
    expected = hidden + floats(delta)
    assert close(after, expected, 1e-6)
    normed = expected / np.sqrt((expected**2).mean(1, keepdims=True) + 1e-5) * weight
    assert close(out, normed, BF16_ERROR)


def test_without_a_delta_the_residual_stays_as_it_is(kernel, random):
    hidden = random.standard_normal((2, 64)).astype(np.float32)
    after, out = run(kernel, hidden, np.uint64(0), np.ones(64, np.float32), 2)
    assert (after == hidden).all()
    assert np.allclose((out**2).mean(1), 1, atol=0.02)


def test_a_row_is_the_same_bits_in_any_batch_and_any_grid(kernel, random):
    hidden = random.standard_normal((4, 576)).astype(np.float32)
    delta, weight = bf16(random.standard_normal((4, 576))), random.random(576, np.float32)
    _, together = run(kernel, hidden, delta, weight, 8)
    for row in range(4):
        _, alone = run(kernel, hidden[row : row + 1], guarded(delta[row : row + 1]), weight, 1)
        assert (alone[0] == together[row]).all()
