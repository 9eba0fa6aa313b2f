"""A machine that is not here, from what the user says of it: cards and the speed of all lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shadowlane.arguments import file_name, number, one_of, switch, whole_number
from shadowlane.disturbances import disturbances
from shadowlane.sizes import format_size, parse_size

if TYPE_CHECKING:
    from shadowlane.actors.spec import CardSettings, Emulated
    from shadowlane.planner.hardware import Hardware

STRATEGIES = (
    "auto",
    "layer-split",
    "layer-split, pipelined",
    "row-split",
    "layer-stream",
    "attention-gpu",
    "cpu-moe",
    "cpu",
)
MOST_SLOWED = 1e6


def emulated_machine(
    hardware: str | Path,
    gpu_memory: str | int | None = None,
    *,
    slowed: float | None = None,
    seed: int | None = None,
    fixed_costs: float = 1.0,
    disturb: Sequence[str] = (),
) -> tuple[tuple[CardSettings, ...], Emulated]:
    """The cards to use and the machine whose speed lanes get.

    gpu_memory: of each card, or one for each, divided by commas; None: all that is not reserved.
    slowed: seconds here for one emulated second; None: as many as this machine needs. seed: of
    hidden factors on all rates, which the planner has to learn; None: the machine is as described.
    fixed_costs: part of launches, crossings and what small matrices lose that is emulated.
    disturb: "40:cpu=0.4,vram=1GiB": from 40 tokens on others leave 0.4 of the cores and take so
    much of each card; "80:" gives all of it back.

    Raises ModelError for a hardware file, ValueError for anything else, in one line.
    """
    from shadowlane.actors.spec import SMALL, CardSettings, Emulated
    from shadowlane.shapes import load_hardware  # with YAML, which other commands need not wait for

    fixed_costs = number("fixed_costs", fixed_costs, 0.0, 1.0)
    slowed = None if slowed is None else number("slowed", slowed, 1.0, MOST_SLOWED)
    machine = load_hardware(Path(file_name("hardware", hardware)))
    machine = replace(
        machine,
        cpu_launch_s=machine.cpu_launch_s * fixed_costs,
        cards=tuple(
            replace(
                card,
                launch_s=card.launch_s * fixed_costs,
                crossing_s=card.crossing_s * fixed_costs,
            )
            for card in machine.cards
        ),
    )
    emulated = Emulated(
        machine,
        seed=0 if seed is None else whole_number("emulate_seed", seed, 0),
        is_hidden=seed is not None,
        slowed=slowed,
        small_nbytes=SMALL * fixed_costs,
        script=disturbances(disturb, machine),
    )
    cards = tuple(CardSettings(nbytes) for nbytes in card_memory(machine, gpu_memory))
    return cards, emulated


def strategy_of(
    strategy: str | None,
    gpu_layers: int | None,
    cpu_moe: bool,
    n_cpu_moe: int | None,
) -> tuple[str, int | None]:
    """(name, layers) of the layout that is asked for. Raises ValueError for two that contradict."""
    cpu_moe = switch("cpu_moe", cpu_moe)
    asked = {
        "strategy": strategy not in (None, "auto"),
        "gpu_layers": gpu_layers is not None,
        "cpu_moe": cpu_moe,
        "n_cpu_moe": n_cpu_moe is not None,
    }
    named = [name for name, is_given in asked.items() if is_given]
    if len(named) > 1:
        raise ValueError(f"{named[0]} must be without {named[1]}: each is a whole layout")
    if gpu_layers is not None:
        return "layer-split", whole_number("gpu_layers", gpu_layers, 0)
    if cpu_moe:
        from shadowlane.planner.hand_placement import EVERY_LAYER

        return "cpu-moe", EVERY_LAYER
    if n_cpu_moe is not None:
        return "cpu-moe", whole_number("n_cpu_moe", n_cpu_moe, 0)
    return one_of("strategy", "auto" if strategy is None else strategy, STRATEGIES), None


def card_memory(machine: Hardware, asked: str | int | None) -> list[int]:
    """Bytes to use of each card of a machine that is described. Raises ValueError in one line."""
    rooms = [int(card.vram_nbytes - card.reserved_nbytes) for card in machine.cards]
    if asked is None:
        return rooms
    parts = str(asked).split(",") if isinstance(asked, str) else [asked]
    if any(str(part).strip() == "auto" for part in parts):
        raise ValueError(
            "gpu_memory must be sizes where a hardware file describes the cards; left out, it is "
            f"all that the file does not reserve; got {asked}"
        )
    if not rooms and any(str(part).strip() != "0" for part in parts):
        raise ValueError(f"gpu_memory must be 0: {machine.name} has no card; got {asked}")
    if len(parts) not in (1, len(rooms)):
        raise ValueError(
            f"gpu_memory must be one size, or one for each of {len(rooms)} cards; got {asked}"
        )
    sizes = [0 if str(p).strip() == "0" else parse_size(p, "gpu_memory") for p in parts]
    sizes = sizes * (len(rooms) // len(sizes)) if len(sizes) == 1 else sizes
    for card, nbytes in zip(machine.cards, sizes, strict=True):
        if nbytes > card.vram_nbytes:
            most = format_size(int(card.vram_nbytes))
            got = format_size(nbytes)
            raise ValueError(f"gpu_memory must be at most the {most} of {card.name}; got {got}")
    return sizes


def sizes_of_cards(asked: str | None, machine: Hardware) -> int | list[int] | None:
    """What `what_if` takes, of what was typed; 0 stands on a machine without cards too."""
    if asked is None or asked.strip() == "0":
        return None if asked is None else 0
    return card_memory(machine, asked)
