"""Words in shared memory, seen from compiled code: atomics, futex, clock, raw loads.

Numba has no atomics on the CPU, so the few that lanes need are emitted as LLVM instructions.
Addresses are int64. Everything here works across processes that map the same memory.

A *counter* is a 32-bit word with one writer at a time, compared cyclically, so it may wrap. Behind
it lie the beds of those who sleep: whoever waits for value `v` sleeps on the futex in bed `v % 64`.
`wait_counter` spins for a bounded time, then sleeps; `publish` looks at the beds of the values that
it reaches, and makes a system call only where somebody lies. So a lane that is watched from afar
does not pay for each instruction it retires, and nobody is woken for a value that he did not want.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shadowlane.ops.compiled import njit
from shadowlane.ops.table import NUM_BEDS

I32, I64 = ir.IntType(32), ir.IntType(64)
BEDS = 64  # byte offset of the first bed; two words: how many sleep in it, a count of wake-ups
BED_NBYTES = 8
LOOK_BACK = 7  # with the bed of the value itself as many as a cache line holds
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 202)
SYS_SCHED_YIELD = {"x86_64": 24, "aarch64": 124}.get(platform.machine(), 24)
FUTEX_WAIT, FUTEX_WAKE = 0, 1
CLOCK_MONOTONIC = 1
SLEEP_NS = 20_000_000  # a sleeper looks again after this, in case its publisher died half way
WAIT_OK, WAIT_ABORTED, WAIT_TIMED_OUT = 0, 1, 2

_syscall = types.ExternalFunction(
    "syscall",
    types.int64(
        types.int64, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64
    ),
)
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_memmove = types.ExternalFunction("memmove", types.int64(types.int64, types.int64, types.int64))


def _pointer(builder: ir.IRBuilder, address: ir.Value, element: ir.Type) -> ir.Value:
    return builder.inttoptr(address, element.as_pointer())


def _atomic_load(name: str, element: ir.IntType, result: types.Integer) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load_atomic(
                _pointer(builder, args[0], element), "seq_cst", element.width // 8
            )

        return result(types.int64), codegen

    load.__name__ = name
    return load


def _atomic_exchange(name: str, operation: str, element: ir.IntType, result: types.Integer) -> Any:
    @intrinsic
    def exchange(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.atomic_rmw(
                operation, _pointer(builder, args[0], element), args[1], "seq_cst"
            )

        return result(types.int64, result), codegen

    exchange.__name__ = name
    return exchange


load32 = _atomic_load("load32", I32, types.int32)
load64 = _atomic_load("load64", I64, types.int64)
swap32 = _atomic_exchange("swap32", "xchg", I32, types.int32)
swap64 = _atomic_exchange("swap64", "xchg", I64, types.int64)
add32 = _atomic_exchange("add32", "add", I32, types.int32)


def _compare_swap(name: str, element: ir.IntType, held: types.Integer) -> Any:
    """1 if the word held `expected` and now holds `desired`, else 0."""

    @intrinsic
    def compare_swap(typingctx: Any, address: Any, expected: Any, desired: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pair = builder.cmpxchg(
                _pointer(builder, args[0], element), args[1], args[2], "seq_cst", "seq_cst"
            )
            return builder.zext(builder.extract_value(pair, 1), I64)

        return types.int64(types.int64, held, held), codegen

    compare_swap.__name__ = name
    return compare_swap


compare_swap32 = _compare_swap("compare_swap32", I32, types.int32)
compare_swap64 = _compare_swap("compare_swap64", I64, types.int64)


def _plain_load(name: str, element: ir.Type, result: Any, align: int) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(_pointer(builder, args[0], element), align=align)

        return result(types.int64), codegen

    load.__name__ = name
    return load


def _plain_store(name: str, element: ir.Type, value_type: Any, align: int) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], _pointer(builder, args[0], element), align=align)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), codegen

    store.__name__ = name
    return store


read_i32 = _plain_load("read_i32", I32, types.int32, 4)
read_i64 = _plain_load("read_i64", I64, types.int64, 8)
read_f32 = _plain_load("read_f32", ir.FloatType(), types.float32, 4)
read_f64 = _plain_load("read_f64", ir.DoubleType(), types.float64, 8)
write_i32 = _plain_store("write_i32", I32, types.int32, 4)
write_i64 = _plain_store("write_i64", I64, types.int64, 8)
write_f32 = _plain_store("write_f32", ir.FloatType(), types.float32, 4)
write_f64 = _plain_store("write_f64", ir.DoubleType(), types.float64, 8)


@intrinsic
def relax(typingctx: Any) -> Any:
    """Tell the processor that this is a spin loop (x86 `pause`; nothing elsewhere)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_address(typingctx: Any, address: Any, arguments: Any) -> Any:
    """Call the C function at `address` with a tuple of int64 arguments; it returns nothing.

    This is how the walker reaches the operator of a layout that it was not compiled with.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [builder.extract_value(args[1], i) for i in range(len(signature.args[1]))]
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(values))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen


@intrinsic
def _stack_pair(typingctx: Any) -> Any:
    """Address of 16 bytes on this call's stack: room for one timespec."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            slot = builder.alloca(ir.ArrayType(I64, 2))
        return builder.ptrtoint(slot, I64)

    return types.int64(), codegen


@njit
def now_ns() -> int:
    """Monotonic time in ns, the same clock as `time.monotonic_ns`."""
    pair = _stack_pair()
    _clock_gettime(types.int32(CLOCK_MONOTONIC), pair)
    return read_i64(pair) * 1_000_000_000 + read_i64(pair + 8)


@njit
def rest() -> None:
    """Let another thread have the core, if one waits for it."""
    _syscall(SYS_SCHED_YIELD, 0, 0, 0, 0, 0, 0)


@njit
def reached(value: int, wanted: int) -> bool:
    """Cyclic comparison of 32-bit counters: has `value` come to `wanted`?"""
    return types.int32(value - wanted) >= 0


@njit
def _bed(counter: int, value: int) -> int:
    return counter + BEDS + (types.int64(value) & (NUM_BEDS - 1)) * BED_NBYTES


@njit
def _wake(bed: int) -> None:
    """Wake all who sleep in a bed."""
    add32(bed + 4, types.int32(1))
    _syscall(SYS_FUTEX, bed + 4, FUTEX_WAKE, 0x7FFFFFFF, 0, 0, 0)


@njit
def wake_all(counter: int) -> None:
    """Wake all sleepers without changing the counter, so that they look at the abort word."""
    for number in range(NUM_BEDS):
        _wake(_bed(counter, number))


@njit
def publish(counter: int, value: int) -> None:
    """Set a counter (one writer at a time); wake those who wait for a value that it reaches."""
    value = types.int32(value)
    passed = types.int64(types.int32(value - swap32(counter, value)))
    # NOTE: a few beds more, for a publisher who lost its core between its store and its look.
    reach = passed + LOOK_BACK
    if passed < 0 or reach > NUM_BEDS:  # set anew, or by so much that all beds are meant
        reach = NUM_BEDS
    for back in range(reach):
        bed = _bed(counter, value - back)
        if load32(bed) != 0:
            _wake(bed)


@njit
def publish_next(counter: int) -> None:
    """Raise by one a counter that several may raise; wake those who wait for its new value."""
    value = add32(counter, types.int32(1)) + 1
    for back in range(1 + LOOK_BACK):
        bed = _bed(counter, value - back)
        if load32(bed) != 0:
            _wake(bed)


@njit
def wait_counter(counter: int, wanted: int, abort: int, spin_ns: int, timeout_ns: int) -> int:
    """Wait until the counter reaches `wanted`; spin for `spin_ns`, then sleep.

    Returns WAIT_OK, WAIT_ABORTED (the abort word is not 0), or WAIT_TIMED_OUT after `timeout_ns`
    (0 = never).
    """
    wanted = types.int32(wanted)
    if reached(load32(counter), wanted):
        return WAIT_OK
    started = now_ns()
    spin_until = started + spin_ns
    while spin_ns > 0:
        for _ in range(32):
            relax()
        if reached(load32(counter), wanted):
            return WAIT_OK
        if now_ns() >= spin_until:
            break
    pause = _stack_pair()
    bed = _bed(counter, wanted)
    while True:
        add32(bed, types.int32(1))
        wakes = load32(bed + 4)
        # NOTE: both are looked at once more after saying that we sleep: a publisher who did not see
        # that has stored its value before.
        is_aborted = load32(abort) != 0
        if not is_aborted and not reached(load32(counter), wanted):
            write_i64(pause, types.int64(0))
            write_i64(pause + 8, types.int64(SLEEP_NS))
            _syscall(SYS_FUTEX, bed + 4, FUTEX_WAIT, types.int64(wakes), pause, 0, 0)
        add32(bed, types.int32(-1))
        if reached(load32(counter), wanted):
            return WAIT_OK
        if is_aborted:
            return WAIT_ABORTED
        if timeout_ns > 0 and now_ns() - started > timeout_ns:
            return WAIT_TIMED_OUT


@njit
def sleep_in(bed: int, wakes: int, timeout_ns: int) -> None:
    """Sleep until somebody wakes the bed; not at all if its count of wake-ups is not `wakes`.

    Who sleeps in a bed without a counter says so first (`add32(bed, 1)`), reads the count, looks
    once more at what it waits for, and says afterwards that it is up (`add32(bed, -1)`).
    """
    pause = _stack_pair()
    write_i64(pause, timeout_ns // 1_000_000_000)
    write_i64(pause + 8, timeout_ns % 1_000_000_000)
    _syscall(SYS_FUTEX, bed + 4, FUTEX_WAIT, types.int64(wakes), pause, 0, 0)


@njit
def wake_bed(bed: int) -> None:
    """Wake all who sleep in a bed, if anybody does."""
    if load32(bed) != 0:
        _wake(bed)


# A mutex between the threads of one process, whose death takes it along: 0 free, 1 held, 2 held
# and somebody may sleep on it.


@njit
def lock(mutex: int) -> None:
    if compare_swap32(mutex, types.int32(0), types.int32(1)) != 0:
        return
    while swap32(mutex, types.int32(2)) != 0:
        _syscall(SYS_FUTEX, mutex, FUTEX_WAIT, 2, 0, 0, 0)


@njit
def unlock(mutex: int) -> None:
    if swap32(mutex, types.int32(0)) == 2:
        _syscall(SYS_FUTEX, mutex, FUTEX_WAKE, 1, 0, 0, 0)


# Tickets: a 64-bit word holds (step << 32 | count). A worker that comes a whole step late finds a
# later step in the word and takes nothing, so nobody has to wait for it.


@njit
def claim(ticket: int, step: int, num_items: int) -> int:
    """Take the next item of this step; -1 when none is left, or the step is over."""
    while True:
        word = load64(ticket)
        held_step = word >> 32
        if held_step > step:
            return -1
        taken = word & 0xFFFFFFFF if held_step == step else 0
        if taken >= num_items:
            return -1
        if compare_swap64(ticket, word, (step << 32) | (taken + 1)):
            return taken


@njit
def complete(done: int, step: int, num_items: int) -> bool:
    """Count one finished item; True for the one that finished the last."""
    while True:
        word = load64(done)
        count = (word & 0xFFFFFFFF if (word >> 32) == step else 0) + 1
        if compare_swap64(done, word, (step << 32) | count):
            return count == num_items


@njit
def copy_bytes(source: int, target: int, nbytes: int) -> None:
    """memmove between two addresses."""
    _memmove(target, source, nbytes)


@njit
def counter_value(counter: int) -> int:
    """What a counter holds now, for callers in Python."""
    return load32(counter)
