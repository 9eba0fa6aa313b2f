"""What no plan over cards, processor, RAM and disk can beat: seconds of one step.

The resource bound lets every byte and operation be shared out freely, all lanes at work at once, in
the best of all ways to fill the cards: the busiest resource still has to do its work. The path
bound knows that groups follow each other, with crossings and launches (`hybrid_path.py`); but not
those of a prompt over several cards, where micro-batches let groups work side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from shadowlane.planner.hit_rate import expected_distinct
from shadowlane.planner.hybrid import flops_of, kv_nbytes, ram_room, read_kv_nbytes, vram_room
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_path import EXACT, Overheads, PathBound, Prices

KV_PARTS = 20  # how finely the part of keys and values on the cards is tried
HALVINGS = 60


@dataclass(frozen=True, slots=True)
class HybridBounds:
    resource_s: float
    path_s: float


@dataclass(frozen=True, slots=True)
class _Totals:
    """Bytes that a step touches, and where they are under one way of filling the cards."""

    on_cards: float
    off_cards: float
    on_disk: float
    flops: float
    # (operations per byte, bytes), the fewest operations first: the processor may choose.
    intensities: tuple[tuple[float, float], ...]

    def within(self, flops: float) -> float:
        """The most bytes whose operations are no more than these; no limit where all are."""
        nbytes = 0.0
        for intensity, its in self.intensities:
            if intensity * its > flops:
                return nbytes + flops / intensity
            flops -= intensity * its
            nbytes += its
        return float("inf")


def hybrid_bounds(
    question: Question, overheads: Overheads = EXACT, prices: Prices | None = None
) -> HybridBounds:
    """Of the best of all placements, keys and values included.

    overheads: of a world that knows more than the planner's model. prices: for the path, where they
    are known of similar work; any give a bound, the best for this work are looked for without.
    """
    parts = [index / KV_PARTS for index in range(KV_PARTS + 1)] if question.machine.cards else [0.0]
    fills = [_fill(question, part) for part in parts]
    resource_s = min(_least_s(question, fill) for fill in fills)
    if question.work.phase == "prefill" and len(question.machine.cards) > 1:
        return HybridBounds(resource_s, resource_s)
    chain_s = min(_least_s(question, fill, only_compute=True) for fill in fills)
    launches = [question.machine.cpu_launch_s]
    launches += [card.launch_s for card in question.machine.cards]
    chain_s += min(launches) * len(question.model.loads)
    path = PathBound(question, overheads)
    path_s = path.best()[0] if prices is None else path.at(prices)
    return HybridBounds(resource_s, max(resource_s, chain_s, path_s))


def _fill(question: Question, kv_part: float) -> _Totals:
    """Cards hold this part of the keys and values, then dense weights, then the hottest experts."""
    model, work, machine = question.model, question.work, question.machine
    room = sum(vram_room(card, question.state) for card in machine.cards)
    kv_room = sum(kv_nbytes(load, work) for load in model.loads)
    kv_part = min(kv_part, room / kv_room) if kv_room else kv_part
    room -= kv_part * kv_room
    is_decode = work.phase == "decode"
    kv = sum(read_kv_nbytes(load, work) for load in model.loads)
    dense = sum(load.nbytes for load in model.loads if not load.experts)
    dense_part = min(1.0, room / dense) if dense else 1.0
    room -= dense_part * dense
    experts = [load for load in model.loads if load.experts]
    whole = sum(load.whole_nbytes for load in experts)
    held = min(1.0, max(0.0, room) / whole) if whole else 0.0
    in_ram = ram_room(machine, question.state) - model.fixed_ram_nbytes
    in_ram -= (1.0 - kv_part) * kv_room + (1.0 - dense_part) * dense
    dense_on_disk = max(0.0, -in_ram)
    kept = min(1.0, held + max(0.0, in_ram) / whole) if whole else 0.0
    chosen = sum(
        expected_distinct(load.experts, load.top_k, work.rows) * load.nbytes for load in experts
    )
    hits, in_memory = (
        (question.hit_rate(held), question.hit_rate(kept)) if is_decode else (held, kept)
    )
    flops = 0.0
    intensities: dict[float, float] = {}
    for load in model.loads:
        its = flops_of(load, work)
        nbytes = read_kv_nbytes(load, work) if load.kind == "attn" else load.nbytes
        if load.experts:
            nbytes *= expected_distinct(load.experts, load.top_k, work.rows)
        flops += its
        if nbytes:
            intensities[its / nbytes] = intensities.get(its / nbytes, 0.0) + nbytes
    on_cards = kv_part * kv + dense_part * dense + hits * chosen
    off_cards = (1 - kv_part) * kv + (1 - dense_part) * dense + (1 - hits) * chosen
    on_disk = dense_on_disk + (1 - in_memory) * chosen
    return _Totals(on_cards, off_cards, on_disk, flops, tuple(sorted(intensities.items())))


def _least_s(question: Question, totals: _Totals, *, only_compute: bool = False) -> float:
    """The shortest time in which every resource can do its part.

    only_compute: as if links, disk and the DRAM port took no time: what computing alone takes.
    """
    low, high = 0.0, 1.0
    while not _is_enough(question, totals, high, only_compute):
        high *= 2.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _is_enough(question, totals, middle, only_compute):
            high = middle
        else:
            low = middle
    return high


def _is_enough(question: Question, totals: _Totals, seconds: float, only_compute: bool) -> bool:
    """Whether so many seconds could do: the processor takes what it can, links bring the rest.

    What would fit a card may be in RAM all the same, if the processor has time for it.
    """
    machine, state = question.machine, question.state
    cards = machine.cards
    card_nbytes = sum(card.vram_bytes_per_s for card in cards) * state.gpu * seconds
    card_flops = sum(card.flops for card in cards) * state.gpu * seconds
    link_nbytes = sum(card.h2d_bytes_per_s for card in cards) * state.link * seconds
    cpu_flops = machine.cpu_flops * state.cpu * seconds
    whole = totals.on_cards + totals.off_cards
    on_cpu = min(whole, machine.cpu_bytes_per_s * state.cpu * seconds)
    # Operations belong to bytes: what the processor cannot compute it need not read.
    on_cpu = min(on_cpu, totals.within(cpu_flops))
    brought = max(0.0, totals.off_cards - on_cpu)
    if whole - on_cpu > card_nbytes or totals.flops > card_flops + cpu_flops:
        return False
    return only_compute or (
        brought <= link_nbytes
        and totals.off_cards + totals.on_disk <= machine.dram_bytes_per_s * seconds
        and totals.on_disk <= machine.disk_bytes_per_s * state.disk * seconds
    )
