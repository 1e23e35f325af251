"""How a step is laid out on a card: grids, shared memory, workspace. Plain arithmetic.

The numbers belong to the .cu files of the same names; their heads explain them.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from gpu.blocks import BLOCK_SIZE
from gpu.errors import ModelError
from gpu.kernels import Batch
from gpu.model_config import ModelConfig

Grid = tuple[int, ...]

HEAD_DIMS = (32, 64, 96, 128)
"""Those the attention kernels are instantiated for."""
PIECE = 128
"""Keys that one warp of attention_decode goes through."""
LINEAR_PIECE = 512
"""Columns that one warp of linear_decode goes through at a time."""
LINEAR_TOKENS = 64
"""Up to so many tokens the weights are streamed once; above, linear_prefill reuses them from registers."""
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LEFT_FREE = 0.05
"""Of the card's memory, for the driver, captured graphs and whoever else looks at it."""


@frozen
class Launch:
    """One kernel of one .cu file, and how it is started. `shared` is in bytes."""

    stem: str
    name: str
    grid: Grid
    block: Grid
    shared: int = 0


@frozen
class StepShape:
    """What decides the grids of a step. Two steps of one shape replay one graph."""

    rows: int
    sequences: int
    samples: int
    pieces: int
    """The most pieces any sequence of attention_decode has; 0: it has none."""
    prefill_rows: int
    """The most rows any sequence of attention_prefill has; 0: it has none."""


def _up(count: int, step: int) -> int:
    return -(-count // step)


def place_pieces(batch: Batch, room: int) -> NDArray[np.int32]:
    """Where each decoding sequence's parts begin in a workspace of `room` pieces, or -1.

    -1: it computes more than one row, or finds no room, and is attention_prefill's; the bits are the same.
    """
    spans = batch.sequences
    counts = np.where(spans[:, 1] == 1, spans[:, 2] // PIECE + 1, 0)
    ends = np.cumsum(counts)
    fits = (counts > 0) & (ends <= room)
    return np.where(fits, ends - counts, -1).astype(np.int32)


def step_shape(batch: Batch, pieces: NDArray[np.int32], most: int) -> StepShape:
    """The shape of a step; where every sequence decodes, rounded up to a bucket of not above `most` rows."""
    spans, placed = batch.sequences, pieces >= 0
    longest = int((spans[placed, 2] // PIECE + 1).max(initial=0))
    if placed.all():
        rows = min(next((bucket for bucket in ROW_BUCKETS if bucket >= len(spans)), most), most)
        return StepShape(rows, rows, rows, 1 << (longest - 1).bit_length(), 0)
    return StepShape(
        len(batch.tokens), len(spans), len(batch.logit_rows), longest, int(spans[~placed, 1].max())
    )


def linear_decode(kind: str, rows: int, columns: int, tokens: int) -> Launch:
    """Few tokens at a time, any number of times."""
    tiles = next((tiles for tiles in (1, 4) if tokens <= 8 * tiles), 8)
    warps = min(8, _up(columns, LINEAR_PIECE))
    grid = (_up(rows, 16), _up(tokens, 8 * tiles))
    return Launch(
        "linear_decode", f"linear_{kind}_{tiles}", grid, (32 * warps,), (2 * warps + 1) * tiles * 512
    )


def linear_prefill(kind: str, rows: int, tokens: int) -> Launch:
    """Many tokens at once."""
    return Launch(
        "linear_prefill", f"linear_{kind}_prefill", (_up(rows, 128), _up(tokens, 128)), (256,), 65536
    )


def _stages(head_dim: int) -> int:
    key_stride = head_dim + 32 if head_dim % 64 == 0 else head_dim
    return 2 * 32 * (key_stride + head_dim + 8) * 2


def attention_decode(config: ModelConfig, shape: StepShape) -> Launch:
    """A warp for each piece, kv head and sequence."""
    tiles = _up(config.heads // config.kv_heads, 16)
    grid = (shape.pieces, config.kv_heads * tiles, shape.sequences)
    return Launch(
        "attention_decode", f"attention_decode_{config.head_dim}", grid, (32,), _stages(config.head_dim)
    )


def attention_fold(config: ModelConfig, shape: StepShape) -> Launch:
    """A block for each head of each sequence."""
    return Launch("attention_decode", "attention_fold", (config.heads, shape.sequences), (config.head_dim,))


def attention_prefill(config: ModelConfig, shape: StepShape) -> Launch:
    """A block for each 64 rows of a kv head and sequence."""
    grid = (_up(shape.prefill_rows * (config.heads // config.kv_heads), 64), config.kv_heads, shape.sequences)
    shared = _stages(config.head_dim) + 64 * config.head_dim * 4
    return Launch("attention_prefill", f"attention_prefill_{config.head_dim}", grid, (128,), shared)


def rope_kv(config: ModelConfig, shape: StepShape) -> Launch:
    """A warp for each head of each row."""
    return Launch("rope_kv", "rope_kv", (shape.rows, _up(config.heads + 2 * config.kv_heads, 4)), (128,))


def check_shape(config: ModelConfig) -> None:
    """Refuse a model the kernels have no instance for. Raises `ModelError`."""
    if config.head_dim not in HEAD_DIMS:
        raise ModelError(f"heads of {config.head_dim} are not supported on a GPU; supported: {HEAD_DIMS}")
    for name in ("width", "feed_forward"):
        if getattr(config, name) % 32:
            raise ModelError(
                f"{name} {getattr(config, name)}: the CUDA kernels need a multiple of 32; serve it on the CPU"
            )


def block_bytes(config: ModelConfig) -> int:
    """Of one block of the cache: bf16 keys and values in every layer."""
    return config.layers * 2 * BLOCK_SIZE * config.kv_heads * config.head_dim * 2


def cache_blocks(config: ModelConfig, free: int, total: int) -> int:
    """How many blocks fit into what weights and workspace left free. Raises `ModelError` if none does."""
    blocks = (free - int(LEFT_FREE * total)) // block_bytes(config)
    if blocks < 1:
        raise ModelError(
            f"the model leaves {free >> 20} MiB of {total >> 20} free on the GPU, too little for any "
            "context; serve a smaller or a quantised one"
        )
    return blocks


def workspace_pieces(max_rows: int, context: int, parts_bytes: int, limit: int = 256 << 20) -> int:
    """Pieces of decode attention's workspace: for all rows at full length, or what `limit` bytes hold.

    One sequence at full length always finds room. `parts_bytes`: of one piece, all heads.
    """
    longest = _up(context, PIECE)
    return max(longest, min(max_rows * longest, limit // parts_bytes))
