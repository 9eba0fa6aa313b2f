"""Where what stays lives in the arena: a first-fit allocator of whole pages."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Sizes(Protocol):
    """Bytes by key: a list, where keys are numbers."""

    def __getitem__(self, key: Any, /) -> int: ...


class Homes(Generic[Key]):
    """Block, routed expert, or heads of a card -> offset of its enclosing range.

    Space is free until it is taken, and again after the last placement that needs it is gone.
    """

    def __init__(self, start: int, nbytes: int, sizes: Sizes) -> None:
        """sizes: bytes that each takes up, by its number."""
        self._sizes = sizes
        self._free = [(start, start + nbytes)] if nbytes else []  # by rising start, never touching
        self.offsets: dict[Key, int] = {}

    def take(self, blocks: Iterable[Key]) -> dict[Key, int]:
        """Homes for blocks that have none yet; {} and nothing taken if they do not all fit."""
        new = [block for block in blocks if block not in self.offsets]
        taken: dict[Key, int] = {}
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

    def drop(self, blocks: Iterable[Key]) -> list[tuple[int, int]]:
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
