"""Bias, head norms, rotation and the way into the cache, against float64."""

import numpy as np
import pytest

from tests.gpu.cuda.arrays import BF16_ERROR, Guarded, batch_of, bf16, close, floats, guarded, step_of

pytestmark = pytest.mark.compiler

BLOCKS, EPS = 3, 1e-5


def run(kernel, qkv, positions, slots, heads, kv_heads, head_dim, *, interleaved, bias=None, norms=None):
    rows, half = len(qkv), head_dim // 2
    angles = np.outer(np.arange(max(positions) + 1), 10000.0 ** (-np.arange(half) / half))
    queries = Guarded((rows, heads, head_dim), np.uint16)
    keys, values = (Guarded((BLOCKS, kv_heads, 16, head_dim), np.uint16) for _ in range(2))
    nothing = np.uint64(0)
    kernel("rope_kv", "rope_kv")(
        (rows + 1, -(-(heads + 2 * kv_heads) // 4)),
        (128,),
        (
            *(step_of(batch_of([0] * rows, positions=positions, slots=slots)), bf16(qkv)),
            nothing if bias is None else guarded(bias.astype(np.float32)),
            *((nothing, nothing) if norms is None else (guarded(norm.astype(np.float32)) for norm in norms)),
            *(
                np.float32(EPS),
                guarded(np.cos(angles, dtype=np.float32)),
                guarded(np.sin(angles, dtype=np.float32)),
            ),
            *(np.int32(heads), np.int32(kv_heads), np.int32(head_dim), np.int32(interleaved)),
            *(queries.array, keys.array, values.array),
        ),
    )
    return floats(queries.checked()), keys.checked(), values.checked(), angles


def rotated(x, angles, *, interleaved):
    half = x.shape[-1] // 2
    a, b = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    out = np.empty_like(x)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out[..., a] = x[..., a] * cosine - x[..., b] * sine
    out[..., b] = x[..., a] * sine + x[..., b] * cosine
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (5, 1, 128)])
@pytest.mark.parametrize("dressed", [False, True])
def test_rotates_and_stores(kernel, random, heads, kv_heads, head_dim, interleaved, dressed):
    positions, slots = [0, 7, 4000], [5, 16, 47]
    width = (heads + 2 * kv_heads) * head_dim
    qkv = random.standard_normal((3, width))
    bias = random.standard_normal(width) if dressed else None
    norms = (random.random(head_dim), random.random(head_dim)) if dressed else None
    queries, keys, values, angles = run(
        *(kernel, qkv, positions, slots, heads, kv_heads, head_dim),
        interleaved=interleaved, bias=bias, norms=norms,
    )  # fmt: skip
    x = (floats(bf16(qkv)) + (0 if bias is None else bias)).reshape(3, -1, head_dim)
    q, k, v = np.split(x, [heads, heads + kv_heads], axis=1)
    if norms is not None:
        q, k = (
            p / np.sqrt((p**2).mean(-1, keepdims=True) + EPS) * w for p, w in zip((q, k), norms, strict=True)
        )
    turn = angles[positions]
    assert close(queries, rotated(q, turn, interleaved=interleaved), BF16_ERROR)
    for row, slot in enumerate(slots):
        at = (slot // 16, slice(None), slot % 16)
        assert close(floats(keys[at]), rotated(k, turn, interleaved=interleaved)[row], BF16_ERROR)
        assert close(floats(values[at]), v[row], BF16_ERROR)


def test_touches_no_other_slot(kernel, random):
    _, keys, values, _ = run(kernel, random.standard_normal((1, 96)), [3], [20], 1, 1, 32, interleaved=False)
    untouched = np.ones((BLOCKS, 1, 16), bool)
    untouched[1, 0, 4] = False
    for cache in (keys, values):
        assert (cache[untouched] == 0xFFFF).all()
        assert (cache[1, 0, 4] != 0xFFFF).all()
