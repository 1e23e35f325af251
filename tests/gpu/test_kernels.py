"""The CPU's kernels against plain NumPy, and their promise: a row does not depend on its neighbours."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.kernels import simd, tiles
from gpu.kernels.cpu import choose_isa, describe_cpu
from gpu.kernels.jit import native
from gpu.kernels.packing import pack_rows
from gpu.kernels.rows import quantize
from gpu.quants import dequantize

HERE = Path(__file__).parent
KINDS = ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16", "BF16", "F32"]


@native("void(int64, int64, int64, int64)")
def _quantize(x, q, meta, blocks):
    quantize(x, q, meta, blocks)


@native("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _tile(function, w, blocks, x, stride, columns, count, out):
    tiles.run_tile(function, w, blocks, x, stride, columns, count, out)


def _rows_of(x):
    """Activations as the tiles want them."""
    n, columns = x.shape
    stride = columns * tiles.ROW_BYTES_TWICE // 2
    rows = np.zeros((n, stride), np.uint8)
    rows[:, : 4 * columns] = x.view(np.uint8)
    for row in rows:
        at = row.ctypes.data
        _quantize(at, at + tiles.Q_AT * columns, at + tiles.META_AT * columns, columns // 32)
    return rows


def _product(kind, raw, x, together):
    """X @ w.T through the tiles, `together` tokens at a time."""
    columns = x.shape[1]
    kept, packed = pack_rows(kind, raw.reshape(-1), columns)
    function, rows = tiles.tile_address(kept), _rows_of(x)
    out = np.zeros((len(packed), len(x), 16), np.float32)
    sums = np.zeros((tiles.TOKENS, 16), np.float32)
    for i, tile in enumerate(packed):
        for first in range(0, len(x), together):
            here = rows[first : first + together]
            _tile(
                function, tile.ctypes.data, columns // 32, here.ctypes.data, rows.shape[1], columns, len(here),
                sums.ctypes.data,
            )  # fmt: skip
            out[i, first : first + together] = sums[: len(here)]
    return out.transpose(1, 0, 2).reshape(len(x), -1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tile_of_each_format_is_the_product_with_the_dequantised_weights(kind):
    raw = tiny_models.random_blocks(kind, 40, 512)
    x = np.random.default_rng(1).standard_normal((5, 512)).astype(np.float32)
    expected = x @ dequantize(kind, raw.reshape(-1), (40, 512)).T
    got = _product(kind, raw, x, tiles.TOKENS)[:, :40]
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bits_whichever_tokens_share_the_call(kind):
    raw = tiny_models.random_blocks(kind, 16, 256)
    x = np.random.default_rng(2).standard_normal((7, 256)).astype(np.float32)
    alone = _product(kind, raw, x, 1)
    for together in range(2, tiles.TOKENS + 1):
        np.testing.assert_array_equal(_product(kind, raw, x, together), alone)


def test_a_block_with_a_value_that_is_not_finite_spoils_its_row_and_no_other():
    raw = tiny_models.random_blocks("Q4_0", 16, 256)
    x = np.random.default_rng(3).standard_normal((3, 256)).astype(np.float32)
    clean = _product("Q4_0", raw, x, 3)
    for poison in (np.nan, np.inf, -np.inf):
        spoiled = x.copy()
        spoiled[1, 77] = poison
        got = _product("Q4_0", raw, spoiled, 3)
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])


def test_zeros_quantise_to_zeros():
    x = np.zeros((1, 64), np.float32)
    assert not _rows_of(x).any()


@simd.emitter("ii")
def _exp2(b, source, target):
    simd.store(b, simd.exp2(b, simd.load(b, source, 0, simd.V8)), target)


@native("void(int64, int64)")
def _call_exp2(source, target):
    _exp2(source, target)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-125, 126, width=32), min_size=8, max_size=8))
def test_exp2_is_exact_to_fp32(values):
    x, y = np.array(values, np.float32), np.zeros(8, np.float32)
    _call_exp2(x.ctypes.data, y.ctypes.data)
    np.testing.assert_allclose(y, np.exp2(x.astype(np.float64)), rtol=3e-7)


def test_exp2_of_zero_is_one_and_of_minus_a_million_nothing():
    x, y = np.array([0, -1e6, 0, -1e6, 0, 0, 0, 0], np.float32), np.zeros(8, np.float32)
    _call_exp2(x.ctypes.data, y.ctypes.data)
    assert y[0] == 1.0
    assert y[1] < 1e-37


def test_the_best_instructions_that_are_wholly_there_are_chosen():
    everything = dict.fromkeys(("avx512f", "avx512bw", "avx512vl", "avx512vnni", "fma", "f16c", "avx2"), True)
    assert choose_isa(everything) == "avx512vnni"
    assert choose_isa({**everything, "avx512vnni": False}) == "avx2"
    assert choose_isa({**everything, "fma": False}) == "portable"
    assert choose_isa({}) == "portable"
    assert choose_isa(everything, "portable") == "portable"
    with pytest.raises(ValueError, match="ANTIPHON_ISA=avx2"):
        choose_isa({}, "avx2")


def test_the_description_is_of_this_machine():
    cpu = describe_cpu()
    assert 1 <= cpu.threads <= cpu.cores


@pytest.mark.slow
def test_portable_instructions_pass_the_same_tests(tmp_path):
    """Every machine has them; most never use them, so they are tried here on purpose."""
    chosen = {**os.environ, "ANTIPHON_ISA": "portable", "ANTIPHON_CACHE": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        str(HERE / "test_kernels.py"),
        str(HERE / "test_models.py"),
    ]
    done = subprocess.run(
        command, env=chosen, capture_output=True, text=True, check=False, cwd=HERE.parents[1]
    )
    assert done.returncode == 0, done.stdout[-2000:]
