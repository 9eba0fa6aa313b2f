"""The kernels of a decode row against plain float64, with the tolerances they promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numba import types
from numba.extending import intrinsic

from shadowlane.ops import rows
from shadowlane.ops.compiled import njit
from shadowlane.ops.kernels import rms_norm, rope_angles, rotate, weighted_sum
from shadowlane.ops.layouts import LAYOUTS

random = np.random.default_rng(5)
EPSILON = 2.0**-24  # half a unit in the last place of float32, relative
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@intrinsic
def _exp_row(typingctx: Any, x: Any, out: Any, count: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, out, count = args

        def lanes(kind: Any, at: Any) -> None:
            power = rows.exp(builder, kind, rows.load(builder, kind, "f32", x, at))
            rows.store(builder, kind, "f32", power, out, at)

        rows.for_lanes(builder, count, lanes)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit
def call_exp(x: int, out: int, count: int) -> None:
    _exp_row(x, out, count)


@njit
def call_silu(gate: int, up: int, out: int, count: int) -> None:
    rows.silu_row(0, gate, up, 0, 0, out, count)


@njit
def call_soften(scores: int, count: int) -> float:
    return rows.soften(scores, count)


@njit
def call_convert(x: int, layout: int, out: int, count: int) -> None:
    rows.convert_row(layout, x, out, count)


@njit
def call_finish(layout: int, x: int, bias: int, adds: int, out: int, count: int) -> None:
    rows.finish_row(layout, x, bias, adds, out, count)


def fill_exp(x: np.ndarray, out: np.ndarray) -> None:
    call_exp(x.ctypes.data, out.ctypes.data, len(x))


def fill_silu(x: np.ndarray, out: np.ndarray) -> None:
    ones = np.ones_like(x)
    call_silu(x.ctypes.data, ones.ctypes.data, out.ctypes.data, len(x))


def assert_near(found: np.ndarray, exact: np.ndarray, relative: float, absolute: float = 0) -> None:
    """|found - exact| <= relative * |exact| + absolute, everywhere."""
    error = np.abs(found.astype(np.float64) - exact)
    allowed = relative * np.abs(exact) + absolute
    worst = int(np.argmax(error - allowed))
    assert (error <= allowed).all(), f"{found.flat[worst]} should be {exact.flat[worst]}"


def rounded(values: np.ndarray, layout: str) -> np.ndarray:
    """float32 -> bytes of a direct layout, by torch."""
    return torch.from_numpy(values).to(TYPES[layout]).view(torch.uint8).numpy()


def half_width(values: np.ndarray, layout: str) -> np.ndarray:
    """Bytes of a direct layout -> float32."""
    return torch.from_numpy(values).view(TYPES[layout]).float().numpy()


def nbytes_of(layout: str) -> int:
    return 4 if layout == "f32" else 2


def test_exp_is_within_two_units() -> None:
    x = np.concatenate(
        [np.linspace(-87.2, 88.0, 200_001), random.uniform(-1, 1, 50_000), [0.0, -0.0, 1e-30]]
    ).astype(np.float32)
    found = np.empty_like(x)
    fill_exp(x, found)
    assert_near(found, np.exp(x.astype(np.float64)), 4 * EPSILON)
    assert found[x == 0].tolist() == [1.0, 1.0]


def test_exp_of_very_small_numbers_is_almost_nothing() -> None:
    x = np.array([-87.3, -88, -1000, -1e30, -np.inf], np.float32)
    found = np.empty_like(x)
    fill_exp(x, found)
    assert (found >= 0).all()
    assert (found < 1.3e-38).all()


def test_silu() -> None:
    x = np.concatenate(
        [np.linspace(-80, 80, 100_001), random.standard_normal(10_000), [0.0, 1000.0]]
    ).astype(np.float32)
    found = np.empty_like(x)
    fill_silu(x, found)
    exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    assert_near(found, exact, 8 * EPSILON)
    edges = np.array([-100.0, np.inf, np.nan, -1e4], np.float32)
    found = np.empty_like(edges)
    fill_silu(edges, found)
    assert found[1] == np.inf
    assert np.isnan(found[2])
    assert (np.abs(found[[0, 3]]) < 1e-30).all()


@pytest.mark.parametrize("layout", TYPES)
@pytest.mark.parametrize("cols", [1, 16, 24, 67, 576])
def test_rms_norm(layout: str, cols: int) -> None:
    x = random.standard_normal(cols).astype(np.float32) * 3
    weight = random.standard_normal(cols).astype(np.float32)
    out = np.zeros(cols * nbytes_of(layout), np.uint8)
    scratch = np.zeros(1, np.float32)
    eps = np.float32(1e-5)
    rms_norm(
        x.ctypes.data,
        weight.ctypes.data,
        LAYOUTS[layout].id,
        out.ctypes.data,
        cols,
        eps,
        scratch.ctypes.data,
    )
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean() + float(eps)) * weight
    step = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}[layout]
    assert_near(half_width(out, layout), exact, step + 8 * EPSILON, absolute=1e-7)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("layout", TYPES)
def test_rotate_pairs_halves_or_neighbours(interleaved: int, layout: str) -> None:
    dim = 24
    x = random.standard_normal(dim).astype(np.float32)
    angles = random.uniform(-3, 3, dim // 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    out = np.zeros(dim * nbytes_of(layout), np.uint8)
    factor = np.float32(0.25)
    rotate(
        x.ctypes.data,
        cos.ctypes.data,
        sin.ctypes.data,
        dim,
        interleaved,
        factor,
        LAYOUTS[layout].id,
        out.ctypes.data,
    )
    pairs = x.reshape(-1, 2) if interleaved else x.reshape(2, -1).T
    turned = (pairs[:, 0] + 1j * pairs[:, 1]) * np.exp(1j * angles) * 0.25
    exact = np.stack([turned.real, turned.imag], axis=1)
    exact = exact.ravel() if interleaved else exact.T.ravel()
    step = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}[layout]
    assert_near(half_width(out, layout), exact, step, absolute=3e-7)


@pytest.mark.parametrize("position", [0, 1, 4095, 131_071])
def test_rope_angles(position: int) -> None:
    inv_freq = (10_000.0 ** -np.linspace(0, 1, 16, endpoint=False)).astype(np.float32)
    cos, sin = np.zeros(16, np.float32), np.zeros(16, np.float32)
    scaling = np.float32(1.25)
    rope_angles(
        position, inv_freq.ctypes.data, scaling, cos.ctypes.data, sin.ctypes.data, len(inv_freq)
    )
    # the product is taken in float32, as transformers does; its cosine is then exact
    angles = (np.float32(position) * inv_freq).astype(np.float64)
    assert_near(cos, 1.25 * np.cos(angles), 4 * EPSILON, absolute=2e-7)
    assert_near(sin, 1.25 * np.sin(angles), 4 * EPSILON, absolute=2e-7)


@pytest.mark.parametrize("layout", TYPES)
def test_elements_are_rounded_to_nearest_even(layout: str) -> None:
    bits = random.integers(0, 2**32, 100_000, np.uint32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.9, 65520, 1e-8, 6e-8, -3e-5, 3e38]
    ties = np.array([0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000], np.uint32).view(np.float32)
    x = np.concatenate([bits.view(np.float32), np.array(special, np.float32), ties])
    out = np.zeros(len(x) * nbytes_of(layout), np.uint8)
    call_convert(x.ctypes.data, LAYOUTS[layout].id, out.ctypes.data, len(x))
    expected = half_width(rounded(x, layout), layout)
    found = half_width(out, layout)
    is_nan = np.isnan(x)
    assert np.isnan(found[is_nan]).all()
    assert np.array_equal(found[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("count", [1, 2, 31, 500])
def test_soften(count: int) -> None:
    scores = random.standard_normal(count).astype(np.float32) * 6
    found = scores.copy()
    total = call_soften(found.ctypes.data, count)
    exact = np.exp((scores - scores.max()).astype(np.float64))  # the difference is of float32
    assert_near(found, exact, 4 * EPSILON, absolute=1e-37)
    assert math.isclose(total, exact.sum(), rel_tol=1e-5)
    assert found.max() == 1.0


@pytest.mark.parametrize("layout", TYPES)
@pytest.mark.parametrize("cols", [8, 16, 24, 80, 144])
@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 7])
def test_weighted_sum_may_be_cut_anywhere(layout: str, cols: int, inputs: int) -> None:
    count = 37
    values = random.standard_normal((count, cols)).astype(np.float32)
    packed = rounded(values, layout).reshape(count, -1)
    factors = random.uniform(0, 1, (inputs, count)).astype(np.float32)

    def add(first: int, last: int, out: np.ndarray, at: int = 0, many: int = inputs) -> None:
        weighted_sum(
            LAYOUTS[layout].id,
            packed.ctypes.data + first * packed.shape[1],
            packed.shape[1],
            last - first,
            cols,
            factors[at:].ctypes.data + 4 * first,
            4 * count,
            many,
            out.ctypes.data,
        )

    whole = np.zeros((inputs, cols), np.float32)
    add(0, count, whole)
    wide = half_width(packed.ravel(), layout).reshape(count, cols).astype(np.float64)
    exact = factors.astype(np.float64) @ wide
    magnitude = factors.astype(np.float64) @ np.abs(wide)
    assert (np.abs(whole - exact) <= 40 * EPSILON * magnitude).all()
    for cut in (1, 7, 32, 36):
        parts = np.zeros((inputs, cols), np.float32)
        add(0, cut, parts)
        add(cut, count, parts)
        assert np.array_equal(parts, whole)
    for index in range(inputs):  # nor does it matter how many inputs go together
        alone = np.zeros((1, cols), np.float32)
        add(0, count, alone, index, 1)
        assert np.array_equal(alone[0], whole[index])


@pytest.mark.parametrize("layout", TYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("adds", [0, 1])
def test_finish_row(layout: str, has_bias: bool, adds: int) -> None:
    values = random.standard_normal(45).astype(np.float32)
    packed = rounded(values, layout)
    bias = random.standard_normal(45).astype(np.float32)
    out = random.standard_normal(45).astype(np.float32)
    expected = half_width(packed, layout) + (bias if has_bias else 0) + (out if adds else 0)
    address = bias.ctypes.data if has_bias else 0
    call_finish(LAYOUTS[layout].id, packed.ctypes.data, address, adds, out.ctypes.data, 45)
    assert np.array_equal(out, expected.astype(np.float32))
