"""The contract on a CPU: operations over buffers at fixed addresses, and threads to run them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from gpu.blocks import BLOCK_SIZE
from gpu.cache import cache_directory
from gpu.errors import ModelError
from gpu.kernels import (
    MAX_TOP_LOGPROBS,
    Batch,
    SamplingBatch,
    StepResult,
    WeightSource,
    attend,
    draw,
    layers,
    simd,
)
from gpu.kernels import header as h
from gpu.kernels.cpu import describe_cpu
from gpu.kernels.jit import operation
from gpu.kernels.packing import Packed, TileFile, load_tiles, tile_file_name
from gpu.kernels.threads import OPERATION_WORDS, Crew
from gpu.kernels.tiles import FLOAT_BYTES, FORMATS, ROW_BYTES_TWICE, ROWS, TOKENS, tile_address
from gpu.rope import rope_tables

_LOG2_E = 1.4426950408889634
_CHUNKS_A_THREAD = 8
"""Pieces a matrix is cut into for each thread: enough that none waits long for another, few enough to hand
out."""
Words = NDArray[np.int64]


@cache
def _compiled(function: Callable[[int, int, int], None]) -> int:
    return int(operation(function).address)


@define(eq=False)
class HostBuffer:
    """Rows of activations: fp32, then integers, then their blocks' scales and sums (`tiles` says how)."""

    width: int
    data: NDArray[np.uint8]

    @property
    def address(self) -> int:
        """Of the first row."""
        return int(self.data.ctypes.data)

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""
        return int(self.data.shape[1])


@frozen
class HostMatrix:
    """Tensors that are stacked by rows, each in tiles of its own kind."""

    names: tuple[str, ...]


@define
class _Operation:
    function: Callable[[int, int, int], None]
    arguments: list[int]
    unit: int
    chunks: int


@frozen
class HostProgram:
    """What `Crew.run` wants. Operations from `forward` on sample."""

    rows: Words
    forward: int
    counters: Words
    arguments: list[Words] = field(repr=False)


class HostKernels:
    """See `gpu.kernels.Kernels`. Numba compiles an operation when a model first needs it, and keeps it."""

    overlaps = False

    def __init__(
        self,
        source: WeightSource,
        path: Path,
        *,
        max_rows: int,
        max_samples: int,
        context: int,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = source.config
        _check_shape(source)
        self.max_rows, self.max_samples = max_rows, max_samples
        self._source, self._path = source, path
        self._progress = progress or (lambda _done, _total: None)
        self._crew = Crew(threads or describe_cpu().threads)
        self._matrices: list[str] = []
        self._operations: list[_Operation] = []
        self._kept: list[Any] = []
        self._tiles: TileFile | None = None
        self._header = np.zeros(h.WORDS, np.int64)
        self._units = np.ones(h.UNITS, np.int64)
        self._cos, self._sin = rope_tables(source, context)
        c = source.config
        scale = _LOG2_E / math.sqrt(c.head_dim)
        self._numbers = np.array([c.norm_eps, scale], np.float32)
        self._header[h.HEADS_IN_BLOCK] = c.kv_heads * c.layers
        self._make_scratch()
        self._make_results()
        self.weight_bytes = 0
        """Of the matrices, mapped from their file."""

    def _make_scratch(self) -> None:
        c = self.config
        group = c.heads // c.kv_heads
        wanted = max(attend.scratch_bytes(group, c.head_dim), TOKENS * (128 + 4 * c.head_dim)) + 4096
        self._scratch = np.zeros((self._crew.threads, -(-wanted // 4096) * 4096), np.uint8)
        self._header[h.SCRATCH], self._header[h.SCRATCH_STRIDE] = (
            self._scratch.ctypes.data,
            self._scratch.shape[1],
        )

    def _make_results(self) -> None:
        n, vocab = self.max_samples, self.config.vocab_size
        self._padded = -(-vocab // ROWS) * ROWS
        # A row and a cache line: where rows are whole pages apart, all of them share one set of the cache.
        self._logits = np.zeros((n, self._padded + ROWS), np.float32)
        self._chosen, self._chosen_logprobs = np.zeros(n, np.int32), np.zeros(n, np.float32)
        self._top = np.zeros((n, MAX_TOP_LOGPROBS), np.int32)
        self._top_logprobs = np.zeros((n, MAX_TOP_LOGPROBS), np.float32)
        self._draw_scratch = np.zeros((self._crew.threads, 4 * self._padded), np.int32)

    @property
    def block_bytes(self) -> int:
        """Of one block of keys and values in all layers."""
        c = self.config
        return c.layers * 2 * BLOCK_SIZE * c.kv_heads * c.head_dim * simd.HALF_BYTES

    def matrix(self, names: tuple[str, ...]) -> HostMatrix:
        """Noted now, brought into tiles all at once by `record`."""
        self._matrices += [name for name in names if name not in self._matrices]
        return HostMatrix(names)

    def vector(self, names: tuple[str, ...]) -> NDArray[np.float32]:
        """fp32, stacked."""
        stacked = np.concatenate([self._source.floats(name).astype(np.float32) for name in names])
        self._kept.append(stacked)
        return stacked

    def buffer(self, width: int) -> HostBuffer:
        """Zeroed rows."""
        stride = -(-(width * ROW_BYTES_TWICE // 2) // 64) * 64
        return HostBuffer(width, np.zeros((self.max_rows, stride), np.uint8))

    def _part(self, name: str) -> tuple[Packed, list[int]]:
        """A tensor, and the words that tell an operation of it: function, address, bytes of a tile."""
        if self._tiles is None:
            raise RuntimeError("matrices are there only while `record` runs and after it")
        packed = self._tiles.index[name]
        return packed, [tile_address(packed.kind), self._tiles.address + packed.start, packed.tile_bytes]

    def _add(
        self, function: Callable[[int, int, int], None], unit: int, chunks: int, *arguments: int
    ) -> None:
        self._operations.append(_Operation(function, [self._header.ctypes.data, *arguments], unit, chunks))

    def embed(self, table: HostMatrix, out: HostBuffer) -> None:
        """See the contract."""
        packed, (_, address, tile_bytes) = self._part(table.names[0])
        form = FORMATS.get(packed.kind)
        if form is None:
            kind, block_bytes = [0, FLOAT_BYTES[packed.kind], packed.kind == "BF16", 0, 0], 0
        else:
            block_bytes = form.block_bytes
            offset = -1 if form.offset is None else form.offset
            kind = [form.bits, form.group, offset, form.scale_bytes == 4, form.value_bytes]
        words = (address, tile_bytes, block_bytes, packed.columns, out.address, out.stride, *map(int, kind))
        self._add(layers.embed, h.ROW_GROUPS, 1, *words)

    def add_norm(
        self, hidden: HostBuffer, delta: HostBuffer | None, weight: NDArray[np.float32], out: HostBuffer
    ) -> None:
        """See the contract."""
        before = (delta.address, delta.stride) if delta else (0, 0)
        after = (weight.ctypes.data, self._numbers.ctypes.data, out.address, out.stride, out.width)
        self._add(layers.add_norm, h.ROW_GROUPS, 1, hidden.address, hidden.stride, *before, *after)

    def qkv(
        self,
        x: HostBuffer,
        weight: HostMatrix,
        bias: NDArray[np.float32] | None,
        norms: tuple[NDArray[np.float32], NDArray[np.float32]] | None,
        layer: int,
        out: HostBuffer,
    ) -> None:
        """See the contract."""
        c = self.config
        eps, scale = self._numbers.ctypes.data, self._numbers.ctypes.data + 4
        normed = [norm.ctypes.data for norm in norms] if norms else [0, 0]
        parts = [word for name in weight.names for word in self._part(name)[1]]
        self._add(
            layers.qkv, h.ONCE, c.heads + 2 * c.kv_heads,
            x.address, x.stride, x.width, c.heads, c.kv_heads, c.head_dim, out.address, out.stride,
            self._cache_of(layer), self._cos.ctypes.data, self._sin.ctypes.data,
            bias.ctypes.data if bias is not None else 0, *normed, eps, scale, *parts,
        )  # fmt: skip

    def attention(self, queries: HostBuffer, layer: int, out: HostBuffer) -> None:
        """See the contract."""
        c = self.config
        sizes = (c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        place = (out.address, out.stride, out.width)
        self._add(
            attend.attention,
            h.TILES,
            c.kv_heads,
            queries.address,
            queries.stride,
            self._cache_of(layer),
            *sizes,
            *place,
        )

    def linear(self, x: HostBuffer, weight: HostMatrix, out: HostBuffer) -> None:
        """See the contract."""
        self._product(x, weight, h.ROWS, h.ONCE, out.address, out.stride)

    def _product(
        self, x: HostBuffer, weight: HostMatrix, rows: int, unit: int, out: int, out_stride: int
    ) -> None:
        packed, part = self._part(weight.names[0])
        many = self._in_a_chunk(packed.tiles)
        words = (rows, x.address, x.stride, x.width, out, out_stride, many, packed.tiles, *part)
        self._add(layers.linear, unit, -(-packed.tiles // many), *words)

    def _in_a_chunk(self, pieces: int) -> int:
        return max(1, pieces // (self._crew.threads * _CHUNKS_A_THREAD))

    def swiglu(self, x: HostBuffer, gate_up: HostMatrix, out: HostBuffer) -> None:
        """See the contract."""
        blocks = out.width // 32
        many = self._in_a_chunk(blocks)
        parts = [word for name in gate_up.names for word in self._part(name)[1]]
        words = (x.address, x.stride, x.width, out.address, out.stride, out.width, many, *parts)
        self._add(layers.swiglu, h.ONCE, -(-blocks // many), *words)

    def logits(self, x: HostBuffer, weight: HostMatrix) -> None:
        """See the contract."""
        wanted = HostBuffer(x.width, np.zeros((self.max_samples, x.stride), np.uint8))
        self._kept.append(wanted)
        self._add(layers.gather, h.DRAWS, 1, x.address, x.stride, wanted.address)
        self._product(
            wanted, weight, h.SAMPLES, h.ANY_SAMPLE, self._logits.ctypes.data, self._logits.strides[0]
        )

    def allocate_cache(self, blocks: int) -> None:
        """Zeroed lazily by the system: memory is used as blocks are."""
        self._cache = np.zeros(blocks * self.block_bytes, np.uint8)

    def _cache_of(self, layer: int) -> int:
        return int(self._cache.ctypes.data) + layer * (self.block_bytes // self.config.layers)

    def record(self, forward: Callable[[], None]) -> HostProgram:
        """Bring the matrices into tiles if no earlier process did, and note what `forward` calls."""
        path = cache_directory() / "tiles" / tile_file_name(self._path)
        self._tiles = load_tiles(self._source, self._matrices, path, self._progress)
        self.weight_bytes = sum(packed.tiles * packed.tile_bytes for packed in self._tiles.index.values())
        self._operations = []
        forward()
        count = len(self._operations)
        self._add(
            draw.draw, h.DRAWS, 1,
            self._logits.ctypes.data, self._logits.strides[0], self.config.vocab_size, self._padded,
            self._draw_scratch.ctypes.data, 4 * self._draw_scratch.shape[1], self._chosen.ctypes.data,
            self._chosen_logprobs.ctypes.data, self._top.ctypes.data, self._top_logprobs.ctypes.data,
        )  # fmt: skip
        arguments = [np.array(operation.arguments, np.int64) for operation in self._operations]
        rows = np.array(
            [
                (_compiled(operation.function), words.ctypes.data, operation.unit, operation.chunks)
                for operation, words in zip(self._operations, arguments, strict=True)
            ],
            np.int64,
        )
        if rows.shape[1] != OPERATION_WORDS:
            raise RuntimeError("a program's rows and its interpreter disagree")
        return HostProgram(rows, count, np.zeros((len(rows), 16), np.int64), arguments)

    def start(self, program: HostProgram, batch: Batch) -> StepResult:
        """The whole step: all cores work at it, so there is nothing to overlap it with."""
        kept = self._note(batch)
        began = time.perf_counter()
        self._crew.run(program.rows, 0, program.forward, self._units, program.counters)
        ran = time.perf_counter()
        samples = len(batch.logit_rows)
        if samples:
            self._crew.run(program.rows, program.forward, len(program.rows), self._units, program.counters)
        ended = time.perf_counter()
        del kept
        return StepResult(
            self._chosen[:samples].copy(),
            self._chosen_logprobs[:samples].copy(),
            self._top[:samples].copy(),
            self._top_logprobs[:samples].copy(),
            ran - began,
            ended - ran,
            ended - began,
            self.weight_bytes + self._cache_bytes(batch),
        )

    def finish(self, pending: StepResult) -> StepResult:
        """What `start` brought."""
        return pending

    def _cache_bytes(self, batch: Batch) -> int:
        blocks = (batch.sequences[:, 2] + batch.sequences[:, 1] + BLOCK_SIZE - 1) // BLOCK_SIZE
        return int(blocks.sum()) * self.block_bytes

    def _note(self, batch: Batch) -> list[Any]:
        """Write the header; what it points to must live as long as the step."""
        tiles = _attention_tiles(
            batch.sequences, max(1, attend.QUERIES // (self.config.heads // self.config.kv_heads))
        )
        words: dict[int, Any] = {
            h.TOKENS: batch.tokens, h.POSITIONS: batch.positions, h.SLOTS: batch.slots, h.TABLES:
            batch.tables,
            h.ITEMS: tiles, h.LOGIT_ROWS: batch.logit_rows, **_sampling_words(batch.sampling),
        }  # fmt: skip
        kept = {index: np.ascontiguousarray(array) for index, array in words.items()}
        for index, array in kept.items():
            self._header[index] = array.ctypes.data
        rows, samples = len(batch.tokens), len(batch.logit_rows)
        self._header[h.ROWS], self._header[h.SAMPLES] = rows, samples
        self._header[h.TABLES_STRIDE] = kept[h.TABLES].strides[0]
        self._units[h.ROW_GROUPS] = -(-rows // h.ROWS_IN_GROUP)
        self._units[h.TILES], self._units[h.DRAWS], self._units[h.ANY_SAMPLE] = (
            len(tiles),
            samples,
            min(samples, 1),
        )
        return list(kept.values())

    def close(self) -> None:
        """End the threads. Memory goes with the object."""
        self._crew.close()


def _check_shape(source: WeightSource) -> None:
    c = source.config
    if c.head_dim % 32:
        raise ModelError(f"heads of {c.head_dim} are not supported on a CPU: a multiple of 32 is")
    if c.rope_pairs == "interleaved" and (
        source.has("blk.0.attn_q.bias") or source.has("blk.0.attn_q_norm.weight")
    ):
        raise ModelError("interleaved rotation with a bias or a norm on queries is not supported")


def _attention_tiles(sequences: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """(sequence, first row, rows) of each tile. Four rows are two tiles already: a few heads are hard to share out."""
    if int(sequences[:, 1].max()) == 1:
        count = np.arange(len(sequences), dtype=np.int32)
        return np.stack([count, sequences[:, 0], sequences[:, 1]], axis=1)
    return np.array(
        [
            (i, first + at, min(step, count - at))
            for i, (first, count, _) in enumerate(sequences.tolist())
            for step in (min(rows, max(2, (count + 1) // 2)),)
            for at in range(0, count, step)
        ],
        np.int32,
    )


def _sampling_words(sampling: SamplingBatch) -> dict[int, Any]:
    return {
        h.TEMPERATURE: sampling.temperature, h.TOP_P: sampling.top_p, h.MIN_P: sampling.min_p, h.TOP_K:
        sampling.top_k,
        h.SEED: sampling.seed, h.POSITION: sampling.position, h.LOGPROBS: sampling.logprobs,
        h.REPETITION: sampling.repetition, h.PRESENCE: sampling.presence, h.FREQUENCY: sampling.frequency,
        h.PENALTY_STARTS: sampling.penalty_starts, h.PENALTY_TOKENS: sampling.penalty_tokens,
        h.PENALTY_COUNTS: sampling.penalty_counts, h.BIAS_STARTS: sampling.bias_starts,
        h.BIAS_TOKENS: sampling.bias_tokens, h.BIAS_VALUES: sampling.bias_values,
    }  # fmt: skip
