"""Dot products straight from packed blocks: bytes times bytes, summed as 32-bit integers.

Activations are quantised once per input to signed bytes, 32 to a scale, with the sum of each 32
beside them, so that an offset in the weights costs one multiplication per block. A format
(`formats.py`) says how a block of its bytes becomes vectors of 32 small bytes with a scale and an
offset; all else is shared. The byte dot product is the one thing that differs between processors:
`vpdpbusd` where there is VNNI, two multiply-adds with AVX2, plain integer arithmetic elsewhere.

The order of additions is fixed: one float32 accumulator of eight lanes per (row, input), blocks in
their order, lanes added in halves at the end. Neither batch nor chunking changes a bit, and the
integer sums are exact, so the three ways of summing bytes give the same bits.

A quantised input of `cols` elements: int8 [cols], float32 scales [cols / 32], float32 sums
[cols / 32]; the sum is scale * (sum of the bytes).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shadowlane.ops.compiled import target_features
from shadowlane.ops.dots import F32, I32, I64, prefetch
from shadowlane.ops.formats import (
    BYTES32,
    FORMATS,
    GROUP,
    I8,
    WORDS8,
    Format,
    bytes32,
    load,
    splat,
)

PREFETCH_NBYTES = 4096  # how far ahead of the block in hand memory is asked for
F8 = ir.VectorType(F32, 8)
I16 = ir.IntType(16)
WORDS16 = ir.VectorType(I16, 16)
ByteDot = Literal["vnni", "avx2", "plain"]


@cache
def byte_dot() -> ByteDot:
    """How bytes are multiplied here: the best the processor has, or what SHADOWLANE_DOT says.

    Raises ValueError for an unknown name, or one that the processor cannot run.
    """
    features = target_features()[2]
    able: list[ByteDot] = ["plain"]
    if "+avx2" in features:
        able.insert(0, "avx2")
    if "+avx512vnni" in features and "+avx512vl" in features:
        able.insert(0, "vnni")
    asked = os.environ.get("SHADOWLANE_DOT")
    if asked is None:
        return able[0]
    for name in able:
        if name == asked:
            return name
    raise ValueError(f"SHADOWLANE_DOT must be one of {', '.join(able)} here; got {asked!r}")


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [each.type for each in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def dot_unsigned(builder: ir.IRBuilder, weights: ir.Value, x: ir.Value, how: ByteDot) -> ir.Value:
    """<8 x i32>, each the sum of four neighbouring products; weights 0..127, x -127..127."""
    if how == "vnni":
        zero = ir.Constant(WORDS8, [0] * 8)
        words = (builder.bitcast(weights, WORDS8), builder.bitcast(x, WORDS8))
        return _call(builder, "llvm.x86.avx512.vpdpbusd.256", WORDS8, zero, *words)
    if how == "avx2":
        # NOTE: pairs are summed in 16 bits with saturation; 2 * 127 * 127 just fits.
        pairs = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", WORDS16, weights, x)
        ones = ir.Constant(WORDS16, [1] * 16)
        return _call(builder, "llvm.x86.avx2.pmadd.wd", WORDS8, pairs, ones)
    wide = ir.VectorType(I32, GROUP)
    products = builder.mul(builder.zext(weights, wide), builder.sext(x, wide))
    parts = [
        builder.shuffle_vector(
            products, products, ir.Constant(WORDS8, list(range(start, GROUP, 4)))
        )
        for start in range(4)
    ]
    return builder.add(builder.add(parts[0], parts[1]), builder.add(parts[2], parts[3]))


def dot_signed(builder: ir.IRBuilder, weights: ir.Value, x: ir.Value, how: ByteDot) -> ir.Value:
    """The same for weights -127..127: their sign moves to x."""
    zero = bytes32(0)
    is_negative = builder.icmp_signed("<", weights, zero)
    magnitude = builder.select(is_negative, builder.sub(zero, weights), weights)
    turned = builder.select(is_negative, builder.sub(zero, x), x)
    return dot_unsigned(builder, magnitude, turned, how)


def _add_lanes(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    width = 8
    while width > 1:
        width //= 2
        kind = ir.VectorType(I32, width)
        low, high = (
            builder.shuffle_vector(
                vector, vector, ir.Constant(kind, list(range(start, start + width)))
            )
            for start in (0, width)
        )
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, I32(0))


def _dot_row(
    builder: ir.IRBuilder,
    form: Format,
    inputs: int,
    row: ir.Value,
    num_blocks: ir.Value,
    x: ir.Value,
    stride: ir.Value,
    out: ir.Value,
    out_stride: ir.Value,
) -> None:
    """One packed row times `inputs` quantised inputs, `stride` bytes apart; out: float32."""
    how = byte_dot()
    cols = builder.mul(num_blocks, I64(form.block_elements))
    groups = builder.udiv(cols, I64(GROUP))
    starts = [builder.add(x, builder.mul(stride, I64(index))) for index in range(inputs)]
    scales = [builder.add(start, cols) for start in starts]
    sums = [builder.add(start, builder.mul(groups, I64(4))) for start in scales]
    totals = [cgutils.alloca_once(builder, F8) for _ in range(inputs)]
    offsets = [cgutils.alloca_once(builder, F32) for _ in range(inputs)]
    for index in range(inputs):
        builder.store(ir.Constant(F8, [0.0] * 8), totals[index])
        builder.store(F32(0.0), offsets[index])
    with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
        block = builder.add(row, builder.mul(loop.index, I64(form.block_nbytes)))
        for line in range(0, form.block_nbytes, 64):
            prefetch(builder, builder.add(block, I64(PREFETCH_NBYTES + line)))
        first = builder.mul(loop.index, I64(form.block_elements // GROUP))
        for number, part in enumerate(form.unpack(builder, block)):
            group = builder.add(first, I64(number))
            dot = dot_signed if part.is_signed else dot_unsigned
            for index in range(inputs):
                at = builder.add(starts[index], builder.mul(group, I64(GROUP)))
                products = dot(builder, part.weights, load(builder, at, BYTES32), how)
                at = builder.add(scales[index], builder.mul(group, I64(4)))
                scale = load(builder, at, F32)
                if part.scale.type == F8:
                    factor = builder.fmul(part.scale, splat(builder, scale, F8))
                else:
                    factor = splat(builder, builder.fmul(part.scale, scale), F8)
                total = _call(
                    builder,
                    "llvm.fmuladd.v8f32",
                    F8,
                    builder.sitofp(products, F8),
                    factor,
                    builder.load(totals[index]),
                )
                builder.store(total, totals[index])
                if part.offset is not None:
                    at = builder.add(sums[index], builder.mul(group, I64(4)))
                    offset = _call(
                        builder,
                        "llvm.fmuladd.f32",
                        F32,
                        part.offset,
                        load(builder, at, F32),
                        builder.load(offsets[index]),
                    )
                    builder.store(offset, offsets[index])
    for index in range(inputs):
        total = builder.fadd(
            _add_lanes(builder, builder.load(totals[index])), builder.load(offsets[index])
        )
        place = builder.add(out, builder.mul(out_stride, I64(index)))
        builder.store(total, builder.inttoptr(place, F32.as_pointer()), align=4)


def make_packed_rows(name: str) -> Callable[..., Any]:
    """An intrinsic for one format, with the arguments of `kernels.MATVEC_SIGNATURE`.

    y[b, r] = weights[r] . x[b], x being quantised inputs. Up to four inputs share the unpacking.
    """
    form = FORMATS[name]

    @intrinsic
    def rows(
        typingctx: Any,
        weights: Any,
        row_nbytes: Any,
        num_rows: Any,
        cols: Any,
        x: Any,
        x_stride: Any,
        num_inputs: Any,
        y: Any,
        y_stride: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, row_nbytes, num_rows, cols, x, x_stride, num_inputs, y, y_stride = args
            num_blocks = builder.udiv(cols, I64(form.block_elements))
            fours = builder.and_(num_inputs, I64(-4))
            twos = builder.and_(num_inputs, I64(-2))
            with cgutils.for_range(builder, num_rows, intp=I64) as loop:
                row = builder.add(weights, builder.mul(loop.index, row_nbytes))
                out = builder.add(y, builder.mul(loop.index, I64(4)))
                for together, start, end in ((4, I64(0), fours), (2, fours, twos), (1, twos, None)):
                    last = num_inputs if end is None else end
                    with cgutils.for_range_slice(builder, start, last, I64(together), I64) as (
                        first,
                        _,
                    ):
                        _dot_row(
                            builder,
                            form,
                            together,
                            row,
                            num_blocks,
                            builder.add(x, builder.mul(first, x_stride)),
                            x_stride,
                            builder.add(out, builder.mul(first, y_stride)),
                            y_stride,
                        )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return rows  # type: ignore[no-any-return]


@intrinsic
def quantise_row(typingctx: Any, x: Any, cols: Any, out: Any) -> Any:
    """One float32 row as a quantised input (see the module); `cols` is a multiple of 32.

    The scale is the largest magnitude of 32 neighbours / 127; values round to nearest, ties to
    even; 32 zeros have scale 0.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, cols, out = args
        wide = ir.VectorType(F32, GROUP)
        groups = builder.udiv(cols, I64(GROUP))
        scales = builder.add(out, cols)
        sums = builder.add(scales, builder.mul(groups, I64(4)))
        with cgutils.for_range(builder, groups, intp=I64) as loop:
            values = load(builder, builder.add(x, builder.mul(loop.index, I64(4 * GROUP))), wide)
            magnitude = _call(builder, "llvm.fabs.v32f32", wide, values)
            largest = _call(builder, "llvm.vector.reduce.fmax.v32f32", F32, magnitude)
            scale = builder.fdiv(largest, F32(127.0))
            is_zero = builder.fcmp_ordered("==", largest, F32(0.0))
            inverse = builder.fdiv(F32(127.0), builder.select(is_zero, F32(1.0), largest))
            scaled = builder.fmul(values, splat(builder, inverse, wide))
            rounded = _call(builder, "llvm.rint.v32f32", wide, scaled)
            whole = builder.fptosi(rounded, ir.VectorType(I32, GROUP))
            at = builder.add(out, builder.mul(loop.index, I64(GROUP)))
            narrow = builder.trunc(whole, ir.VectorType(I8, GROUP))
            builder.store(narrow, builder.inttoptr(at, BYTES32.as_pointer()), align=1)
            count = _call(builder, "llvm.vector.reduce.add.v32i32", I32, whole)
            total = builder.fmul(scale, builder.sitofp(count, F32))
            for base, value in ((scales, scale), (sums, total)):
                at = builder.add(base, builder.mul(loop.index, I64(4)))
                builder.store(value, builder.inttoptr(at, F32.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
