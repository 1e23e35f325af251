"""The same shape through `transformers` on the same card, where that is installed."""

from __future__ import annotations

import importlib
import time
from functools import cache
from typing import Any

from gpu.model_config import ModelConfig

STEPS = 10


@cache
def _peer(config: ModelConfig) -> tuple[Any, Any, Any]:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.feed_forward,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.context_length,
        rope_theta=config.rope_base,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return torch, transformers, transformers.LlamaForCausalLM(shape).eval()


def transformers_rate(config: ModelConfig, sequences: int, context: int) -> float:
    """Tokens a second of greedy decoding after `context` random keys. Raises `ImportError` where it is missing."""
    torch, transformers, model = _peer(config)
    kept = transformers.DynamicCache()
    shape = (sequences, config.kv_heads, context, config.head_dim)
    for layer in range(config.layers):
        kept.update(torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda"), layer)
    tokens = torch.zeros((sequences, 1), dtype=torch.long, device="cuda")
    times = []
    with torch.inference_mode():
        for _ in range(STEPS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            tokens = model(input_ids=tokens, past_key_values=kept, use_cache=True).logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return float(sequences / sorted(times)[len(times) // 2])
