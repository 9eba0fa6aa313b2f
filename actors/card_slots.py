"""Where what comes to a card lies when a step uses it: in slots of its ring, another each time."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shadowlane.actors.arena import CardLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.card_program import CardInstruction, Weights, block_at, expert_at
from shadowlane.ops.card.products import CardBlock


@dataclass(frozen=True, slots=True)
class CardSlots:
    """memory: all of the card's, in which the ring lies."""

    blueprint: Blueprint
    where: CardLayout
    memory: torch.Tensor
    _blocks: dict[tuple[int, int], CardBlock] = field(default_factory=dict)  # (block, slot)

    def weights(self, each: CardInstruction, base: int = 0) -> Weights:
        """What an instruction finds where it lives, and in slots, in a step.

        base: how much was brought before the step.
        """
        blocks, experts = list(each.resident), {}
        for block, place in each.brought:
            slot = (base + place) % self.where.num_slots
            if (block, slot) not in self._blocks:
                found = block_at(self.blueprint, block, self.memory, self._home(slot))
                self._blocks[block, slot] = found
            blocks.append(self._blocks[block, slot])
        if each.experts is not None:
            experts = dict(each.experts.resident)
            for expert, place in each.experts.brought:
                home = self._home((base + place) % self.where.num_slots)
                at = (self.blueprint, each.experts.layer, expert, self.memory, home)
                experts[expert] = expert_at(*at)
        return Weights(blocks, experts)

    def _home(self, slot: int) -> int:
        return self.where.ring + slot * self.where.slot_nbytes
