"""An imaginary engine with cards, which obeys a planner."""

from __future__ import annotations

from shadowlane.planner import events as ev
from shadowlane.planner.card_planner import CardPlanner
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.placement import Placement
from shadowlane.planner.program import build_programs
from shadowlane.planner.search import later_slots
from shadowlane.planner.validate import validate

CARD = Card("a card", 8e9, 0.0, 400e9, 20e12, 12e9, 12e9, 5e-6, 2e-5)
MACHINE = Hardware("a machine", (CARD,), 40e9, 1e12, 2e-6, 50e9, 32e9, 0.0, 3e9)


class CardEngine:
    """Obeys at once: what is published is acknowledged by all lanes and announced; but for what the
    rings and slots of the first placement cannot do, which it refuses as the real one does."""

    def __init__(self, planner: CardPlanner) -> None:
        self.planner = planner
        self.placements: list[Placement] = []
        self.reasons: list[str] = []
        self.notes: list[str] = []
        self.refused: list[str] = []
        self.step = 0
        self.active = 0
        self.obey(planner.handle(ev.EngineStarted()))

    @property
    def running(self) -> Placement:
        return next(each for each in self.placements if each.placement_id == self.active)

    def obey(self, commands: list[ev.Command]) -> None:
        todo = list(commands)
        while todo:
            command = todo.pop(0)
            if isinstance(command, ev.PublishPlacement):
                placement = command.placement
                why = misfit(self.planner.catalog, (self.placements or [placement])[0], placement)
                if why is not None:
                    self.refused.append(why)
                    todo += self.planner.handle(ev.PlacementRefused(placement.placement_id, why))
                    continue
                self.placements.append(placement)
                self.reasons.append(command.reason)
                for phase in ("decode", "prefill"):
                    programs = build_programs(self.planner.catalog, placement, phase)
                    validate(self.planner.catalog, placement, programs, phase)
                links = [card.link for card in placement.cards]
                for lane in [*(each.name for each in placement.lanes), *links, "disk:0"]:
                    acknowledged = ev.PlacementAcknowledged(lane, placement.placement_id)
                    todo += self.planner.handle(acknowledged)
            elif isinstance(command, ev.AnnouncePlacement):
                announced = ev.PlacementAnnounced(command.placement_id, self.step + 1)
                todo += self.planner.handle(announced)
                self.active = command.placement_id
            elif isinstance(command, ev.Note):
                self.notes.append(command.text)
            self.planner.validate()

    def steps(self, count: int, slower: float = 1.0) -> None:
        """Decode steps, the processor so many times slower than predicted."""
        for _ in range(count):
            self.step += 1
            seconds = self.running.predicted_step_s * slower
            busy = {"cpu:0": 0.8 * seconds}
            for card in self.running.cards:
                busy |= {card.lane: 0.1 * seconds, card.link: 0.1 * seconds}
            event = ev.StepRetired(
                self.step, self.active, "decode", 1, 100, seconds, busy | {"disk:0": 0.0}
            )
            self.obey(self.planner.handle(event))


def misfit(catalog: Catalog, first: Placement, later: Placement) -> str | None:
    """What of a later placement has no room in what was laid out for the first one."""
    slots = first.num_slots or later_slots(catalog.slot_nbytes)
    if later.sweep and later.num_slots != slots:
        return f"the ring has {slots} slots; {later.num_slots} are wanted"
    if later.expert_slots != first.expert_slots:
        return f"RAM has {first.expert_slots} slots for experts; {later.expert_slots} are wanted"
    for there, part in zip(first.cards, later.cards, strict=True):
        if not (part.decode_sweep or part.prefill_sweep):
            continue
        if (part.num_slots, part.slot_nbytes) != (there.num_slots, there.slot_nbytes):
            return (
                f"{part.lane} has {there.num_slots} slots of {there.slot_nbytes} bytes; "
                f"{part.num_slots} of {part.slot_nbytes} are wanted"
            )
    return None
