"""The kernels' contract on an NVIDIA GPU.

A recording is a list of launches. A step that only decodes is rounded up to a bucket and replays a graph of
them; any other step launches them one by one. A step's input goes up in one copy, its tokens come back
in one. After a bucket was met once, steps take no memory.

A token's result does not depend on the step it was in, bit for bit: the .cu files say how they see to that.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from gpu.blocks import BLOCK_SIZE
from gpu.errors import GpuFull, ModelError
from gpu.kernels import MAX_TOP_LOGPROBS, Batch, StepResult, WeightSource
from gpu.kernels import cuda_geometry as geometry
from gpu.kernels.cuda_device import Array, Device, Function, Graph
from gpu.kernels.cuda_geometry import Launch, StepShape
from gpu.kernels.cuda_step import HEADER_WORDS, pack_step
from gpu.kernels.cuda_weights import pack_matrix
from gpu.rope import rope_tables

OUT_BF16, OUT_F32, OUT_SWIGLU = np.int32(0), np.int32(1), np.int32(2)
NOTHING = np.uint64(0)
"""A null pointer as a kernel's argument."""
RESULT_WORDS = 2 + 2 * MAX_TOP_LOGPROBS
SAMPLING_SHARED = 5120
LIST_WORDS = 1 << 22
"""Most tokens with a bias or a penalty in one step."""
LOG2_E = math.log2(math.e)

Operation = Callable[[StepShape], None]


@frozen
class Limits:
    """What the buffers are made for: rows and sequences of a step, tokens of a sequence."""

    rows: int
    sequences: int
    context: int


@frozen
class Loaded:
    """Weights on the card, in the order of `cuda_weights`."""

    kind: str
    rows: int
    columns: int
    data: Array
    scales: Array

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the linear kernels take them."""
        return self.data, self.scales, np.int32(self.rows), np.int32(self.columns)


@define(eq=False)
class CudaMatrix:
    """Tensors stacked by rows. They are loaded when it is known what for: swiglu wants another order."""

    names: tuple[str, ...]
    loaded: Loaded | None = None


@define(eq=False)
class Rows:
    """Activations: (limits.rows, width), memory given at the first use, which says the type."""

    width: int
    array: Array = None


@define(eq=False)
class Program:
    """A recorded forward pass and the graphs of it, by shape."""

    operations: tuple[Operation, ...]
    graphs: dict[StepShape, Graph] = field(factory=dict)


@frozen
class Pending:
    """A step that is on its way."""

    samples: int
    bytes_moved: int


class CudaKernels:
    """See `gpu.kernels.Kernels`. Raises `ModelError` for what they do not run and when memory is short."""

    overlaps = True

    def __init__(self, source: WeightSource, device: Device, limits: Limits) -> None:
        geometry.check_shape(source.config)
        self.source, self.config, self.device, self.limits = source, source.config, device, limits
        self._functions: dict[tuple[str, str], Function] = {}
        self._shared: dict[tuple[str, str], int] = {}
        self._operations: list[Operation] = []
        self._programs: list[Program] = []
        self._weight_bytes = 0
        self._keys: list[Array] = []
        self._values: list[Array] = []
        with device.active():
            self._make_workspace()

    def _make_workspace(self) -> None:
        config, limits, empty = self.config, self.limits, self.device.empty
        heads = config.heads + 2 * config.kv_heads
        part_bytes = config.heads * (config.head_dim + 2) * 4
        self._piece_room = geometry.workspace_pieces(limits.rows, limits.context, part_bytes)
        self._parts = empty((self._piece_room, config.heads, config.head_dim), np.float32)
        self._tops = empty((self._piece_room, config.heads, 2), np.float32)
        self._qkv = empty((limits.rows, heads * config.head_dim), np.uint16)
        self._logits = empty((limits.sequences, config.vocab_size), np.float32)
        self._result = empty((limits.sequences * RESULT_WORDS,), np.int32)
        words = self._step_words()
        self._step = empty((words,), np.int32)
        self._saved = empty((words,), np.float32)
        # Two, taken in turn: the copy of a step whose start failed half way may still be under way at the next try.
        self._staged = [self.device.pinned(words) for _ in range(2)]
        self._brought = self.device.pinned(limits.sequences * RESULT_WORDS)
        self._cosines, self._sines = map(self.device.upload, rope_tables(self.source, limits.context))

    def _step_words(self) -> int:
        limits = self.limits
        columns = -(-limits.context // BLOCK_SIZE) + 1
        lists = min(limits.sequences * min(self.config.vocab_size, limits.context), LIST_WORDS)
        return HEADER_WORDS + 3 * limits.rows + limits.sequences * (columns + 32) + 4 * lists

    @property
    def block_bytes(self) -> int:
        """Of one block: bf16 keys and values in every layer."""
        return geometry.block_bytes(self.config)

    def matrix(self, names: tuple[str, ...]) -> CudaMatrix:
        """Quantised as in the file where the kernels know the type, else bf16. Loaded while `record` runs."""
        return CudaMatrix(names)

    def _load(self, matrix: CudaMatrix, *, interleave: bool = False) -> Loaded:
        if matrix.loaded is None:
            packed = pack_matrix(self.source, matrix.names, interleave=interleave)
            self._weight_bytes += packed.data.nbytes + packed.scales.nbytes
            data, scales = self.device.upload(packed.data), self.device.upload(packed.scales)
            matrix.loaded = Loaded(packed.kind, packed.rows, packed.columns, data, scales)
        return matrix.loaded

    def vector(self, names: tuple[str, ...]) -> Array:
        """In fp32."""
        with self.device.active():
            return self.device.upload(np.concatenate([self.source.floats(name) for name in names]))

    def buffer(self, width: int) -> Rows:
        """The residual stream is kept in fp32, everything between two kernels in bf16."""
        return Rows(width)

    def _memory(self, rows: Rows, dtype: type) -> Array:
        if rows.array is None:
            rows.array = self.device.empty((self.limits.rows, rows.width), dtype)
        if rows.array.dtype != dtype:
            raise ModelError(f"a buffer holds {rows.array.dtype}, an operation wants {np.dtype(dtype)}")
        return rows.array

    def _launch(self, launch: Launch, *arguments: Any) -> None:
        """Start a kernel on the step's input. More shared memory is asked for when it is first needed."""
        key = (launch.stem, launch.name)
        if launch.shared > self._shared.get(key, -1):
            self._functions[key] = self.device.function(*key, launch.shared)
            self._shared[key] = launch.shared
        self._functions[key](launch.grid, launch.block, (self._step, *arguments), shared_mem=launch.shared)

    def embed(self, table: CudaMatrix, out: Rows) -> None:
        """One launch."""
        weight = self._load(table)
        arguments = (weight.data, weight.scales, self._memory(out, np.float32), np.int32(out.width))

        def run(shape: StepShape) -> None:
            self._launch(Launch("embedding", f"embed_{weight.kind}", (shape.rows,), (128,)), *arguments)

        self._operations.append(run)

    def add_norm(self, hidden: Rows, delta: Rows | None, weight: Array, out: Rows) -> None:
        """One launch."""
        arguments = (
            self._memory(hidden, np.float32),
            NOTHING if delta is None else self._memory(delta, np.uint16),
            weight,
            self._memory(out, np.uint16),
            np.int32(hidden.width),
            np.float32(self.config.norm_eps),
        )

        def run(shape: StepShape) -> None:
            self._launch(Launch("add_norm", "add_norm", (shape.rows,), (256,), 128), *arguments)

        self._operations.append(run)

    def qkv(
        self,
        x: Rows,
        weight: CudaMatrix,
        bias: Array | None,
        norms: tuple[Array, Array] | None,
        layer: int,
        out: Rows,
    ) -> None:
        """Two launches: the product, then everything else."""
        config, from_x, loaded = self.config, self._memory(x, np.uint16), self._load(weight)
        queries = self._memory(out, np.uint16)
        dressed = (NOTHING if bias is None else bias, *((NOTHING, NOTHING) if norms is None else norms))
        sizes = (np.int32(config.heads), np.int32(config.kv_heads), np.int32(config.head_dim))
        interleaved = np.int32(config.rope_pairs == "interleaved")
        arguments = (
            *(self._qkv, *dressed, np.float32(config.norm_eps), self._cosines, self._sines),
            *(*sizes, interleaved, queries),
        )

        def run(shape: StepShape) -> None:
            self._linear(shape, loaded, from_x, self._qkv, OUT_BF16)
            self._launch(geometry.rope_kv(config, shape), *arguments, self._keys[layer], self._values[layer])

        self._operations.append(run)

    def attention(self, queries: Rows, layer: int, out: Rows) -> None:
        """Sequences that compute one row and those that compute several go to kernels of their own."""
        config = self.config
        from_queries, to = self._memory(queries, np.uint16), self._memory(out, np.uint16)
        heads, head_dim = np.int32(config.heads), np.int32(config.head_dim)
        scale = np.float32(LOG2_E / math.sqrt(config.head_dim))

        def run(shape: StepShape) -> None:
            cache = (self._keys[layer], self._values[layer], heads, np.int32(config.kv_heads), scale)
            if shape.pieces:
                decode = geometry.attention_decode(config, shape)
                self._launch(decode, from_queries, *cache, self._parts, self._tops)
                fold = geometry.attention_fold(config, shape)
                self._launch(fold, self._parts, self._tops, heads, head_dim, to)
            if shape.prefill_rows:
                self._launch(geometry.attention_prefill(config, shape), from_queries, *cache, to)

        self._operations.append(run)

    def linear(self, x: Rows, weight: CudaMatrix, out: Rows) -> None:
        """One launch; which kernel depends on the number of tokens, the result does not."""
        self._record_linear(x, self._load(weight), out, OUT_BF16)

    def swiglu(self, x: Rows, gate_up: CudaMatrix, out: Rows) -> None:
        """One launch: gates and ups lie side by side, so a thread that has one has the other."""
        self._record_linear(x, self._load(gate_up, interleave=True), out, OUT_SWIGLU)

    def _record_linear(self, x: Rows, weight: Loaded, out: Rows, output: np.int32) -> None:
        from_x, to = self._memory(x, np.uint16), self._memory(out, np.uint16)
        self._operations.append(lambda shape: self._linear(shape, weight, from_x, to, output))

    def _linear(self, shape: StepShape, weight: Loaded, x: Array, to: Array, output: np.int32) -> None:
        if shape.rows > geometry.LINEAR_TOKENS:
            launch = geometry.linear_prefill(weight.kind, weight.rows, shape.rows)
            self._launch(launch, *weight.arguments, x, to, output)
        else:
            launch = geometry.linear_decode(weight.kind, weight.rows, weight.columns, shape.rows)
            self._launch(launch, *weight.arguments, x, to, output, np.int32(0))

    def logits(self, x: Rows, weight: CudaMatrix) -> None:
        """Of the wanted rows only, in fp32."""
        from_x, loaded = self._memory(x, np.uint16), self._load(weight)

        def run(shape: StepShape) -> None:
            if shape.samples:
                launch = geometry.linear_decode(loaded.kind, loaded.rows, loaded.columns, shape.samples)
                self._launch(launch, *loaded.arguments, from_x, self._logits, OUT_F32, np.int32(1))

        self._operations.append(run)

    def record(self, forward: Callable[[], None]) -> Program:
        """Note the launches; the buffers get their memory here."""
        self._operations = []
        with self.device.active():
            forward()
        program = Program(tuple(self._operations))
        self._programs.append(program)
        return program

    def cache_blocks(self) -> int:
        """How many blocks fit beside what is loaded by now. Raises `ModelError` if none does."""
        with self.device.active():
            return geometry.cache_blocks(self.config, *self.device.memory())

    def allocate_cache(self, blocks: int) -> None:
        """Keys and values, (layers, blocks, kv_heads, 16, head_dim) each. Raises `ModelError` if too large.

        May come before or after `record`, and again: the old cache goes first, with the graphs over it.
        """
        config = self.config
        self._keys, self._values = [], []
        for program in self._programs:
            program.graphs.clear()
        shape = (config.layers, blocks, config.kv_heads, BLOCK_SIZE, config.head_dim)
        with self.device.active():
            keys, values = self.device.empty(shape, np.uint16), self.device.empty(shape, np.uint16)
        self._keys = [keys[layer] for layer in range(config.layers)]
        self._values = [values[layer] for layer in range(config.layers)]

    def start(self, program: Program, batch: Batch) -> Pending:
        """Put a step on its way and come back while the card works. Raises `StepTooLarge` with nothing started."""
        pieces = geometry.place_pieces(batch, self._piece_room)
        staged = self._staged[0]
        words = pack_step(batch, pieces, staged)
        self._staged.reverse()
        shape, samples = geometry.step_shape(batch, pieces, self.limits.sequences), len(batch.logit_rows)
        with self.device.active():
            self.device.mark(0)
            self.device.copy_in(self._step, staged[:words])
            self._forward(program, shape)
            self.device.mark(1)
            if samples:
                self._sample(samples)
            self.device.mark(2)
        return Pending(samples, self._bytes(batch))

    def _forward(self, program: Program, shape: StepShape) -> None:
        graph = program.graphs.get(shape)
        if graph is not None:
            graph.launch()
            return
        self._run_all(program, shape)  # the first time in a bucket also loads what the graph will need
        if not shape.prefill_rows:
            # Where memory is too short for a graph, the step has run all the same; the next one tries again.
            with contextlib.suppress(GpuFull):
                program.graphs[shape] = self.device.capture(lambda: self._run_all(program, shape))

    @staticmethod
    def _run_all(program: Program, shape: StepShape) -> None:
        for operation in program.operations:
            operation(shape)

    def _sample(self, samples: int) -> None:
        launch = Launch("sampling", "sample", (samples,), (512,), SAMPLING_SHARED)
        self._launch(launch, self._logits, np.int32(self.config.vocab_size), self._saved, self._result)

    def _bytes(self, batch: Batch) -> int:
        """Weights once, and every sequence's keys and values once."""
        tokens = int((batch.sequences[:, 1] + batch.sequences[:, 2]).sum())
        return self._weight_bytes + tokens * geometry.block_bytes(self.config) // BLOCK_SIZE

    def finish(self, pending: Pending) -> StepResult:
        """Wait for the step and bring back its tokens: one small copy."""
        samples = pending.samples
        brought = self._brought[: samples * RESULT_WORDS]
        began = time.perf_counter()
        with self.device.active():
            self.device.copy_out(brought, self._result)
            waited = time.perf_counter() - began
            forward, sampling = self.device.seconds(0, 1), self.device.seconds(1, 2)
        words = brought.reshape(samples, RESULT_WORDS).copy()
        chances: NDArray[np.float32] = words.view(np.float32)
        return StepResult(
            tokens=words[:, 0],
            logprobs=chances[:, 1],
            top_tokens=words[:, 2 : 2 + MAX_TOP_LOGPROBS],
            top_logprobs=chances[:, 2 + MAX_TOP_LOGPROBS :],
            forward_seconds=forward,
            sampling_seconds=sampling,
            waited_seconds=waited,
            bytes_moved=pending.bytes_moved,
        )

    def close(self) -> None:
        """Forget graphs and arrays, and give the memory back. Idempotent."""
        for program in self._programs:
            program.graphs.clear()
            program.operations = ()
        self._programs, self._operations, self._keys, self._values = [], [], [], []
        self._functions.clear()
        for name in (
            "_parts",
            "_tops",
            "_qkv",
            "_logits",
            "_result",
            "_step",
            "_saved",
            "_cosines",
            "_sines",
        ):
            setattr(self, name, None)
        self.device.close()
