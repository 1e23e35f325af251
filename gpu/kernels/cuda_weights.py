"""Weights in the order the kernels read them. `weights.cuh` is the other side and explains the layout."""

from __future__ import annotations

from typing import Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gpu.errors import ModelError
from gpu.kernels import WeightSource
from gpu.quants import Quantized, unpack

Kind = Literal["bf16", "q8_0", "q4_0", "q4_1"]
BLOCK = 32
CHUNK_BLOCKS: dict[Kind, int] = {"bf16": 1, "q8_0": 2, "q4_0": 4, "q4_1": 4}
_KINDS: dict[str, Kind] = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1", "Q4_K": "q4_1"}
"""Every other type is held as bf16. Q4_K has Q4_1's form once its group scales are multiplied out, in f16."""
SWIGLU_ROWS = 8
"""Gates and ups alternate by so many rows."""


@frozen
class PackedMatrix:
    """(rows, columns) weights on the host, ready to be copied to a card."""

    kind: Kind
    rows: int
    columns: int
    data: NDArray[np.uint16] | NDArray[np.uint8] | NDArray[np.uint32]
    scales: NDArray[np.float16]  # (rows, padded blocks, 1 or 2); (1,) for bf16


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest even. NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def pack_matrix(source: WeightSource, names: tuple[str, ...], *, interleave: bool = False) -> PackedMatrix:
    """Stack tensors by rows. `interleave`: two of them, gates and ups, for swiglu. Raises `ModelError`."""
    raws = [source.raw(name) for name in names]
    columns, rows = raws[0][1][-1], sum(shape[0] for _, shape, _ in raws)
    if columns % BLOCK:
        raise ModelError(
            f"{names[0]}: a row of {columns} weights; the CUDA kernels need a multiple of {BLOCK}"
        )
    kinds = {_KINDS.get(kind, "bf16") for kind, _, _ in raws}
    kind: Kind = kinds.pop() if len(kinds) == 1 else "bf16"
    if kind == "bf16":
        data = np.concatenate([bf16_bits(source.floats(name)) for name in names])
        scales = np.zeros(1, np.float16)
    else:
        parts = [_pack(kind, unpack(raw_kind, raw, columns)) for raw_kind, _, raw in raws]
        data, scales = (np.concatenate(planes) for planes in zip(*parts, strict=True))
    if interleave:
        order = _interleaved(rows, names[0])
        data, scales = data[order], scales if kind == "bf16" else scales[order]
    return PackedMatrix(kind, rows, columns, np.ascontiguousarray(data), np.ascontiguousarray(scales))


def _interleaved(rows: int, name: str) -> NDArray[np.intp]:
    if rows % (2 * SWIGLU_ROWS):
        raise ModelError(f"{name}: {rows // 2} rows; the CUDA kernels need a multiple of {SWIGLU_ROWS}")
    return np.arange(rows).reshape(2, -1, SWIGLU_ROWS).transpose(1, 0, 2).reshape(-1)


def _pack(kind: Kind, quantized: Quantized) -> tuple[NDArray[np.generic], NDArray[np.float16]]:
    rows, columns = quantized.q.shape
    chunk = CHUNK_BLOCKS[kind]
    blocks = columns // BLOCK
    missing = -blocks % chunk
    q = np.pad(quantized.q, ((0, 0), (0, missing * BLOCK)))
    # (row, chunk, block, lane, 8) to (row, chunk, lane, block, 8): a lane's share is one run of 16 bytes
    shares = q.reshape(rows, -1, chunk, 4, 8).transpose(0, 1, 3, 2, 4)
    planes = (quantized.scale, quantized.minimum) if kind == "q4_1" else (quantized.scale,)
    scales = np.pad(np.stack(planes, -1), ((0, 0), (0, missing), (0, 0))).astype(np.float16)
    return (_bytes(shares) if kind == "q8_0" else _nibbles(shares)), scales


def _bytes(shares: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(shares ^ 128).reshape(len(shares), -1)


def _nibbles(shares: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Weight 2j in nibble j, 2j + 1 in nibble j + 4: a pair lies 16 bits apart, as bf16 do in a word."""
    words = np.zeros(shares.shape[:-1], np.uint32)
    for j in range(4):
        words |= shares[..., 2 * j].astype(np.uint32) << np.uint32(4 * j)
        words |= shares[..., 2 * j + 1].astype(np.uint32) << np.uint32(4 * j + 16)
    return words.reshape(len(words), -1)
