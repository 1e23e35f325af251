"""Every block format, taken apart, gives the weights the `gguf` package gives."""

import gguf
import numpy as np
import pytest
import tiny_models

from gpu.errors import ModelError
from gpu.quants import dequantize, unpack

KINDS = ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16", "BF16", "F32"]


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_blocks_agree_with_the_gguf_package(kind):
    raw = tiny_models.random_blocks(kind, 5, 512)
    ours = dequantize(kind, raw.reshape(-1), (5, 512))
    theirs = gguf.quants.dequantize(raw, tiny_models._QUANTIZED[kind])
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
def test_an_offset_stands_for_the_minima(kind):
    weights = unpack(kind, tiny_models.random_blocks(kind, 3, 256).reshape(-1), 256)
    np.testing.assert_array_equal(weights.minimum, -np.float32(weights.offset) * weights.scale)


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(ModelError, match="IQ2_XXS"):
        unpack("IQ2_XXS", np.zeros(66, np.uint8), 256)


def test_rows_that_are_not_whole_blocks_are_refused():
    with pytest.raises(ModelError, match="whole Q4_K blocks"):
        unpack("Q4_K", np.zeros(144, np.uint8), 128)
