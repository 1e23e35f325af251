"""Which tensors a model must have, and how large: what a file is held against before anything reads its weights."""

from __future__ import annotations

from collections.abc import Callable

from gpu.model_config import ModelConfig

Shapes = dict[str, tuple[int, ...]]
"""By GGUF's names: (out, in) of a matrix, (length,) of a vector."""


def tensor_shapes(config: ModelConfig, has: Callable[[str], bool]) -> Shapes:
    """Every tensor the decoder uses. `has` tells of those that only some models have."""
    vocabulary = (config.vocab_size, config.width)
    shapes: Shapes = {"token_embd.weight": vocabulary, "output_norm.weight": (config.width,)}
    if not config.tied_embeddings or has("output.weight"):
        shapes["output.weight"] = vocabulary
    if has("rope_freqs.weight"):
        shapes["rope_freqs.weight"] = (config.head_dim // 2,)
    for layer in range(config.layers):
        shapes |= _layer_shapes(config, f"blk.{layer}.", has)
    return shapes


def _layer_shapes(config: ModelConfig, layer: str, has: Callable[[str], bool]) -> Shapes:
    width, feed_forward, head_dim = config.width, config.feed_forward, config.head_dim
    q_width, kv_width = config.heads * head_dim, config.kv_heads * head_dim
    shapes: Shapes = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (q_width, width),
        "attn_k.weight": (kv_width, width),
        "attn_v.weight": (kv_width, width),
        "attn_output.weight": (width, q_width),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (feed_forward, width),
        "ffn_up.weight": (feed_forward, width),
        "ffn_down.weight": (width, feed_forward),
    }
    if config.architecture == "qwen2" or has(f"{layer}attn_q.bias"):
        shapes |= {"attn_q.bias": (q_width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}
    if config.architecture == "qwen3" or has(f"{layer}attn_q_norm.weight"):
        shapes |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    return {layer + name: shape for name, shape in shapes.items()}
