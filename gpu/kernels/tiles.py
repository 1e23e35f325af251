"""Sixteen rows of a matrix against a few tokens: the loop nearly all time is spent in.

A matrix lies in tiles of 16 rows. A tile is a run of blocks of 32 columns, each block complete in itself:

    4 bits:  256 bytes   [4 steps][16 rows][4 columns], low half: columns 8s..8s+3, high half: 8s+4..8s+7
    8 bits:  512 bytes   [8 steps][16 rows][4 columns]
    scales:  [32 / group][16 rows], then minima likewise if the format has them

A token's activations lie in one row: fp32 values; the same as int16, by blocks of 32; and for each block its
scale, the
scale times the sum of its integers, and that sum (see `rows.quantize`). Eight bits would be faster by half,
but lose as
much as the weights' four do: greedy text then differs from the fp32 model's. The integer products are exact,
and the
scaled sums are added block after block: a row's result is the same whichever tokens share the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from attrs import frozen
from llvmlite import ir

from gpu.kernels import simd
from gpu.kernels.jit import ISA, compiled
from gpu.kernels.simd import (
    F32,
    I16,
    I32,
    I64,
    Value,
    call,
    constant,
    emitter,
    load,
    loop,
    splat,
    store,
    vector,
)

ROWS = 16
COLUMNS = 32
META_BYTES = 16
"""Of a block of activations: its scale, scale times sum, sum, and the sum of its first half."""
Q_AT, META_AT = 4, 6
"""Where a row's integers and its blocks' words begin, in bytes per column; fp32 come first."""
ROW_BYTES_TWICE = 13
"""Bytes of a row for two columns: 4, 2 and a half for each."""
COLUMN_ORDER = (0, 2, 1, 3)
"""How four columns' integers lie in a row."""
TOKENS = 8 if ISA == "avx512vnni" else 4
"""Tokens that share one pass over a tile; what the registers hold."""

_TILE = "void(int64, int64, int64, int64, int64, int64, int64)"
Emit = Callable[..., None]


@frozen
class Format:
    """How a tile's blocks are written. `offset` is what every integer is too large by, if that is all."""

    bits: int
    group: int = COLUMNS
    offset: int | None = None
    exact_scales: bool = False
    """fp32 scales: where the file's would not fit fp16."""

    @property
    def scale_type(self) -> ir.Type:
        """Of scales and minima."""
        return F32 if self.exact_scales else simd.HALF

    @property
    def scale_bytes(self) -> int:
        """Of one scale."""
        return 4 if self.exact_scales else simd.HALF_BYTES

    @property
    def value_bytes(self) -> int:
        """Of a block's integers."""
        return ROWS * COLUMNS * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """Of a whole block."""
        scales = ROWS * (COLUMNS // self.group) * self.scale_bytes
        return self.value_bytes + scales * (1 if self.offset is not None else 2)


class _Lanes:
    """16 rows as the vectors an instruction set has: how to take products of 4 columns, and sum them.

    Weights are widened to 16 bits as the columns lie, even ones and odd ones apart, which costs a mask and a
    shift;
    activations were stored in that order (`COLUMN_ORDER`).
    """

    width = 8
    """fp32 lanes of a part."""

    def __init__(self, b: ir.IRBuilder) -> None:
        self.b = b

    def weights(self, address: Value, bits: int, step: int, part: int) -> tuple[Value, Value]:
        """Integers of `step`'s columns 0 and 2, and 1 and 3, of the rows of `part`, 16 bits each."""
        b = self.b
        lanes = vector(I16, 2 * self.width)
        if bits == 8:
            pairs = load(b, address, 64 * step + 4 * self.width * part, lanes)
            return b.and_(pairs, constant(lanes, 255)), b.lshr(pairs, constant(lanes, 8))
        pairs = load(b, address, 64 * (step // 2) + 4 * self.width * part, lanes)
        nibble, shift = constant(lanes, 15), step % 2 * 4
        even = b.lshr(pairs, constant(lanes, shift)) if shift else pairs
        odd = b.lshr(pairs, constant(lanes, 8 + shift))
        return b.and_(even, nibble), b.and_(odd, nibble)

    def columns(self, address: Value, offset: Value) -> tuple[Value, Value]:
        """A token's activations for columns 0 and 2, and 1 and 3, for every row."""
        b = self.b
        lanes = vector(I16, 2 * self.width)
        both = (load(b, address, b.add(offset, constant(I64, at)), I32) for at in (0, 4))
        first, second = (b.bitcast(splat(b, pair, self.width), lanes) for pair in both)
        return first, second

    def add_products(self, total: Value | None, weights: Value, columns: Value) -> Value:
        """`total` plus, for each row, the products of a pair of columns; int32, exact."""
        raise NotImplementedError


class _Vnni(_Lanes):
    width = 16

    def add_products(self, total: Value | None, weights: Value, columns: Value) -> Value:
        ints = vector(I32, 16)
        pairs = (self.b.bitcast(operand, ints) for operand in (weights, columns))
        return call(
            self.b,
            "llvm.x86.avx512.vpdpwssd.512",
            ints,
            constant(ints, 0) if total is None else total,
            *pairs,
        )


class _Avx2(_Lanes):
    def add_products(self, total: Value | None, weights: Value, columns: Value) -> Value:
        products = call(self.b, "llvm.x86.avx2.pmadd.wd", vector(I32, 8), weights, columns)
        return products if total is None else self.b.add(total, products)


class _Portable(_Lanes):
    def add_products(self, total: Value | None, weights: Value, columns: Value) -> Value:
        b = self.b
        empty = ir.Constant(weights.type, ir.Undefined)
        for column in range(2):
            lanes = ir.Constant(vector(I32, 8), [2 * row + column for row in range(8)])
            wide = [
                b.sext(b.shuffle_vector(operand, empty, lanes), vector(I32, 8))
                for operand in (weights, columns)
            ]
            product = b.mul(*wide)
            total = product if total is None else b.add(total, product)
        return total


_LANES: dict[str, Any] = {"avx512vnni": _Vnni, "avx2": _Avx2, "portable": _Portable}


def _integer_tile(form: Format, tokens: int) -> Emit:  # noqa: C901 - one loop nest, read from top to bottom
    """Emit: `tokens` tokens against one tile; sums go to `out` as (tokens, 16) fp32."""

    def emit(b: ir.IRBuilder, *args: Value) -> None:  # noqa: C901 - see above
        w, blocks, x, stride, columns, count, out = args
        lanes = _LANES[ISA](b)
        parts = range(ROWS // lanes.width)
        floats = vector(F32, lanes.width)
        rows = [b.add(x, b.mul(_clamped(b, t, count), stride)) for t in range(tokens)]
        for t in range(tokens):
            for part in parts:
                store(b, constant(floats, 0.0), out, 64 * t + 4 * lanes.width * part)
        steps = form.group // 4
        with loop(b, blocks) as block:
            at_block = b.add(w, b.mul(block, constant(I64, form.block_bytes)))
            q_at = b.add(b.mul(columns, constant(I64, Q_AT)), b.mul(block, constant(I64, 2 * COLUMNS)))
            meta_at = b.add(b.mul(columns, constant(I64, META_AT)), b.mul(block, constant(I64, META_BYTES)))
            for g in range(COLUMNS // form.group):
                dots: list[list[Value]] = [[None for _ in parts] for _ in rows]
                for step in range(g * steps, (g + 1) * steps):
                    weights = [lanes.weights(at_block, form.bits, step, part) for part in parts]
                    place = b.add(q_at, constant(I64, 8 * step))
                    for t in range(tokens):
                        values = lanes.columns(rows[t], place)
                        for part in parts:
                            for pair in range(2):
                                dots[t][part] = lanes.add_products(
                                    dots[t][part], weights[part][pair], values[pair]
                                )
                scales = [_scales(b, form, at_block, g, part, lanes.width) for part in parts]
                for t in range(tokens):
                    meta = b.add(rows[t], meta_at)
                    scale = splat(b, load(b, meta, 0, F32), lanes.width)
                    for part in parts:
                        sums = _without_offset(b, form, dots[t][part], meta, g, lanes.width)
                        place = 64 * t + 4 * lanes.width * part
                        total = load(b, out, place, floats)
                        factor, least = scales[part]
                        total = simd.madd(b, b.sitofp(sums, floats), b.fmul(factor, scale), total)
                        if least is not None:
                            total = simd.madd(b, least, splat(b, load(b, meta, 4, F32), lanes.width), total)
                        store(b, total, out, place)

    return emit


def _clamped(b: ir.IRBuilder, t: int, count: Value) -> Value:
    """Token t, or the last there is: nobody looks at the repetition."""
    index = constant(I64, t)
    return b.select(b.icmp_signed("<", index, count), index, b.sub(count, constant(I64, 1)))


def _scales(
    b: ir.IRBuilder, form: Format, block: Value, g: int, part: int, width: int
) -> tuple[Value, Value]:
    def floats(offset: int) -> Value:
        values = load(b, block, offset + part * width * form.scale_bytes, vector(form.scale_type, width))
        return values if form.scale_type is F32 else b.fpext(values, vector(F32, width))

    run = ROWS * form.scale_bytes
    groups = COLUMNS // form.group
    scale = floats(form.value_bytes + g * run)
    return scale, floats(form.value_bytes + (groups + g) * run) if form.offset is None else None


def _without_offset(b: ir.IRBuilder, form: Format, dots: Value, meta: Value, g: int, width: int) -> Value:
    """Σ(q - offset)·x from Σq·x, in integers: exact."""
    if form.offset is None:
        return dots
    total = load(b, meta, 8, I32)
    if form.group < COLUMNS:
        first = load(b, meta, 12, I32)
        total = b.sub(total, first) if g else first
    return b.sub(dots, splat(b, b.mul(total, constant(I32, form.offset)), width))


def _float_tile(kind: str, tokens: int) -> Emit:
    """Emit the same for a tile of floats, [column][16 rows], and fp32 activations: column after column."""
    element = {"F32": F32, "F16": simd.F16, "BF16": I16}[kind]
    size = 4 if kind == "F32" else 2

    def widened(b: ir.IRBuilder, address: Value, offset: Value) -> Value:
        values = load(b, address, offset, vector(element, 8))
        if kind == "F16":
            return b.fpext(values, simd.V8)
        if kind == "BF16":
            wide = b.shl(b.zext(values, vector(I32, 8)), constant(vector(I32, 8), 16))
            return b.bitcast(wide, simd.V8)
        return values

    def emit(b: ir.IRBuilder, *args: Value) -> None:
        w, blocks, x, stride, _, count, out = args
        rows = [b.add(x, b.mul(_clamped(b, t, count), stride)) for t in range(tokens)]
        totals = [[simd.cell(b, constant(simd.V8, 0.0)) for _ in range(2)] for _ in rows]
        with loop(b, b.mul(blocks, constant(I64, COLUMNS))) as column:
            start = b.mul(column, constant(I64, ROWS * size))
            weights = [widened(b, w, b.add(start, constant(I64, 8 * size * part))) for part in range(2)]
            for t, row in enumerate(rows):
                value = splat(b, load(b, row, b.mul(column, constant(I64, 4)), F32), 8)
                for part in range(2):
                    total = simd.madd(b, weights[part], value, b.load(totals[t][part]))
                    b.store(total, totals[t][part])
        for t in range(tokens):
            for part in range(2):
                store(b, b.load(totals[t][part]), out, 64 * t + 32 * part)

    return emit


def _for_any_count(make: Callable[[int], Emit]) -> Any:
    """One intrinsic for 1 to `TOKENS` tokens: few do not pay for many."""

    @emitter("iiiiiii")
    def tile(b: ir.IRBuilder, *args: Value) -> None:
        _for_at_most(b, make, [n for n in (1, 2, 4) if n < TOKENS], args)

    return tile


def _for_at_most(
    b: ir.IRBuilder, make: Callable[[int], Emit], sizes: list[int], args: tuple[Value, ...]
) -> None:
    if not sizes:
        make(TOKENS)(b, *args)
        return
    fits = b.icmp_signed("<=", args[5], constant(I64, sizes[0]))
    with b.if_else(fits) as (few, many):
        with few:
            make(sizes[0])(b, *args)
        with many:
            _for_at_most(b, make, sizes[1:], args)


FORMATS = {
    "Q4_0": Format(4, offset=8),
    "Q4_1": Format(4),
    "Q8_0": Format(8, offset=128),
    "Q4_K": Format(4, exact_scales=True),
    "Q6_K": Format(8, group=16, offset=32, exact_scales=True),
}
FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

_q4_0 = _for_any_count(partial(_integer_tile, FORMATS["Q4_0"]))
_q4_1 = _for_any_count(partial(_integer_tile, FORMATS["Q4_1"]))
_q8_0 = _for_any_count(partial(_integer_tile, FORMATS["Q8_0"]))
_q4_k = _for_any_count(partial(_integer_tile, FORMATS["Q4_K"]))
_q6_k = _for_any_count(partial(_integer_tile, FORMATS["Q6_K"]))
_f32 = _for_any_count(partial(_float_tile, "F32"))
_f16 = _for_any_count(partial(_float_tile, "F16"))
_bf16 = _for_any_count(partial(_float_tile, "BF16"))

# Numba's cache knows a function by its file and its line, not by what it closes over: so each is spelled out.


def _tile_q4_0(w: int, blocks: int, x: int, stride: int, columns: int, count: int, out: int) -> None:
    _q4_0(w, blocks, x, stride, columns, count, out)


def _tile_q4_1(w: int, blocks: int, x: int, stride: int, columns: int, count: int, out: int) -> None:
    _q4_1(w, blocks, x, stride, columns, count, out)


def _tile_q8_0(w: int, blocks: int, x: int, stride: int, columns: int, count: int, out: int) -> None:
    _q8_0(w, blocks, x, stride, columns, count, out)


def _tile_q4_k(w: int, blocks: int, x: int, stride: int, columns: int, count: int, out: int) -> None:
    _q4_k(w, blocks, x, stride, columns, count, out)


def _tile_q6_k(w: int, blocks: int, x: int, stride: int, columns: int, count: int, out: int) -> None:
    _q6_k(w, blocks, x, stride, columns, count, out)


def _tile_f32(w: int, blocks: int, x: int, stride: int, columns: int, count: int, out: int) -> None:
    _f32(w, blocks, x, stride, columns, count, out)


def _tile_f16(w: int, blocks: int, x: int, stride: int, columns: int, count: int, out: int) -> None:
    _f16(w, blocks, x, stride, columns, count, out)


def _tile_bf16(w: int, blocks: int, x: int, stride: int, columns: int, count: int, out: int) -> None:
    _bf16(w, blocks, x, stride, columns, count, out)


_TILES = {
    "Q4_0": _tile_q4_0,
    "Q4_1": _tile_q4_1,
    "Q8_0": _tile_q8_0,
    "Q4_K": _tile_q4_k,
    "Q6_K": _tile_q6_k,
    "F32": _tile_f32,
    "F16": _tile_f16,
    "BF16": _tile_bf16,
}


@cache
def tile_address(kind: str) -> int:
    """The address of a tensor type's tile function, compiled when first asked for."""
    return int(compiled(_TILE)(_TILES[kind]).address)


@emitter("iiiiiiii")
def run_tile(b: ir.IRBuilder, function: Value, *args: Value) -> None:
    """Call a tile function by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 7)
    b.call(b.inttoptr(function, ir.PointerType(kind)), args)
