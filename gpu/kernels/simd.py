"""A few words of LLVM for vector code that Numba's loops would not become.

Addresses are plain integers throughout. Nothing here allows floating-point sums to be reordered: that is
what keeps a
row's result the same whatever is computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from gpu.kernels.jit import ISA

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F16 = ir.FloatType(), ir.HalfType()

LANES = 8
"""fp32 lanes of the vectors used for everything but matrix products."""
V8 = ir.VectorType(F32, LANES)

HALF = F32 if ISA == "portable" else F16
"""What scales and the KV cache are kept in: fp16 where the processor converts it by itself."""
HALF_BYTES = 4 if ISA == "portable" else 2

Value = Any


def vector(kind: ir.Type, lanes: int) -> ir.VectorType:
    """The type of `lanes` elements."""
    return ir.VectorType(kind, lanes)


def constant(kind: ir.Type, value: float) -> ir.Constant:
    """A constant; in every lane, if `kind` is a vector."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


def at(b: ir.IRBuilder, address: Value, offset: Value | int, kind: ir.Type) -> Value:
    """A pointer to `kind` at `address + offset` bytes."""
    step = constant(I64, offset) if isinstance(offset, int) else offset
    return b.inttoptr(b.add(address, step), ir.PointerType(kind))


def load(b: ir.IRBuilder, address: Value, offset: Value | int, kind: ir.Type) -> Value:
    """Load, aligned or not."""
    value = b.load(at(b, address, offset, kind))
    value.align = 1
    return value


def store(b: ir.IRBuilder, value: Value, address: Value, offset: Value | int = 0) -> None:
    """Store, aligned or not."""
    b.store(value, at(b, address, offset, value.type)).align = 1


def splat(b: ir.IRBuilder, scalar: Value, lanes: int) -> Value:
    """`scalar` in every lane."""
    empty = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    first = b.insert_element(empty, scalar, constant(I32, 0))
    return b.shuffle_vector(first, empty, constant(vector(I32, lanes), 0))


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args: Value) -> Value:
    """Call a function or an LLVM intrinsic by name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)  # type: ignore[no-untyped-call]


def _suffix(kind: ir.Type) -> str:
    return f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"


def madd(b: ir.IRBuilder, x: Value, y: Value, z: Value) -> Value:
    """`x * y + z`, fused where the processor fuses."""
    if ISA == "portable":
        return b.fadd(b.fmul(x, y), z)
    return call(b, f"llvm.fma.{_suffix(x.type)}", x.type, x, y, z)


def maximum(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    """The larger; `y` where either is not a number."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def minimum(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    """The smaller; `y` where either is not a number."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def fold(b: ir.IRBuilder, value: Value, combine: Callable[[ir.IRBuilder, Value, Value], Value]) -> Value:
    """All lanes into one, halves upon halves."""
    lanes = value.type.count
    while lanes > 1:
        lanes //= 2
        low = ir.Constant(vector(I32, lanes), list(range(lanes)))
        high = ir.Constant(vector(I32, lanes), list(range(lanes, 2 * lanes)))
        empty = ir.Constant(value.type, ir.Undefined)
        value = combine(b, b.shuffle_vector(value, empty, low), b.shuffle_vector(value, empty, high))
    return b.extract_element(value, constant(I32, 0))


def add(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    """Floating-point sum, in the shape `fold` wants."""
    return b.fadd(x, y)


_LN2_POWERS = (1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477,
               0.0013333558146428443, 0.00015403530393381608, 1.525273380405984e-05)  # fmt: skip


def exp2(b: ir.IRBuilder, x: Value) -> Value:
    """2**x for x ≤ 127, relative error below 2e-7; exactly 1 at 0; about 1e-38 for anything below -126.

    Taylor's series of 2**f on |f| ≤ 1/2, times a power of two made in the exponent.
    """
    kind = x.type
    ints = vector(I32, kind.count)
    x = minimum(b, maximum(b, x, constant(kind, -126.0)), constant(kind, 127.0))
    whole = call(b, f"llvm.nearbyint.{_suffix(kind)}", kind, x)
    f = b.fsub(x, whole)
    power = constant(kind, _LN2_POWERS[-1])
    for coefficient in reversed(_LN2_POWERS[:-1]):
        power = madd(b, power, f, constant(kind, coefficient))
    scale = b.shl(b.add(b.fptosi(whole, ints), constant(ints, 127)), constant(ints, 23))
    return b.fmul(power, b.bitcast(scale, kind))


def cell(b: ir.IRBuilder, value: Value) -> Value:
    """A variable, which LLVM will keep in a register; `value` is stored here and now."""
    return cgutils.alloca_once_value(b, value)  # type: ignore[no-untyped-call]


def loop(b: ir.IRBuilder, count: Value, step: int = 1) -> Any:
    """A counting loop, for a with statement: it gives the index, from 0 below `count`."""
    return _Loop(b, count, step)


class _Loop:
    def __init__(self, b: ir.IRBuilder, count: Value, step: int) -> None:
        limit = constant(I64, count) if isinstance(count, int) else count
        zero = constant(I64, 0)
        self._range = cgutils.for_range_slice(b, zero, limit, constant(I64, step), intp=I64)

    def __enter__(self) -> Value:
        index, _ = self._range.__enter__()
        return index

    def __exit__(self, *exc: object) -> None:
        self._range.__exit__(*exc)  # type: ignore[arg-type]


_KINDS = {"i": "int64", "f": "float32"}


def emitter(inputs: str, result: str = "void") -> Callable[[Callable[..., Value]], Any]:
    """Make a Numba intrinsic of `emit(builder, *arguments)`; a letter each, i: int64, f: fp32.

    Addresses are int64 too. `result` is a Numba type's name; `emit` returns its value, or nothing for void.
    """

    def decorate(emit: Callable[..., Value]) -> Any:
        kind = getattr(types, result)
        kinds = [getattr(types, _KINDS[letter]) for letter in inputs]

        def typing(_context: Any, *_args: Any) -> Any:
            def generate(
                context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[Value]
            ) -> Value:
                value = emit(builder, *args)
                return context.get_dummy_value() if result == "void" else value

            return kind(*kinds), generate

        # Numba binds calls by the parameters' names: give it as many as there are.
        names = ["context", *(f"a{i}" for i in range(len(inputs)))]
        signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
        setattr(typing, "__signature__", signature)  # noqa: B010 - functions have it, their type does not say so
        typing.__name__ = emit.__name__
        return intrinsic(typing)

    return decorate
