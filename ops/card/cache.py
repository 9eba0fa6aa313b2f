"""The KV cache of a card: pages of the layers and KV heads that it holds, and of no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from shadowlane.ops.card.packed_torch import DIRECT, expand, pack_q8_0
from shadowlane.ops.layouts import LAYOUTS

Allocate = Callable[[int], torch.Tensor]
"""So many bytes of device memory, uint8 [nbytes], at an address that is a multiple of 16."""


@dataclass(frozen=True, slots=True)
class HeldHeads:
    """KV heads first..last of a layer."""

    first: int
    last: int
    # [pages + 1, keys or values, heads, page tokens, a row], of the cache's type
    pages: torch.Tensor


class KvCache:
    """Keys and values by layer, page and head; a page of one head lies as it does in the arena.

    There is one page more than is asked for, number `spare`: rows that pad a step write there.
    """

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        head_dim: int,
        layout: str,
        device: torch.device,
        allocate: Allocate | None = None,
    ) -> None:
        """layout: f32, f16, bf16 or q8_0. Raises ValueError where heads do not fit it."""
        if layout not in (*DIRECT, "q8_0"):
            raise ValueError(f"kv layout must be f32, f16, bf16 or q8_0; got {layout!r}")
        self._row_nbytes = LAYOUTS[layout].row_nbytes(head_dim)
        self._num_pages, self._head_dim, self._device = num_pages, head_dim, device
        self._allocate = allocate
        self.page_tokens, self.layout = page_tokens, layout
        self.layers: dict[int, HeldHeads] = {}

    @property
    def spare(self) -> int:
        """Number of the page that belongs to no sequence."""
        return self._num_pages

    def nbytes(self, heads: int) -> int:
        """Of so many heads of one layer."""
        return (self._num_pages + 1) * 2 * heads * self.page_tokens * self._row_nbytes

    def hold(self, held: Mapping[int, tuple[int, int]]) -> None:
        """Hold KV heads [first, last) of these layers from now on; what they held is forgotten."""
        for layer, (first, last) in held.items():
            self.layers.pop(layer, None)
            if last <= first:
                continue
            nbytes = self.nbytes(last - first)
            self.hold_in(
                layer,
                first,
                last,
                torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                if self._allocate is None
                else self._allocate(nbytes),
            )

    def hold_in(self, layer: int, first: int, last: int, memory: torch.Tensor) -> None:
        """Hold KV heads [first, last) of a layer in this memory, as `Allocate` gives it."""
        # NOTE: what no token has written takes part in sums with weight 0, so it must be finite
        memory.zero_()
        shape = (self._num_pages + 1, 2, last - first, self.page_tokens, self._row_nbytes)
        pages = memory.view(shape)
        if self.layout in DIRECT:
            pages = pages.view(DIRECT[self.layout])
        self.layers[layer] = HeldHeads(first, last, pages)

    def read_pages(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """What a layer's heads have in these pages (int64), bytes: [pages, 2, heads, page bytes]"""
        held = self.layers[layer].pages
        return held[pages].flatten(-2).view(torch.uint8)

    def write_pages(self, layer: int, pages: torch.Tensor, cached: torch.Tensor) -> None:
        """Put back what `read_pages` gave, of the same heads of whichever card or arena."""
        held = self.layers[layer].pages
        held[pages] = cached.view(held.dtype).view(len(pages), *held.shape[1:])

    def page(self, layer: int, page: int, value: int, head: int) -> torch.Tensor:
        """One head's keys (value = 0) or values (1) of a page: uint8 [page bytes], to be copied."""
        held = self.layers[layer]
        rows = held.pages[page, value, head - held.first]
        return rows.reshape(-1).view(torch.uint8)

    def heads(self, layer: int, first: int, last: int) -> torch.Tensor:
        """Pages of heads first..last: [pages + 1, keys or values, heads, page tokens, a row]."""
        held = self.layers.get(layer)
        if held is None or not held.first <= first <= last <= held.last:
            raise ValueError(f"KV heads {first} to {last} of layer {layer} are not on this card")
        return held.pages[:, :, first - held.first : last - held.first]

    def store(
        self,
        layer: int,
        first: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        page: torch.Tensor,
        slot: torch.Tensor,
    ) -> None:
        """keys, values: float32 [rows, heads from `first`, head_dim]; page, slot: int64 [rows]."""
        heads = self.heads(layer, first, first + keys.shape[1])
        for value, rows in enumerate((keys, values)):
            stored = pack_q8_0(rows) if self.layout == "q8_0" else rows.to(heads.dtype)
            heads[:, value][page, :, slot] = stored

    def gather(
        self, layer: int, first: int, last: int, value: int, pages: torch.Tensor
    ) -> torch.Tensor:
        """Cached rows of heads first..last, [..., heads, tokens, head_dim], of the pages' order.

        pages: int64 [..., pages]. Direct layouts keep their type, packed ones become float32.
        """
        found = self.heads(layer, first, last)[:, value][pages]  # [..., pages, heads, tokens, row]
        found = found.movedim(-4, -3).flatten(-3, -2)
        if self.layout in DIRECT:
            return found
        rows = expand(self.layout, found.reshape(-1, self._row_nbytes), self._head_dim)
        return rows.view(*found.shape[:-1], self._head_dim)
