"""Linear layers against float64 over the dequantised weights, and small against large batches bit for bit."""

import numpy as np
import pytest

from gpu.kernels.cuda_weights import pack_matrix
from tests.gpu.cuda.arrays import BF16_ERROR, Guarded, batch_of, bf16, close, floats, guarded, step_of
from tests.gpu.cuda.weight_source import MadeUpWeights, tensor

pytestmark = pytest.mark.compiler

BF16, F32, SWIGLU = 0, 1, 2
KINDS = ["BF16", "Q8_0", "Q4_0", "Q4_1"]


def made_up(random, kind, rows, columns):
    source = MadeUpWeights(None, {"w": tensor(random, kind, (rows, columns))})
    return source.floats("w").astype(np.float64), pack_matrix(source, ("w",))


def on_device(weight):
    return guarded(weight.data), guarded(weight.scales), np.int32(weight.rows), np.int32(weight.columns)


def result(tokens, rows, output):
    if output == F32:
        return Guarded((tokens, rows), np.float32)
    return Guarded((tokens, rows // 2 if output == SWIGLU else rows), np.uint16)


def decode(kernel, weight, x, *, tiles, warps, output=F32, logit_rows=None):
    tokens = len(x) if logit_rows is None else len(logit_rows)
    out = result(tokens, weight.rows, output)
    step = step_of(batch_of([0] * len(x), logit_rows=logit_rows or ()))
    kernel("linear_decode", f"linear_{weight.kind}_{tiles}")(
        (-(-weight.rows // 16), -(-tokens // (8 * tiles))),
        (32 * warps,),
        (step, *on_device(weight), x, out.array, np.int32(output), np.int32(logit_rows is not None)),
        shared_mem=(2 * warps + 1) * tiles * 512,
    )
    return out.checked() if output == F32 else floats(out.checked())


def prefill(kernel, weight, x, *, output=F32):
    out = result(len(x), weight.rows, output)
    function = kernel("linear_prefill", f"linear_{weight.kind}_prefill")
    function.max_dynamic_shared_size_bytes = 65536
    function(
        (-(-weight.rows // 128), -(-len(x) // 128)),
        (256,),
        (step_of(batch_of([0] * len(x))), *on_device(weight), x, out.array, np.int32(output)),
        shared_mem=65536,
    )
    return out.checked() if output == F32 else floats(out.checked())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "tokens", "tiles"), [(16, 32, 1, 1), (40, 576, 11, 4), (24, 1312, 5, 1)]
)
def test_few_tokens(kernel, random, kind, rows, columns, tokens, tiles):
    exact, weight = made_up(random, kind, rows, columns)
    x = bf16(random.standard_normal((tokens, columns)))
    out = decode(kernel, weight, x, tiles=tiles, warps=2)
    assert close(out, floats(x) @ exact.T, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(136, 608, 9), (16, 160, 131)])
def test_many_tokens(kernel, random, kind, rows, columns, tokens):
    exact, weight = made_up(random, kind, rows, columns)
    x = bf16(random.standard_normal((tokens, columns)))
    assert close(prefill(kernel, weight, x), floats(x) @ exact.T, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokens_row_is_the_same_bits_however_many_there_are(kernel, random, kind):
    _, weight = made_up(random, kind, 16, 1184)
    x = bf16(random.standard_normal((19, 1184)))
    alone = decode(kernel, weight, guarded(x[18:]), tiles=1, warps=1)
    assert (decode(kernel, weight, x, tiles=1, warps=3)[18] == alone[0]).all()
    assert (decode(kernel, weight, x, tiles=4, warps=2)[18] == alone[0]).all()
    assert (decode(kernel, weight, x, tiles=8, warps=1)[18] == alone[0]).all()
    assert (prefill(kernel, weight, x)[18] == alone[0]).all()


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_swiglu_of_gates_and_ups_loaded_side_by_side(kernel, random, kind, many):
    tensors = {"gate": tensor(random, kind, (24, 64), 0.5), "up": tensor(random, kind, (24, 64), 0.5)}
    source = MadeUpWeights(None, tensors)
    weight = pack_matrix(source, ("gate", "up"), interleave=True)
    x = bf16(random.standard_normal((3, 64)))
    gate, up = (floats(x) @ source.floats(name).astype(np.float64).T for name in ("gate", "up"))
    out = (
        prefill(kernel, weight, x, output=SWIGLU)
        if many
        else decode(kernel, weight, x, tiles=1, warps=1, output=SWIGLU)
    )
    assert close(out, gate / (1 + np.exp(-gate)) * up, 2 * BF16_ERROR)


def test_logits_of_the_wanted_rows_only(kernel, random):
    exact, weight = made_up(random, "Q8_0", 48, 96)
    x = bf16(random.standard_normal((7, 96)))
    out = decode(kernel, weight, x, tiles=1, warps=1, logit_rows=[6, 0, 3])
    assert close(out, floats(x)[[6, 0, 3]] @ exact.T, 1e-5)


def test_the_order_of_the_threads_changes_nothing(kernel, random):
    _, weight = made_up(random, "Q4_0", 32, 1184)
    x = bf16(random.standard_normal((8, 1184)))
    function = kernel("linear_decode", "linear_q4_0_1")
    results = []
    for seed in (1, 2, 3):

        def seeded(stem, name, seed=seed):
            function.seed = seed
            return function

        results.append(decode(seeded, weight, x, tiles=1, warps=3))
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()
