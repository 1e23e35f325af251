"""Whether what is asked of an engine's size can work with this model on this machine."""

from __future__ import annotations

from gpu.blocks import BLOCK_SIZE
from gpu.kernels.cuda_geometry import block_bytes
from gpu.model_config import ModelConfig
from scripts.config import Config
from scripts.engines import Chosen
from scripts.failure import UsageFault

MOST_ON_A_PROCESSOR = 255
"""Sequences in one step there: a step has 256 tokens, and prefill needs one besides those that decode."""
LEAST_TOKENS = 1024
"""Of context: with less, hardly a conversation fits."""
_MIB = 1 << 20


def check_sizes(config: Config, chosen: Chosen, shape: ModelConfig) -> str:
    """Return what a person must know of the sizes that were chosen; "" is nothing. Raises `UsageFault`."""
    if chosen.kind == "host" and config.max_batch > MOST_ON_A_PROCESSOR:
        raise UsageFault(
            f"max_batch is {config.max_batch}: on a processor it must be {MOST_ON_A_PROCESSOR} at most,"
            " or 0 for what suits it"
        )
    if chosen.kind == "scripted" or not config.kv_mib:
        return ""
    tokens = config.kv_mib * _MIB // block_bytes(shape) * BLOCK_SIZE
    least = min(shape.context_length, LEAST_TOKENS)
    if tokens < least:
        raise UsageFault(
            f"kv_mib is {config.kv_mib}: that holds {tokens} tokens of this model; give {_mib(shape, least)}"
            f" or more for {least} tokens, or 0 for what fits into memory"
        )
    if tokens >= shape.context_length:
        return ""
    return (
        f"with kv_mib {config.kv_mib} a request may have {tokens} tokens;"
        f" kv_mib {_mib(shape, shape.context_length)} holds the model's {shape.context_length}"
    )


def _mib(shape: ModelConfig, tokens: int) -> int:
    """The MiB that hold a context of so many tokens."""
    return -(-(-(-tokens // BLOCK_SIZE) * block_bytes(shape)) // _MIB)
