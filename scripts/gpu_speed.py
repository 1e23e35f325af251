"""How fast a model's shape runs on a card, its weights made up there: nothing to download."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gpu.blocks import BLOCK_SIZE
from gpu.engine import Engine
from gpu.kernels import Batch
from gpu.kernels.cuda import CudaKernels, CudaMatrix, Limits, Loaded
from gpu.kernels.cuda_device import Array, Device
from gpu.llama import Llama
from gpu.model_config import ModelConfig
from gpu.sampling_params import SamplingParams
from gpu.sequence import Request
from gpu.warm_up import first_step

EIGHT_B = ModelConfig("llama", 32, 4096, 14336, 32, 8, 128, 128256, 8192, 1e-5, 5e5, "halves")
SMOLLM2 = ModelConfig(
    "llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e-5, 1e5, "interleaved", tied_embeddings=True
)
ROUNDS = 20

Fill = Callable[[int, int], Array]
"""(rows, columns) of random bf16 on the card."""


@frozen
class Speed:
    """Medians over the rounds, in seconds: on the card, and from the call to the answer."""

    on_card: float
    in_all: float
    bytes_moved: int
    operations: int


class ShapeOnly:
    """A model that is nothing but its shape."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        kv_width, q_width = config.kv_heads * config.head_dim, config.heads * config.head_dim
        self.shapes = {
            "token_embd": (config.vocab_size, config.width),
            "output": (config.vocab_size, config.width),
            "attn_q": (q_width, config.width),
            "attn_k": (kv_width, config.width),
            "attn_v": (kv_width, config.width),
            "attn_output": (config.width, q_width),
            "ffn_gate": (config.feed_forward, config.width),
            "ffn_up": (config.feed_forward, config.width),
            "ffn_down": (config.width, config.feed_forward),
        }

    def has(self, name: str) -> bool:
        """No biases, no head norms, no stretched rotations."""
        return name.removesuffix(".weight").rsplit(".", 1)[-1] in self.shapes

    def shape(self, name: str) -> tuple[int, int]:
        """(out, in)."""
        return self.shapes[name.removesuffix(".weight").rsplit(".", 1)[-1]]

    def raw(self, name: str) -> tuple[str, tuple[int, ...], NDArray[np.uint8]]:
        """There are no bytes: `MadeUpKernels` never asks."""
        raise NotImplementedError(name)

    def floats(self, name: str) -> NDArray[np.float32]:
        """Norms of one; every vector is one."""
        if self.has(name):
            raise NotImplementedError(name)
        return np.ones(self.config.width, np.float32)


class MadeUpKernels(CudaKernels):
    """Weights are drawn on the card instead of loaded."""

    def __init__(self, source: ShapeOnly, device: Device, limits: Limits, fill: Fill) -> None:
        self.shape_only, self.fill = source, fill
        super().__init__(source, device, limits)

    def _load(self, matrix: CudaMatrix, *, interleave: bool = False) -> Loaded:
        del interleave  # one random order is as good as another
        if matrix.loaded is None:
            shapes = [self.shape_only.shape(name) for name in matrix.names]
            rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
            scales = self.device.upload(np.zeros(1, np.float16))
            matrix.loaded = Loaded("bf16", rows, columns, self.fill(rows, columns), scales)
            self._weight_bytes += rows * columns * 2
        return matrix.loaded

    def fill_cache(self, blocks: int) -> None:
        """A cache of random keys and values: zeros and NaN do not run like data."""
        config = self.config
        shape = (blocks, config.kv_heads, BLOCK_SIZE, config.head_dim)
        width = config.kv_heads * BLOCK_SIZE * config.head_dim
        with self.device.active():
            keys, values = (self.fill(blocks, width).reshape(shape) for _ in range(2))
        # Every layer reads the same one: it is far larger than any cache on the chip.
        self._keys, self._values = [keys] * config.layers, [values] * config.layers


def make_up(config: ModelConfig, device: Device, limits: Limits, fill: Fill, blocks: int) -> Llama:
    """A model of this shape, ready to step."""
    kernels = MadeUpKernels(ShapeOnly(config), device, limits, fill)
    model = Llama(kernels.shape_only, kernels)
    kernels.fill_cache(blocks)
    return model


def decoding_step(sequences: int, context: int, blocks: int) -> Batch:
    """One token each, at position `context - 1`; tables wrap round the cache where it is too small for all."""
    columns = -(-context // BLOCK_SIZE)
    tables = (np.arange(sequences * columns, dtype=np.int32) * 7919 % blocks).reshape(sequences, columns)
    slots = tables[:, -1] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    spans = np.stack([np.arange(sequences), np.ones(sequences), np.full(sequences, context - 1)], 1)
    return _batch(
        np.full(sequences, context - 1, np.int32), slots, spans.astype(np.int32), tables, np.arange(sequences)
    )


def prefill_step(tokens: int, blocks: int) -> Batch:
    """One prompt, from its first token to its last."""
    columns = -(-tokens // BLOCK_SIZE)
    table = np.arange(columns, dtype=np.int32) % blocks
    positions = np.arange(tokens, dtype=np.int32)
    slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return _batch(positions, slots, np.array([[0, tokens, 0]], np.int32), table[None], np.array([tokens - 1]))


def _batch(
    positions: NDArray[np.int32],
    slots: NDArray[np.int32],
    spans: NDArray[np.int32],
    tables: NDArray[np.int32],
    logit_rows: NDArray[np.intp],
) -> Batch:
    one = first_step().sampling
    samples = len(logit_rows)
    columns = {
        name: np.repeat(getattr(one, name), samples)
        for name in ("temperature", "top_p", "min_p", "top_k", "seed", "position", "logprobs")
    } | {name: np.repeat(getattr(one, name), samples) for name in ("repetition", "presence", "frequency")}
    starts = np.zeros(samples + 1, np.int32)
    lists = {
        name: getattr(one, name)
        for name in ("penalty_tokens", "penalty_counts", "bias_tokens", "bias_values")
    }
    sampling = type(one)(**columns, **lists, penalty_starts=starts, bias_starts=starts)
    tokens = np.arange(len(positions), dtype=np.int32) % 1000
    return Batch(
        tokens, positions, slots.astype(np.int32), spans, tables, logit_rows.astype(np.int32), sampling
    )


def measure(model: Llama, batch: Batch, rounds: int = ROUNDS) -> Speed:
    """Step over `batch` again and again. The first steps make the graph and are not counted."""
    for _ in range(3):
        model.step(batch)
    on_card, in_all, moved = [], [], 0
    for _ in range(rounds):
        began = time.perf_counter()
        result = model.step(batch)
        in_all.append(time.perf_counter() - began)
        on_card.append(result.forward_seconds + result.sampling_seconds)
        moved = result.bytes_moved
    return Speed(
        statistics.median(on_card), statistics.median(in_all), moved, operations(model.config, batch)
    )


def time_outside(model: Llama, blocks: int, context: int, steps: int) -> float:
    """Median seconds of an engine's decoding step at batch 1 in which the device has nothing to do.

    The engine as a batcher drives it, scheduler and all, by a caller that takes no time itself.
    """
    engine = Engine(model, eos_ids=(), blocks=blocks, max_batch=8, token_budget=64)
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    engine.add(Request("one", tuple(range(context)), params))
    outside = []
    while engine.has_work:
        began = time.perf_counter()
        output = engine.step()
        lasted = time.perf_counter() - began
        if output.outputs and output.outputs[0].finish == "error":
            raise RuntimeError(output.outputs[0].error)
        stats = output.stats
        if stats.decoded:
            outside.append(lasted - stats.forward_seconds - stats.sampling_seconds)
    return statistics.median(outside)


def operations(config: ModelConfig, batch: Batch) -> int:
    """Multiplications and additions of the linear layers and of attention."""
    shapes = ShapeOnly(config).shapes
    per_layer = sum(
        rows * columns for name, (rows, columns) in shapes.items() if name not in ("token_embd", "output")
    )
    keys = int((batch.positions.astype(np.int64) + 1).sum())
    attention = 4 * keys * config.heads * config.head_dim
    head = shapes["output"][0] * shapes["output"][1] * len(batch.logit_rows)
    return 2 * (config.layers * per_layer * len(batch.tokens) + head) + config.layers * attention
