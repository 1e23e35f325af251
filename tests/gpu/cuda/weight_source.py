"""A model's weights made up on the spot, under GGUF's names and in GGUF's block formats."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gpu.model_config import ModelConfig
from gpu.quants import dequantize


@frozen
class MadeUpWeights:
    """Tensors by name: type, shape, bytes."""

    config: ModelConfig | None
    tensors: dict[str, tuple[str, tuple[int, ...], NDArray[np.uint8]]]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def raw(self, name: str) -> tuple[str, tuple[int, ...], NDArray[np.uint8]]:
        return self.tensors[name]

    def floats(self, name: str) -> NDArray[np.float32]:
        kind, shape, data = self.tensors[name]
        return dequantize(kind, data, shape)


def tensor(
    random: np.random.Generator, kind: str, shape: tuple[int, ...], scale: float = 0.05
) -> tuple[str, tuple[int, ...], NDArray[np.uint8]]:
    """Random weights of a type, as bytes of GGUF blocks."""
    if kind in ("F32", "F16", "BF16"):
        values = (random.standard_normal(shape) * scale).astype(np.float32)
        if kind == "F16":
            return kind, shape, values.astype(np.float16).reshape(-1).view(np.uint8)
        bits = values.view(np.uint32) >> 16
        return kind, shape, (values if kind == "F32" else bits.astype(np.uint16)).reshape(-1).view(np.uint8)
    blocks = int(np.prod(shape)) // 32

    def halves(low: float, high: float) -> NDArray[np.uint8]:
        return (
            (random.uniform(low, high, blocks) * scale).astype(np.float16).view(np.uint8).reshape(blocks, 2)
        )

    quants = random.integers(0, 256, (blocks, 32 if kind == "Q8_0" else 16), np.uint8)
    widest = 128 if kind == "Q8_0" else 8
    parts = [halves(-1 / widest, 1 / widest)]
    if kind == "Q4_1":
        parts.append(halves(-1, 1))
    return kind, shape, np.concatenate([*parts, quants], axis=1).reshape(-1)
