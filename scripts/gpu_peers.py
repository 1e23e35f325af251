"""The same shape through `transformers` on the same card, where that is installed."""

from __future__ import annotations

import gc
import importlib
import time
from typing import Any

from gpu.model_config import ModelConfig
from scripts.gpu_speed import ShapeOnly

STEPS = 10
SLACK = 3 << 30
"""Bytes for CUDA's context, activations and logits."""


class TransformersPeer:
    """A model of this shape on the card, until `close`. Raises `ImportError` where PyTorch or transformers is missing.

    PyTorch keeps what it once had of the card: `close` makes it give everything back.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._torch, self._transformers = (
            importlib.import_module(name) for name in ("torch", "transformers")
        )
        self.config = config
        self._model = self._load()

    def _load(self) -> Any:
        config, torch = self.config, self._torch
        shape = self._transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.feed_forward,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context_length,
            rope_theta=config.rope_base,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda"):
                return self._transformers.LlamaForCausalLM(shape).eval()
        finally:
            torch.set_default_dtype(before)

    def rate(self, sequences: int, context: int) -> float:
        """Tokens a second of greedy decoding after `context` random keys: forward passes, with no scheduler.

        Raises `RuntimeError` where memory is short. What an earlier call took is given back first, when nothing holds
        it any more: an error holds the tensors of all it went through.
        """
        self._give_back()
        torch, config = self._torch, self.config
        kept = self._transformers.DynamicCache()
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        for layer in range(config.layers):
            shape = (sequences, config.kv_heads, context, config.head_dim)
            kept.update(torch.randn(shape, **kind), torch.randn(shape, **kind), layer)
        tokens = torch.zeros((sequences, 1), dtype=torch.long, device="cuda")
        times = []
        with torch.inference_mode():
            for _ in range(STEPS):
                torch.cuda.synchronize()
                began = time.perf_counter()
                logits = self._model(input_ids=tokens, past_key_values=kept, use_cache=True).logits
                tokens = logits[:, -1:].argmax(-1)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
        return sequences / sorted(times)[len(times) // 2]

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._model = None
        self._give_back()

    def _give_back(self) -> None:
        gc.collect()
        self._torch.cuda.empty_cache()


def peer_bytes(config: ModelConfig, sequences: int, context: int) -> int:
    """What the peer needs at most: weights, keys and values, and for one layer both twice over.

    A layer's cache is copied to grow, and its keys and values are repeated for each head that shares them.
    """
    shapes = ShapeOnly(config).shapes
    ends = sum(rows * columns for name, (rows, columns) in shapes.items() if name in ("token_embd", "output"))
    every = sum(rows * columns for rows, columns in shapes.values()) - ends
    layer = 2 * 2 * sequences * (context + STEPS) * config.kv_heads * config.head_dim
    repeated = layer * config.heads // config.kv_heads
    return 2 * (config.layers * every + ends) + config.layers * layer + layer + repeated + SLACK


def most_sequences(config: ModelConfig, sequences: int, context: int, memory: int) -> int:
    """`sequences`, halved until `memory` bytes hold the peer; 0 where they do not hold it with one."""
    while sequences and peer_bytes(config, sequences, context) > memory:
        sequences //= 2
    return sequences
