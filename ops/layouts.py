"""How the bytes of a block are to be read: one `Layout` per number format of a weight file.

Packed formats keep their name and their bytes in every tier. Sizes are those of ggml
(`ggml-common.h`) and of safetensors. `id` is what a lowered table carries, so it never changes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    name: str
    id: int
    block_elements: int  # elements that are packed together; a row holds a whole number of these
    block_nbytes: int  # bytes of one such packed block

    def row_nbytes(self, cols: int) -> int:
        """Bytes of one row of `cols` elements; ValueError if no whole number of blocks."""
        if cols % self.block_elements:
            raise ValueError(
                f"a {self.name} row must hold a multiple of {self.block_elements} elements; "
                f"got {cols}"
            )
        return cols // self.block_elements * self.block_nbytes


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("f32", 0, 1, 4),
        Layout("f16", 1, 1, 2),
        Layout("bf16", 2, 1, 2),
        Layout("q8_0", 3, 32, 34),
        Layout("q4_0", 4, 32, 18),
        Layout("q4_1", 5, 32, 20),
        Layout("q5_0", 6, 32, 22),
        Layout("q5_1", 7, 32, 24),
        Layout("q4_K", 8, 256, 144),
        Layout("q5_K", 9, 256, 176),
        Layout("q6_K", 10, 256, 210),
        Layout("mxfp4", 11, 32, 17),
    )
}


def quantised_nbytes(cols: int) -> int:
    """Bytes of one activation row in the form that packed weights are multiplied with.

    Signed bytes, and per 32 of them a float32 scale and a float32 sum; whole cache lines.
    """
    groups = -(-cols // 32)
    return -(-groups * 40 // 64) * 64
