"""Causal attention over paged keys and values, sixty-four tokens at a time, with a running softmax.

A block's keys lie transposed, [head_dim][16 tokens], and its values plain, [16 tokens][head_dim]: so scores
and sums are
both products of a few queries with rows of 16, every key and value is widened once for all queries that
share it, and
no sum runs across a vector. Steps begin at multiples of 64 tokens of the sequence, whatever the query: a
row's result
does not depend on the rows beside it. Formula: Milakov and Gimelshein, "Online normalizer calculation for
softmax".
"""

from __future__ import annotations

from llvmlite import ir

from gpu.blocks import BLOCK_SIZE
from gpu.kernels import simd
from gpu.kernels.header import (
    HEADS_IN_BLOCK,
    ITEMS,
    POSITIONS,
    SCRATCH,
    SCRATCH_STRIDE,
    TABLES,
    TABLES_STRIDE,
    word,
)
from gpu.kernels.jit import ISA
from gpu.kernels.rows import copy_floats, get_i32, get_i64, quantize
from gpu.kernels.simd import F32, I32, I64, Value, constant, emitter, load, loop, splat, store, vector
from gpu.kernels.tiles import META_AT, Q_AT

STEP = 64
"""Tokens between two looks at the running maximum."""
QUERIES = 12
"""Queries, of all heads of a group, that share a pass over keys and values: more would leave threads idle."""
_LANES = 16 if ISA == "avx512vnni" else 8
_VECTOR = vector(F32, _LANES)
_VECTOR_BYTES = 4 * _LANES
_TILES = (6, 3, 2, 1) if ISA == "avx512vnni" else (3, 2, 1)
"""Queries whose sums are held in registers at once,"""
_ABREAST = 4 if ISA == "avx512vnni" else 2
"""each of so many times 16 columns: chains enough that no sum waits for the one before it."""
_HALF_BYTES = simd.HALF_BYTES
_BLOCK = BLOCK_SIZE
_NEVER = -1e30


def _widened(b: ir.IRBuilder, address: Value, offset: Value | int) -> Value:
    values = load(b, address, offset, vector(simd.HALF, _LANES))
    return values if simd.HALF is F32 else b.fpext(values, _VECTOR)


def _outer(
    b: ir.IRBuilder,
    fresh: bool,
    sums: Value,
    sums_stride: Value,
    factors: Value,
    factors_stride: Value,
    matrices: list[Value],
    row_bytes: Value,
    count: Value,
    queries: Value,
) -> None:
    """sums[i][16g:16g+16] (+)= Σ_j factors[i][j] · matrices[g][j][0:16], j below count, in order."""
    done = simd.cell(b, constant(I64, 0))
    for tile in _TILES:
        start = b.load(done)
        passes = b.sdiv(b.sub(queries, start), constant(I64, tile))
        with loop(b, passes) as index:
            first = b.add(start, b.mul(index, constant(I64, tile)))
            rows = [b.add(first, constant(I64, i)) for i in range(tile)]
            targets = [b.add(sums, b.mul(row, sums_stride)) for row in rows]
            sources = [b.add(factors, b.mul(row, factors_stride)) for row in rows]
            _outer_tile(b, fresh, targets, sources, matrices, row_bytes, count)
        b.store(b.add(start, b.mul(passes, constant(I64, tile))), done)


def _outer_tile(
    b: ir.IRBuilder,
    fresh: bool,
    targets: list[Value],
    sources: list[Value],
    matrices: list[Value],
    row_bytes: Value,
    count: Value,
) -> None:
    zero = constant(_VECTOR, 0.0)
    places = [
        (matrix, part, 64 * g + part * _VECTOR_BYTES)
        for g, matrix in enumerate(matrices)
        for part in range(16 // _LANES)
    ]
    cells = [
        [simd.cell(b, zero if fresh else load(b, target, place, _VECTOR)) for _, _, place in places]
        for target in targets
    ]
    with loop(b, count) as j:
        row_at, at = b.mul(j, row_bytes), b.mul(j, constant(I64, 4))
        spread = [splat(b, load(b, source, at, F32), _LANES) for source in sources]
        for index, (matrix, part, _) in enumerate(places):
            offset = b.add(row_at, constant(I64, part * _LANES * _HALF_BYTES))
            column = _widened(b, matrix, offset)
            for factor, row in zip(spread, cells, strict=True):
                b.store(simd.madd(b, column, factor, b.load(row[index])), row[index])
    for target, row in zip(targets, cells, strict=True):
        for (_, _, place), each in zip(places, row, strict=True):
            store(b, b.load(each), target, place)


@emitter("iiiiii")
def _score(
    b: ir.IRBuilder, scores: Value, queries: Value, width: Value, keys: Value, row_bytes: Value, count: Value
) -> None:
    """Products of `count` queries with the keys of `_ABREAST` blocks, whose addresses lie at `keys`."""
    blocks = [load(b, keys, 8 * g, I64) for g in range(_ABREAST)]
    stride = b.mul(width, constant(I64, 4))
    _outer(b, True, scores, constant(I64, 4 * STEP), queries, stride, blocks, row_bytes, width, count)


@emitter("iiiiii")
def _gain(
    b: ir.IRBuilder, sums: Value, scores: Value, width: Value, values: Value, tokens: Value, count: Value
) -> None:
    """Add a block's first `tokens` values, weighted, to the sums of `count` queries."""
    stride, row_bytes = b.mul(width, constant(I64, 4)), b.mul(width, constant(I64, _HALF_BYTES))
    done = simd.cell(b, constant(I64, 0))
    for abreast in (4, 2) if _ABREAST == 4 else (2,):
        columns = 16 * abreast
        start = b.load(done)
        passes = b.sdiv(b.sub(width, start), constant(I64, columns))
        with loop(b, passes) as index:
            first = b.add(start, b.mul(index, constant(I64, columns)))
            matrices = [
                b.add(values, b.mul(b.add(first, constant(I64, 16 * g)), constant(I64, _HALF_BYTES)))
                for g in range(abreast)
            ]
            target = b.add(sums, b.mul(first, constant(I64, 4)))
            _outer(
                b, False, target, stride, scores, constant(I64, 4 * STEP), matrices, row_bytes, tokens, count
            )
        b.store(b.add(start, b.mul(passes, constant(I64, columns))), done)


@emitter("ii")
def _put_i64(b: ir.IRBuilder, address: Value, value: Value) -> None:
    store(b, value, address)


@emitter("iiiiii")
def _soften(
    b: ir.IRBuilder, scores: Value, columns: Value, valid: Value, state: Value, sums: Value, width: Value
) -> None:
    """One query's step: scores become weights, those from `valid` on 0; `sums` are rescaled.

    Scores are in powers of two. `state` holds the running maximum and the running total.
    """
    size = b.mul(columns, constant(I64, 4))
    ramp = ir.Constant(vector(I32, _LANES), list(range(_LANES)))
    limit = splat(b, b.trunc(valid, I32), _LANES)
    old = load(b, state, 0, F32)
    top = simd.cell(b, constant(_VECTOR, 0.0))
    b.store(splat(b, old, _LANES), top)
    with loop(b, size, _VECTOR_BYTES) as at:
        lane = b.add(ramp, splat(b, b.trunc(b.sdiv(at, constant(I64, 4)), I32), _LANES))
        inside = b.icmp_signed("<", lane, limit)
        value = b.select(inside, load(b, scores, at, _VECTOR), constant(_VECTOR, _NEVER))
        store(b, value, scores, at)
        b.store(simd.maximum(b, value, b.load(top)), top)
    new = simd.fold(b, b.load(top), simd.maximum)
    highest = splat(b, new, _LANES)
    total = simd.cell(b, constant(_VECTOR, 0.0))
    b.store(constant(_VECTOR, 0.0), total)
    with loop(b, size, _VECTOR_BYTES) as at:
        lane = b.add(ramp, splat(b, b.trunc(b.sdiv(at, constant(I64, 4)), I32), _LANES))
        inside = b.icmp_signed("<", lane, limit)
        weight = simd.exp2(b, b.fsub(load(b, scores, at, _VECTOR), highest))
        weight = b.select(inside, weight, constant(_VECTOR, 0.0))
        store(b, weight, scores, at)
        b.store(b.fadd(b.load(total), weight), total)
    shrink = simd.exp2(b, splat(b, b.fsub(old, new), _LANES))
    fading = b.extract_element(shrink, constant(I32, 0))
    gained = simd.fold(b, b.load(total), simd.add)
    store(b, new, state, 0)
    store(b, b.fadd(b.fmul(load(b, state, 4, F32), fading), gained), state, 4)
    with loop(b, b.mul(width, constant(I64, 4)), _VECTOR_BYTES) as at:
        store(b, b.fmul(load(b, sums, at, _VECTOR), shrink), sums, at)


@emitter("iii")
def _begin(b: ir.IRBuilder, state: Value, sums: Value, width: Value) -> None:
    store(b, constant(F32, _NEVER), state, 0)
    store(b, constant(F32, 0.0), state, 4)
    with loop(b, b.mul(width, constant(I64, 4)), _VECTOR_BYTES) as at:
        store(b, constant(_VECTOR, 0.0), sums, at)


@emitter("iiii")
def _finish(b: ir.IRBuilder, sums: Value, state: Value, target: Value, width: Value) -> None:
    """Write sums / total to the target."""
    scale = splat(b, b.fdiv(constant(F32, 1.0), load(b, state, 4, F32)), _LANES)
    with loop(b, b.mul(width, constant(I64, 4)), _VECTOR_BYTES) as at:
        store(b, b.fmul(load(b, sums, at, _VECTOR), scale), target, at)


def attention(args: int, chunk: int, thread: int) -> None:
    """One tile of a sequence's rows, for one key head and the query heads that share it.

    Arguments: header, queries, their stride, cache of the layer, kv heads, group, head_dim, out, its stride,
    width.
    """
    header = get_i64(args)
    queries, queries_stride, layer = get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    kv_heads, group, width = get_i64(args + 32), get_i64(args + 40), get_i64(args + 48)
    out, out_stride, columns = get_i64(args + 56), get_i64(args + 64), get_i64(args + 72)
    item = word(header, ITEMS) + 12 * (chunk // kv_heads)
    head = chunk % kv_heads
    sequence, first, rows = get_i32(item), get_i32(item + 4), get_i32(item + 8)
    start = get_i32(word(header, POSITIONS) + 4 * first)
    heads_in_block = word(header, HEADS_IN_BLOCK)
    table = word(header, TABLES) + sequence * word(header, TABLES_STRIDE)

    count = rows * group
    q = word(header, SCRATCH) + thread * word(header, SCRATCH_STRIDE)
    sums = q + count * width * 4
    scores = sums + count * width * 4
    state = scores + count * STEP * 4
    places = state + count * 8
    head_bytes = head * group * width * 4
    for row in range(rows):
        copy_floats(
            queries + (first + row) * queries_stride + head_bytes, q + row * group * width * 4, group * width
        )
    for i in range(count):
        _begin(state + 8 * i, sums + i * width * 4, width)

    end = start + rows
    half = _BLOCK * width * _HALF_BYTES
    block_bytes = 2 * half
    for at in range(0, end, STEP):
        here = min(STEP, end - at)
        blocks = (here + _BLOCK - 1) // _BLOCK
        for j in range(STEP // _BLOCK):
            block = get_i32(table + 4 * (at // _BLOCK + min(j, blocks - 1)))
            place = layer + (block * heads_in_block + head) * block_bytes
            _put_i64(places + 8 * j, place)
        for j in range(0, blocks, _ABREAST):
            _score(scores + 64 * j, q, width, places + 8 * j, _BLOCK * _HALF_BYTES, count)
        for i in range(count):
            valid = min(STEP, max(0, start + i // group + 1 - at))
            _soften(scores + i * STEP * 4, blocks * _BLOCK, valid, state + 8 * i, sums + i * width * 4, width)
        for j in range(blocks):
            values = get_i64(places + 8 * j) + half
            _gain(sums, scores + 64 * j, width, values, min(_BLOCK, here - j * _BLOCK), count)

    for row in range(rows):
        target = out + (first + row) * out_stride
        for i in range(group):
            k = row * group + i
            _finish(sums + k * width * 4, state + 8 * k, target + head_bytes + i * width * 4, width)
        block = head * group * width // 32
        quantize(
            target + head_bytes,
            target + Q_AT * columns + 64 * block,
            target + META_AT * columns + 16 * block,
            group * width // 32,
        )


def scratch_bytes(group: int, width: int) -> int:
    """Of one thread."""
    count = max(QUERIES, group)
    return count * (2 * width + STEP + 2) * 4 + STEP // _BLOCK * 8
