"""GGUF's block formats taken apart: every one is `weight = scale * q + minimum` over small groups.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.h
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gpu.errors import ModelError
from gpu.gguf_file import BLOCK_SHAPES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

FLOAT_TYPES = ("F32", "F16", "BF16")


@frozen
class Quantized:
    """A matrix as small unsigned integers. `offset` is set where `minimum == -offset * scale` exactly."""

    q: Bytes  # (rows, columns)
    scale: Floats  # (rows, columns / group)
    minimum: Floats  # (rows, columns / group)
    group: int
    bits: int
    offset: int | None

    def floats(self) -> Floats:
        """The weights in fp32."""
        rows, columns = self.q.shape
        grouped = self.q.reshape(rows, columns // self.group, self.group).astype(np.float32)
        return (grouped * self.scale[..., None] + self.minimum[..., None]).reshape(rows, columns)


def dequantize(kind: str, raw: Bytes, shape: tuple[int, ...]) -> Floats:
    """Any supported tensor in fp32."""
    if kind == "F32":
        return raw.view(np.float32).reshape(shape)
    if kind == "F16":
        return raw.view(np.float16).reshape(shape).astype(np.float32)
    if kind == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return unpack(kind, raw, shape[-1]).floats().reshape(shape)


def unpack(kind: str, raw: Bytes, columns: int) -> Quantized:
    """Rows of `columns` weights each, from blocks as they lie in the file. Raises `ModelError`."""
    if kind not in _UNPACKERS:
        raise ModelError(f"tensor type {kind} is not supported; supported: {', '.join(BLOCK_SHAPES)}")
    weights, size = BLOCK_SHAPES[kind]
    if columns % weights:
        raise ModelError(f"a row of {columns} weights is not whole {kind} blocks of {weights}")
    per_row = columns // weights
    return _UNPACKERS[kind](raw.reshape(-1, per_row, size))


def _half(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """(…, n) bytes to (…, 2n): all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: Bytes) -> Quantized:
    scale = _half(blocks, 0)
    q = _nibbles(blocks[..., 2:]).reshape(len(blocks), -1)
    return Quantized(q, scale, -8 * scale, 32, 4, 8)


def _q4_1(blocks: Bytes) -> Quantized:
    q = _nibbles(blocks[..., 4:]).reshape(len(blocks), -1)
    return Quantized(q, _half(blocks, 0), _half(blocks, 2), 32, 4, None)


def _q8_0(blocks: Bytes) -> Quantized:
    scale = _half(blocks, 0)
    # Adding 128 to a signed byte is flipping its top bit.
    q = (blocks[..., 2:] ^ np.uint8(128)).reshape(len(blocks), -1)
    return Quantized(q, scale, -128 * scale, 32, 8, 128)


def _q4_k(blocks: Bytes) -> Quantized:
    rows = len(blocks)
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    scale = (_half(blocks, 0)[..., None] * scales).reshape(rows, -1)
    minimum = -(_half(blocks, 2)[..., None] * minima).reshape(rows, -1)
    q = _nibbles(blocks[..., 16:].reshape(rows, -1, 4, 32)).reshape(rows, -1)
    return Quantized(q, scale.astype(np.float32), minimum.astype(np.float32), 32, 4, None)


def _q6_k(blocks: Bytes) -> Quantized:
    rows, count = blocks.shape[:2]
    low = blocks[..., :128].reshape(rows, count, 2, 2, 32)
    high = blocks[..., 128:192].reshape(rows, count, 2, 1, 32)
    lows = np.concatenate([low & 15, low >> 4], axis=3)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    q = (lows | ((high >> shifts) & 3) << 4).reshape(rows, -1).astype(np.uint8)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    scale = (_half(blocks, 208)[..., None] * scales).reshape(rows, -1).astype(np.float32)
    return Quantized(q, scale, -32 * scale, 16, 6, 32)


_UNPACKERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}
