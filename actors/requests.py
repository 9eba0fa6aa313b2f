"""What the planner is asked, from what the user chose: the same for an engine and for a preview."""

from __future__ import annotations

from shadowlane.actors.spec import EngineSettings, Options
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.described import profile_of
from shadowlane.planner.placement import LaneSpec, Request
from shadowlane.planner.profile import Profile


def lanes_of(settings: EngineSettings) -> tuple[LaneSpec, ...]:
    """All compute lanes, by their numbers: processors first."""
    return (
        *(LaneSpec(f"cpu:{number}", len(each)) for number, each in enumerate(settings.cores)),
        *(LaneSpec(f"gpu:{card}", 1) for card in range(len(settings.cards))),
    )


def num_workers(settings: EngineSettings) -> int:
    """Threads of all compute lanes; a card has one that stands in for it."""
    return sum(lane.threads for lane in lanes_of(settings))


def described_profile(settings: EngineSettings, catalog: Catalog) -> Profile | None:
    """Of the processor and disk of an emulated machine; None where none is emulated."""
    if settings.emulated is None:
        return None
    processors = [lane for lane in lanes_of(settings) if lane.name.startswith("cpu:")]
    return profile_of(settings.emulated.planned, catalog, processors)


def request_of(options: Options, settings: EngineSettings) -> Request:
    return Request(
        ram=settings.ram,
        lanes=lanes_of(settings),
        context=options.context,
        max_batch=options.max_batch,
        num_slots=settings.num_slots,
        expand=settings.expand,
        subchunks=settings.subchunks,
        micro_batches=settings.micro_batches,
        machine=settings.emulated.planned if settings.emulated else settings.machine,
        cards=tuple(card.memory for card in settings.cards),
        cards_here=bool(settings.cards) and settings.emulated is None,
        strategy=settings.strategy,
        strategy_layers=settings.strategy_layers,
        replan=settings.replan,
        headroom=settings.headroom,
        pins=dict(settings.pins),
    )
