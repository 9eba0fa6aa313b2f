"""Where the user wants groups to live: patterns of names made into a home for each group.

A home is "gpu:<n>" (on that card and computed there), "cpu" (in RAM and computed by processors) or
"disk" (only there). Plans over cards honour it through `Load.home`, those without in `search.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shadowlane.planner.catalog import Catalog, GroupKind
from shadowlane.planner.hardware import Hardware
from shadowlane.planner.hybrid import Model, Work, all_kv_nbytes, ram_room, vram_room
from shadowlane.planner.placement import InfeasiblePlan, show_nbytes

Named = Sequence[tuple[str, GroupKind]]
NEVER_ON_DISK: Mapping[GroupKind, str] = {
    "attn": "keys and values are in memory",
    "router": "routers stay in RAM",
    "experts": "experts share RAM by use",
}


def homes_of(groups: Named, pins: Mapping[str, str], cards: int) -> dict[str, str]:
    """Group -> home, of those that are pinned; a pattern is looked for anywhere in a name.

    What a home cannot hold is passed over where a pattern matches other groups too.

    Raises ValueError for a pattern that is none or matches nothing, for a card that is not there,
    and for two patterns that give one group different homes.
    """
    homes: dict[str, str] = {}
    wanted_by: dict[str, str] = {}
    for pattern, home in pins.items():
        if home.startswith("gpu:") and int(home.removeprefix("gpu:")) >= cards:
            there = ", ".join(f"gpu:{card}" for card in range(cards)) or "there is none"
            raise ValueError(f"pin '{pattern}' must name a card in use ({there}); got {home}")
        matched = matching(groups, pattern)
        able = [name for name, kind in matched if _why_not(kind, home) is None]
        if not able:
            why = _why_not(matched[0][1], home)
            raise ValueError(f"pin '{pattern}' must match a group that {home} may hold: {why}")
        for name in able:
            if homes.setdefault(name, home) != home:
                raise ValueError(
                    f"pins must agree: '{wanted_by[name]}' wants {name} on {homes[name]}, "
                    f"'{pattern}' on {home}"
                )
            wanted_by.setdefault(name, pattern)
    return homes


def matching(groups: Named, pattern: str) -> list[tuple[str, GroupKind]]:
    """Raises ValueError where there is none."""
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pin must be a regular expression; got '{pattern}': {error}") from None
    matched = [(name, kind) for name, kind in groups if wanted.search(name)]
    if not matched:
        some = ", ".join([*(name for name, _ in groups[1:4]), "...", groups[-1][0]])
        raise ValueError(f"pin '{pattern}' must match a group ({some}); it matches none")
    return matched


def _why_not(kind: GroupKind, home: str) -> str | None:
    if home.startswith("gpu:") and kind == "embed":
        return "processors compute the embedding"
    return NEVER_ON_DISK.get(kind) if home == "disk" else None


def catalog_homes(catalog: Catalog, pins: Mapping[str, str], cards: int) -> dict[str, str]:
    """`homes_of` the groups of our own engine."""
    if not pins:
        return {}
    groups = [(group.name, group.kind) for group in catalog.groups]
    homes = homes_of(groups, pins, cards)
    # without blocks, but with a choice of home
    movable = ("attn", "experts", "router") if cards else ()
    for pattern in pins:
        held = [catalog.group(name) for name, _ in matching(groups, pattern) if name in homes]
        if not any(group.blocks or group.kind in movable for group in held):
            raise ValueError(f"pin '{pattern}' must match a group with weights; it matches none")
    on_disk = [pattern for pattern, home in pins.items() if home == "disk"]
    if catalog.experts is not None and on_disk:
        raise ValueError(
            f"pin '{on_disk[0]}' must name gpu:<n> or cpu: dense parts of a mixture are never "
            "left on disk; got disk"
        )
    return homes


def pinned(model: Model, homes: Mapping[str, str]) -> Model:
    """`model` with these homes for its loads; it knows nothing of other groups."""
    if not homes:
        return model
    loads = tuple(replace(load, home=homes.get(load.name)) for load in model.loads)
    return replace(model, loads=loads)


def check_pins_fit(model: Model, work: Work, machine: Hardware) -> None:
    """Raises ValueError where what is pinned is more than a card or RAM has room for."""
    weights: dict[str, float] = {}
    kv: dict[str, float] = {}
    kvs = all_kv_nbytes(model, work)
    for load, whole, its_kv in zip(model.loads, model.wholes, kvs, strict=True):
        if load.home is None or load.home == "disk":
            continue
        if not (load.home == "cpu" and load.experts):  # of which RAM holds what it can
            weights[load.home] = weights.get(load.home, 0.0) + whole
        kv[load.home] = kv.get(load.home, 0.0) + its_kv
    for number, card in enumerate(machine.cards):
        home = f"gpu:{number}"
        needed, room = weights.get(home, 0.0) + kv.get(home, 0.0), vram_room(card)
        if needed > room:
            raise ValueError(
                f"pins must fit {home}: weights {_size(weights[home])} + keys and values "
                f"{_size(kv[home])} = {_size(needed)}; its budget is {_size(room)}, "
                f"short by {_size(needed - room)}"
            )
    if "cpu" in kv:
        parts = {
            "embedding and scratch": round(model.fixed_ram_nbytes),
            "pinned weights": round(weights.get("cpu", 0.0)),
            "pinned keys and values": round(kv["cpu"]),
        }
        room = ram_room(machine)
        if sum(parts.values()) > room:
            raise InfeasiblePlan("the pins do not fit", parts, round(room))


def _size(nbytes: float) -> str:
    return show_nbytes(round(nbytes))
