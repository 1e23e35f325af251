"""Embedding against the dequantised table."""

import numpy as np
import pytest

from gpu.kernels.cuda_weights import pack_matrix
from tests.gpu.cuda.arrays import Guarded, batch_of, close, guarded, step_of
from tests.gpu.cuda.weight_source import MadeUpWeights, tensor

pytestmark = pytest.mark.compiler


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("width", [32, 96, 576])
def test_a_row_is_its_tokens_row_of_the_table(kernel, random, kind, width):
    source = MadeUpWeights(None, {"table": tensor(random, kind, (11, width))})
    table = pack_matrix(source, ("table",))
    tokens = [10, 0, 3, 3]
    out = Guarded((4, width), np.float32)
    kernel("embedding", f"embed_{table.kind}")(
        (5,),
        (128,),
        (step_of(batch_of(tokens)), guarded(table.data), guarded(table.scales), out.array, np.int32(width)),
    )
    exact = source.floats("table").astype(np.float64)[tokens]
    assert close(out.checked(), exact, 4e-3 if kind == "F32" else 1e-6)
