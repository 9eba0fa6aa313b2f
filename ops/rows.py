"""Elementwise work on rows, sixteen lanes at a time: norms, rotations, activations, softmax.

Written as LLVM vectors, because loops over addresses do not vectorise by themselves. Every function
takes addresses; `layout` is the id of a direct layout and is looked at once per call. A result
depends on the row alone: sums add lane by lane in a fixed order, as in `dots.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shadowlane.ops.dots import (
    ELEMENT_NBYTES,
    F32,
    I16,
    I32,
    I64,
    LANES,
    VF32,
    add_lanes,
    for_each_layout,
    load_lanes,
    load_one,
)

VI32 = ir.VectorType(I32, LANES)
Body = Callable[[ir.Type, ir.Value], None]
EXP_LOWEST, EXP_HIGHEST = -87.3, 88.0
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
TERMS = [1 / math.factorial(n) for n in range(8)]


def constant(kind: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES if kind is VF32 else value)


def integer(kind: ir.Type, value: int) -> ir.Constant:
    """An i32 constant, or sixteen of them where `kind` is a vector of floats."""
    return ir.Constant(VI32, [value] * LANES) if kind is VF32 else ir.Constant(I32, value)


def splat(builder: ir.IRBuilder, kind: ir.Type, value: ir.Value) -> ir.Value:
    """A float32 in every lane of `kind`."""
    if kind is F32:
        return value
    first = builder.insert_element(ir.Constant(VF32, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(VI32, [0] * LANES))


def load(builder: ir.IRBuilder, kind: ir.Type, layout: str, row: ir.Value, at: ir.Value) -> Any:
    address = builder.add(row, builder.mul(at, I64(ELEMENT_NBYTES[layout])))
    return (load_lanes if kind is VF32 else load_one)(builder, address, layout)


def store(
    builder: ir.IRBuilder, kind: ir.Type, layout: str, value: ir.Value, row: ir.Value, at: ir.Value
) -> None:
    """Store float32 lanes as elements of a layout, rounded to nearest even."""
    address = builder.add(row, builder.mul(at, I64(ELEMENT_NBYTES[layout])))

    def shaped(element: ir.Type) -> ir.Type:
        return ir.VectorType(element, LANES) if kind is VF32 else element

    if layout == "f16":
        value = builder.fptrunc(value, shaped(ir.HalfType()))
    elif layout == "bf16":
        bits = builder.bitcast(value, shaped(I32))
        odd = builder.and_(builder.lshr(bits, integer(kind, 16)), integer(kind, 1))
        rounded = builder.add(bits, builder.add(odd, integer(kind, 0x7FFF)))
        quiet = builder.or_(bits, integer(kind, 0x400000))
        is_nan = builder.fcmp_unordered("uno", value, value)
        high = builder.lshr(builder.select(is_nan, quiet, rounded), integer(kind, 16))
        value = builder.trunc(high, shaped(I16))
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def for_lanes(builder: ir.IRBuilder, count: ir.Value, body: Body) -> None:
    """Run `body(kind, index)` over whole sixteens as vectors, then over the rest one by one."""
    whole = builder.and_(count, I64(-LANES))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES), I64) as (at, _):
        body(VF32, at)
    with cgutils.for_range_slice(builder, whole, count, I64(1), I64) as (at, _):
        body(F32, at)


def _call(builder: ir.IRBuilder, name: str, kind: ir.Type, *args: ir.Value) -> ir.Value:
    suffix = f"v{LANES}f32" if kind is VF32 else "f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(args)), f"llvm.{name}.{suffix}"
    )
    return builder.call(function, args)


def _clamp(builder: ir.IRBuilder, kind: ir.Type, value: ir.Value, low: float, high: float) -> Any:
    for predicate, limit in (("<", low), (">", high)):
        bound = constant(kind, limit)
        value = builder.select(builder.fcmp_ordered(predicate, value, bound), bound, value)
    return value


def exp(builder: ir.IRBuilder, kind: ir.Type, x: ir.Value) -> ir.Value:
    """e**x within 2 units in the last place for x between -87.3 and 88; clamped outside.

    Cody and Waite's reduction to |rest| <= ln 2 / 2, then Taylor's series to the seventh power.
    """
    x = _clamp(builder, kind, x, EXP_LOWEST, EXP_HIGHEST)
    scaled = builder.fmul(x, constant(kind, math.log2(math.e)))
    power = _call(builder, "floor", kind, builder.fadd(scaled, constant(kind, 0.5)))
    rest = builder.fsub(x, builder.fmul(power, constant(kind, LN2_HIGH)))
    rest = builder.fsub(rest, builder.fmul(power, constant(kind, LN2_LOW)))
    tail = constant(kind, TERMS[7])
    for term in TERMS[6:1:-1]:
        tail = builder.fadd(builder.fmul(tail, rest), constant(kind, term))
    square = builder.fmul(rest, rest)
    sum_ = builder.fadd(builder.fadd(builder.fmul(square, tail), rest), constant(kind, 1.0))
    whole = builder.fptosi(power, VI32 if kind is VF32 else I32)
    bits = builder.shl(builder.add(whole, integer(kind, 127)), integer(kind, 23))
    return builder.fmul(sum_, builder.bitcast(bits, kind))


@intrinsic
def scale_row(
    typingctx: Any, layout: Any, x: Any, factor: Any, weight: Any, out: Any, cols: Any
) -> Any:
    """out[i] = x[i] * factor * weight[i]; x, weight float32, out of `layout`."""

    def body(builder: ir.IRBuilder, layout: str, args: Any) -> None:
        x, factor, weight, out, cols = args

        def lanes(kind: ir.Type, at: ir.Value) -> None:
            value = builder.fmul(load(builder, kind, "f32", x, at), splat(builder, kind, factor))
            value = builder.fmul(value, load(builder, kind, "f32", weight, at))
            store(builder, kind, layout, value, out, at)

        for_lanes(builder, cols, lanes)

    i64 = types.int64
    return types.void(i64, i64, types.float32, i64, i64, i64), for_each_layout(body)


@intrinsic
def finish_row(
    typingctx: Any, layout: Any, x: Any, bias: Any, adds: Any, out: Any, cols: Any
) -> Any:
    """out[i] = x[i] (+ bias[i]) (+ out[i] if `adds`); x of `layout`, the rest float32.

    bias: an address, or 0 for none.
    """

    def body(builder: ir.IRBuilder, layout: str, args: Any) -> None:
        x, bias, adds, out, cols = args

        def write(has_bias: bool, adds_out: bool) -> None:
            def lanes(kind: ir.Type, at: ir.Value) -> None:
                value = load(builder, kind, layout, x, at)
                if has_bias:
                    value = builder.fadd(value, load(builder, kind, "f32", bias, at))
                if adds_out:
                    value = builder.fadd(value, load(builder, kind, "f32", out, at))
                store(builder, kind, "f32", value, out, at)

            for_lanes(builder, cols, lanes)

        _by_flags(builder, bias, adds, write)

    return types.void(*[types.int64] * 6), for_each_layout(body)


def _by_flags(
    builder: ir.IRBuilder, first: ir.Value, second: ir.Value, write: Callable[[bool, bool], None]
) -> None:
    """One version of the code for each answer to "is it zero?" of two integers."""
    for first_set in (False, True):
        for second_set in (False, True):
            one = builder.icmp_signed("!=" if first_set else "==", first, I64(0))
            two = builder.icmp_signed("!=" if second_set else "==", second, I64(0))
            with builder.if_then(builder.and_(one, two)):
                write(first_set, second_set)


Activation = Callable[[ir.IRBuilder, ir.Type, ir.Value, ir.Value], ir.Value]


def _activate(
    builder: ir.IRBuilder, layout: str, operands: Any, out: Any, cols: Any, activation: Activation
) -> None:
    """out = activation(gate + its bias, up + its bias); operands: gate, up and their biases."""
    gate, up, gate_bias, up_bias = operands

    def write(has_bias: bool) -> None:
        def lanes(kind: ir.Type, at: ir.Value) -> None:
            x = load(builder, kind, layout, gate, at)
            factor = load(builder, kind, layout, up, at)
            if has_bias:
                x = builder.fadd(x, load(builder, kind, "f32", gate_bias, at))
                factor = builder.fadd(factor, load(builder, kind, "f32", up_bias, at))
            store(builder, kind, layout, activation(builder, kind, x, factor), out, at)

        for_lanes(builder, cols, lanes)

    for has_bias in (False, True):
        wanted = builder.icmp_signed("!=" if has_bias else "==", gate_bias, I64(0))
        with builder.if_then(wanted):
            write(has_bias)


def _one_plus_exp(builder: ir.IRBuilder, kind: ir.Type, x: ir.Value) -> ir.Value:
    """1 + exp(-x)"""
    power = exp(builder, kind, builder.fsub(constant(kind, -0.0), x))
    return builder.fadd(power, constant(kind, 1.0))


@intrinsic
def silu_row(
    typingctx: Any,
    layout: Any,
    gate: Any,
    up: Any,
    gate_bias: Any,
    up_bias: Any,
    out: Any,
    cols: Any,
) -> Any:
    """out[i] = silu(gate[i] + gate_bias[i]) * (up[i] + up_bias[i]), silu(x) = x / (1 + exp(-x)).

    gate, up and out of `layout`; the biases float32, or both 0 for none.
    """

    def silu(builder: ir.IRBuilder, kind: ir.Type, x: ir.Value, factor: ir.Value) -> ir.Value:
        return builder.fmul(builder.fdiv(x, _one_plus_exp(builder, kind, x)), factor)

    def body(builder: ir.IRBuilder, layout: str, args: Any) -> None:
        *operands, out, cols = args
        _activate(builder, layout, operands, out, cols, silu)

    return types.void(*[types.int64] * 7), for_each_layout(body)


@intrinsic
def clamped_row(
    typingctx: Any,
    layout: Any,
    gate: Any,
    up: Any,
    gate_bias: Any,
    up_bias: Any,
    limit: Any,
    alpha: Any,
    out: Any,
    cols: Any,
) -> Any:
    """The SwiGLU of GPT-OSS: out[i] = (u + 1) * g / (1 + exp(-alpha * g)).

    g = min(gate[i] + gate_bias[i], limit); u = up[i] + up_bias[i], within -limit to limit.
    gate, up and out of `layout`; the biases float32, or both 0 for none.
    """

    def body(builder: ir.IRBuilder, layout: str, args: Any) -> None:
        *operands, limit, alpha, out, cols = args

        def clamped(
            builder: ir.IRBuilder, kind: ir.Type, x: ir.Value, factor: ir.Value
        ) -> ir.Value:
            most = splat(builder, kind, limit)
            least = builder.fsub(constant(kind, -0.0), most)
            x = builder.select(builder.fcmp_ordered(">", x, most), most, x)
            factor = builder.select(builder.fcmp_ordered(">", factor, most), most, factor)
            factor = builder.select(builder.fcmp_ordered("<", factor, least), least, factor)
            steep = builder.fmul(x, splat(builder, kind, alpha))
            factor = builder.fadd(factor, constant(kind, 1.0))
            return builder.fmul(builder.fdiv(x, _one_plus_exp(builder, kind, steep)), factor)

        _activate(builder, layout, operands, out, cols, clamped)

    i64, f32 = types.int64, types.float32
    signature = types.void(i64, i64, i64, i64, i64, f32, f32, i64, i64)
    return signature, for_each_layout(body)


@intrinsic
def convert_row(typingctx: Any, layout: Any, x: Any, out: Any, cols: Any) -> Any:
    """out[i] = x[i]; x float32, out of `layout`."""

    def body(builder: ir.IRBuilder, layout: str, args: Any) -> None:
        x, out, cols = args
        for_lanes(
            builder,
            cols,
            lambda kind, at: store(
                builder, kind, layout, load(builder, kind, "f32", x, at), out, at
            ),
        )

    return types.void(*[types.int64] * 4), for_each_layout(body)


@intrinsic
def rotate_halves(
    typingctx: Any, layout: Any, x: Any, cos: Any, sin: Any, factor: Any, out: Any, half: Any
) -> Any:
    """Rotary embedding of one head whose pairs are (i, i + half), times `factor`.

    x, cos, sin: float32 [2 * half], [half], [half]; out of `layout`.
    """

    def body(builder: ir.IRBuilder, layout: str, args: Any) -> None:
        x, cos, sin, factor, out, half = args

        def lanes(kind: ir.Type, at: ir.Value) -> None:
            second_at = builder.add(at, half)
            a, b = load(builder, kind, "f32", x, at), load(builder, kind, "f32", x, second_at)
            c, s = load(builder, kind, "f32", cos, at), load(builder, kind, "f32", sin, at)
            scale = splat(builder, kind, factor)
            first = builder.fsub(builder.fmul(a, c), builder.fmul(b, s))
            second = builder.fadd(builder.fmul(b, c), builder.fmul(a, s))
            store(builder, kind, layout, builder.fmul(first, scale), out, at)
            store(builder, kind, layout, builder.fmul(second, scale), out, second_at)

        for_lanes(builder, half, lanes)

    i64 = types.int64
    return types.void(i64, i64, i64, i64, types.float32, i64, i64), for_each_layout(body)


@intrinsic
def rotate_neighbours(
    typingctx: Any, layout: Any, x: Any, cos: Any, sin: Any, factor: Any, out: Any, half: Any
) -> Any:
    """The same for pairs (2 i, 2 i + 1), as some files hold their rows."""

    def body(builder: ir.IRBuilder, layout: str, args: Any) -> None:
        x, cos, sin, factor, out, half = args

        def lanes(kind: ir.Type, at: ir.Value) -> None:
            double = builder.mul(at, I64(2))
            if kind is VF32:
                next_at = builder.add(double, I64(LANES))
                low = load(builder, kind, "f32", x, double)
                high = load(builder, kind, "f32", x, next_at)
                a, b = (
                    builder.shuffle_vector(
                        low, high, ir.Constant(VI32, list(range(start, 2 * LANES, 2)))
                    )
                    for start in (0, 1)
                )
            else:
                next_at = builder.add(double, I64(1))
                a = load(builder, kind, "f32", x, double)
                b = load(builder, kind, "f32", x, next_at)
            c, s = load(builder, kind, "f32", cos, at), load(builder, kind, "f32", sin, at)
            scale = splat(builder, kind, factor)
            first = builder.fmul(builder.fsub(builder.fmul(a, c), builder.fmul(b, s)), scale)
            second = builder.fmul(builder.fadd(builder.fmul(b, c), builder.fmul(a, s)), scale)
            if kind is VF32:
                order = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
                first, second = (
                    builder.shuffle_vector(first, second, ir.Constant(VI32, part))
                    for part in (order[:LANES], order[LANES:])
                )
            store(builder, kind, layout, first, out, double)
            store(builder, kind, layout, second, out, next_at)

        for_lanes(builder, half, lanes)

    i64 = types.int64
    return types.void(i64, i64, i64, i64, types.float32, i64, i64), for_each_layout(body)


@intrinsic
def soften(typingctx: Any, scores: Any, count: Any) -> Any:
    """Replace scores by exp(score - largest) and return their sum; float32 [count], count >= 1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, count = args
        first = load_one(builder, scores, "f32")
        largest = {kind: cgutils.alloca_once(builder, kind) for kind in (VF32, F32)}
        total = {kind: cgutils.alloca_once(builder, kind) for kind in (VF32, F32)}
        for kind in (VF32, F32):
            builder.store(splat(builder, kind, first), largest[kind])
            builder.store(constant(kind, 0.0), total[kind])

        def find(kind: ir.Type, at: ir.Value) -> None:
            value, best = load(builder, kind, "f32", scores, at), builder.load(largest[kind])
            is_more = builder.fcmp_ordered(">", value, best)
            builder.store(builder.select(is_more, value, best), largest[kind])

        for_lanes(builder, count, find)
        best, lanes = builder.load(largest[F32]), builder.load(largest[VF32])
        for lane in range(LANES):
            value = builder.extract_element(lanes, I32(lane))
            best = builder.select(builder.fcmp_ordered(">", value, best), value, best)

        def raise_(kind: ir.Type, at: ir.Value) -> None:
            value = load(builder, kind, "f32", scores, at)
            power = exp(builder, kind, builder.fsub(value, splat(builder, kind, best)))
            store(builder, kind, "f32", power, scores, at)
            builder.store(builder.fadd(builder.load(total[kind]), power), total[kind])

        for_lanes(builder, count, raise_)
        return builder.fadd(add_lanes(builder, builder.load(total[VF32])), builder.load(total[F32]))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def divide_row(typingctx: Any, x: Any, divisor: Any, cols: Any) -> Any:
    """x[i] /= divisor; float32 [cols]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, divisor, cols = args
        for_lanes(
            builder,
            cols,
            lambda kind, at: store(
                builder,
                kind,
                "f32",
                builder.fdiv(load(builder, kind, "f32", x, at), splat(builder, kind, divisor)),
                x,
                at,
            ),
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen
