"""From the bytes of a weight file to float32 in plain torch, on any device.

What `ops/expand.py` does on the processor, bit for bit: product and sum are rounded one after the
other. It serves products of many rows (expand, then multiply), embedding rows, and devices for
which there is no Triton. Nothing here looks at values, so all of it may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from shadowlane.ops.layouts import LAYOUTS

DIRECT: Final = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""Layouts whose bytes are numbers that torch knows."""


def expand(layout: str, packed: torch.Tensor, cols: int) -> torch.Tensor:
    """Rows of a weight file as float32 [rows, cols].

    packed: uint8 [rows, row bytes], contiguous within a row, at any address. Raises ValueError
    where a row does not have the bytes that `cols` elements take, KeyError for unknown layouts.
    """
    nbytes = LAYOUTS[layout].row_nbytes(cols)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != nbytes:
        raise ValueError(
            f"packed must be uint8 [rows, {nbytes}] for {cols} columns of {layout}; "
            f"got {packed.dtype} {list(packed.shape)}"
        )
    if layout in DIRECT:
        return direct_rows(layout, packed).float()
    blocks = packed.reshape(-1, LAYOUTS[layout].block_nbytes)
    return _EXPANSIONS[layout](blocks).reshape(packed.shape[0], cols)


def direct_rows(layout: str, packed: torch.Tensor) -> torch.Tensor:
    """Rows of a direct layout as numbers, [rows, cols]: a view, or a copy from an odd address."""
    kind = DIRECT[layout]
    if packed.data_ptr() % kind.itemsize or not packed.is_contiguous():
        packed = packed.clone(memory_format=torch.contiguous_format)
    return packed.view(kind)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The half at byte `at` of each block, float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _signed(codes: torch.Tensor, zero: int) -> torch.Tensor:
    """Codes 0..255 less what stands for zero, as float32."""
    return codes.to(torch.int16).sub_(zero).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, n] bytes -> [blocks, 2 n] codes: all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, n] bytes -> [blocks, 8 n] bits, the lowest of each byte first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1)


# Blocks of 32 ------------------------------------------------------------------------------------


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = blocks[:, 2:].contiguous().view(torch.int8)
    return codes.float() * _half(blocks, 0)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _signed(_nibbles(blocks[:, 2:]), 8) * _half(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return _signed(codes, 16) * _half(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return codes.float() * _half(blocks, 0) + _half(blocks, 2)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """A power of two, then small floats, which stand doubled here: 0 1 2 3 4 6 8 12 and below."""
    codes = _nibbles(blocks[:, 1:]).to(torch.int32)
    size = codes & 7
    doubled = torch.where(size < 2, size, (2 + (size & 1)) << ((size >> 1) - 1).clamp(min=0))
    exponent = blocks[:, :1].to(torch.int32)
    bits = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return torch.where(codes < 8, doubled, -doubled).float() * bits.view(torch.float32)


# Blocks of 256: scales of the scales -------------------------------------------------------------


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes per block -> 8 scales and 8 minima of six bits, float32 [blocks, 8]."""
    first, second, shared = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (shared & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (shared >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.float(), minima.float()


def _parts(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """codes: [blocks, 8 parts, 32]; scaled as q4_K and q5_K are."""
    scales, minima = _six_bits(blocks[:, 4:16])
    scales, minima = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return codes.float() * scales[:, :, None] - minima[:, :, None]


def _pairs_of_parts(nibbles: torch.Tensor) -> torch.Tensor:
    """[blocks, 128] -> [blocks, 8, 32]: 32 bytes are one part low and the next part high."""
    rows = nibbles.view(-1, 4, 1, 32)
    return torch.cat((rows & 15, rows >> 4), dim=2).flatten(1, 2)


def _q4_K(blocks: torch.Tensor) -> torch.Tensor:
    return _parts(blocks, _pairs_of_parts(blocks[:, 16:].contiguous()))


def _q5_K(blocks: torch.Tensor) -> torch.Tensor:
    part = torch.arange(8, dtype=torch.uint8, device=blocks.device)[None, :, None]
    fifth = (blocks[:, None, 16:48] >> part) & 1
    return _parts(blocks, _pairs_of_parts(blocks[:, 48:].contiguous()) | (fifth << 4))


def _q6_K(blocks: torch.Tensor) -> torch.Tensor:
    low = blocks[:, :128].reshape(-1, 2, 1, 2, 32)  # half, nibble, which 32 bytes
    low = torch.cat((low & 15, low >> 4), dim=2).reshape(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    upper = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    codes = _signed(low | (upper << 4), 32).reshape(-1, 16, 16)
    return codes * scales[:, :, None]


_EXPANSIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_K": _q4_K,
    "q5_K": _q5_K,
    "q6_K": _q6_K,
    "mxfp4": _mxfp4,
}


def pack_q8_0(values: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] in blocks of q8_0, uint8 [..., n / 32 * 34]: for keys and values."""
    groups = values.unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = 127.0 / torch.where(largest == 0, 1.0, largest)
    codes = (groups * inverse).round().to(torch.int8).view(torch.uint8)
    scales = (largest / 127.0).to(torch.float16).view(torch.uint8)
    return torch.cat((scales, codes), dim=-1).flatten(-2)
