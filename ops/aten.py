"""Torch's operators from compiled code, through the C interface that torch keeps for such callers.

`aoti_torch_*` in libtorch_cpu (AOTInductor's shim, `torch/csrc/inductor/aoti_torch/c/shim.h`, whose
names and arguments torch promises to keep) takes handles of tensors and returns 0 or a failure. So
a worker multiplies without the GIL, and torch's Python half, a second and 200 MB, is not imported.

Functions here take `aten`, the int64 array of `load`, and `words`: the address of WORDS_NBYTES
(`table.py`) of memory that the calling thread has to itself.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shadowlane.ops.atomics import read_i64, write_i64
from shadowlane.ops.compiled import njit
from shadowlane.ops.errors import ModelError
from shadowlane.ops.layouts import LAYOUTS

# aten[...]: addresses of functions, then torch's numbers of the direct layouts
_FUNCTIONS = (
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_copy_",
    "aoti_torch_cpu_mm_out",
    "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu",
)
CREATE, DELETE, COPY, MM_OUT, ATTENTION = range(len(_FUNCTIONS))
DTYPES: Final = len(_FUNCTIONS)  # + id of a direct layout
_DTYPE_OF = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
SIZES, STRIDES, HANDLE, RESULTS = 0, 64, 128, 192  # byte offsets in `words`

I32, I64, F64 = ir.IntType(32), ir.IntType(64), ir.DoubleType()
_KINDS: dict[str, Any] = {"i": I32, "l": I64, "d": F64}


@cache
def _library() -> ctypes.CDLL:
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("torch must be installed: pip install shadowlane")
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    try:
        # As torch's Python half does: libraries that others are to find, MKL in some builds.
        ctypes.CDLL(str(folder / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(folder / "libtorch_cpu.so"))
    except OSError:
        # A build whose libraries find each other only once its Python half has loaded them.
        import torch  # noqa: F401

        return ctypes.CDLL(str(folder / "libtorch_cpu.so"))


@cache
def load() -> np.ndarray:
    """The table that compiled code needs; int64 [DTYPES + number of direct layouts]."""
    library = _library()
    table = np.zeros(DTYPES + len(_DTYPE_OF), np.int64)
    try:
        for place, name in enumerate(_FUNCTIONS):
            table[place] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        for layout, name in _DTYPE_OF.items():
            table[DTYPES + LAYOUTS[layout].id] = getattr(library, f"aoti_torch_dtype_{name}")()
        _ = library._ZN2at15set_num_threadsEi
    except AttributeError as error:
        raise ModelError(f"torch must have the C interface of 2.13 or later; {error}") from None
    return table


def last_error() -> str:
    """Why torch refused the calling thread's last operation, in a line."""
    what = _library().torch_exception_get_what_without_backtrace
    what.restype = ctypes.c_char_p
    return " ".join((what() or b"").decode(errors="replace").split())


def use_one_thread() -> None:
    """Products of the calling thread run on it alone (OpenMP keeps the number per thread)."""
    _library()._ZN2at15set_num_threadsEi(1)  # at::set_num_threads, which has no C name


def _c_function(kinds: str) -> Any:
    """An intrinsic `call(address, arguments)`: a C function that returns an int."""

    @intrinsic
    def call(typingctx: Any, address: Any, arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = [builder.extract_value(args[1], place) for place in range(len(kinds))]
            wanted = [_KINDS[kind] for kind in kinds]
            values = [
                builder.trunc(value, I32) if kind is I32 else value
                for value, kind in zip(values, wanted, strict=True)
            ]
            function = builder.inttoptr(args[0], ir.FunctionType(I32, wanted).as_pointer())
            return builder.sext(builder.call(function, values), I64)

        return types.int64(types.int64, arguments), codegen

    return call


_create = _c_function("llllliiil")
_delete = _c_function("l")
_copy = _c_function("lli")
_mm_out = _c_function("lll")
_attention = _c_function("llldillll")


@njit
def delete(aten: Any, handle: int) -> None:
    if handle != 0:
        _delete(aten[DELETE], (handle,))


@njit
def _tensor(aten: Any, words: int, address: int, dims: int, layout: int) -> int:
    """Handle of a tensor over memory of ours, by the sizes and strides in `words`; 0: refused."""
    write_i64(words + HANDLE, 0)
    arguments = (
        address, dims, words + SIZES, words + STRIDES, 0, aten[DTYPES + layout], 0, 0,
        words + HANDLE,
    )  # fmt: skip
    if _create(aten[CREATE], arguments) != 0:
        return 0
    return read_i64(words + HANDLE)


@njit
def matrix(
    aten: Any, words: int, address: int, rows: int, cols: int, row: int, col: int, layout: int
) -> int:
    """A tensor [rows, cols] of a direct layout; `row`, `col`: elements from one to the next."""
    write_i64(words + SIZES, rows)
    write_i64(words + SIZES + 8, cols)
    write_i64(words + STRIDES, row)
    write_i64(words + STRIDES + 8, col)
    return _tensor(aten, words, address, 2, layout)


@njit
def heads(
    aten: Any,
    words: int,
    address: int,
    count: int,
    rows: int,
    dim: int,
    head: int,
    row: int,
    layout: int,
) -> int:
    """A tensor [1, count, rows, dim]; `head`, `row`: elements from one to the next."""
    sizes = (1, count, rows, dim)
    strides = (count * head, head, row, 1)
    for place in range(4):
        write_i64(words + SIZES + 8 * place, sizes[place])
        write_i64(words + STRIDES + 8 * place, strides[place])
    return _tensor(aten, words, address, 4, layout)


@njit
def multiply(
    aten: Any,
    words: int,
    x: int,
    count: int,
    cols: int,
    weights: int,
    rows: int,
    out: int,
    layout: int,
) -> bool:
    """out = x times the transpose of weights: [count, cols], [rows, cols] -> [count, rows].

    Addresses of dense rows of a direct layout. False: torch refused.
    """
    left = matrix(aten, words, x, count, cols, cols, 1, layout)
    right = matrix(aten, words, weights, cols, rows, 1, cols, layout)
    result = matrix(aten, words, out, count, rows, rows, 1, layout)
    done = left != 0 and right != 0 and result != 0
    if done:
        done = _mm_out(aten[MM_OUT], (result, left, right)) == 0
    delete(aten, left)
    delete(aten, right)
    delete(aten, result)
    return done


@njit
def attention(
    aten: Any, words: int, queries: int, keys: int, values: int, mask: int, out: int
) -> bool:
    """out = softmax(queries . keys / sqrt(dim) + mask) . values; handles, mask 0: causal.

    queries, out [1, heads, rows, dim]; keys, values [1, heads, keys, dim]; mask [rows, keys].
    False: torch refused.
    """
    if queries == 0 or keys == 0 or values == 0 or out == 0:
        return False
    write_i64(words + HANDLE, mask)
    write_i64(words + RESULTS, 0)
    write_i64(words + RESULTS + 8, 0)
    is_causal = 1 if mask == 0 else 0
    arguments = (
        queries, keys, values, 0.0, is_causal, 0 if mask == 0 else words + HANDLE, 0,
        words + RESULTS, words + RESULTS + 8,
    )  # fmt: skip
    done = _attention(aten[ATTENTION], arguments) == 0
    attended = read_i64(words + RESULTS)
    if done:
        done = _copy(aten[COPY], (out, attended, 0)) == 0
    delete(aten, attended)
    delete(aten, read_i64(words + RESULTS + 8))
    return done
