"""A model onto a card: weights, workspace, a first step, and then as large a cache as the rest holds."""

from __future__ import annotations

import numpy as np

from gpu.blocks import BLOCK_SIZE
from gpu.kernels import Batch, SamplingBatch, WeightSource
from gpu.kernels.cuda import CudaKernels, Limits
from gpu.kernels.cuda_device import Device
from gpu.llama import Llama


def load_on_gpu(
    source: WeightSource, device: Device, limits: Limits, kv_bytes: int | None = None
) -> tuple[Llama, int]:
    """The model, ready to step, and how many blocks its cache has: what fits, or `kv_bytes` worth of them.

    Free memory is looked at after a first step, when kernels are loaded and buffers made: afterwards nothing
    takes memory but the graph of a bucket that is met for the first time. Raises `ModelError`.
    """
    kernels = CudaKernels(source, device, limits)
    model = Llama(source, kernels)
    kernels.allocate_cache(1)
    model.step(first_step())
    fits = kernels.cache_blocks()
    most = limits.sequences * -(-limits.context // BLOCK_SIZE)
    wanted = most if kv_bytes is None else kv_bytes // kernels.block_bytes
    blocks = max(1, min(fits, wanted, most))
    kernels.allocate_cache(blocks)
    return model, blocks


def first_step() -> Batch:
    """Token 0 at position 0 in block 0, sampled greedily."""
    one, none = np.ones(1, np.float32), np.zeros(0, np.int32)
    zero, starts = np.zeros(1, np.int32), np.zeros(2, np.int32)
    sampling = SamplingBatch(
        temperature=one * 0,
        top_p=one,
        min_p=one * 0,
        top_k=zero,
        seed=np.zeros(1, np.uint64),
        position=zero,
        logprobs=zero - 1,
        repetition=one,
        presence=one * 0,
        frequency=one * 0,
        penalty_starts=starts,
        penalty_tokens=none,
        penalty_counts=none,
        bias_starts=starts,
        bias_tokens=none,
        bias_values=np.zeros(0, np.float32),
    )
    return Batch(zero, zero, zero, np.array([[0, 1, 0]], np.int32), zero[None], zero, sampling)
