"""How a packed block becomes vectors of 32 small bytes, a scale and an offset.

One entry per format. The weights of a part are `scale * byte + offset`; block layouts are those of
ggml (`ggml-common.h`). Written as LLVM vectors that are read at any byte address; `packed.py`
multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from shadowlane.ops.dots import F32, I32, I64
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.vectors import half_of_e8m0, signed_of_e2m1

GROUP = 32  # elements that share a scale, in activations always and in most formats
I8 = ir.IntType(8)
HALF = ir.HalfType()
BYTES16, BYTES32 = ir.VectorType(I8, 16), ir.VectorType(I8, GROUP)
WORDS8 = ir.VectorType(I32, 8)
F8, F16 = ir.VectorType(F32, 8), ir.VectorType(F32, 16)


@dataclass(frozen=True, slots=True)
class Part:
    """32 weights of one row: scale * bytes + offset."""

    weights: ir.Value  # <32 x i8>
    scale: ir.Value  # float, or <8 x float>: lane i serves bytes 4 i .. 4 i + 3
    offset: ir.Value | None  # float
    is_signed: bool = False  # bytes are -127..127, else 0..127


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    unpack: Callable[[ir.IRBuilder, ir.Value], list[Part]]  # parts in the order of their elements

    @property
    def block_nbytes(self) -> int:
        return LAYOUTS[self.name].block_nbytes

    @property
    def block_elements(self) -> int:
        return LAYOUTS[self.name].block_elements


def bytes32(value: int) -> ir.Constant:
    return ir.Constant(BYTES32, [value] * GROUP)


def bytes16(value: int) -> ir.Constant:
    return ir.Constant(BYTES16, [value] * 16)


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, offset: int = 0) -> ir.Value:
    """A value of `kind` at any byte address."""
    if offset:
        address = builder.add(address, I64(offset))
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def splat(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(
        first, first, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    )


def _half(builder: ir.IRBuilder, block: ir.Value, offset: int) -> ir.Value:
    return builder.fpext(load(builder, block, HALF, offset), F32)


def _nibbles(builder: ir.IRBuilder, block: ir.Value, offset: int) -> ir.Value:
    """16 bytes: elements 0..15 are the low halves, 16..31 the high ones."""
    raw = load(builder, block, BYTES16, offset)
    low, high = builder.and_(raw, bytes16(15)), builder.lshr(raw, bytes16(4))
    return builder.shuffle_vector(
        low, high, ir.Constant(ir.VectorType(I32, GROUP), list(range(GROUP)))
    )


def _fifth_bits(builder: ir.IRBuilder, block: ir.Value, offset: int) -> ir.Value:
    """Bit i of a 32-bit word, as 16 or 0 in byte i."""
    bits = builder.bitcast(load(builder, block, I32, offset), ir.VectorType(ir.IntType(1), GROUP))
    return builder.shl(builder.zext(bits, BYTES32), bytes32(4))


def _q8_0(builder: ir.IRBuilder, block: ir.Value) -> list[Part]:
    weights = load(builder, block, BYTES32, 2)
    return [Part(weights, _half(builder, block, 0), None, is_signed=True)]


def _q4_0(builder: ir.IRBuilder, block: ir.Value) -> list[Part]:
    scale = _half(builder, block, 0)
    return [Part(_nibbles(builder, block, 2), scale, builder.fmul(scale, F32(-8.0)))]


def _q4_1(builder: ir.IRBuilder, block: ir.Value) -> list[Part]:
    return [Part(_nibbles(builder, block, 4), _half(builder, block, 0), _half(builder, block, 2))]


def _q5_0(builder: ir.IRBuilder, block: ir.Value) -> list[Part]:
    scale = _half(builder, block, 0)
    weights = builder.or_(_nibbles(builder, block, 6), _fifth_bits(builder, block, 2))
    return [Part(weights, scale, builder.fmul(scale, F32(-16.0)))]


def _q5_1(builder: ir.IRBuilder, block: ir.Value) -> list[Part]:
    weights = builder.or_(_nibbles(builder, block, 8), _fifth_bits(builder, block, 4))
    return [Part(weights, _half(builder, block, 0), _half(builder, block, 2))]


def _k_scales(builder: ir.IRBuilder, block: ir.Value) -> tuple[list[Any], list[Any]]:
    """The eight scales and eight minima of a q4_K or q5_K block, times its two half floats.

    12 bytes hold sixteen 6-bit numbers: the first four of each in the low six bits of bytes 0..3
    and 4..7; the others with four low bits in bytes 8..11 and two high bits on top of the first.
    """
    scale, least = _half(builder, block, 0), _half(builder, block, 2)
    words = [load(builder, block, I32, 4 + 4 * index) for index in range(3)]

    def six(word: ir.Value) -> ir.Value:
        return builder.and_(word, I32(0x3F3F3F3F))

    def four(word: ir.Value) -> ir.Value:
        return builder.and_(word, I32(0x0F0F0F0F))

    def top(word: ir.Value) -> ir.Value:
        two = builder.and_(builder.lshr(word, I32(6)), I32(0x03030303))
        return builder.shl(two, I32(4))

    scales = (six(words[0]), builder.or_(four(words[2]), top(words[0])))
    minima = (six(words[1]), builder.or_(four(builder.lshr(words[2], I32(4))), top(words[1])))

    def floats(pair: tuple[ir.Value, ir.Value], factor: ir.Value) -> list[ir.Value]:
        result = []
        for word in pair:
            four_bytes = builder.bitcast(word, ir.VectorType(I8, 4))
            wide = builder.zext(four_bytes, ir.VectorType(I32, 4))
            values = builder.uitofp(wide, ir.VectorType(F32, 4))
            result += [
                builder.fmul(builder.extract_element(values, I32(lane)), factor)
                for lane in range(4)
            ]
        return result

    return floats(scales, scale), floats(minima, builder.fmul(least, F32(-1.0)))


def _k_parts(builder: ir.IRBuilder, block: ir.Value, codes: int, fifth: int | None) -> list[Part]:
    """Eight parts of a q4_K or q5_K block, whose nibbles begin at `codes`."""
    scales, minima = _k_scales(builder, block)
    top = None if fifth is None else load(builder, block, BYTES32, fifth)
    parts = []
    for pair in range(4):
        raw = load(builder, block, BYTES32, codes + 32 * pair)
        halves = (builder.and_(raw, bytes32(15)), builder.lshr(raw, bytes32(4)))
        for half, weights in enumerate(halves):
            number = 2 * pair + half
            if top is not None:
                bit = builder.and_(builder.lshr(top, bytes32(number)), bytes32(1))
                weights = builder.or_(weights, builder.shl(bit, bytes32(4)))
            parts.append(Part(weights, scales[number], minima[number]))
    return parts


def _q4_k(builder: ir.IRBuilder, block: ir.Value) -> list[Part]:
    return _k_parts(builder, block, 16, None)


def _q5_k(builder: ir.IRBuilder, block: ir.Value) -> list[Part]:
    return _k_parts(builder, block, 48, 16)


def _q6_k(builder: ir.IRBuilder, block: ir.Value) -> list[Part]:
    """Scales serve 16 elements each, so a part of 32 has two."""
    signed = builder.sext(load(builder, block, BYTES16, 192), ir.VectorType(I32, 16))
    factor = splat(builder, _half(builder, block, 208), F16)
    scales = builder.fmul(builder.sitofp(signed, F16), factor)
    parts = []
    for half in range(2):
        lows = [load(builder, block, BYTES32, 64 * half + start) for start in (0, 32)]
        tops = load(builder, block, BYTES32, 128 + 32 * half)
        nibbles = [builder.and_(low, bytes32(15)) for low in lows]
        nibbles += [builder.lshr(low, bytes32(4)) for low in lows]
        for quarter, nibble in enumerate(nibbles):
            two = builder.and_(builder.lshr(tops, bytes32(2 * quarter)), bytes32(3))
            code = builder.or_(nibble, builder.shl(two, bytes32(4)))
            first = 8 * half + 2 * quarter
            scale = builder.shuffle_vector(
                scales, scales, ir.Constant(WORDS8, [first] * 4 + [first + 1] * 4)
            )
            parts.append(Part(builder.sub(code, bytes32(32)), scale, None, is_signed=True))
    return parts


def _mxfp4(builder: ir.IRBuilder, block: ir.Value) -> list[Part]:
    """A power of two as one byte, then nibbles of e2m1; the scale is halved, the values doubled."""
    scale = half_of_e8m0(builder, load(builder, block, I8))
    return [Part(signed_of_e2m1(builder, _nibbles(builder, block, 1)), scale, None, is_signed=True)]


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format("q8_0", _q8_0),
        Format("q4_0", _q4_0),
        Format("q4_1", _q4_1),
        Format("q5_0", _q5_0),
        Format("q5_1", _q5_1),
        Format("q4_K", _q4_k),
        Format("q5_K", _q5_k),
        Format("q6_K", _q6_k),
        Format("mxfp4", _mxfp4),
    )
}
