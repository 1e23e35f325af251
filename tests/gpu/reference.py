"""The decoder said plainly: fp32 NumPy, the whole sequence at once, nothing cached. What the engine is judged by."""

from __future__ import annotations

import numpy as np

from gpu.rope import rope_tables


def reference_logprobs(source, tokens):
    """Log-probabilities after each token, (tokens, vocab)."""
    c = source.config
    n, group = len(tokens), c.heads // c.kv_heads
    cos, sin = rope_tables(source, n)
    x = source.floats("token_embd.weight")[list(tokens)]
    for layer in range(c.layers):

        def weight(part, layer=layer):
            return source.floats(f"blk.{layer}.{part}")

        h = _norm(x, weight("attn_norm.weight"), c.norm_eps)
        q, k, v = (
            _project(source, h, f"blk.{layer}.attn_{part}").reshape(n, -1, c.head_dim) for part in "qkv"
        )
        if source.has(f"blk.{layer}.attn_q_norm.weight"):
            q = _norm(q, weight("attn_q_norm.weight"), c.norm_eps)
            k = _norm(k, weight("attn_k_norm.weight"), c.norm_eps)
        q, k = _turn(q, cos, sin, c.rope_pairs), _turn(k, cos, sin, c.rope_pairs)
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(c.head_dim)
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", p, v).reshape(n, -1) @ weight("attn_output.weight").T
        h = _norm(x, weight("ffn_norm.weight"), c.norm_eps)
        gate, up = h @ weight("ffn_gate.weight").T, h @ weight("ffn_up.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight("ffn_down.weight").T
    head = source.floats("token_embd.weight" if c.tied_embeddings else "output.weight")
    logits = (_norm(x, source.floats("output_norm.weight"), c.norm_eps) @ head.T).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def _project(source, x, name):
    out = x @ source.floats(f"{name}.weight").T
    return out + source.floats(f"{name}.bias") if source.has(f"{name}.bias") else out


def _turn(x, cos, sin, pairs):
    half = x.shape[-1] // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2))
        if pairs == "interleaved"
        else (slice(0, half), slice(half, None))
    )
    out = np.empty_like(x)
    cos, sin = cos[:, None], sin[:, None]
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out
