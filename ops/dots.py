"""Dot products of weight rows with activations, with an order of addition that never changes.

Each (row, input) pair has one accumulator of sixteen float32 lanes. Lane `i` adds the products at
`i, i+16, i+32, ...` in that order with fused multiply-add; the lanes are then added pairwise, in
halves; elements beyond the last whole sixteen are added one by one at the end. How many rows and
inputs go through the loop together changes only how often a weight is loaded, so neither batch
size nor the cut into chunks changes a bit. LLVM vector types say this directly, and the compiler
maps sixteen lanes to whatever registers the processor has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shadowlane.ops.layouts import LAYOUTS

LANES = 16
F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
VF32 = ir.VectorType(F32, LANES)
DIRECT_LAYOUTS = ("f32", "f16", "bf16")  # a lane is one element; packed layouts are expanded first
ELEMENT_NBYTES = {"f32": 4, "f16": 2, "bf16": 2}
FMA = "llvm.fmuladd"


def _splat(value: int, element: ir.IntType) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, LANES), [value] * LANES)


def load_lanes(builder: ir.IRBuilder, address: ir.Value, layout: str) -> ir.Value:
    """Sixteen elements at any byte address, as float32."""
    if layout == "f32":
        return builder.load(builder.inttoptr(address, VF32.as_pointer()), align=1)
    if layout == "f16":
        half = ir.VectorType(ir.HalfType(), LANES)
        return builder.fpext(
            builder.load(builder.inttoptr(address, half.as_pointer()), align=1), VF32
        )
    bits = ir.VectorType(I16, LANES)
    raw = builder.load(builder.inttoptr(address, bits.as_pointer()), align=1)
    wide = builder.zext(raw, ir.VectorType(I32, LANES))
    return builder.bitcast(builder.shl(wide, _splat(16, I32)), VF32)


def load_one(builder: ir.IRBuilder, address: ir.Value, layout: str) -> ir.Value:
    if layout == "f32":
        return builder.load(builder.inttoptr(address, F32.as_pointer()), align=1)
    if layout == "f16":
        half = builder.load(builder.inttoptr(address, ir.HalfType().as_pointer()), align=1)
        return builder.fpext(half, F32)
    raw = builder.load(builder.inttoptr(address, I16.as_pointer()), align=1)
    return builder.bitcast(builder.shl(builder.zext(raw, I32), I32(16)), F32)


def fma(
    builder: ir.IRBuilder, kind: ir.Type, left: ir.Value, right: ir.Value, add: ir.Value
) -> Any:
    name = f"{FMA}.v{LANES}f32" if kind is VF32 else f"{FMA}.f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind, kind, kind]), name
    )
    return builder.call(function, [left, right, add])


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for a cache line that will be read soon; an address that nobody maps does no harm."""
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, pointer), I32(0), I32(3), I32(1)])


def add_lanes(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Sum of the lanes: halves added to halves, so 8, 4, 2, 1."""
    width = LANES
    while width > 1:
        width //= 2
        low = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width)))
        vector = builder.fadd(
            builder.shuffle_vector(vector, vector, low),
            builder.shuffle_vector(vector, vector, high),
        )
    return builder.extract_element(vector, I32(0))


def for_each_layout(body: Any) -> Any:
    """Code for an intrinsic whose first argument is a layout id: one `body` per direct layout."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for layout in DIRECT_LAYOUTS:
            wanted = builder.icmp_signed("==", args[0], I64(LAYOUTS[layout].id))
            with builder.if_then(wanted):
                body(builder, layout, args[1:])
        return context.get_dummy_value()

    return codegen


def make_dot(rows: int, inputs: int) -> Any:
    """An intrinsic `dot(layout, weights, row_nbytes, ahead, x, x_stride_nbytes, cols, out)`.

    layout: id of a direct layout, looked at once per call; weights: `rows` rows of it; ahead: bytes
    from a weight to the one that is asked for while it is read, 0 where nothing follows;
    x: `inputs` rows of float32; out: float32 [rows, inputs].
    All addresses and sizes are int64; addresses may be unaligned.
    """

    @intrinsic
    def dot(
        typingctx: Any,
        layout: Any,
        weights: Any,
        row_nbytes: Any,
        ahead: Any,
        x: Any,
        stride: Any,
        cols: Any,
        out: Any,
    ) -> Any:
        def body(builder: ir.IRBuilder, layout: str, args: Any) -> None:
            weights, row_nbytes, ahead, x, stride, cols, out = args
            element_nbytes = ELEMENT_NBYTES[layout]
            row_starts = [
                builder.add(weights, builder.mul(row_nbytes, I64(r))) for r in range(rows)
            ]
            input_starts = [builder.add(x, builder.mul(stride, I64(b))) for b in range(inputs)]
            pairs = [(r, b) for r in range(rows) for b in range(inputs)]
            sums = [cgutils.alloca_once(builder, VF32) for _ in pairs]
            for slot in sums:
                builder.store(ir.Constant(VF32, [0.0] * LANES), slot)
            whole = builder.and_(cols, I64(-LANES))
            with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES), I64) as (at, _):
                weight_offset = builder.mul(at, I64(element_nbytes))
                x_offset = builder.mul(at, I64(4))
                loaded = [
                    load_lanes(builder, builder.add(s, x_offset), "f32") for s in input_starts
                ]
                for r in range(rows):
                    at_row = builder.add(row_starts[r], weight_offset)
                    if rows > 1:
                        prefetch(builder, builder.add(at_row, ahead))
                    row = load_lanes(builder, at_row, layout)
                    for b in range(inputs):
                        slot = sums[r * inputs + b]
                        builder.store(fma(builder, VF32, row, loaded[b], builder.load(slot)), slot)
            totals = [cgutils.alloca_once(builder, F32) for _ in pairs]
            for slot, total in zip(sums, totals, strict=True):
                builder.store(add_lanes(builder, builder.load(slot)), total)
            with cgutils.for_range_slice(builder, whole, cols, I64(1), I64) as (at, _):
                weight_offset = builder.mul(at, I64(element_nbytes))
                x_offset = builder.mul(at, I64(4))
                for r, b in pairs:
                    element = load_one(builder, builder.add(row_starts[r], weight_offset), layout)
                    factor = load_one(builder, builder.add(input_starts[b], x_offset), "f32")
                    total = totals[r * inputs + b]
                    builder.store(fma(builder, F32, element, factor, builder.load(total)), total)
            for index, total in enumerate(totals):
                place = builder.inttoptr(builder.add(out, I64(4 * index)), F32.as_pointer())
                builder.store(builder.load(total), place, align=4)

        return types.void(*[types.int64] * 8), for_each_layout(body)

    return dot


def make_weighted_sum(inputs: int) -> Any:
    """An intrinsic `accumulate(layout, rows, row_nbytes, num_rows, cols, factors, stride, out)`.

    out[b][c] += factors[b][0] * rows[0][c] + factors[b][1] * rows[1][c] + ..., in the order of the
    rows. layout: id of a direct layout, that of `rows`; factors float32 [inputs, num_rows], their
    rows `stride` bytes apart; out float32 [inputs, cols].
    """

    @intrinsic
    def accumulate(
        typingctx: Any,
        layout: Any,
        rows: Any,
        row_nbytes: Any,
        num_rows: Any,
        cols: Any,
        factors: Any,
        stride: Any,
        out: Any,
    ) -> Any:
        def body(builder: ir.IRBuilder, layout: str, args: Any) -> None:
            rows, row_nbytes, num_rows, cols, factors, stride, out = args
            element_nbytes = ELEMENT_NBYTES[layout]
            starts = [builder.add(factors, builder.mul(stride, I64(b))) for b in range(inputs)]

            def columns(at: ir.Value, kind: ir.Type, count: int) -> None:
                """`count` neighbouring vectors (or one element) of all inputs, in registers."""
                width = LANES if kind is VF32 else 1
                places, totals = [], []
                for b in range(inputs):
                    row = builder.add(out, builder.mul(cols, I64(4 * b)))
                    for v in range(count):
                        offset = builder.mul(builder.add(at, I64(v * width)), I64(4))
                        place = builder.inttoptr(builder.add(row, offset), kind.as_pointer())
                        total = cgutils.alloca_once(builder, kind)
                        builder.store(builder.load(place, align=4), total)
                        places.append(place)
                        totals.append(total)
                start = builder.add(rows, builder.mul(at, I64(element_nbytes)))
                with cgutils.for_range(builder, num_rows, intp=I64) as loop:
                    address = builder.add(start, builder.mul(loop.index, row_nbytes))
                    elements = [
                        (load_lanes if kind is VF32 else load_one)(
                            builder, builder.add(address, I64(v * width * element_nbytes)), layout
                        )
                        for v in range(count)
                    ]
                    for b in range(inputs):
                        factor = load_one(
                            builder, builder.add(starts[b], builder.mul(loop.index, I64(4))), "f32"
                        )
                        if kind is VF32:
                            first = builder.insert_element(
                                ir.Constant(VF32, ir.Undefined), factor, I32(0)
                            )
                            factor = builder.shuffle_vector(first, first, _splat(0, I32))
                        for v in range(count):
                            total = totals[b * count + v]
                            builder.store(
                                fma(builder, kind, elements[v], factor, builder.load(total)), total
                            )
                for place, total in zip(places, totals, strict=True):
                    builder.store(builder.load(total), place, align=4)

            four = builder.and_(cols, I64(-4 * LANES))
            whole = builder.and_(cols, I64(-LANES))
            with cgutils.for_range_slice(builder, I64(0), four, I64(4 * LANES), I64) as (at, _):
                columns(at, VF32, 4)
            with cgutils.for_range_slice(builder, four, whole, I64(LANES), I64) as (at, _):
                columns(at, VF32, 1)
            with cgutils.for_range_slice(builder, whole, cols, I64(1), I64) as (at, _):
                columns(at, F32, 1)

        return types.void(*[types.int64] * 8), for_each_layout(body)

    return accumulate
