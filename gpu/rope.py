"""Rotary position embedding: how fast each pair of a head's elements turns."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gpu.kernels import WeightSource
from gpu.model_config import ModelConfig, RopeScaling


def rope_frequencies(source: WeightSource) -> NDArray[np.float64]:
    """Radians per position for each of the head's pairs, (head_dim / 2,).

    Formula: RoFormer, section 3.2.2.
    """
    config: ModelConfig = source.config
    half = config.head_dim // 2
    frequencies = config.rope_base ** (-np.arange(half, dtype=np.float64) / half)
    if source.has("rope_freqs.weight"):
        return frequencies / source.floats("rope_freqs.weight").astype(np.float64)
    if config.rope_scaling:
        return np.array([_stretched(frequency, config.rope_scaling) for frequency in frequencies])
    return frequencies


def _stretched(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3: slow turns are slowed by `factor`, fast ones kept, and those between blended."""
    turns = scaling.original_context * frequency / (2 * math.pi)
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def rope_tables(source: WeightSource, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, each (positions, head_dim / 2)."""
    angles = np.outer(np.arange(positions, dtype=np.float64), rope_frequencies(source))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
