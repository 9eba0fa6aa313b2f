"""Placements over emulated cards for tests: any way of sharing groups out, drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from inprocess import AMPLE, ONE_THREAD, InProcess, running

from shadowlane.actors.blueprint import Options
from shadowlane.actors.spec import CardSettings
from shadowlane.planner.card_placement import place_on_cards
from shadowlane.planner.card_question import question_over_cards
from shadowlane.planner.catalog import Catalog, Group
from shadowlane.planner.cost import CostModel
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import Plan, Site
from shadowlane.planner.placement import (
    MIN_SLOTS,
    CardPart,
    LaneSpec,
    Placement,
    Request,
    Share,
    expert_shares,
    whole_pages,
)
from shadowlane.planner.search import most_kept, place
from shadowlane.planner.validate import validate_phases

OPTIONS = Options(context=128, prefill_chunk=24)

CARD = Card(
    name="a card for tests",
    vram_nbytes=1e9,
    reserved_nbytes=0.0,
    vram_bytes_per_s=100e9,
    flops=10e12,
    h2d_bytes_per_s=10e9,
    d2h_bytes_per_s=10e9,
    launch_s=2e-6,
    crossing_s=5e-6,
)


def machine_with(cards: int) -> Hardware:
    """Fast enough that no test waits for it."""
    return Hardware(
        name="a machine for tests",
        cards=(CARD,) * cards,
        cpu_bytes_per_s=50e9,
        cpu_flops=1e12,
        cpu_launch_s=1e-6,
        dram_bytes_per_s=60e9,
        ram_nbytes=64e9,
        reserved_nbytes=0.0,
        disk_bytes_per_s=5e9,
    )


def cut_points(catalog: Catalog, group: Group) -> list[int]:
    """Units between which no block of a group is cut; both ends too."""
    blocks = [catalog.blocks[index] for index in group.blocks]
    return [
        unit
        for unit in range(group.units + 1)
        if not any(block.first_unit < unit < block.last_unit for block in blocks)
    ]


def over_cards(
    catalog: Catalog,
    whole: Placement,
    seed: int,
    cards: int = 1,
    num_slots: int = MIN_SLOTS,
    *,
    embeds: bool = False,
    brings: bool = False,
    reads: bool = False,
    routes: bool = False,
    sums: bool = False,
    streams: bool = False,
    comes: bool = True,
) -> Placement:
    """`whole`, of which all is in RAM, with every group shared out at random.

    A part may live on a card, come over its link (in decode, in prefill, or in both; not at all
    unless `comes`), or stay.
    Of experts, any may live on cards. embeds: the table of embeddings is the first card's.
    brings: any of the other experts are brought in prefill, as many as RAM has slots for; reads:
    more of them, which the disk reads for links.
    routes: any lane may choose the experts of a layer, and any may add up what they give; sums:
    any may add up. streams: any of what lives on no card may be only on disk.
    """
    random = Random(seed)
    names = [f"gpu:{number}" for number in range(cards)]
    resident: dict[str, list[int]] = {name: [] for name in names}
    sweeps: dict[tuple[str, str], list[int]] = {
        (name, phase): [] for name in names for phase in ("decode", "prefill")
    }
    kv_heads = dict.fromkeys(names, 0)
    shares: dict[str, dict[str, tuple[Share, ...]]] = {"decode": {}, "prefill": {}}
    leaves = set()  # RAM
    experts = [draw_experts(catalog, random, cards) for _ in catalog.sparse_groups]
    come: list[tuple[tuple[int, ...], ...]] = [((),) * cards] * len(experts)
    read: tuple[int, ...] = ()
    if brings:
        come, read = draw_brought(catalog, random, experts, whole, reads)
    for group in catalog.groups:
        if group.kind == "experts":
            of_layer = experts[catalog.sparse_groups.index(group)]
            counts = dict(zip(names, map(len, of_layer), strict=True))
            adds_up = random.choice(("cpu:0", *names)) if routes or sums else "cpu:0"
            layer = catalog.sparse_groups.index(group)
            brought = dict(zip(names, map(len, come[layer]), strict=True))
            shares["decode"][group.name] = expert_shares(counts, "cpu:0", group.units, adds_up)
            shares["prefill"][group.name] = expert_shares(
                counts, "cpu:0", group.units, adds_up, brought=brought
            )
            for name, of_card in zip(names, come[layer], strict=True):
                numbers = [catalog.expert_number(layer, expert) for expert in of_card]
                sweeps[name, "prefill"] += numbers
            continue
        if group.kind == "embed" and embeds:
            resident[names[0]] += group.blocks
            for phase in shares:
                shares[phase][group.name] = (Share(names[0], 0, group.units),)
            continue
        if group.kind == "router" and routes and (lane := random.choice(("", *names))):
            resident[lane] += group.blocks
            leaves |= set(group.blocks)
            for phase in shares:
                shares[phase][group.name] = (Share(lane, 0, group.units),)
            continue
        if group.kind in ("embed", "router"):
            for phase in shares:
                shares[phase][group.name] = (Share("cpu:0", 0, group.units),)
            continue
        points = cut_points(catalog, group)
        ends = sorted(random.choices(points, k=2 * cards))
        bounds = [0, *ends, group.units]
        parts: dict[str, list[Share]] = {"decode": [], "prefill": []}
        for number, (first, last) in enumerate(pairwise(bounds)):
            if first == last:
                continue
            card = None if number == 2 * cards else names[number // 2]
            within = [
                index
                for index in group.blocks
                if first <= catalog.blocks[index].first_unit
                and catalog.blocks[index].last_unit <= last
            ]
            if card is None:
                lanes = {"decode": "cpu:0", "prefill": "cpu:0"}
            elif number % 2 == 0 or not within or not comes:
                lanes = {"decode": card, "prefill": card}
                resident[card] += within
                leaves |= {index for index in within if random.random() < 0.5}
                if group.kind == "attn":
                    kv_heads[card] += last - first
            else:
                phases = random.choice((("decode",), ("prefill",), ("decode", "prefill")))
                lanes = {phase: card if phase in phases else "cpu:0" for phase in parts}
                for phase in phases:
                    sweeps[card, phase] += within
            for phase, lane in lanes.items():
                if parts[phase] and parts[phase][-1].lane == lane:
                    before = parts[phase].pop()
                    parts[phase].append(Share(lane, before.first_unit, last))
                else:
                    parts[phase].append(Share(lane, first, last))
        for phase in shares:
            shares[phase][group.name] = tuple(parts[phase])
    room = sum(block.held_nbytes for block in catalog.blocks)  # for any other draw beside this one
    expert_nbytes = catalog.experts.slot_nbytes if catalog.experts else 0
    slot_nbytes = max(catalog.slot_nbytes, expert_nbytes if brings else 0)
    parts_of = tuple(
        CardPart(
            lane=name,
            resident=tuple(sorted(resident[name])),
            decode_sweep=tuple(sweeps[name, "decode"]),
            prefill_sweep=tuple(sweeps[name, "prefill"]),
            num_slots=num_slots,
            slot_nbytes=slot_nbytes,
            budget=1 << 30,
            weights_nbytes=2 * room,
            slots_nbytes=num_slots * slot_nbytes,
            kv_nbytes=4096 * kv_heads[name],
            experts=tuple(layer[number] for layer in experts),
            experts_nbytes=expert_nbytes * sum(len(layer[number]) for layer in experts),
        )
        for number, name in enumerate(names)
    )
    if streams:
        here = {index for held in resident.values() for index in held}
        here |= {
            index for group in catalog.groups if group.kind == "embed" for index in group.blocks
        }
        others = [block.index for block in catalog.blocks if block.index not in here]
        part = random.choice((0.1, 0.5, 1.0))
        sweep = tuple(index for index in others if random.random() < part)
        leaves |= set(sweep)
        whole = replace(
            whole, num_slots=MIN_SLOTS, slots_nbytes=MIN_SLOTS * catalog.slot_nbytes, sweep=sweep
        )
    kept = tuple(is_kept and index not in leaves for index, is_kept in enumerate(whole.resident))
    if reads:
        ring = {"num_slots": MIN_SLOTS, "slot_nbytes": slot_nbytes}
        whole = replace(whole, slots_nbytes=MIN_SLOTS * slot_nbytes, prefill_sweep=read, **ring)
    return replace(
        whole,
        strategy=f"at random, seed {seed}",
        weights_nbytes=2 * room,
        lanes=(*(each for each in whole.lanes if each.name == "cpu:0"), *specs(names)),
        resident=kept,
        shares=shares["decode"],
        prefill_shares=shares["prefill"],
        cards=parts_of,
    )


def on_cards(
    model: Path, first: Callable[[Catalog, Request], Placement], cards: int = 1, **settings: Any
) -> AbstractContextManager[InProcess]:
    """An engine whose plans begin with `first`, over cards of a GiB that are here or emulated."""
    where = {} if "emulated" in settings else {"machine": machine_with(cards)}
    return running(
        model,
        ram=AMPLE,
        first=first,
        cards=(CardSettings(1 << 30),) * cards,
        **{"options": OPTIONS, "cores": ONE_THREAD, **where, **settings},
    )


def draw_experts(catalog: Catalog, random: Random, cards: int) -> tuple[tuple[int, ...], ...]:
    """Of one layer, those on each card: none, some or all of them."""
    assert catalog.experts is not None
    part = random.choice((0.0, 0.3, 0.7, 1.0))
    held: list[list[int]] = [[] for _ in range(cards)]
    for expert in range(catalog.experts.per_layer):
        if random.random() < part:
            random.choice(held).append(expert)
    return tuple(map(tuple, held))


def draw_brought(
    catalog: Catalog,
    random: Random,
    experts: Sequence[tuple[tuple[int, ...], ...]],
    whole: Placement,
    reads: bool,
) -> tuple[list[tuple[tuple[int, ...], ...]], tuple[int, ...]]:
    """By layer and card, those that are brought: some or all that live on no card, in any order.

    And those that the disk reads for that, by their numbers; none unless it `reads`.
    """
    assert catalog.experts is not None
    room = most_kept(catalog.experts, whole.expert_slots)
    found: list[tuple[tuple[int, ...], ...]] = []
    read: list[int] = []
    for layer, of_layer in enumerate(experts):
        part = random.choice((0.0, 0.5, 1.0))
        on_cards = {expert for held in of_layer for expert in held}
        free = [each for each in range(catalog.experts.per_layer) if each not in on_cards]
        random.shuffle(free)
        come: list[list[int]] = [[] for _ in of_layer]
        for expert in free:
            if (room > 0 or reads) and random.random() < part:
                random.choice(come).append(expert)
                if reads and (room == 0 or random.random() < 0.5):
                    read.append(catalog.expert_number(layer, expert))
                else:
                    room -= 1
        found.append(tuple(map(tuple, come)))
    return found, tuple(read)


def specs(names: Sequence[str]) -> tuple[LaneSpec, ...]:
    return tuple(LaneSpec(name, 1) for name in names)


def drawn(
    seed: int,
    cards: int,
    slots: int | None = None,
    *,
    embeds: bool = False,
    brings: bool = False,
    reads: bool = False,
    routes: bool = False,
    sums: bool = False,
    streams: bool = False,
    comes: bool = True,
    micro_batches: int = 1,
) -> Callable[[Catalog, Request], Placement]:
    """What a scripted planner begins with: a placement over cards at random, which can run.

    slots: of experts in RAM; None: one for each.
    """

    def first(catalog: Catalog, request: Request) -> Placement:
        processors = replace(request, lanes=(LaneSpec("cpu:0", 1),))
        whole = place(catalog, processors, CostModel(None))
        if slots is not None:
            assert catalog.experts is not None
            nbytes = slots * catalog.experts.slot_nbytes
            whole = replace(whole, expert_slots=slots, experts_nbytes=nbytes)
        drawing = {"embeds": embeds, "brings": brings or reads, "reads": reads, "comes": comes}
        drawing |= {"routes": routes, "sums": sums, "streams": streams}
        placement = over_cards(catalog, whole, seed, cards, **drawing)
        placement = replace(placement, micro_batches=micro_batches)
        validate_phases(catalog, placement)
        return placement

    return first


def by_layers(
    ends: Sequence[int], micro_batches: int = 1
) -> Callable[[Catalog, Request], Placement]:
    """As `drawn`: each card has the layers from the end of the one before it up to `ends`; the
    processor has the rest, and the embedding; the last card the head."""
    names = [f"gpu:{number}" for number in range(len(ends))]

    def first(catalog: Catalog, request: Request) -> Placement:
        whole = place(catalog, replace(request, lanes=(LaneSpec("cpu:0", 1),)), CostModel(None))
        lane_of = {"embed": "cpu:0", "lm_head": names[-1]}
        for group in catalog.groups:
            if group.name not in lane_of:
                layer = int(group.name.split(".")[0])
                card = sum(layer >= end for end in ends)
                lane_of[group.name] = "cpu:0" if card == len(ends) else names[card]
        held: dict[str, list[int]] = {name: [] for name in names}
        heads = dict.fromkeys(names, 0)
        for group in catalog.groups:
            if (name := lane_of[group.name]) in held:
                held[name] += group.blocks
                heads[name] += group.units * (group.kind == "attn")
        room = whole_pages(sum(block.held_nbytes for block in catalog.blocks))
        experts = {
            name: tuple(
                tuple(range(group.units - 1)) if lane_of[group.name] == name else ()
                for group in catalog.sparse_groups
            )
            for name in names
        }
        expert_nbytes = catalog.experts.slot_nbytes if catalog.experts else 0
        parts = tuple(
            CardPart(
                lane=name,
                experts=experts[name],
                experts_nbytes=expert_nbytes * sum(map(len, experts[name])),
                resident=tuple(sorted(held[name])),
                decode_sweep=(),
                prefill_sweep=(),
                num_slots=0,
                slot_nbytes=0,
                budget=1 << 30,
                weights_nbytes=room,
                slots_nbytes=0,
                kv_nbytes=4096 * heads[name],
            )
            for name in names
        )
        placement = replace(
            whole,
            strategy="by layers",
            lanes=(*whole.lanes, *specs(names)),
            shares={
                each.name: (Share(lane_of[each.name], 0, each.units),) for each in catalog.groups
            },
            prefill_shares=None,
            cards=parts,
            micro_batches=micro_batches,
        )
        validate_phases(catalog, placement)
        return placement

    return first


def all_on_a_card(catalog: Catalog, request: Request) -> Placement:
    """All but the embedding, with all experts, as the planner cuts it; sums are the card's too."""
    question = question_over_cards(catalog, request)
    plan = Plan("all", (Site(1.0, 0.0),) * len(question.model.loads))
    return place_on_cards(catalog, plan, request, question)
