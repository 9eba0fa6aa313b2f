"""What a measured step tells of the machine under a plan: rates, fixed costs, the DRAM port.

Of each lane two figures are told apart where it had groups of different sizes: what a group costs
beside its bytes and operations, and how fast the rest of it goes. One figure for both would make
large groups too slow and small ones too fast, and a plan of other groups would be predicted wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log, sqrt
from statistics import fmean
from typing import NamedTuple

from shadowlane.planner.hardware import Hardware
from shadowlane.planner.hybrid import HitRate, Model, Plan, rows_at_once
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_play import beside_cores, port_left, work_by_kind

FASTEST, SLOWEST = 4.0, 0.05  # factors on a file's rates that are believed
SURE = 0.04  # of a lane's total: below, a difference between predicted and measured is noise
SURE_BY_KIND = 0.01  # the same where seconds are known by kind
# Standard deviations: kinds of groups from their line; rates and launches from what was thought.
SCATTER, RATE_SPREAD, LAUNCH_SPREAD_S = 0.03, 0.2, 2e-5
LAUNCH_STEPS = 60
MOST_LAUNCH_S = 2e-4
BENDS = (0.25, 4.0)  # of the rate at which experts on cards are chosen
CROSSINGS = (0.4, 4.0)  # factors on a file's crossing that are believed
FELT = 0.005  # of a step that crossings must be worth for it to tell their cost


@dataclass(frozen=True, slots=True)
class StepMeasured:
    """One step of the plan in force."""

    seconds: float
    busy_s: Mapping[str, float]
    moved_nbytes: float = 0.0  # of the background move, by all lanes, during this step
    # of `busy_s`, by lane and kind of group, where spans were kept; a lane may be left out
    kinds_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    hits: float | None = None  # of the chosen experts, the part that lives on cards; None: unknown
    # by card: one activation's way over its link, where that is told; by a processor's lane, over
    # the slowest of those that it waits for
    crossings_s: Mapping[str, float] = field(default_factory=dict)


class _Lane(NamedTuple):
    """What one lane showed."""

    launch_s: float
    fixed_s: float  # launches of one step
    speed: float  # of the rest: times as fast as it was thought to be, nothing beside it


def learned(
    question: Question,
    stated: Hardware,
    plan: Plan,
    now: StepMeasured,
    *,
    is_fresh: bool,
    blames_port: bool | None = None,
) -> Hardware:
    """`question.machine`, so that `plan` would be predicted as it was measured.

    stated: the hardware file's; rates further from it than is believed are not learned.
    is_fresh: the plan has just begun. Cores that are slower than predicted while links work beside
    them are then put down to the DRAM port, later on to the cores; the other way round where only
    that explains how long the step took. blames_port: which of the two is thought of first,
    whenever it is.
    """
    if blames_port is None:
        blames_port = is_fresh
    machine = question.machine
    lanes = _lanes(question, plan, now, is_fresh)
    predicted = question.times(plan)
    cards = []
    for index, (card, its) in enumerate(zip(machine.cards, stated.cards, strict=True)):
        name = f"gpu:{index}"
        lane = lanes[name]
        gpu = _sure(lane.speed, SURE_BY_KIND if now.kinds_s.get(name) else SURE)
        link = _speed(predicted.busy_s, now.busy_s, f"h2d:{index}")
        cards.append(
            replace(
                card,
                vram_bytes_per_s=_within(card.vram_bytes_per_s * gpu, its.vram_bytes_per_s),
                flops=_within(card.flops * gpu, its.flops),
                h2d_bytes_per_s=_within(card.h2d_bytes_per_s * link, its.h2d_bytes_per_s),
                launch_s=lane.launch_s,
            )
        )
    disk = machine.disk_bytes_per_s * _speed(predicted.busy_s, now.busy_s, "disk:0")
    machine = replace(
        machine,
        cards=tuple(cards),
        disk_bytes_per_s=_within(disk, stated.disk_bytes_per_s),
        cpu_launch_s=lanes["cpu:0"].launch_s,
    )
    question = replace(question, machine=machine)
    machine = _with_cores(question, stated, plan, now, lanes["cpu:0"].fixed_s, blames_port)
    if now.crossings_s:
        brings = [predicted.busy_s[f"h2d:{at}"] > 0.0 for at in range(len(machine.cards))]
        copied = question.model.row_nbytes * rows_at_once(plan, question.work)
        return _with_told_crossings(machine, stated, copied, brings, now.crossings_s)
    if now.kinds_s:
        machine = _with_crossings(replace(question, machine=machine), stated, plan, now)
    return machine


# -- experts


def bent(hit_rate: HitRate, bend: float) -> HitRate:
    """The same, but what is missed with 1 is missed with its power `bend`: above 1, less often."""
    if bend == 1.0:
        return hit_rate
    return lambda part: 1.0 - float(max(0.0, 1.0 - hit_rate(part)) ** bend)


def bend_of(model: Model, plan: Plan, hit_rate: HitRate, hits: float) -> float:
    """The bend with which `plan` would be expected to hit cards as often as it did."""
    parts: dict[float, int] = {}
    for load, site in zip(model.loads, plan.sites, strict=True):
        if load.experts:
            parts[site.vram] = parts.get(site.vram, 0) + 1
    count = sum(parts.values())
    low, high = BENDS
    for _ in range(20):
        middle = sqrt(low * high)
        rate = bent(hit_rate, middle)
        expected = sum(each * rate(part) for part, each in parts.items()) / count
        low, high = (middle, high) if expected < hits else (low, middle)
    return sqrt(low * high)


# -- lanes by themselves


def _lanes(question: Question, plan: Plan, now: StepMeasured, is_fresh: bool) -> dict[str, _Lane]:
    """Of the processor and each card. What changes under a plan is rates, not launches."""
    machine = question.machine
    launches = {"cpu:0": machine.cpu_launch_s}
    launches |= {f"gpu:{index}": card.launch_s for index, card in enumerate(machine.cards)}
    work = work_by_kind(
        question.model, plan, question.work, machine, question.state, question.hit_rate
    )
    return {
        lane: _lane(
            work[lane],
            launch_s,
            now.busy_s.get(lane, 0.0),
            now.kinds_s.get(lane) if is_fresh else None,
        )
        for lane, launch_s in launches.items()
    }


def _lane(
    work: Mapping[str, tuple[int, float]],
    launch_s: float,
    busy_s: float,
    kinds_s: Mapping[str, float] | None,
) -> _Lane:
    """work: by kind, the groups that the lane has a part in and their seconds, launches apart."""
    total_s = sum(seconds for _, seconds in work.values())
    count = sum(each for each, _ in work.values())
    if total_s <= 0.0 or busy_s <= 0.0:
        return _Lane(launch_s, 0.0, 1.0)
    if kinds_s:
        points = [
            (seconds / each, kinds_s[kind] / each, each)
            for kind, (each, seconds) in work.items()
            if seconds > 0.0 and kinds_s.get(kind, 0.0) > 0.0
        ]
        launch_s = _launch_s(points, launch_s)
    fixed_s = min(count * launch_s, 0.9 * busy_s)
    return _Lane(launch_s, fixed_s, total_s / (busy_s - fixed_s))


def _launch_s(points: Sequence[tuple[float, float, int]], known_s: float) -> float:
    """What a group costs beside its work. points: a group's work, its seconds, how many of them.

    The most likely of what explains all kinds at once: kinds scatter, a rate is seldom far from
    what was thought, nor is a launch. So one kind alone, which could be either, is put down to
    both.
    """
    if not points:
        return known_s
    whole = sum(count for _, _, count in points)
    work_s = sum(size * count for size, _, count in points)
    took_s = sum(seconds * count for _, seconds, count in points)
    most = min(MOST_LAUNCH_S, 0.9 * min(seconds for _, seconds, _ in points))

    def unlikely(launch_s: float) -> float:
        slope = (took_s - launch_s * whole) / work_s
        off = sum(
            count * ((launch_s + slope * size) / seconds - 1.0) ** 2
            for size, seconds, count in points
        )
        return (
            off / whole / SCATTER**2
            + (log(slope) / RATE_SPREAD) ** 2
            + ((launch_s - known_s) / LAUNCH_SPREAD_S) ** 2
        )

    tried = [most * step / LAUNCH_STEPS for step in range(LAUNCH_STEPS + 1)]
    return min(tried, key=unlikely)


def _speed(predicted: Mapping[str, float], measured: Mapping[str, float], lane: str) -> float:
    """Times as fast as predicted."""
    busy_s = measured.get(lane, 0.0)
    return _sure(predicted[lane] / busy_s if busy_s > 0.0 else 1.0, SURE)


def _sure(factor: float, least: float) -> float:
    return 1.0 if abs(factor - 1.0) < least else factor


def _within(rate: float, stated: float) -> float:
    return min(max(rate, stated * SLOWEST), stated * FASTEST)


# -- what lanes share


def _with_cores(
    question: Question,
    stated: Hardware,
    plan: Plan,
    now: StepMeasured,
    fixed_s: float,
    blames_port: bool,
) -> Hardware:
    """fixed_s: of the cores' time, their launches."""
    machine = question.machine
    if now.busy_s["cpu:0"] <= 0.0:
        return machine
    sure = SURE_BY_KIND if now.kinds_s.get("cpu:0") else SURE
    thought_s = question.times(plan).busy_s["cpu:0"]
    factor = _sure((thought_s - fixed_s) / (now.busy_s["cpu:0"] - fixed_s), sure)
    if factor == 1.0:
        return machine
    brought = sum(
        now.busy_s[f"h2d:{index}"] * card.h2d_bytes_per_s
        for index, card in enumerate(machine.cards)
    )
    read = now.busy_s["disk:0"] * machine.disk_bytes_per_s
    beside = beside_cores(brought, read) / now.seconds
    cores, port, flops = machine.cpu_bytes_per_s, machine.dram_bytes_per_s, machine.cpu_flops
    reached = min(cores, port_left(port, beside)) * factor

    def with_rates(cores: float, port: float, flops: float) -> Hardware:
        return replace(
            machine,
            cpu_bytes_per_s=_within(cores, stated.cpu_bytes_per_s),
            dram_bytes_per_s=_within(max(port, cores), stated.dram_bytes_per_s),
            cpu_flops=_within(flops, stated.cpu_flops),
        )

    if factor > 1.0:
        faster = max(cores, reached) if beside else reached
        return with_rates(faster, max(port, reached + beside), flops * faster / cores)
    slower_cores = with_rates(reached, port, flops * reached / cores)
    if not beside:
        return slower_cores
    full_port = with_rates(cores, reached + beside, flops)
    guesses = [full_port, slower_cores] if blames_port else [slower_cores, full_port]
    first, second = (_misfit(question, plan, now, guess) for guess in guesses)
    return guesses[0] if first <= second + SURE else guesses[1]


def _misfit(question: Question, plan: Plan, now: StepMeasured, machine: Hardware) -> float:
    """How far a step of `plan` would be predicted from how it was measured."""
    return abs(replace(question, machine=machine).times(plan).step_s / now.seconds - 1.0)


def _with_crossings(
    question: Question, stated: Hardware, plan: Plan, now: StepMeasured
) -> Hardware:
    """What a step took beyond its lanes' work is put down to crossings, where there are many."""
    machine = question.machine
    if not machine.cards:
        return machine

    def times_s(factor: float) -> float:
        return replace(question, machine=_crossing(machine, stated, factor)).times(plan).step_s

    least, most = CROSSINGS
    low_s, high_s = times_s(least), times_s(most)
    if high_s - low_s < FELT * now.seconds * (most - least):
        return machine
    for _ in range(5):  # of a line that bends a little where lanes wait for each other
        factor = least + (most - least) * (now.seconds - low_s) / (high_s - low_s)
        if not least < factor < most:
            break
        seconds = times_s(factor)
        if abs(seconds / now.seconds - 1.0) < SURE_BY_KIND / 4:
            break
        least, low_s, most, high_s = (
            (factor, seconds, most, high_s)
            if seconds < now.seconds
            else (least, low_s, factor, seconds)
        )
    return _crossing(machine, stated, min(max(factor, CROSSINGS[0]), CROSSINGS[1]))


def _with_told_crossings(
    machine: Hardware,
    stated: Hardware,
    copied: float,
    brings: Sequence[bool],
    crossings_s: Mapping[str, float],
) -> Hardware:
    """Few rows cross in what a crossing costs beside its bytes, many as fast as the link copies.

    copied: bytes of a crossing. brings: of each link, whether the plan brings weights over it: then
    its rate is known from those.
    """
    copies_s = [copied / card.h2d_bytes_per_s for card in machine.cards]
    expected_s = [
        card.crossing_s + copy_s for card, copy_s in zip(machine.cards, copies_s, strict=True)
    ]
    # What only a processor has waited for came over some card's link, the slowest's at most.
    of_all = [s for lane, s in crossings_s.items() if not lane.startswith("gpu:")]
    slower = fmean(of_all) / max(expected_s) if of_all else 1.0
    cards = []
    for at, (card, its, copy_s, is_known) in enumerate(
        zip(machine.cards, stated.cards, copies_s, brings, strict=True)
    ):
        whole_s = crossings_s.get(f"gpu:{at}", slower * expected_s[at])
        if copy_s <= card.crossing_s or is_known:
            least_s, most_s = (its.crossing_s * factor for factor in CROSSINGS)
            crossing_s = min(max(whole_s - copy_s, least_s), most_s)
            cards.append(replace(card, crossing_s=crossing_s))
            continue
        faster = copy_s / max(whole_s - card.crossing_s, 1e-12)
        cards.append(
            replace(
                card,
                h2d_bytes_per_s=_within(card.h2d_bytes_per_s * faster, its.h2d_bytes_per_s),
                d2h_bytes_per_s=_within(card.d2h_bytes_per_s * faster, its.d2h_bytes_per_s),
            )
        )
    return replace(machine, cards=tuple(cards))


def _crossing(machine: Hardware, stated: Hardware, factor: float) -> Hardware:
    cards = zip(machine.cards, stated.cards, strict=True)
    return replace(
        machine,
        cards=tuple(replace(card, crossing_s=its.crossing_s * factor) for card, its in cards),
    )
