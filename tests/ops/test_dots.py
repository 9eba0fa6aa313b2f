"""Products of weight rows: near the exact result, and the same bits however they are cut."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from shadowlane.ops.compiled import njit
from shadowlane.ops.dots import DIRECT_LAYOUTS, LANES
from shadowlane.ops.expand import expand_row_address, expand_rows
from shadowlane.ops.kernels import EXPAND_AT, matvec_address
from shadowlane.ops.layouts import LAYOUTS, quantised_nbytes
from shadowlane.ops.packed import quantise_row

MATVEC = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 12)
# Sixteen sums run side by side, so an element passes cols / 16 + 5 additions. Their roundings
# mostly cancel: this bound, relative to the sum of magnitudes, leaves room and finds any mistake.
RELATIVE = 3e-7
QUANTIZED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
random = np.random.default_rng(11)


def pack(layout: str, values: np.ndarray) -> np.ndarray:
    """float32 [rows, cols] -> uint8 [rows, row bytes]."""
    if layout == "f32":
        return values.view(np.uint8)
    kind = gguf.GGMLQuantizationType[layout.upper()]
    return np.ascontiguousarray(gguf.quantize(values, kind)).view(np.uint8)


def random_rows(layout: str, rows: int, cols: int) -> np.ndarray:
    """Packed rows; K formats, which nothing packs here, from bytes whose scales are moderate."""
    if layout not in ("q4_K", "q5_K", "q6_K"):
        return pack(layout, random.standard_normal((rows, cols), np.float32))
    kind = LAYOUTS[layout]
    packed = random.integers(0, 256, (rows, cols // 256, kind.block_nbytes), np.uint8)
    offsets = (208,) if layout == "q6_K" else (0, 2)
    for offset in offsets:
        scales = random.standard_normal((rows, cols // 256)).astype(np.float16)
        packed[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    return packed.reshape(rows, -1)


def matvec(
    layout: str, packed: np.ndarray, inputs: np.ndarray, first: int = 0, count: int | None = None
) -> np.ndarray:
    """float32 [inputs, rows] for rows [first, first + count) of packed weights."""
    rows = len(packed) - first if count is None else count
    cols = inputs.shape[1]
    stride = cols * 4
    if layout not in DIRECT_LAYOUTS:
        inputs = quantise(inputs)
        stride = inputs.shape[1]
    result = np.full((len(inputs), rows), np.nan, np.float32)
    scratch = np.zeros(EXPAND_AT + 4 * cols * 4, np.uint8)
    row_nbytes = packed.shape[1]
    MATVEC(matvec_address(layout))(
        LAYOUTS[layout].id,
        expand_row_address(layout),
        packed.ctypes.data + first * row_nbytes,
        row_nbytes,
        rows,
        cols,
        inputs.ctypes.data,
        stride,
        len(inputs),
        result.ctypes.data,
        rows * 4,
        scratch.ctypes.data,
    )
    return result


@njit
def call_quantise(x: int, cols: int, out: int) -> None:
    quantise_row(x, cols, out)


def quantise(inputs: np.ndarray) -> np.ndarray:
    """uint8 [inputs, quantised_nbytes]: what packed rows are multiplied with."""
    count, cols = inputs.shape
    result = np.zeros((count, quantised_nbytes(cols)), np.uint8)
    for row, out in zip(np.ascontiguousarray(inputs), result, strict=True):
        call_quantise(row.ctypes.data, cols, out.ctypes.data)
    return result


def rounded(inputs: np.ndarray) -> np.ndarray:
    """Inputs as their quantised form has them, float32."""
    count, cols = inputs.shape
    quantised = quantise(inputs)
    codes = quantised[:, :cols].view(np.int8).reshape(count, -1, 32)
    scales = quantised[:, cols : cols + cols // 8].copy().view(np.float32)
    return (codes * scales[..., None]).reshape(count, cols).astype(np.float32)


def expanded(layout: str, packed: np.ndarray, cols: int) -> np.ndarray:
    return expand_rows(layout, packed, len(packed), cols)


def assert_near_exact(
    result: np.ndarray, weights: np.ndarray, inputs: np.ndarray, relative: float = RELATIVE
) -> None:
    exact = inputs.astype(np.float64) @ weights.T.astype(np.float64)
    magnitude = np.abs(inputs).astype(np.float64) @ np.abs(weights).T.astype(np.float64)
    assert (np.abs(result - exact) <= relative * magnitude).all()


@pytest.mark.parametrize("layout", DIRECT_LAYOUTS)
@pytest.mark.parametrize("cols", [1, 3, 15, 16, 17, 64, 100, 576, 4096])
def test_direct_rows_of_any_length(layout: str, cols: int) -> None:
    packed = random_rows(layout, 7, cols)
    inputs = random.standard_normal((3, cols), np.float32)
    assert_near_exact(matvec(layout, packed, inputs), expanded(layout, packed, cols), inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_multiplies_what_it_expands_to(layout: str) -> None:
    """A packed row, times quantised inputs, is the row that it expands to times these."""
    cols = 768
    packed = random_rows(layout, 9, cols)
    inputs = random.standard_normal((5, cols), np.float32)
    rows = expanded(layout, packed, cols)
    result = matvec(layout, packed, inputs)
    if layout in DIRECT_LAYOUTS:
        assert_near_exact(result, rows, inputs)
    else:
        # An offset is multiplied apart from the bytes, so what cancels in the row does not here.
        assert_near_exact(result, rows, rounded(inputs), 3e-6)


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each not in DIRECT_LAYOUTS])
@pytest.mark.parametrize("scale", [0.0, 1e-7, 3e4])
def test_packed_rows_of_extreme_blocks(layout: str, scale: float) -> None:
    """All codes at their ends, scales from zero to large; odd numbers of rows and inputs."""
    kind, cols = LAYOUTS[layout], 512
    rows = 5
    blocks = rows * cols // kind.block_elements
    packed = random.choice(np.array([0, 255, 128, 127], np.uint8), (blocks, kind.block_nbytes))
    offsets = {"q8_0": (0,), "q4_0": (0,), "q5_0": (0,), "q6_K": (208,)}.get(layout, (0, 2))
    if layout == "mxfp4":  # one byte: the power of two below
        packed[:, 0] = 128 + int(np.floor(np.log2(scale))) if scale else 0
        offsets = ()
    for offset in offsets:
        packed[:, offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    packed = packed.reshape(rows, -1)
    inputs = random.standard_normal((3, cols), np.float32)
    inputs[0] = 0
    inputs[1, ::2] = 1e4
    found = matvec(layout, packed, inputs)
    exact = rounded(inputs).astype(np.float64) @ expanded(layout, packed, cols).T
    # the parts that are summed: bytes times scale, and the offset, before they cancel
    magnitude = np.abs(rounded(inputs)).sum(axis=1)[:, None] * scale * 64 * 127
    assert (np.abs(found - exact) <= 3e-6 * magnitude + 1e-12).all()
    assert (found[0] == 0).all()


def test_inputs_are_quantised_to_the_nearest_of_255_steps() -> None:
    inputs = random.standard_normal((2, 96), np.float32)
    inputs[1, 32:64] = 0
    largest = np.abs(inputs.reshape(2, 3, 32)).max(axis=2, keepdims=True)
    error = np.abs(rounded(inputs) - inputs).reshape(2, 3, 32)
    assert (error <= largest / 254 * 1.0001).all()
    sums = quantise(inputs)[:, 96 + 12 : 96 + 24].copy().view(np.float32)
    assert np.allclose(sums, rounded(inputs).reshape(2, 3, 32).sum(axis=2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["vnni", "avx2", "plain"])
def test_all_ways_of_summing_bytes_give_the_same_bits(how: str) -> None:
    """Each in a process of its own: the choice is made when code is generated."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_dots, hashlib, numpy as np;"
        "test_dots.random = np.random.default_rng(3);"
        "x = test_dots.random.standard_normal((3, 512), np.float32);"
        "print(hashlib.sha256(b''.join(test_dots.matvec(each, test_dots.random_rows(each, 5, 512),"
        " x).tobytes() for each in test_dots.LAYOUTS)).hexdigest())"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    here = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    environment = {**os.environ, "SHADOWLANE_DOT": how}
    there = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if "SHADOWLANE_DOT must be one of" in there.stderr:
        pytest.skip(f"this processor cannot run {how}")
    assert there.stdout == here != ""


@pytest.mark.parametrize("layout", [*DIRECT_LAYOUTS, "q8_0", "q4_K", "mxfp4"])
def test_the_same_bits_for_any_batch(layout: str) -> None:
    cols = 203 if layout in DIRECT_LAYOUTS else 256 * 3
    packed = random_rows(layout, 13, cols)
    inputs = random.standard_normal((8, cols), np.float32)
    alone = np.concatenate([matvec(layout, packed, each[None]) for each in inputs])
    for batch in range(1, 9):
        for first in range(0, 9 - batch):
            together = matvec(layout, packed, inputs[first : first + batch])
            assert np.array_equal(together, alone[first : first + batch])


@pytest.mark.parametrize("layout", [*DIRECT_LAYOUTS, "q8_0", "q4_K"])
def test_the_same_bits_for_any_cut(layout: str) -> None:
    cols = 512 if layout in ("q8_0", "q4_K") else 77
    packed = random_rows(layout, 21, cols)
    inputs = random.standard_normal((3, cols), np.float32)
    whole = matvec(layout, packed, inputs)
    for height in range(1, 21):
        for first in range(0, 21, height):
            count = min(height, 21 - first)
            part = matvec(layout, packed, inputs, first, count)
            assert np.array_equal(part, whole[:, first : first + count])


def test_the_same_bits_at_any_address() -> None:
    """Weights begin wherever their file has them."""
    cols = 200
    packed = random_rows("bf16", 6, cols)
    inputs = random.standard_normal((2, cols), np.float32)
    expected = matvec("bf16", packed, inputs)
    room = np.zeros(packed.size + 64, np.uint8)
    for shift in (1, 2, 7, 33):
        room[shift : shift + packed.size] = packed.ravel()
        moved = room[shift : shift + packed.size].reshape(packed.shape)
        assert np.array_equal(matvec("bf16", moved, inputs), expected)


def test_the_order_of_additions_is_the_documented_one() -> None:
    """Lane i adds i, i + 16, ...; then halves to halves; then the rest one by one.

    Products of small whole numbers are exact, fused or not, so the order alone decides the bits.
    """
    cols = 16 * 9 + 5
    weights = random.integers(-3000, 3000, (4, cols)).astype(np.float32)
    inputs = random.integers(-1000, 1000, (2, cols)).astype(np.float32)
    result = matvec("f32", pack("f32", weights), inputs)
    whole = cols // LANES * LANES
    for row, weight in enumerate(weights):
        for index, values in enumerate(inputs):
            products = weight * values  # exact: below 2**24
            lanes = np.zeros(LANES, np.float32)
            for first in range(0, whole, LANES):
                lanes = lanes + products[first : first + LANES]
            while len(lanes) > 1:
                lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
            total = lanes[0]
            for product in products[whole:]:
                total = np.float32(total + product)
            assert result[index, row] == total


def test_not_a_number_is_never_hidden() -> None:
    weights = random.standard_normal((5, 40), np.float32)
    for place in (0, 17, 39):
        inputs = random.standard_normal((1, 40), np.float32)
        inputs[0, place] = np.nan
        assert np.isnan(matvec("f32", pack("f32", weights), inputs)).all()
