"""A model onto a card: weights, workspace, a first step, and then as large a cache as the rest holds."""

from __future__ import annotations

from gpu.blocks import BLOCK_SIZE
from gpu.kernels import WeightSource
from gpu.kernels.cuda import CudaKernels, Limits
from gpu.kernels.cuda_device import Device
from gpu.llama import Llama
from gpu.warm_up import first_step


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
