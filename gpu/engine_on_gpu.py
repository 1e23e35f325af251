"""The engine on a GPU: the same engine, over the CUDA kernels."""

from __future__ import annotations

from pathlib import Path

from gpu.cache import cache_directory
from gpu.engine import MAX_WAITING, Engine
from gpu.kernels.cuda import Limits
from gpu.kernels.cuda_device import CupyDevice, Device
from gpu.kernels.cuda_load import load_on_gpu
from gpu.weights import open_weights

MAX_BATCH = 128
TOKEN_BUDGET = 2048
"""Rows of a step: enough to be bound by the matrix units, few enough not to keep decoding sequences waiting."""


def load_engine_on_gpu(
    path: str | Path,
    device: Device | None = None,
    *,
    kv_bytes: int | None = None,
    max_batch: int = MAX_BATCH,
    token_budget: int = TOKEN_BUDGET,
    max_waiting: int = MAX_WAITING,
) -> Engine:
    """Load a GGUF file or a safetensors directory onto the first card this process sees.

    `kv_bytes` bounds the KV pool (default: all that is left). Raises `ModelError` where there is no usable card,
    where the model does not fit, and for models the CUDA kernels do not run, `GpuFailed` where CUDA fails; nothing
    stays on the card then.
    """
    card, source = open_weights(path)
    device = device or CupyDevice(cache_directory() / "cubins")
    limits = Limits(rows=token_budget, sequences=max_batch, context=card.context_length)
    try:
        model, blocks = load_on_gpu(source, device, limits, kv_bytes)
    except BaseException:
        device.close()
        raise
    return Engine(
        model,
        eos_ids=card.eos_ids,
        blocks=blocks,
        max_batch=max_batch,
        token_budget=token_budget,
        max_waiting=max_waiting,
    )
