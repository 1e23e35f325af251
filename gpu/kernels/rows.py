"""Operations on one row of activations: embedding, residual and norm, quantising, rotating."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir

from gpu.kernels import simd
from gpu.kernels.jit import inner
from gpu.kernels.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    V8,
    Value,
    constant,
    emitter,
    load,
    loop,
    splat,
    store,
    vector,
)
from gpu.kernels.tiles import COLUMN_ORDER, COLUMNS, META_BYTES

LARGEST = 32767.0
_ORDER_OF_EIGHT = [*COLUMN_ORDER, *(4 + column for column in COLUMN_ORDER)]


@emitter("i", "float32")
def get_f32(b: ir.IRBuilder, address: Value) -> Value:
    """The fp32 at an address."""
    return load(b, address, 0, F32)


@emitter("i", "int64")
def get_i32(b: ir.IRBuilder, address: Value) -> Value:
    """The int32 at an address."""
    return b.sext(load(b, address, 0, I32), I64)


@emitter("i", "int64")
def get_i64(b: ir.IRBuilder, address: Value) -> Value:
    """The int64 at an address."""
    return load(b, address, 0, I64)


@emitter("i", "int64")
def get_u8(b: ir.IRBuilder, address: Value) -> Value:
    """The byte at an address."""
    return b.zext(load(b, address, 0, I8), I64)


@emitter("i", "float32")
def get_half(b: ir.IRBuilder, address: Value) -> Value:
    """The scale at an address, in whatever this machine keeps scales in."""
    value = load(b, address, 0, simd.HALF)
    return value if simd.HALF is F32 else b.fpext(value, F32)


@emitter("i", "float32")
def get_f16(b: ir.IRBuilder, address: Value) -> Value:
    """The fp16 at an address."""
    return b.fpext(load(b, address, 0, simd.F16), F32)


@emitter("i", "float32")
def get_bf16(b: ir.IRBuilder, address: Value) -> Value:
    """The bf16 at an address."""
    wide = b.shl(b.zext(load(b, address, 0, I16), I32), constant(I32, 16))
    return b.bitcast(wide, F32)


@emitter("if")
def put_f32(b: ir.IRBuilder, address: Value, value: Value) -> None:
    """Write one fp32 to an address."""
    store(b, value, address)


@emitter("iii")
def copy_floats(b: ir.IRBuilder, source: Value, target: Value, count: Value) -> None:
    """Copy `count` fp32, a multiple of 8."""
    with loop(b, b.mul(count, constant(I64, 4)), 32) as at:
        store(b, load(b, source, at, V8), target, at)


@emitter("iii")
def add_to(b: ir.IRBuilder, target: Value, source: Value, count: Value) -> None:
    """`target += source` over `count` fp32, a multiple of 8."""
    with loop(b, b.mul(count, constant(I64, 4)), 32) as at:
        store(b, b.fadd(load(b, target, at, V8), load(b, source, at, V8)), target, at)


@emitter("ii", "float32")
def sum_of_squares(b: ir.IRBuilder, x: Value, count: Value) -> Value:
    """Over `count` fp32, a multiple of 16; sixteen partial sums, folded at the end."""
    parts = [simd.cell(b, constant(V8, 0.0)) for _ in range(2)]
    with loop(b, b.mul(count, constant(I64, 4)), 64) as at:
        for i, part in enumerate(parts):
            value = load(b, x, b.add(at, constant(I64, 32 * i)), V8)
            b.store(simd.madd(b, value, value, b.load(part)), part)
    return simd.fold(b, b.fadd(b.load(parts[0]), b.load(parts[1])), simd.add)


@emitter("iifii")
def scaled_by(b: ir.IRBuilder, x: Value, weight: Value, factor: Value, target: Value, count: Value) -> None:
    """`target = x * factor * weight` over `count` fp32, a multiple of 8."""
    scale = splat(b, factor, 8)
    with loop(b, b.mul(count, constant(I64, 4)), 32) as at:
        value = b.fmul(b.fmul(load(b, x, at, V8), scale), load(b, weight, at, V8))
        store(b, value, target, at)


@emitter("iiii")
def quantize(b: ir.IRBuilder, x: Value, q: Value, meta: Value, blocks: Value) -> None:
    """Turn fp32 into int16 by blocks of 32: `q = round(x / scale)`, `scale = max|x| / 32767`.

    The sums `tiles` wants come with them. A block that holds a value that is not finite gets a scale that is
    not a number, so that the row ends as one.
    """
    ints = vector(I32, 8)
    with loop(b, blocks) as block:
        at = b.mul(block, constant(I64, 4 * COLUMNS))
        values = [load(b, x, b.add(at, constant(I64, 32 * i)), V8) for i in range(4)]
        sizes = [simd.call(b, "llvm.fabs.v8f32", V8, value) for value in values]
        top = sizes[0]
        for size in sizes[1:]:
            top = simd.maximum(b, top, size)
        most = simd.fold(b, top, simd.maximum)
        spoiled = b.fadd(b.fadd(values[0], values[1]), b.fadd(values[2], values[3]))
        poison = b.fmul(simd.fold(b, spoiled, simd.add), constant(F32, 0.0))
        inverse = b.select(
            b.fcmp_ordered(">", most, constant(F32, 0.0)),
            b.fdiv(constant(F32, LARGEST), most),
            constant(F32, 0.0),
        )
        scale = b.fadd(b.fmul(most, constant(F32, 1.0 / LARGEST)), poison)
        factor = splat(b, inverse, 8)
        whole = []
        for value in values:
            rounded = simd.call(b, "llvm.nearbyint.v8f32", V8, b.fmul(value, factor))
            limited = simd.minimum(b, simd.maximum(b, rounded, constant(V8, -LARGEST)), constant(V8, LARGEST))
            whole.append(b.fptosi(limited, ints))
        first = b.add(whole[0], whole[1])
        halves = [simd.fold(b, part, ir.IRBuilder.add) for part in (first, b.add(whole[2], whole[3]))]
        total = b.add(*halves)
        for i, value in enumerate(whole):
            place = b.add(b.mul(block, constant(I64, 2 * COLUMNS)), constant(I64, 16 * i))
            ordered = b.shuffle_vector(value, value, ir.Constant(ints, _ORDER_OF_EIGHT))
            store(b, b.trunc(ordered, vector(I16, 8)), q, place)
        place = b.add(meta, b.mul(block, constant(I64, META_BYTES)))
        store(b, scale, place, 0)
        store(b, b.fmul(scale, b.sitofp(total, F32)), place, 4)
        store(b, total, place, 8)
        store(b, halves[0], place, 12)


@emitter("iiii")
def rotate(b: ir.IRBuilder, x: Value, cosines: Value, sines: Value, half: Value) -> None:
    """Turn the pairs (i, i + half) of one head, in place; `half` is a multiple of 8."""
    size = b.mul(half, constant(I64, 4))
    with loop(b, size, 32) as at:
        far = b.add(at, size)
        first, second = load(b, x, at, V8), load(b, x, far, V8)
        cosine, sine = load(b, cosines, at, V8), load(b, sines, at, V8)
        store(b, b.fsub(b.fmul(first, cosine), b.fmul(second, sine)), x, at)
        store(b, b.fadd(b.fmul(first, sine), b.fmul(second, cosine)), x, far)


@emitter("ifi")
def scale_in_place(b: ir.IRBuilder, x: Value, factor: Value, count: Value) -> None:
    """`x *= factor` over `count` fp32, a multiple of 8."""
    scale = splat(b, factor, 8)
    with loop(b, b.mul(count, constant(I64, 4)), 32) as at:
        store(b, b.fmul(load(b, x, at, V8), scale), x, at)


_LOG2_E = 1.4426950408889634


@emitter("iii")
def gated(b: ir.IRBuilder, gate: Value, up: Value, target: Value) -> None:
    """`target = silu(gate) * up` over 16 fp32."""
    for part in range(2):
        g, u = load(b, gate, 32 * part, V8), load(b, up, 32 * part, V8)
        fading = simd.exp2(b, b.fmul(g, constant(V8, -_LOG2_E)))
        store(b, b.fmul(b.fdiv(g, b.fadd(constant(V8, 1.0), fading)), u), target, 32 * part)


@emitter("iii")
def keep_key(b: ir.IRBuilder, x: Value, target: Value, count: Value) -> None:
    """Write a head's key as one column of its block, [count][16 tokens]."""
    with loop(b, count) as i:
        value = load(b, x, b.mul(i, constant(I64, 4)), F32)
        store(b, _halved(b, value), target, b.mul(i, constant(I64, 16 * simd.HALF_BYTES)))


@emitter("iii")
def keep_value(b: ir.IRBuilder, x: Value, target: Value, count: Value) -> None:
    """Write a head's value as one row of its block; `count` is a multiple of 8."""
    with loop(b, count, 8) as i:
        value = load(b, x, b.mul(i, constant(I64, 4)), V8)
        store(b, _halved(b, value), target, b.mul(i, constant(I64, simd.HALF_BYTES)))


def _halved(b: ir.IRBuilder, value: Value) -> Value:
    if simd.HALF is F32:
        return value
    kind = vector(simd.F16, value.type.count) if isinstance(value.type, ir.VectorType) else simd.F16
    return b.fptrunc(value, kind)


@inner
def inverse_rms(x, count, eps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """1 / sqrt(mean(x²) + eps)."""
    return np.float32(1.0) / np.float32(math.sqrt(sum_of_squares(x, count) / np.float32(count) + eps))
