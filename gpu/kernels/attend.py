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
from gpu.kernels.header import ITEMS, POSITIONS, SCRATCH, SCRATCH_STRIDE, TABLES, TABLES_STRIDE, word
from gpu.kernels.rows import copy_floats, get_i32, get_i64, quantize
from gpu.kernels.simd import F32, I32, I64, V8, Value, constant, emitter, load, loop, splat, store, vector
from gpu.kernels.tiles import META_AT, Q_AT

STEP = 64
"""Tokens between two looks at the running maximum."""
QUERIES = 24
"""Queries, of all heads of a group, that share a pass over keys and values; what the first-level cache
holds."""
_TILES = (6, 3, 2, 1)
"""Queries whose sums are held in registers at once."""
_HALF_BYTES = simd.HALF_BYTES
_BLOCK = BLOCK_SIZE
_NEVER = -1e30


def _widened(b: ir.IRBuilder, address: Value, offset: Value | int) -> Value:
    values = load(b, address, offset, vector(simd.HALF, 8))
    return values if simd.HALF is F32 else b.fpext(values, V8)


def _outer(b: ir.IRBuilder, fresh: bool, *args: Value) -> None:
    """sums[i][0:16] (+)= Σ_j factors[i][j] · matrix[j][0:16], j below count, in order."""
    sums, sums_stride, factors, factors_stride, matrix, matrix_stride, count, queries = args
    done = simd.cell(b, constant(I64, 0))
    for tile in _TILES:
        left = b.sub(queries, b.load(done))
        passes = b.sdiv(left, constant(I64, tile))
        start = b.load(done)
        with loop(b, passes) as index:
            first = b.add(start, b.mul(index, constant(I64, tile)))
            _outer_tile(
                b,
                tile,
                fresh,
                first,
                sums,
                sums_stride,
                factors,
                factors_stride,
                matrix,
                matrix_stride,
                count,
            )
        b.store(b.add(start, b.mul(passes, constant(I64, tile))), done)


def _outer_tile(b: ir.IRBuilder, tile: int, fresh: bool, first: Value, *args: Value) -> None:
    sums, sums_stride, factors, factors_stride, matrix, matrix_stride, count = args
    rows = [b.add(first, constant(I64, i)) for i in range(tile)]
    targets = [b.add(sums, b.mul(row, sums_stride)) for row in rows]
    sources = [b.add(factors, b.mul(row, factors_stride)) for row in rows]
    zero = constant(V8, 0.0)
    cells = [
        [simd.cell(b, zero if fresh else load(b, target, 32 * part, V8)) for part in range(2)]
        for target in targets
    ]
    with loop(b, count) as j:
        row = b.mul(j, matrix_stride)
        columns = [
            _widened(b, matrix, b.add(row, constant(I64, 8 * part * _HALF_BYTES))) for part in range(2)
        ]
        at = b.mul(j, constant(I64, 4))
        for source, pair in zip(sources, cells, strict=True):
            factor = splat(b, load(b, source, at, F32), 8)
            for part in range(2):
                b.store(simd.madd(b, columns[part], factor, b.load(pair[part])), pair[part])
    for target, pair in zip(targets, cells, strict=True):
        for part in range(2):
            store(b, b.load(pair[part]), target, 32 * part)


@emitter("iiiiiiii")
def outer_set(b: ir.IRBuilder, *args: Value) -> None:
    """Sums = factors · matrix."""
    _outer(b, True, *args)


@emitter("iiiiiiii")
def outer_add(b: ir.IRBuilder, *args: Value) -> None:
    """Sums += factors · matrix."""
    _outer(b, False, *args)


@emitter("iiiiii")
def _soften(
    b: ir.IRBuilder, scores: Value, columns: Value, valid: Value, state: Value, sums: Value, width: Value
) -> None:
    """One query's step: scores become weights, those from `valid` on 0; `sums` are rescaled.

    Scores are in powers of two. `state` holds the running maximum and the running total.
    """
    size = b.mul(columns, constant(I64, 4))
    ramp = ir.Constant(vector(I32, 8), list(range(8)))
    limit = splat(b, b.trunc(valid, I32), 8)
    old = load(b, state, 0, F32)
    top = simd.cell(b, constant(V8, 0.0))
    b.store(splat(b, old, 8), top)
    with loop(b, size, 32) as at:
        lane = b.add(ramp, splat(b, b.trunc(b.sdiv(at, constant(I64, 4)), I32), 8))
        inside = b.icmp_signed("<", lane, limit)
        value = b.select(inside, load(b, scores, at, V8), constant(V8, _NEVER))
        store(b, value, scores, at)
        b.store(simd.maximum(b, value, b.load(top)), top)
    new = simd.fold(b, b.load(top), simd.maximum)
    highest = splat(b, new, 8)
    total = simd.cell(b, constant(V8, 0.0))
    b.store(constant(V8, 0.0), total)
    with loop(b, size, 32) as at:
        lane = b.add(ramp, splat(b, b.trunc(b.sdiv(at, constant(I64, 4)), I32), 8))
        inside = b.icmp_signed("<", lane, limit)
        weight = simd.exp2(b, b.fsub(load(b, scores, at, V8), highest))
        weight = b.select(inside, weight, constant(V8, 0.0))
        store(b, weight, scores, at)
        b.store(b.fadd(b.load(total), weight), total)
    shrink = simd.exp2(b, splat(b, b.fsub(old, new), 8))
    fading = b.extract_element(shrink, constant(I32, 0))
    gained = simd.fold(b, b.load(total), simd.add)
    store(b, new, state, 0)
    store(b, b.fadd(b.fmul(load(b, state, 4, F32), fading), gained), state, 4)
    with loop(b, b.mul(width, constant(I64, 4)), 32) as at:
        store(b, b.fmul(load(b, sums, at, V8), shrink), sums, at)


@emitter("iii")
def _begin(b: ir.IRBuilder, state: Value, sums: Value, width: Value) -> None:
    store(b, constant(F32, _NEVER), state, 0)
    store(b, constant(F32, 0.0), state, 4)
    with loop(b, b.mul(width, constant(I64, 4)), 32) as at:
        store(b, constant(V8, 0.0), sums, at)


@emitter("iiii")
def _finish(b: ir.IRBuilder, sums: Value, state: Value, target: Value, width: Value) -> None:
    """Write sums / total to the target."""
    scale = splat(b, b.fdiv(constant(F32, 1.0), load(b, state, 4, F32)), 8)
    with loop(b, b.mul(width, constant(I64, 4)), 32) as at:
        store(b, b.fmul(load(b, sums, at, V8), scale), target, at)


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
    table = word(header, TABLES) + sequence * word(header, TABLES_STRIDE)

    count = rows * group
    q = word(header, SCRATCH) + thread * word(header, SCRATCH_STRIDE)
    sums = q + count * width * 4
    scores = sums + count * width * 4
    state = scores + count * STEP * 4
    head_bytes = head * group * width * 4
    for row in range(rows):
        copy_floats(
            queries + (first + row) * queries_stride + head_bytes, q + row * group * width * 4, group * width
        )
    for i in range(count):
        _begin(state + 8 * i, sums + i * width * 4, width)

    end = start + rows
    block_bytes = 2 * _BLOCK * width * _HALF_BYTES
    for at in range(0, end, STEP):
        here = min(STEP, end - at)
        blocks = (here + _BLOCK - 1) // _BLOCK
        for j in range(blocks):
            block = get_i32(table + 4 * (at // _BLOCK + j))
            keys = layer + (block * kv_heads + head) * block_bytes
            outer_set(scores + 64 * j, STEP * 4, q, width * 4, keys, _BLOCK * _HALF_BYTES, width, count)
        for i in range(count):
            valid = min(STEP, max(0, start + i // group + 1 - at))
            _soften(scores + i * STEP * 4, blocks * _BLOCK, valid, state + 8 * i, sums + i * width * 4, width)
        for j in range(blocks):
            block = get_i32(table + 4 * (at // _BLOCK + j))
            values = layer + (block * kv_heads + head) * block_bytes + block_bytes // 2
            inside = min(_BLOCK, here - j * _BLOCK)
            for piece in range(0, width, 16):
                outer_add(
                    sums + 4 * piece, width * 4, scores + 64 * j, STEP * 4, values + piece * _HALF_BYTES,
                    width * _HALF_BYTES, inside, count,
                )  # fmt: skip

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
    return count * (2 * width + STEP + 2) * 4
