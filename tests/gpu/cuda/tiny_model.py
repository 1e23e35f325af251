"""Llamas of a few thousand weights, with every odd shape the real ones have."""

from __future__ import annotations

import numpy as np

from gpu.model_config import ModelConfig
from tests.gpu.cuda.weight_source import MadeUpWeights, tensor


def tiny_model(
    random: np.random.Generator,
    *,
    kind: str = "Q4_1",
    embedding: str = "Q8_0",
    dressed: bool = False,
    heads: int = 3,
    kv_heads: int = 1,
) -> MadeUpWeights:
    """Two layers, an odd group of heads, tied embeddings; `dressed`: biases, head norms, an own head."""
    width, feed_forward, head_dim, vocabulary = 96, 160, 32, 131
    config = ModelConfig(
        architecture="qwen3" if dressed else "llama",
        layers=2,
        width=width,
        feed_forward=feed_forward,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        context_length=512,
        norm_eps=1e-5,
        rope_base=10000.0,
        rope_pairs="halves" if dressed else "interleaved",
        tied_embeddings=not dressed,
    )
    shapes = {
        "attn_q": (heads * head_dim, width),
        "attn_k": (kv_heads * head_dim, width),
        "attn_v": (kv_heads * head_dim, width),
        "attn_output": (width, heads * head_dim),
        "ffn_gate": (feed_forward, width),
        "ffn_up": (feed_forward, width),
        "ffn_down": (width, feed_forward),
    }
    tensors = {"token_embd.weight": tensor(random, embedding, (vocabulary, width), 0.7)}
    vectors = {"output_norm.weight": width}
    for layer in range(2):
        for name, shape in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = tensor(random, kind, shape, 0.1)
        vectors |= {f"blk.{layer}.{name}.weight": width for name in ("attn_norm", "ffn_norm")}
        if dressed:
            vectors |= {
                f"blk.{layer}.{name}.bias": shapes[name][0] for name in ("attn_q", "attn_k", "attn_v")
            }
            vectors |= {f"blk.{layer}.{name}.weight": head_dim for name in ("attn_q_norm", "attn_k_norm")}
    for name, size in vectors.items():
        values = random.standard_normal(size) * 0.2 + (0 if name.endswith("bias") else 1)
        tensors[name] = ("F32", (size,), values.astype(np.float32).view(np.uint8))
    if dressed:
        tensors["output.weight"] = tensor(random, embedding, (vocabulary, width), 0.7)
    return MadeUpWeights(config, tensors)
