"""Sixteen lanes at a time: vector values inside functions compiled by numba.

Whether a plain loop becomes vector code depends on the compiler's guesses about aliasing and loop
lengths, and a block of 16 packed bytes is just what it unrolls into scalar code. Here a vector is a
value like any other: loaded from an address (which may be unaligned), combined with the operators
`+ * & | << >> -`, stored to an address. LLVM cuts the sixteen lanes into what the processor has.
Products and sums are rounded one by one, never fused, so every processor gives the same results.

Scalars on the right of an operator are spread over the lanes. Byte arithmetic wraps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from shadowlane.ops.compiled import njit, target_features

LANES = 16

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_F32 = ir.FloatType()


class Vector(types.Type):
    """numba type of sixteen lanes; `element` is the LLVM type of one."""

    def __init__(self, name: str, element: ir.Type) -> None:
        self.element = element
        super().__init__(name=name)

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(self.element, LANES)


class BytesType(Vector):
    pass


class HalvesType(Vector):
    pass


class FloatsType(Vector):
    pass


@register_model(BytesType)
@register_model(HalvesType)
@register_model(FloatsType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


u8x16 = BytesType("u8x16", _I8)
u16x16 = HalvesType("u16x16", _I16)
f32x16 = FloatsType("f32x16", _F32)


def _spread(builder: ir.IRBuilder, vector: Vector, value: ir.Value) -> ir.Value:
    """One value in all lanes."""
    undefined = ir.Constant(vector.llvm, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, lanes)


def _constant(element: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, LANES), [value] * LANES)


# Operators --------------------------------------------------------------------------------------

_OPERATORS: dict[Any, tuple[type[Vector], str]] = {
    operator.add: (FloatsType, "fadd"),
    operator.mul: (FloatsType, "fmul"),
    operator.and_: (BytesType, "and_"),
    operator.or_: (BytesType, "or_"),
    operator.lshift: (BytesType, "shl"),
    operator.rshift: (BytesType, "lshr"),
    operator.sub: (BytesType, "sub"),
}


def _register_operator(function: Any, kind: type[Vector], instruction: str) -> None:
    scalar_kind = types.Float if kind is FloatsType else types.Integer

    @infer_global(function)
    class _Template(AbstractTemplate):  # found by numba through the decorator
        def generic(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
            if len(args) == 2 and isinstance(args[0], kind):
                if isinstance(args[1], kind):
                    return signature(args[0], args[0], args[1])
                if isinstance(args[1], scalar_kind):
                    scalar = types.float32 if kind is FloatsType else args[1]
                    return signature(args[0], args[0], scalar)
            return None

    @lower_builtin(function, kind, kind)
    def vector_with_vector(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return getattr(builder, instruction)(args[0], args[1])

    @lower_builtin(function, kind, scalar_kind)
    def vector_with_scalar(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        vector, scalar = args
        if kind is BytesType:
            scalar = builder.trunc(scalar, _I8) if scalar.type.width > 8 else scalar
        return getattr(builder, instruction)(vector, _spread(builder, sig.args[0], scalar))


for _function, (_kind, _instruction) in _OPERATORS.items():
    _register_operator(_function, _kind, _instruction)


# Memory -----------------------------------------------------------------------------------------


def _pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type) -> ir.Value:
    return builder.inttoptr(address, pointee.as_pointer())


def _loader(result: types.Type, element: ir.Type, lanes: int, doc: str) -> Any:
    llvm = element if lanes == 1 else ir.VectorType(element, lanes)

    def load(typing_context: Any, address: Any) -> Any:
        if not isinstance(address, types.Integer):
            return None

        def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            # align=1: blocks of a weight file may start at any byte
            return builder.load(_pointer(builder, args[0], llvm), align=1)

        return result(types.int64), lower

    load.__doc__ = doc
    return intrinsic(load)


load_u8 = _loader(types.uint8, _I8, 1, "The byte at an address.")
load_i8 = _loader(types.int8, _I8, 1, "The signed byte at an address.")
load_u16 = _loader(types.uint16, _I16, 1, "The 16-bit number at an address, aligned or not.")
load_u32 = _loader(types.uint32, _I32, 1, "The 32-bit number at an address, aligned or not.")
load_u8x16 = _loader(u8x16, _I8, LANES, "Sixteen bytes from an address, aligned or not.")
load_u16x16 = _loader(u16x16, _I16, LANES, "Sixteen 16-bit numbers from an address.")
load_f32x16 = _loader(f32x16, _F32, LANES, "Sixteen float32 from an address, aligned or not.")


@intrinsic
def store_u32(typing_context: Any, address: Any, value: Any) -> Any:
    """Write 32 bits to an address."""

    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.store(args[1], _pointer(builder, args[0], _I32), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint32), lower


@intrinsic
def store_f32(typing_context: Any, address: Any, value: Any) -> Any:
    """Write one float32 to an address."""

    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.store(args[1], _pointer(builder, args[0], _F32), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), lower


@intrinsic
def store_f32x16(typing_context: Any, address: Any, value: Any) -> Any:
    """Write sixteen float32 to an address, aligned or not."""

    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.store(args[1], _pointer(builder, args[0], f32x16.llvm), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, f32x16), lower


# Conversions ------------------------------------------------------------------------------------

_Lower = Callable[[ir.IRBuilder, ir.Value], ir.Value]


def _conversion(source: types.Type, result: types.Type, lower_value: _Lower, doc: str) -> Any:
    def convert(typing_context: Any, value: Any) -> Any:
        def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return lower_value(builder, args[0])

        return result(source), lower

    convert.__doc__ = doc
    return intrinsic(convert)


def _unsigned_to_float(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    # through signed int32: every processor converts that in one instruction
    wide = builder.zext(value, ir.VectorType(_I32, LANES))
    return builder.sitofp(wide, f32x16.llvm)


def _signed_to_float(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    wide = builder.sext(value, ir.VectorType(_I32, LANES))
    return builder.sitofp(wide, f32x16.llvm)


def _bits_to_bytes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    lanes = builder.bitcast(value, ir.VectorType(ir.IntType(1), LANES))
    return builder.zext(lanes, u8x16.llvm)


def _bfloat_to_float(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    wide = builder.zext(value, ir.VectorType(_I32, LANES))
    return builder.bitcast(builder.shl(wide, _constant(_I32, 16)), f32x16.llvm)


def signed_of_e2m1(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Four-bit floats in bytes 0..15 as twice their value: 0 1 2 3 4 6 8 12, bit 3 the sign.

    By comparisons, as every processor has them. Minus zero becomes zero.
    """
    kind = codes.type

    def constant(number: int) -> ir.Constant:
        return ir.Constant(kind, [number] * kind.count)

    low = builder.and_(codes, constant(7))
    value = low
    for least, more in ((4, 1), (5, 1), (6, 3)):
        is_above = builder.icmp_unsigned(">", low, constant(least))
        value = builder.add(value, builder.select(is_above, constant(more), constant(0)))
    is_negative = builder.icmp_unsigned(">", codes, constant(7))
    return builder.select(is_negative, builder.sub(constant(0), value), value)


def half_of_e8m0(builder: ir.IRBuilder, exponent: ir.Value) -> ir.Value:
    """Half of the power of two that a byte stands for, 2^(byte - 128), as float32.

    The two smallest are subnormal. 255 is a power like the others, as ggml has it.
    """
    wide = builder.zext(exponent, _I32)
    subnormal = builder.shl(_I32(0x00200000), builder.and_(wide, _I32(1)))
    normal = builder.shl(builder.sub(wide, _I32(1)), _I32(23))
    is_small = builder.icmp_unsigned("<", wide, _I32(2))
    return builder.bitcast(builder.select(is_small, subnormal, normal), _F32)


def _half_by_instruction(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    if isinstance(value.type, ir.VectorType):
        halves, floats = ir.VectorType(ir.HalfType(), LANES), f32x16.llvm
    else:
        halves, floats = ir.HalfType(), _F32
    return builder.fpext(builder.bitcast(value, halves), floats)


def _half_by_integers(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """IEEE half to float32 with integer instructions, exact for subnormals, infinities and NaN.

    A subnormal half is its mantissa times 2^-24, which float32 holds as a normal number; so the
    result does not depend on whether the processor flushes subnormal float32 to zero.
    """
    is_vector = isinstance(value.type, ir.VectorType)
    integers: ir.Type = ir.VectorType(_I32, LANES) if is_vector else _I32
    floats: ir.Type = f32x16.llvm if is_vector else _F32

    def constant(kind: ir.Type, number: float) -> ir.Constant:
        return _constant(kind, number) if is_vector else ir.Constant(kind, number)

    wide = builder.zext(value, integers)
    sign = builder.shl(builder.and_(wide, constant(_I32, 0x8000)), constant(_I32, 16))
    magnitude = builder.and_(wide, constant(_I32, 0x7FFF))
    shifted = builder.shl(magnitude, constant(_I32, 13))
    normal = builder.add(shifted, constant(_I32, 112 << 23))  # exponent bias 15 -> 127
    special = builder.or_(shifted, constant(_I32, 0x7F800000))
    # a NaN becomes quiet, as the conversion instructions make it
    quiet = builder.or_(special, constant(_I32, 0x00400000))
    is_nan = builder.icmp_unsigned(">", magnitude, constant(_I32, 0x7C00))
    special = builder.select(is_nan, quiet, special)
    scaled = builder.fmul(builder.sitofp(magnitude, floats), constant(_F32, 2.0**-24))
    subnormal = builder.bitcast(scaled, integers)
    is_subnormal = builder.icmp_unsigned("<", magnitude, constant(_I32, 0x0400))
    is_special = builder.icmp_unsigned(">=", magnitude, constant(_I32, 0x7C00))
    bits = builder.select(is_subnormal, subnormal, builder.select(is_special, special, normal))
    return builder.bitcast(builder.or_(bits, sign), floats)


def has_half_instruction() -> bool:
    """Whether the target converts halves itself. Elsewhere LLVM would call a runtime library that
    a just-in-time compiled function cannot be linked with."""
    triple, _, features = target_features()
    return triple.startswith(("aarch64", "arm64")) or "+f16c" in features.split(",")


_half_to_float = _half_by_instruction if has_half_instruction() else _half_by_integers

floats_of_unsigned = _conversion(u8x16, f32x16, _unsigned_to_float, "Bytes 0..255 as float32.")
floats_of_signed = _conversion(u8x16, f32x16, _signed_to_float, "Bytes -128..127 as float32.")
signed_of_codes = _conversion(u8x16, u8x16, signed_of_e2m1, "e2m1 codes 0..15, doubled.")
floats_of_bfloats = _conversion(u16x16, f32x16, _bfloat_to_float, "bfloat16 bits as float32.")
floats_of_halves = _conversion(u16x16, f32x16, _half_to_float, "IEEE half bits as float32.")
bytes_of_bits = _conversion(
    types.uint16, u8x16, _bits_to_bytes, "Bit i of a 16-bit number as lane i: 0 or 1."
)
float_of_half = _conversion(
    types.uint16, types.float32, _half_to_float, "IEEE half bits as one float32."
)

half_of_exponent = _conversion(
    types.uint8, types.float32, half_of_e8m0, "2^(byte - 128) as one float32."
)


@njit(inline="always")
def load_half(address: int) -> Any:
    """The IEEE half at an address as float32."""
    return float_of_half(load_u16(address))
