"""The decoder said plainly: fp32 NumPy, the whole sequence at once, nothing cached. What the engine is judged by."""

from __future__ import annotations

import numpy as np


def reference_logprobs(source, tokens):
    """Log-probabilities after each token, (tokens, vocab)."""
    return log_softmax(reference_hidden(source, tokens) @ _head(source).T)


def reference_scores(source, tokens, piece=128):
    """The log-probability of each token but the first, given those before it: (tokens - 1,)."""
    hidden, head = reference_hidden(source, tokens), _head(source)
    out = []
    for start in range(0, len(tokens) - 1, piece):
        rows = log_softmax(hidden[start : start + piece] @ head.T)
        nexts = tokens[start + 1 : start + 1 + piece]
        out += [row[token] for row, token in zip(rows, nexts, strict=False)]
    return np.array(out)


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _head(source):
    return source.floats("token_embd.weight" if source.config.tied_embeddings else "output.weight")


def reference_hidden(source, tokens):
    """What the head is multiplied with, (tokens, width)."""
    c = source.config
    n, group = len(tokens), c.heads // c.kv_heads
    cos, sin = rotations(source, n)
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
        attended = [_attend(q[:, head], k[:, head], v[:, head]) for head in range(c.heads)]
        x = x + np.concatenate(attended, axis=1) @ weight("attn_output.weight").T
        h = _norm(x, weight("ffn_norm.weight"), c.norm_eps)
        gate, up = h @ weight("ffn_gate.weight").T, h @ weight("ffn_up.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight("ffn_down.weight").T
    return _norm(x, source.floats("output_norm.weight"), c.norm_eps)


def rotations(source, positions):
    """Cosines and sines, (positions, head_dim / 2) each, by nothing of `gpu.rope`."""
    c = source.config
    frequencies = 1 / c.rope_base ** (np.arange(0, c.head_dim, 2) / c.head_dim)
    if source.has("rope_freqs.weight"):
        frequencies = frequencies / source.floats("rope_freqs.weight")
    if c.rope_scaling:
        s = c.rope_scaling
        frequencies = llama_3_1(
            frequencies, s.factor, s.low_freq_factor, s.high_freq_factor, s.original_context
        )
    angles = np.arange(positions)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def llama_3_1(frequencies, factor, low_freq_factor, high_freq_factor, original_context):
    """Llama 3.1's published scaling, said in wavelengths as Meta's `apply_scaling` and transformers say it.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
    https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py
    """
    longest_kept = original_context / high_freq_factor
    shortest_divided = original_context / low_freq_factor
    out = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength < longest_kept:
            out.append(frequency)
        elif wavelength > shortest_divided:
            out.append(frequency / factor)
        else:
            smooth = (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            out.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(out)


def _attend(q, k, v):
    """One head: (tokens, head_dim) each."""
    scores = q @ k.T / np.float32(np.sqrt(q.shape[1]))
    scores = np.where(np.tril(np.ones(scores.shape, bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)).astype(np.float32) @ v


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
