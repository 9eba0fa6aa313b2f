"""What goes into the planner and what comes out of it: events in the past, commands to obey."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shadowlane.planner.heat import Heat
from shadowlane.planner.placement import Placement
from shadowlane.planner.profile import Phase, Profile
from shadowlane.planner.ram_watch import RamRead


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """Files are read and the request is known: the first placement is wanted."""


@dataclass(frozen=True, slots=True)
class EngineResumed:
    """The planner before this one is gone; the engine runs on under what it planned."""

    placement: Placement  # steps retire under it
    newest_id: int  # no id up to this one may be given to another placement


@dataclass(frozen=True, slots=True)
class StepRetired:
    step: int
    placement_id: int
    phase: Phase  # "prefill" if any row of the step was a prefill row
    rows: int  # activation rows
    context: int  # tokens attended, of the longest sequence
    seconds: float  # from the step being filled to its last instruction retired
    busy_s: Mapping[str, float] = field(default_factory=dict)  # lane -> inside instructions
    wait_s: Mapping[str, float] = field(default_factory=dict)  # lane -> waiting for counters
    # of `busy_s`, by lane that computes and kind of group, where its spans tell them apart
    kinds_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # by lane that waited for its input: an activation's way over one card's link, where it is told
    crossings_s: Mapping[str, float] = field(default_factory=dict)
    experts_chosen: int = 0  # of a mixture's decode step, over all layers and rows
    experts_resident: int = 0  # of these, in RAM and not for this step's sake
    experts_read_nbytes: int = 0
    experts_on_cards: int = 0  # chosen ones that live on cards, beside `experts_chosen`


@dataclass(frozen=True, slots=True)
class ExpertsChosen:
    """What routers of a mixture chose since the last such event, wherever the experts were."""

    lately: Heat


@dataclass(frozen=True, slots=True)
class RunQueueDelayed:
    """Threads of `lane` were runnable but not running for `fraction` of the last window."""

    lane: str
    fraction: float


@dataclass(frozen=True, slots=True)
class LaneDied:
    lane: str


@dataclass(frozen=True, slots=True)
class LaneRestored:
    lane: str


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    ram: int


@dataclass(frozen=True, slots=True)
class MemoryLeft:
    """Other programs hold so much of each card and of RAM, of what this engine was given."""

    vram_taken_nbytes: float
    ram_taken_nbytes: float = 0.0


@dataclass(frozen=True, slots=True)
class RamLooked:
    """What a look at this machine's memory found; for budgets that nobody named."""

    found: RamRead


@dataclass(frozen=True, slots=True)
class PlacementAcknowledged:
    lane: str
    placement_id: int


@dataclass(frozen=True, slots=True)
class PlacementAnnounced:
    """The engine has promised that `step` is the first to run under this placement."""

    placement_id: int
    step: int


@dataclass(frozen=True, slots=True)
class PlacementRefused:
    """The engine cannot bring this about, and has told no lane of it."""

    placement_id: int
    why: str


@dataclass(frozen=True, slots=True)
class ProfileMeasured:
    profile: Profile


Event = (
    EngineStarted
    | EngineResumed
    | StepRetired
    | ExpertsChosen
    | RunQueueDelayed
    | LaneDied
    | LaneRestored
    | BudgetChanged
    | MemoryLeft
    | RamLooked
    | PlacementAcknowledged
    | PlacementAnnounced
    | PlacementRefused
    | ProfileMeasured
)


@dataclass(frozen=True, slots=True)
class PublishPlacement:
    """Give it to every live lane; each lowers it and acknowledges."""

    placement: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class AnnouncePlacement:
    """All have acknowledged: announce it for the first step to which no lane is committed."""

    placement_id: int


@dataclass(frozen=True, slots=True)
class RetirePlacement:
    """No step will run under it any more: programs and copies that only it needs may go."""

    placement_id: int


@dataclass(frozen=True, slots=True)
class SetSpin:
    """How long the workers of `lane` spin at a wait before they sleep; 0: sleep at once."""

    lane: str
    spin_us: int


@dataclass(frozen=True, slots=True)
class Note:
    """A decision worth telling that changes nothing."""

    text: str


Command = PublishPlacement | AnnouncePlacement | RetirePlacement | SetSpin | Note


def brief(message: Event | Command) -> str:
    """One line for a history; a placement by its id only."""
    if isinstance(message, PublishPlacement):
        return f"PublishPlacement placement {message.placement.placement_id} ({message.reason})"
    if isinstance(message, ProfileMeasured):
        return f"ProfileMeasured {message.profile.hardware}"
    if isinstance(message, ExpertsChosen):
        return f"ExpertsChosen in {message.lately.visits:g} steps"
    named = getattr(message, "placement_id", None)
    about = "" if named is None else f" placement {named}"
    return f"{type(message).__name__}{about} {message}"
