"""Bytes of a file that are read together."""

from __future__ import annotations

from dataclasses import dataclass

from shadowlane.planner.placement import PAGE_NBYTES


@dataclass(frozen=True, slots=True)
class FileRange:
    """What `ModelFile.read_block` needs to know. Direct reads bring whole 4 KiB pages."""

    path: str
    offset: int  # of the first byte wanted
    nbytes: int

    @property
    def skew(self) -> int:
        """Bytes from the start of the enclosing 4 KiB range to what is wanted."""
        return self.offset % PAGE_NBYTES

    @property
    def held_nbytes(self) -> int:
        """Size of the enclosing 4 KiB range: what a direct read transfers."""
        return -(-(self.skew + self.nbytes) // PAGE_NBYTES) * PAGE_NBYTES
