"""The contract between the decoder and the machine that runs it: one for a CPU, one for a GPU.

A forward pass is *recorded* once as a list of operations over buffers, and *run* once per step: sizes that
differ from
step to step come from the step's `Batch`, never from the recording. A GPU captures the recording as a graph;
a CPU
interprets it on its threads without coming back to Python in between.

Every implementation keeps this promise: **a row's result does not depend on what other rows are in the
step**, nor on
how a prompt was cut into steps, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gpu.model_config import ModelConfig

Buffer = Any
"""Rows of activations, opaque to the decoder: as many rows as a step has tokens."""
Matrix = Any
"""A linear layer's weights in the implementation's own layout."""
Vector = Any
"""A norm's weight or a bias."""
Program = Any
"""A recorded forward pass."""
Pending = Any
"""A step that was started and not finished."""

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@frozen
class Batch:
    """One step's input. A *row* is one token; each sequence's rows are adjacent and in order."""

    tokens: Ints  # (rows,)
    positions: Ints  # (rows,): of the token in its sequence
    slots: Ints  # (rows,): block * BLOCK_SIZE + offset, where the row's key and value go
    sequences: Ints  # (sequences, 3): first row, number of rows, position of the first row
    tables: Ints  # (sequences, columns): block tables, any value past a sequence's end
    logit_rows: Ints  # (samples,): rows whose logits are wanted
    sampling: SamplingBatch


@frozen
class SamplingBatch:
    """How each wanted row's token is chosen; see `gpu.sampling_params` for the meaning of the fields."""

    temperature: Floats  # (samples,)
    top_p: Floats
    min_p: Floats
    top_k: Ints
    seed: NDArray[np.uint64]
    position: Ints  # (samples,): index in the reply, the generator's counter
    logprobs: Ints  # (samples,): -1, or how many likeliest tokens are wanted
    repetition: Floats
    presence: Floats
    frequency: Floats
    penalty_starts: Ints  # (samples + 1,): each row's part of the two below
    penalty_tokens: Ints
    penalty_counts: Ints  # times in the reply; 0: only in the prompt
    bias_starts: Ints  # (samples + 1,)
    bias_tokens: Ints
    bias_values: Floats  # added to the logit; -inf forbids


@frozen
class StepResult:
    """What a step brought back, one row for each of `Batch.logit_rows`."""

    tokens: Ints  # (samples,): -1 where the row held no finite distribution
    logprobs: Floats  # (samples,)
    top_tokens: Ints  # (samples, MAX_TOP_LOGPROBS)
    top_logprobs: Floats  # (samples, MAX_TOP_LOGPROBS)
    forward_seconds: float
    sampling_seconds: float
    waited_seconds: float
    """For which `start` and `finish` kept their caller and did nothing but compute, or wait for what computes."""
    bytes_moved: int


MAX_TOP_LOGPROBS = 20


class WeightSource(Protocol):
    """Where weights come from: a GGUF file or safetensors shards, under GGUF's tensor names."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    def has(self, name: str) -> bool:
        """Whether the model has this tensor."""
        ...

    def raw(self, name: str) -> tuple[str, tuple[int, ...], NDArray[np.uint8]]:
        """Its type's name, its shape, and its bytes as they lie in the file."""
        ...

    def floats(self, name: str) -> Floats:
        """The tensor in fp32: for vectors and references."""
        ...


class Kernels(Protocol):
    """Everything the decoder asks of a machine. Widths are in elements, per row."""

    @property
    def block_bytes(self) -> int:
        """Of one block of keys and values in all layers."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether `start` comes back while the step runs, so that its caller can do something else meanwhile."""
        ...

    def matrix(self, names: tuple[str, ...]) -> Matrix:
        """Note (out, in) tensors, stacked by rows. They are loaded by `record` at the latest."""
        ...

    def vector(self, names: tuple[str, ...]) -> Vector:
        """Load vectors, one after the other."""
        ...

    def buffer(self, width: int) -> Buffer:
        """Activations for as many rows as a step may have."""
        ...

    def embed(self, table: Matrix, out: Buffer) -> None:
        """Each row of `out`: the embedding of its token."""
        ...

    def add_norm(self, hidden: Buffer, delta: Buffer | None, weight: Vector, out: Buffer) -> None:
        """`hidden += delta`, then `out = hidden / rms(hidden) * weight`."""
        ...

    def qkv(
        self,
        x: Buffer,
        weight: Matrix,
        bias: Vector | None,
        norms: tuple[Vector, Vector] | None,
        layer: int,
        out: Buffer,
    ) -> None:
        """Queries, keys and values, normed and turned; keys and values go to the layer's cache."""
        ...

    def attention(self, queries: Buffer, layer: int, out: Buffer) -> None:
        """Causal attention of each row over its sequence's blocks; query heads share key heads."""
        ...

    def linear(self, x: Buffer, weight: Matrix, out: Buffer) -> None:
        """`out = x @ weight.T`."""
        ...

    def swiglu(self, x: Buffer, gate_up: Matrix, out: Buffer) -> None:
        """`out = silu(x @ gate.T) * (x @ up.T)`."""
        ...

    def logits(self, x: Buffer, weight: Matrix) -> None:
        """Logits of the rows the batch wants, kept for sampling."""
        ...

    def record(self, forward: Callable[[], None]) -> Program:
        """Note the operations `forward` calls, in order. The cache must be there: addresses are kept."""
        ...

    def allocate_cache(self, blocks: int) -> None:
        """Make room for the keys and values of `blocks` blocks in every layer."""
        ...

    def start(self, program: Program, batch: Batch) -> Pending:
        """Begin one step; at most one is under way. The batch's arrays are read before it returns, and not kept."""
        ...

    def finish(self, pending: Pending) -> StepResult:
        """The end of the step that `start` began."""
        ...

    def close(self) -> None:
        """Stop threads and give memory back. Idempotent."""
        ...
