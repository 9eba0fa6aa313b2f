"""Every layout expands to the very bits of the reference, whatever the block holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from numba import types

from shadowlane.ops.compiled import cfunc
from shadowlane.ops.expand import expand_row_address, expand_rows
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.vectors import (
    _conversion,
    _half_by_integers,
    has_half_instruction,
    load_u16,
    store_f32,
)

# Where the half-precision scales of a block lie.
SCALE_OFFSETS = {
    "f16": (0,),
    "q8_0": (0,),
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q4_K": (0, 2),
    "q5_K": (0, 2),
    "q6_K": (208,),
}
SPECIAL_HALVES = np.array(
    [
        0x0000,  # zero
        0x8000,  # minus zero
        0x0001,  # the smallest subnormal
        0x83FF,  # the largest subnormal, negative
        0x0400,  # the smallest normal number
        0x3C01,  # a little more than one
        0x7BFF,  # the largest
        0xFBFF,
        0x7C00,  # infinity
        0xFC00,
        0x7E00,  # not a number
        0x7C01,  # a signalling one
    ],
    np.uint16,
)


def reference(layout: str, packed: np.ndarray, num_rows: int) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[layout.upper()]
    with np.errstate(all="ignore"):
        return gguf.dequantize(packed.copy().reshape(num_rows, -1), kind)


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, the sign of zeros too; a NaN equals any NaN, as its bits are the processor's."""
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])


def random_rows(layout: str, num_rows: int, cols: int, skew: int = 0) -> np.ndarray:
    """Random bytes that begin `skew` bytes behind an aligned address."""
    nbytes = num_rows * LAYOUTS[layout].row_nbytes(cols)
    random = np.random.default_rng(LAYOUTS[layout].id)
    return random.integers(0, 256, nbytes + 64, dtype=np.uint8)[skew : skew + nbytes]


@pytest.mark.parametrize("skew", [0, 1, 3, 6])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_blocks_at_any_address(layout: str, skew: int) -> None:
    packed = random_rows(layout, 24, 512, skew)
    assert_same_bits(expand_rows(layout, packed, 24, 512), reference(layout, packed, 24))


@pytest.mark.parametrize("layout", SCALE_OFFSETS)
def test_special_scales_with_extreme_codes(layout: str) -> None:
    shape = LAYOUTS[layout]
    scales = len(SPECIAL_HALVES)
    # all bytes 0, all 255, nibbles of 0 and 15, then random ones; each with each pair of scales
    blocks = np.zeros((4, scales, scales, shape.block_nbytes), np.uint8)
    blocks[1], blocks[2] = 255, 0x0F
    blocks[3] = np.random.default_rng(5).integers(0, 256, blocks[3].shape)
    offsets = SCALE_OFFSETS[layout]
    blocks[..., offsets[0] : offsets[0] + 2] = SPECIAL_HALVES.view(np.uint8).reshape(scales, 1, 2)
    if len(offsets) == 2:
        blocks[..., offsets[1] : offsets[1] + 2] = SPECIAL_HALVES.view(np.uint8).reshape(scales, 2)
    packed = blocks.reshape(-1)
    num_blocks = packed.size // shape.block_nbytes
    found = expand_rows(layout, packed, num_blocks, shape.block_elements)
    assert_same_bits(found, reference(layout, packed, num_blocks))


def test_every_power_of_two_times_every_code() -> None:
    """mxfp4: exponents 0 and 1 are subnormal, 255 is a number; codes 0 to 15 in both halves."""
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) | np.arange(16)[::-1] << 4
    with np.errstate(all="ignore"):
        expected = reference("mxfp4", blocks, 256)
    assert expected[0, 1] == 2.0**-128
    assert expected[254, 1] == 2.0**126
    assert np.isinf(expected[255, 4])
    assert_same_bits(expand_rows("mxfp4", blocks.reshape(-1), 256, 32), expected)


@pytest.mark.parametrize("layout", ["f16", "bf16"])
def test_every_number_of_sixteen_bits(layout: str) -> None:
    packed = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    found = expand_rows(layout, packed, 1, 1 << 16)
    assert_same_bits(found, reference(layout, packed, 1))


def test_halves_without_the_instruction_of_the_processor() -> None:
    """Processors that cannot convert halves go by integers: the same bits."""
    by_integers = _conversion(types.uint16, types.float32, _half_by_integers, "")

    @cfunc(types.void(types.int64, types.int64, types.int64))
    def expand(source: int, destination: int, num_elements: int) -> None:
        for element in range(num_elements):
            store_f32(destination + 4 * element, by_integers(load_u16(source + 2 * element)))

    halves = np.arange(1 << 16, dtype=np.uint16)
    found = np.empty(1 << 16, np.float32)
    expand.ctypes(halves.ctypes.data, found.ctypes.data, halves.size)
    with np.errstate(invalid="ignore"):
        assert_same_bits(found, halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("layout", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("cols", [1, 15, 16, 17, 33])
def test_rows_of_plain_elements_may_have_any_length(layout: str, cols: int) -> None:
    packed = random_rows(layout, 1, cols)
    assert_same_bits(expand_rows(layout, packed, 1, cols), reference(layout, packed, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_written_outside_the_row(layout: str) -> None:
    cols = max(LAYOUTS[layout].block_elements, 17)
    packed = random_rows(layout, 1, cols)
    guarded = np.full(cols + 64, -7.0, np.float32)
    expand_rows(layout, packed, 1, cols, out=guarded[32 : 32 + cols].reshape(1, cols))
    assert (guarded[:32] == -7).all()
    assert (guarded[32 + cols :] == -7).all()
    assert_same_bits(guarded[32 : 32 + cols].reshape(1, cols), reference(layout, packed, 1))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32 elements; got 40"):
        expand_rows("q8_0", np.zeros(34, np.uint8), 1, 40)
    with pytest.raises(ValueError, match="must be contiguous uint8 of 68 bytes"):
        expand_rows("q8_0", np.zeros(34, np.uint8), 2, 32)
    with pytest.raises(ValueError, match=r"out must be contiguous float32 \[1, 32\]"):
        expand_rows("q8_0", np.zeros(34, np.uint8), 1, 32, out=np.zeros((1, 32)))
    with pytest.raises(KeyError):
        expand_row_address("q2_K")


def test_the_half_instruction_is_used_where_the_processor_has_it() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "flags" not in cpuinfo.read_text():
        pytest.skip("no list of processor flags to compare with")
    assert has_half_instruction() == (" f16c " in cpuinfo.read_text())


COMPILE_AND_REPORT = """
import json
from shadowlane.ops import compiled, expand
address = expand.expand_row_address("q4_1")
hits = expand._compiled("q4_1").cache_hits
print(json.dumps([str(compiled.compiled_code_directory()), hits]))
"""


def test_code_is_kept_in_the_users_cache_and_found_again(tmp_path: Path) -> None:
    def compile_once(**changes: str) -> tuple[Path, int]:
        environment = {**os.environ, "SHADOWLANE_CACHE": str(tmp_path / "cache"), **changes}
        done = subprocess.run(
            [sys.executable, "-c", COMPILE_AND_REPORT, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        directory, hits = json.loads(done.stdout)
        return Path(directory), hits

    directory, hits = compile_once()
    assert directory.parent == tmp_path / "cache" / "numba"
    assert hits == 0
    assert list(directory.rglob("*.nbc"))
    assert compile_once() == (directory, 1)
    # another processor has a folder of its own
    other, hits = compile_once(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert other != directory
    assert hits == 0


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    environment = {**os.environ, "SHADOWLANE_CACHE": str(tmp_path / "file")}
    subprocess.run(
        [sys.executable, "-c", COMPILE_AND_REPORT, str(tmp_path)],
        capture_output=True,
        check=True,
        env=environment,
    )
    assert (tmp_path / "file").read_text() == "in the way"
