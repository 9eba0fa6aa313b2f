"""Keys and values that a card holds, on their way to the arena and back between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shadowlane.actors.arena import Arena, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.held_heads import Heads, page_nbytes
from shadowlane.ops.card.cache import KvCache


@dataclass(frozen=True, slots=True)
class CardHeads:
    """Its methods start work on torch's current stream. memory: all of the card's."""

    blueprint: Blueprint
    layout: ArenaLayout
    arena: Arena
    cache: KvCache
    memory: torch.Tensor

    def leave(self, layers: Sequence[int], pages: Sequence[int]) -> None:
        """Copy what the card has cached of these layers, in these pages, to the arena."""
        if not pages:
            return
        numbers = np.array(pages, np.int64)
        places = torch.as_tensor(numbers, device=self.memory.device)
        for layer in layers:
            held = self.cache.layers[layer]
            theirs = self._in_ram(layer)[:, :, held.first : held.last]
            theirs[numbers] = self.cache.read_pages(layer, places).cpu().numpy()

    def take(
        self, dropped: Sequence[int], heads: Mapping[Heads, int | None], pages: Sequence[int]
    ) -> None:
        """Hold these heads from now on, with what the arena has cached of them in these pages.

        dropped: layers whose heads the card has no more; heads: where each lies on the card, None:
        in memory beside its budget, which has no piece that is large enough.
        """
        for layer in [*dropped, *(each.layer for each in heads)]:
            self.cache.layers.pop(layer, None)
        self.hold(heads)
        if not pages:
            return
        numbers = np.array(pages, np.int64)
        places = torch.as_tensor(numbers, device=self.memory.device)
        for each in heads:
            theirs = self._in_ram(each.layer)[numbers, :, each.first : each.last]
            cached = torch.from_numpy(np.ascontiguousarray(theirs)).to(self.memory.device)
            self.cache.write_pages(each.layer, places, cached)

    def hold(self, heads: Mapping[Heads, int | None]) -> None:
        """Hold these heads, of which nothing is cached yet."""
        for each, home in heads.items():
            nbytes = self.cache.nbytes(each.last - each.first)
            if home is None:
                where = torch.empty(nbytes, dtype=torch.uint8, device=self.memory.device)
            else:
                where = self.memory[home : home + nbytes]
            self.cache.hold_in(*each, where)

    def _in_ram(self, layer: int) -> np.ndarray:
        """A layer's pages in the arena: uint8 [pages, keys or values, heads, page bytes]."""
        head_nbytes = page_nbytes(self.blueprint) // 2
        heads, pages = self.blueprint.config.num_kv_heads, self.layout.num_pages
        at = self.layout.kv + layer * pages * 2 * heads * head_nbytes
        return self.arena.view(at, np.uint8, pages, 2, heads, head_nbytes)
