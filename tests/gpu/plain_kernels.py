"""The kernels' contract in plain NumPy: what an implementation is compared with, operation by operation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import define
from numpy.typing import NDArray
from reference import rotations

from gpu.blocks import BLOCK_SIZE
from gpu.kernels import MAX_TOP_LOGPROBS, Batch, StepResult, WeightSource
from gpu.philox import uniform

Floats = NDArray[np.float32]


@define
class _Rows:
    width: int
    data: Any = None


class PlainKernels:
    """fp32 throughout; one row at a time wherever a sum's order could depend on the batch."""

    overlaps = False

    def __init__(self, source: WeightSource, context: int) -> None:
        self.source = source
        self.config = source.config
        self.cos, self.sin = rotations(source, context)
        self.operations: list[Callable[[Batch], None]] = []
        self.result = np.zeros((0, 0), np.float32)

    @property
    def block_bytes(self) -> int:
        c = self.config
        return c.layers * 2 * BLOCK_SIZE * c.kv_heads * c.head_dim * 4

    def matrix(self, names: tuple[str, ...]) -> Floats:
        return np.concatenate([self.source.floats(name) for name in names])

    def vector(self, names: tuple[str, ...]) -> Floats:
        return np.concatenate([self.source.floats(name) for name in names])

    def buffer(self, width: int) -> _Rows:
        return _Rows(width)

    def embed(self, table: Floats, out: _Rows) -> None:
        def run(batch: Batch) -> None:
            out.data = table[batch.tokens]

        self.operations.append(run)

    def add_norm(self, hidden: _Rows, delta: _Rows | None, weight: Floats, out: _Rows) -> None:
        def run(batch: Batch) -> None:
            if delta is not None:
                hidden.data = hidden.data + delta.data
            out.data = _normed(hidden.data, weight, self.config.norm_eps)

        self.operations.append(run)

    def qkv(self, x: _Rows, weight: Floats, bias: Any, norms: Any, layer: int, out: _Rows) -> None:
        config = self.config
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def run(batch: Batch) -> None:
            qkv = _by_row(x.data, weight)
            if bias is not None:
                qkv = qkv + bias
            q, k, v = np.split(qkv, [q_width, q_width + kv_width], axis=1)
            q, k = (part.reshape(len(qkv), -1, config.head_dim) for part in (q, k))
            if norms is not None:
                q, k = _normed(q, norms[0], config.norm_eps), _normed(k, norms[1], config.norm_eps)
            out.data = self._rotated(q, batch)
            self.keys[layer, batch.slots] = self._rotated(k, batch)
            self.values[layer, batch.slots] = v.reshape(len(qkv), config.kv_heads, config.head_dim)

        self.operations.append(run)

    def _rotated(self, x: Floats, batch: Batch) -> Floats:
        cos, sin = self.cos[batch.positions][:, None], self.sin[batch.positions][:, None]
        out = np.empty_like(x)
        half = self.config.head_dim // 2
        if self.config.rope_pairs == "interleaved":
            first, second = slice(0, None, 2), slice(1, None, 2)
        else:
            first, second = slice(0, half), slice(half, None)
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    def attention(self, queries: _Rows, layer: int, out: _Rows) -> None:
        config = self.config
        group = config.heads // config.kv_heads

        def run(batch: Batch) -> None:
            out.data = np.empty((len(batch.tokens), config.heads * config.head_dim), np.float32)
            for table, (first, rows, start) in zip(batch.tables, batch.sequences, strict=True):
                for row in range(first, first + rows):
                    at = np.arange(start + row - first + 1)
                    slots = table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
                    k, v = self.keys[layer, slots], self.values[layer, slots]
                    q = queries.data[row].reshape(config.kv_heads, group, config.head_dim)
                    scores = np.einsum("hgd,thd->hgt", q, k) / np.float32(config.head_dim**0.5)
                    weights = np.exp(scores - scores.max(-1, keepdims=True))
                    weights /= weights.sum(-1, keepdims=True)
                    out.data[row] = np.einsum("hgt,thd->hgd", weights, v).reshape(-1)

        self.operations.append(run)

    def linear(self, x: _Rows, weight: Floats, out: _Rows) -> None:
        def run(batch: Batch) -> None:
            out.data = _by_row(x.data, weight)

        self.operations.append(run)

    def swiglu(self, x: _Rows, gate_up: Floats, out: _Rows) -> None:
        def run(batch: Batch) -> None:
            gate, up = np.split(_by_row(x.data, gate_up), 2, axis=1)
            out.data = gate / (1 + np.exp(-gate)) * up

        self.operations.append(run)

    def logits(self, x: _Rows, weight: Floats) -> None:
        def run(batch: Batch) -> None:
            self.result = _by_row(x.data[batch.logit_rows], weight)

        self.operations.append(run)

    def record(self, forward: Callable[[], None]) -> list[Callable[[Batch], None]]:
        self.operations = []
        forward()
        return self.operations

    def allocate_cache(self, blocks: int) -> None:
        shape = (self.config.layers, blocks * BLOCK_SIZE, self.config.kv_heads, self.config.head_dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def start(self, program: list[Callable[[Batch], None]], batch: Batch) -> StepResult:
        began = time.perf_counter()
        for operation in program:
            operation(batch)
        ran = time.perf_counter()
        chosen = [_choose(self.result[i], batch, i) for i in range(len(batch.logit_rows))]
        ended = time.perf_counter()
        tokens, logprobs, top_tokens, top_logprobs = zip(*chosen, strict=True) if chosen else ((), (), (), ())
        return StepResult(
            np.array(tokens, np.int32),
            np.array(logprobs, np.float32),
            np.array(top_tokens, np.int32).reshape(-1, MAX_TOP_LOGPROBS),
            np.array(top_logprobs, np.float32).reshape(-1, MAX_TOP_LOGPROBS),
            ran - began,
            ended - ran,
            ended - began,
            0,
        )

    def finish(self, pending: StepResult) -> StepResult:
        return pending

    def close(self) -> None:
        self.operations = []


def _by_row(x: Floats, weight: Floats) -> Floats:
    # A sum for each row by itself: a matrix product sums in another order than a vector's.
    rows = [(weight * row).sum(1) for row in x]
    return np.stack(rows) if rows else np.zeros((0, len(weight)), np.float32)


def _normed(x: Floats, weight: Floats, eps: float) -> Floats:
    return np.asarray(x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(eps)) * weight, np.float32)


def _choose(logits: Floats, batch: Batch, i: int) -> tuple[int, float, Any, Any]:
    """One row's token, its log-probability, and the likeliest tokens with theirs."""
    nothing = np.zeros(MAX_TOP_LOGPROBS, np.int32), np.zeros(MAX_TOP_LOGPROBS, np.float32)
    if not np.isfinite(logits).all():
        return -1, 0.0, *nothing
    s = batch.sampling
    raw = logits.astype(np.float64)
    raw -= raw.max()
    raw -= np.log(np.exp(raw).sum())
    top_tokens = np.argsort(-raw, kind="stable")[:MAX_TOP_LOGPROBS].astype(np.int32)
    adjusted = _adjusted(logits, batch, i)
    token = _draw(
        adjusted,
        s.temperature[i],
        int(s.top_k[i]),
        s.top_p[i],
        s.min_p[i],
        int(s.seed[i]),
        int(s.position[i]),
    )
    top_tokens = np.pad(top_tokens, (0, MAX_TOP_LOGPROBS - len(top_tokens)))
    return token, float(raw[token]), top_tokens, raw[top_tokens].astype(np.float32)


def _adjusted(logits: Floats, batch: Batch, i: int) -> Floats:
    s = batch.sampling
    out = logits.copy()
    for j in range(s.bias_starts[i], s.bias_starts[i + 1]):
        out[s.bias_tokens[j]] += s.bias_values[j]
    for j in range(s.penalty_starts[i], s.penalty_starts[i + 1]):
        token, count = s.penalty_tokens[j], s.penalty_counts[j]
        out[token] = out[token] / s.repetition[i] if out[token] > 0 else out[token] * s.repetition[i]
        out[token] -= count * s.frequency[i] + (count > 0) * s.presence[i]
    return out


def _draw(
    logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    if top_k:
        order = order[:top_k]
    scaled = (logits[order].astype(np.float64) - logits[order[0]]) / max(temperature, 1e-6)
    p = np.exp(scaled)
    p = p[p >= min_p]
    p /= p.sum()
    cumulative = np.cumsum(p)
    kept = int(np.searchsorted(cumulative, top_p)) + 1
    cumulative = cumulative[:kept]
    chosen = int(np.searchsorted(cumulative, uniform(seed, position) * cumulative[-1], side="right"))
    return int(order[min(chosen, len(cumulative) - 1)])
