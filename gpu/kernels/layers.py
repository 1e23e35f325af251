"""A decoder layer's operations, each the work of one chunk: see `threads`.

Arguments are words at an address.
"""

from __future__ import annotations

from gpu.blocks import BLOCK_SIZE
from gpu.kernels import simd
from gpu.kernels.header import (
    HEADS_IN_BLOCK,
    LOGIT_ROWS,
    POSITIONS,
    ROWS,
    ROWS_IN_GROUP,
    SCRATCH,
    SCRATCH_STRIDE,
    SLOTS,
    TOKENS,
    word,
)
from gpu.kernels.jit import inner
from gpu.kernels.rows import (
    add_to,
    copy_floats,
    gated,
    get_bf16,
    get_f16,
    get_f32,
    get_half,
    get_i32,
    get_i64,
    get_u8,
    inverse_rms,
    keep_key,
    keep_value,
    put_f32,
    quantize,
    rotate,
    scale_in_place,
    scaled_by,
)
from gpu.kernels.tiles import META_AT, Q_AT, run_tile
from gpu.kernels.tiles import TOKENS as TOGETHER

_HALF_BYTES = simd.HALF_BYTES
_BLOCK = BLOCK_SIZE
_ACCUMULATORS = TOGETHER * 64
"""Bytes of one tile's sums."""
_TOKEN_BLOCK = 32
"""Tokens that go through all of a chunk's tiles before the next do: their activations stay in the cache."""


@inner
def _weight(w, kind, at_block, lane, column):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """One weight of a block.

    `kind` points at bits, group, offset (or -1), exact scales, bytes of the integers.
    """
    bits, group, offset = get_i64(kind), get_i64(kind + 8), get_i64(kind + 16)
    exact, size = get_i64(kind + 24), get_i64(kind + 32)
    if bits == 8:
        q = get_u8(w + at_block + column // 4 * 64 + lane * 4 + column % 4)
    else:
        q = get_u8(w + at_block + column // 8 * 64 + lane * 4 + column % 4) >> (column % 8 // 4 * 4) & 15
    width = 4 if exact else _HALF_BYTES
    place = w + at_block + size + (column // group * 16 + lane) * width
    scale = get_f32(place) if exact else get_half(place)
    if offset >= 0:
        return scale * (q - offset)
    place += 32 // group * 16 * width
    least = get_f32(place) if exact else get_half(place)
    return scale * q + least


def embed(args: int, chunk: int, thread: int) -> None:  # noqa: ARG001
    """Embeddings of a few rows.

    Arguments: header, table, bytes of its tiles, of its blocks, columns, out, stride, then `_weight`'s kind.
    Floats have 0 bits, their size where the group would be, and 1 for bf16 where the offset would be.
    """
    header = get_i64(args)
    table, tile_bytes, block_bytes = get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    columns, out, stride = get_i64(args + 32), get_i64(args + 40), get_i64(args + 48)
    kind = args + 56
    bits, size, brain = get_i64(kind), get_i64(kind + 8), get_i64(kind + 16)
    first = chunk * ROWS_IN_GROUP
    for row in range(first, min(first + ROWS_IN_GROUP, word(header, ROWS))):
        token = get_i32(word(header, TOKENS) + 4 * row)
        tile, lane = table + token // 16 * tile_bytes, token % 16
        for column in range(columns):
            if bits:
                value = _weight(tile, kind, column // 32 * block_bytes, lane, column % 32)
            else:
                place = tile + (column * 16 + lane) * size
                value = get_f32(place) if size == 4 else (get_bf16(place) if brain == 1 else get_f16(place))
            put_f32(out + row * stride + 4 * column, value)


def add_norm(args: int, chunk: int, thread: int) -> None:  # noqa: ARG001
    """Arguments: header, hidden, stride, delta or 0, stride, weight, address of eps, out, stride, width."""
    header = get_i64(args)
    hidden, hidden_stride, delta, delta_stride = (
        get_i64(args + 8), get_i64(args + 16), get_i64(args + 24), get_i64(args + 32)
    )  # fmt: skip
    weight, eps, out, out_stride, width = (
        get_i64(args + 40), get_f32(get_i64(args + 48)), get_i64(args + 56), get_i64(args + 64), get_i64(args
        + 72)
    )  # fmt: skip
    first = chunk * ROWS_IN_GROUP
    for row in range(first, min(first + ROWS_IN_GROUP, word(header, ROWS))):
        x, y = hidden + row * hidden_stride, out + row * out_stride
        if delta:
            add_to(x, delta + row * delta_stride, width)
        scaled_by(x, weight, inverse_rms(x, width, eps), y, width)
        quantize(y, y + Q_AT * width, y + META_AT * width, width // 32)


def linear(args: int, chunk: int, thread: int) -> None:
    """A matrix times every row.

    Arguments: header, which of its words counts the rows, x, stride, columns, out, stride, tiles in a chunk,
    tiles in all, then the tile's function, the weights and bytes of a tile.
    """
    header = get_i64(args)
    rows = word(header, get_i64(args + 8))
    x, stride, columns = get_i64(args + 16), get_i64(args + 24), get_i64(args + 32)
    out, out_stride = get_i64(args + 40), get_i64(args + 48)
    many, tiles = get_i64(args + 56), get_i64(args + 64)
    function, w, tile_bytes = get_i64(args + 72), get_i64(args + 80), get_i64(args + 88)
    sums = word(header, SCRATCH) + thread * word(header, SCRATCH_STRIDE)
    for begin in range(0, rows, _TOKEN_BLOCK):
        end = min(rows, begin + _TOKEN_BLOCK)
        for tile in range(chunk * many, min(tiles, chunk * many + many)):
            for row in range(begin, end, TOGETHER):
                count = min(TOGETHER, end - row)
                run_tile(
                    function,
                    w + tile * tile_bytes,
                    columns // 32,
                    x + row * stride,
                    stride,
                    columns,
                    count,
                    sums,
                )
                for i in range(count):
                    copy_floats(sums + 64 * i, out + (row + i) * out_stride + 64 * tile, 16)


def swiglu(args: int, chunk: int, thread: int) -> None:
    """Gate and up, and what comes of them.

    Arguments: header, x, stride, columns, out, stride, its width, blocks of 32 in a chunk, then for gate and
    for up: function, weights, bytes of a tile.
    """
    header = get_i64(args)
    rows = word(header, ROWS)
    x, stride, columns = get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    out, out_stride, width, many = (
        get_i64(args + 32),
        get_i64(args + 40),
        get_i64(args + 48),
        get_i64(args + 56),
    )
    gate, gate_w, gate_bytes = get_i64(args + 64), get_i64(args + 72), get_i64(args + 80)
    up, up_w, up_bytes = get_i64(args + 88), get_i64(args + 96), get_i64(args + 104)
    gates = word(header, SCRATCH) + thread * word(header, SCRATCH_STRIDE)
    ups = gates + _ACCUMULATORS
    blocks = columns // 32
    for begin in range(0, rows, _TOKEN_BLOCK):
        end = min(rows, begin + _TOKEN_BLOCK)
        for block in range(chunk * many, min(width // 32, chunk * many + many)):
            for row in range(begin, end, TOGETHER):
                count = min(TOGETHER, end - row)
                here = x + row * stride
                for tile in range(2 * block, 2 * block + 2):
                    run_tile(gate, gate_w + tile * gate_bytes, blocks, here, stride, columns, count, gates)
                    run_tile(up, up_w + tile * up_bytes, blocks, here, stride, columns, count, ups)
                    for i in range(count):
                        gated(gates + 64 * i, ups + 64 * i, out + (row + i) * out_stride + 64 * tile)
                for i in range(count):
                    y = out + (row + i) * out_stride
                    quantize(
                        y + 128 * block, y + Q_AT * width + 64 * block, y + META_AT * width + 16 * block, 1
                    )


def qkv(args: int, chunk: int, thread: int) -> None:
    """One head: of queries, then of keys, then of values.

    Arguments: header, x, its stride, columns, heads, kv heads, head_dim, out, its stride, cache of the
    layer, cosines,
    sines, bias or 0, norm of queries or 0, of keys or 0, address of eps, address of the queries' scale, then
    for
    queries, keys and values: function, weights, bytes of a tile.
    """
    header = get_i64(args)
    x, stride, columns = get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    heads, kv_heads, width = get_i64(args + 32), get_i64(args + 40), get_i64(args + 48)
    bias = get_i64(args + 96)
    part = 0 if chunk < heads else (1 if chunk < heads + kv_heads else 2)
    head = chunk - (0 if part == 0 else (heads if part == 1 else heads + kv_heads))
    weights = args + 136 + 24 * part
    function, w, tile_bytes = get_i64(weights), get_i64(weights + 8), get_i64(weights + 16)
    sums = word(header, SCRATCH) + thread * word(header, SCRATCH_STRIDE)
    values = sums + _ACCUMULATORS
    tiles = width // 16
    rows = word(header, ROWS)
    for row in range(0, rows, TOGETHER):
        count = min(TOGETHER, rows - row)
        for tile in range(tiles):
            place = w + (head * tiles + tile) * tile_bytes
            run_tile(function, place, columns // 32, x + row * stride, stride, columns, count, sums)
            for i in range(count):
                copy_floats(sums + 64 * i, values + i * width * 4 + 64 * tile, 16)
        for i in range(count):
            value = values + i * width * 4
            if bias:
                add_to(value, bias + 4 * width * chunk, width)
            _place(args, header, part, head, row + i, value)


@inner
def _place(args, header, part, head, row, value):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Norm, turn, and put where it belongs: one head of one row."""
    width = get_i64(args + 48)
    out, out_stride, layer = get_i64(args + 56), get_i64(args + 64), get_i64(args + 72)
    if part < 2:
        norm = get_i64(args + 104 + 8 * part)
        if norm:
            scaled_by(value, norm, inverse_rms(value, width, get_f32(get_i64(args + 120))), value, width)
        turn = get_i32(word(header, POSITIONS) + 4 * row) * width * 2
        rotate(value, get_i64(args + 80) + turn, get_i64(args + 88) + turn, width // 2)
    if part == 0:
        scale_in_place(value, get_f32(get_i64(args + 128)), width)
        copy_floats(value, out + row * out_stride + head * width * 4, width)
        return
    slot = get_i32(word(header, SLOTS) + 4 * row)
    block = layer + (slot // _BLOCK * word(header, HEADS_IN_BLOCK) + head) * (
        2 * _BLOCK * width * _HALF_BYTES
    )
    if part == 1:
        keep_key(value, block + slot % _BLOCK * _HALF_BYTES, width)
    else:
        keep_value(value, block + (_BLOCK + slot % _BLOCK) * width * _HALF_BYTES, width)


def gather(args: int, chunk: int, thread: int) -> None:  # noqa: ARG001
    """Copy a wanted row. Arguments: header, x, its stride, out (of the same stride)."""
    header = get_i64(args)
    x, stride, out = get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    row = get_i32(word(header, LOGIT_ROWS) + 4 * chunk)
    copy_floats(x + row * stride, out + chunk * stride, stride // 4)
