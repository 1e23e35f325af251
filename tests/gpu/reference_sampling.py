"""Sampling said plainly: one row of logits, in float64, with sorts. What `gpu.kernels.draw` is judged by."""

from __future__ import annotations

import numpy as np

from gpu.philox import uniform


def log_softmax(logits):
    raw = logits.astype(np.float64) - logits.max()
    return raw - np.log(np.exp(raw).sum())


def adjusted(logits, *, bias=(), counts=None, repetition=1.0, presence=0.0, frequency=0.0):
    """Bias, then penalties. `counts` is token → times in the reply; 0 for tokens of the prompt alone."""
    out = logits.astype(np.float64).copy()
    for token, value in bias:
        out[token] += value
    for token, count in (counts or {}).items():
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= count * frequency + (count > 0) * presence
    return out


def kept(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Weights relative to the heaviest token, 0 where a cut falls."""
    weights = np.exp((logits - logits.max()) / max(temperature, 1e-6))
    order = np.lexsort((np.arange(len(logits)), -weights))
    order = order[weights[order] >= min_p]
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        reached = np.cumsum(weights[order]) >= top_p * weights[order].sum()
        order = order[: int(reached.argmax()) + 1 if reached.any() else len(order)]
    out = np.zeros_like(weights)
    out[order] = weights[order]
    return out


def draw(logits, *, temperature, seed, position, **cuts):
    """The token, and how far from another choice the draw was, as a share of the whole."""
    if temperature <= 0:
        best = np.sort(logits)[-2:]
        return int(logits.argmax()), float(best[1] - best[0])
    weights = kept(logits, temperature=temperature, **cuts)
    edges = np.cumsum(weights) / weights.sum()
    share = uniform(seed, position)
    token = int(np.searchsorted(edges, share, side="right"))
    return token, float(np.abs(edges - share).min())
