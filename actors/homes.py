"""Where what stays lives in the arena: a first-fit allocator of whole pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Homes:
    """Block, or routed expert, -> arena offset of its enclosing range. Space is free until it is
    taken, and again after the last placement that needs it is gone."""

    def __init__(self, start: int, nbytes: int, sizes: Sequence[int]) -> None:
        """sizes: bytes that each takes up, by its number."""
        self._sizes = sizes
        self._free = [(start, start + nbytes)] if nbytes else []  # by rising start, never touching
        self.offsets: dict[int, int] = {}

    def take(self, blocks: Iterable[int]) -> dict[int, int]:
        """Homes for blocks that have none yet; {} and nothing taken if they do not all fit."""
        new = [block for block in blocks if block not in self.offsets]
        taken: dict[int, int] = {}
        for block in new:
            need = self._sizes[block]
            for index, (start, end) in enumerate(self._free):
                if end - start >= need:
                    taken[block] = start
                    if end - start == need:
                        del self._free[index]
                    else:
                        self._free[index] = (start + need, end)
                    break
            else:
                for undone, offset in taken.items():
                    self._give_back(offset, self._sizes[undone])
                return {}
        self.offsets.update(taken)
        return taken

    def drop(self, blocks: Iterable[int]) -> list[tuple[int, int]]:
        """Free the homes of these blocks; returns their (offset, nbytes)."""
        dropped = []
        for block in blocks:
            offset = self.offsets.pop(block)
            nbytes = self._sizes[block]
            self._give_back(offset, nbytes)
            dropped.append((offset, nbytes))
        return dropped

    def _give_back(self, offset: int, nbytes: int) -> None:
        ranges = sorted([*self._free, (offset, offset + nbytes)])
        merged: list[tuple[int, int]] = []
        for start, end in ranges:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged
