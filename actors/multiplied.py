"""How many bytes of weights compute lanes have multiplied: what is told of a request's lanes."""

from __future__ import annotations

from shadowlane.actors.gauges import Gauges
from shadowlane.actors.sequence import ExpertUse
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.placement import Placement


class Multiplied:
    """Since the engine's start. For the engine, between two steps."""

    def __init__(self, catalog: Catalog, num_lanes: int, num_cards: int) -> None:
        self._catalog = catalog
        self.of_blocks = [0] * num_lanes  # bytes
        # Of the experts that steps with rows of prompts chose, over all layers: what a processor
        # computed, and each card.
        self.prompt_experts = 0
        self.prompt_on_cards = [0] * num_cards
        self._in_a_step: tuple[int, list[int]] | None = None  # of a placement, by its id

    def step(self, placement: Placement, gauges: Gauges, *, has_prompt: bool) -> None:
        """Count one that has just retired. has_prompt: it had rows of one."""
        for lane, nbytes in enumerate(self.in_a_step(placement)):
            self.of_blocks[lane] += nbytes
        if has_prompt:
            self.prompt_experts += gauges.newest_use()[1]
            for card, count in enumerate(gauges.newest_on_cards()):
                self.prompt_on_cards[card] += count

    def so_far(self, placement: Placement, used: ExpertUse) -> list[int]:
        """Bytes by compute lane. used: of the experts that decode steps chose."""
        found, experts = list(self.of_blocks), self._catalog.experts
        if experts is None:
            return found
        processors = (  # of which one computes all that are on no card
            share.lane
            for group in self._catalog.sparse_groups
            for share in placement.shares[group.name]
            if share.lane.startswith("cpu:")
        )
        first = placement.number_of(next(processors, placement.lanes[0].name))
        found[first] += (used.chosen + self.prompt_experts) * experts.nbytes
        held = placement.experts_on_cards
        # Tokens hit cards alike, as they hold hot ones and cold alike.
        for part, of_prompts in zip(placement.cards, self.prompt_on_cards, strict=True):
            share = used.on_cards * part.num_experts // held if held else 0
            found[placement.number_of(part.lane)] += (share + of_prompts) * experts.nbytes
        return found

    def in_a_step(self, placement: Placement) -> list[int]:
        """Bytes of blocks that each compute lane multiplies in a step, by its share of units."""
        if self._in_a_step is None or self._in_a_step[0] != placement.placement_id:
            total = [0.0] * len(self.of_blocks)
            for group in self._catalog.groups:
                if group.kind == "embed":
                    continue
                nbytes = sum(self._catalog.blocks[index].nbytes for index in group.blocks)
                for share in placement.shares[group.name]:
                    part = (share.last_unit - share.first_unit) / group.units
                    total[placement.number_of(share.lane)] += nbytes * part
            self._in_a_step = placement.placement_id, [round(each) for each in total]
        return self._in_a_step[1]
