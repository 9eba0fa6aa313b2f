"""The law of emulated lanes: how long a step takes on a machine that is not there.

It is not the planner's model, so that plans have something to be wrong about. Cores, links and disk
share the DRAM port like water, second by second; small matrices reach less of a rate than large
ones; a card pays a floor per layer, not per group; each chosen expert is drawn, not expected; cores
are taken away for milliseconds at a time; a card gets slower when it is warm; everything scatters.
And each rate is off from the hardware file by a hidden factor, drawn from a seed, that planners
have to learn from what they measure.

On a virtual clock: `World.step` computes, nothing waits. Rates are emulated, whatever they say.
`ops/emulated.py` is the same law for the engine's own lanes, instruction by instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate, cycle
from math import floor
from random import Random
from typing import NamedTuple, Protocol

from shadowlane.actors.spec import SMALL
from shadowlane.ops.emulated import (
    CHUNK_S,
    CORE_OFF_S,
    FIRST_OF_LAYER,
    LEAST_PART,
    REST_OF_LAYER,
)
from shadowlane.planner.catalog import GroupKind
from shadowlane.planner.hardware import CALM, Hardware
from shadowlane.planner.hit_rate import expected_distinct
from shadowlane.planner.hybrid import (
    NOTHING,
    HitRate,
    Load,
    Model,
    Plan,
    Site,
    Work,
    chooser,
    disk_ring_nbytes,
    flops_of,
    read_kv_nbytes,
    rows_at_once,
    stage_nbytes,
)
from shadowlane.planner.hybrid_learning import StepMeasured
from shadowlane.planner.hybrid_moves import Migration

CHUNK_NBYTES = 4e6  # of what links bring
READ_S = 1e-4  # before a read on demand begins
JITTER = 0.02  # standard deviation of each duration, as a part of it
JITTERS = 32768  # that are drawn before they come round again: those of dozens of steps
BINS = 64  # of a step's time, over which what goes through the DRAM port is told apart
MOVE_PART = 0.25  # of a step that lanes give to a background move if nothing is left over
WARM_AFTER_S = 30.0
WARM_LOSES = 0.06  # of a card's rate, once warm


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a hardware file does not know: factors on its rates, and the crossing's."""

    cpu: float = 1.0
    gpu: float = 1.0
    link: float = 1.0
    disk: float = 1.0
    dram: float = 1.0
    crossing: float = 1.0

    @staticmethod
    def drawn(seed: int, spread: float = 0.3) -> Hidden:
        """Each factor between 1 - spread and 1 + spread."""
        random = Random(seed)
        return Hidden(*(1.0 + random.uniform(-spread, spread) for _ in fields(Hidden)))


def true_machine(machine: Hardware, hidden: Hidden) -> Hardware:
    """The machine as it really is; a planner that knew it would be clairvoyant."""
    cards = tuple(
        replace(
            card,
            vram_bytes_per_s=card.vram_bytes_per_s * hidden.gpu,
            flops=card.flops * hidden.gpu,
            h2d_bytes_per_s=card.h2d_bytes_per_s * hidden.link,
            d2h_bytes_per_s=card.d2h_bytes_per_s * hidden.link,
            crossing_s=card.crossing_s * hidden.crossing,
        )
        for card in machine.cards
    )
    return replace(
        machine,
        cards=cards,
        cpu_bytes_per_s=machine.cpu_bytes_per_s * hidden.cpu,
        cpu_flops=machine.cpu_flops * hidden.cpu,
        dram_bytes_per_s=max(
            machine.dram_bytes_per_s * hidden.dram, machine.cpu_bytes_per_s * hidden.cpu
        ),
        disk_bytes_per_s=machine.disk_bytes_per_s * hidden.disk,
    )


class Routes(Protocol):
    """What routers choose, where it was recorded."""

    def hits(self, layer: int, part: float, step: int) -> float:
        """Part of a layer's choices in a step that hit the hottest `part` of its experts."""
        ...


class Span(NamedTuple):
    """What one lane does for one group, in seconds since its step began."""

    lane: str
    group: str
    kind: GroupKind
    start_s: float
    end_s: float


@cache
def _jitters(seed: int) -> tuple[float, ...]:
    """What durations are multiplied by, one after the other."""
    random = Random(seed)
    return tuple(max(0.5, random.gauss(1.0, JITTER)) for _ in range(JITTERS))


class World:
    """One model on one emulated machine, its clock, and what else runs there (`state`)."""

    def __init__(
        self,
        model: Model,
        machine: Hardware,
        hidden: Hidden | None = None,
        *,
        hit_rate: HitRate = lambda part: part,
        routes: Routes | None = None,
        seed: int = 0,
        is_warm: bool = False,
    ) -> None:
        """routes: in place of drawn choices, one after the other and from the beginning again.

        is_warm: cards have worked for long.
        """
        self.model = model
        self.machine = true_machine(machine, hidden or Hidden())
        self.state = CALM
        self.now_s = 0.0
        self.hit_rate = hit_rate
        self._routes = routes
        self._num_steps = 0
        self._random = Random(seed)
        self._jitter = cycle(_jitters(seed))
        self._card_busy_s = 2 * WARM_AFTER_S if is_warm else 0.0
        self._traffic: _Traffic | None = None  # of the newest step

    def step(
        self,
        plan: Plan,
        work: Work,
        moving: Migration | None = None,
        spans: list[Span] | None = None,
    ) -> StepMeasured:
        """One step of `plan`; the clock goes on.

        spans: what each lane does is added to them, but not the background move. moving: what is
        still to be moved in the background, over what links and disk have left beside the step, or
        a part of the step where they have nothing left. All lanes of a move get on alike.
        """
        if self._traffic is None or not self._traffic.is_of(plan, work):
            first = _Step(self, plan, work, None, None)
            self._traffic = first.traffic(first.play())
        run = _Step(self, plan, work, spans, self._traffic)
        seconds = run.play()
        self._traffic = run.traffic(seconds)
        self._num_steps += 1
        part = 0.0
        if moving is not None:
            needs = {lane: nbytes / self.rate(lane) for lane, nbytes in moving.lanes().items()}
            left = {lane: max(0.0, seconds - run.busy.get(lane, 0.0)) for lane in needs}
            part = min(1.0, *(left[lane] / need for lane, need in needs.items() if need))
            if part < 1.0:  # a move never starves: it gets a part of every step
                longest_s = max(needs.values())
                more = min(1.0 - part, seconds * MOVE_PART / longest_s)
                seconds += more * longest_s
                part += more
        self._card_busy_s += max((run.busy[name] for name in run.cards), default=0.0)
        self.now_s += seconds
        moved = part * moving.nbytes if moving else 0.0
        hits = run.hits / run.chosen if run.chosen else None
        crossings_s = {lane: seconds / count for lane, (seconds, count) in run.crossed.items()}
        return StepMeasured(seconds, run.busy, moved, run.kinds, hits, crossings_s)

    def wait_for(self, moving: Migration) -> float:
        """Seconds that a step waits until all of it has been moved; the clock goes on."""
        seconds = self.jitter() * max(
            nbytes / self.rate(lane) for lane, nbytes in moving.lanes().items()
        )
        self.now_s += seconds
        return seconds

    def rate(self, lane: str) -> float:
        """Bytes per second of a link or the disk, as they are now."""
        kind, _, index = lane.partition(":")
        if kind == "disk":
            return self.machine.disk_bytes_per_s * self.state.disk
        card = self.machine.cards[int(index)]
        return (card.h2d_bytes_per_s if kind == "h2d" else card.d2h_bytes_per_s) * self.state.link

    def jitter(self) -> float:
        return next(self._jitter)

    def draw_hits(self, load: Load, part: float) -> int:
        """How many of the experts that one token chooses of a layer are among the hottest."""
        if self._routes is not None:
            # A recording may have other numbers of choices: its part of them, rounded by chance.
            hits = self._routes.hits(load.layer or 0, part, self._num_steps)
            return int(hits * load.top_k + self._random.random())
        rate = self.hit_rate(part)
        return sum(self._random.random() < rate for _ in range(load.top_k))

    def core_off_s(self, seconds: float) -> float:
        """How long a neighbour holds the cores up while they want to work for `seconds`."""
        taken = 1.0 - self.state.cpu
        if taken <= 0.0:
            return 0.0
        # Off and on in turns; a short piece of work meets an off time now and then, whole.
        expected = seconds * taken / (1.0 - taken)
        count, rest = divmod(expected, CORE_OFF_S)
        return CORE_OFF_S * (count + (self._random.random() * CORE_OFF_S < rest))

    @property
    def card_rate(self) -> float:
        return self.state.gpu * (1.0 - WARM_LOSES * (self._card_busy_s > WARM_AFTER_S))


class _Traffic:
    """What goes through the DRAM port ahead of its use in a step: bytes per second, over time."""

    def __init__(
        self, plan: Plan, work: Work, seconds: float, moved: Sequence[tuple[float, float, float]]
    ) -> None:
        """moved: (start, end, bytes per second) since the step began, which took `seconds`.

        What is before its start or after its end is in the step before or after, as much as here.
        """
        self._plan, self._work = plan, work
        self._bin_s = seconds / BINS
        nbytes = [0.0] * BINS
        for start_s, end_s, rate in moved:
            while start_s < end_s - 1e-12:
                number = floor(start_s / self._bin_s + 1e-9)
                until_s = min(end_s, (number + 1) * self._bin_s)
                nbytes[number % BINS] += (until_s - start_s) * rate
                start_s = until_s
        self._until = [0.0, *accumulate(nbytes)]  # bytes moved before each bin

    def is_of(self, plan: Plan, work: Work) -> bool:
        return self._plan is plan and self._work == work

    def load(self, start_s: float, end_s: float) -> float:
        """Mean bytes per second over the bins that this time touches."""
        first, last = floor(start_s / self._bin_s), floor(end_s / self._bin_s) + 1
        rounds, first = divmod(first, BINS)
        moved = self._before(last - rounds * BINS) - self._before(first)
        return moved / ((last - rounds * BINS - first) * self._bin_s)

    def _before(self, number: int) -> float:
        rounds, rest = divmod(number, BINS)
        return rounds * self._until[-1] + self._until[rest]


class _Step:
    """One step played through, group by group; links run on beside."""

    def __init__(
        self,
        world: World,
        plan: Plan,
        work: Work,
        spans: list[Span] | None,
        before: _Traffic | None,
    ) -> None:
        """before: what went through the DRAM port ahead of its use in a step like this one.

        None: not known; links and disk are taken to work without a pause.
        """
        self._world, self._plan, self._work, self._spans = world, plan, work, spans
        self._before = before
        self._ahead: list[tuple[float, float, float]] = []  # (start, end, bytes per second)
        machine = world.machine
        self.cards = [f"gpu:{index}" for index in range(len(machine.cards))]
        self.links = [f"h2d:{index}" for index in range(len(machine.cards))]
        self.busy = dict.fromkeys(["cpu:0", "disk:0", *self.cards, *self.links], 0.0)
        self.chosen = self.hits = 0.0  # experts, and those on cards
        self.kinds: dict[str, dict[str, float]] = {lane: {} for lane in ("cpu:0", *self.cards)}
        self.crossed: dict[str, tuple[float, int]] = {}  # by card: seconds, how often over its link
        self._made = [(0, 1.0)]  # the sides that newest made something, and their jitters
        if not self.links:
            self.links = ["disk:0"]
        row_nbytes = world.model.row_nbytes * rows_at_once(plan, work)
        # Of each side, the cores first: what a crossing to or from it takes.
        self._cross_s = [0.0] + [
            card.crossing_s + row_nbytes / (card.h2d_bytes_per_s * world.state.link)
            for card in machine.cards
        ]
        self._hops = [
            [0.0 if here == there else cross_s + its_s for there, its_s in enumerate(self._cross_s)]
            for here, cross_s in enumerate(self._cross_s)
        ]
        ahead = [
            site
            for load, site in zip(world.model.loads, plan.sites, strict=True)
            if load.nbytes and not (load.experts and work.phase == "decode")
        ]
        self._ring_nbytes = disk_ring_nbytes(world.model, machine, world.state)
        self._most_load = 0.0  # of the port, by what comes ahead of its use
        if any(site.brought_in(work.phase) for site in ahead):
            self._most_load += sum(map(world.rate, self.links))
        if any(site.vram + site.ram < 1.0 - NOTHING for site in ahead):
            self._most_load += world.rate("disk:0")
        self._link_free_s = [0.0] * len(machine.cards)
        self._through_s = [0.0] * (1 + len(machine.cards))  # each side, with its newest group

    def play(self) -> float:
        """Micro-batch after micro-batch: a side begins one when it is through with that before."""
        world, work, sites = self._world, self._work, self._plan.sites
        count = self._plan.micro_batches if work.phase == "prefill" else 1
        self._work = replace(work, rows=rows_at_once(self._plan, work))
        for number in range(count):
            ready = list(self._cross_s)
            layer: int | None = -1
            for index, (load, site) in enumerate(zip(world.model.loads, sites, strict=True)):
                if load.kind == "lm_head" and number < count - 1:
                    continue
                is_first = load.layer != layer
                layer = load.layer
                adds_up = chooser(world.model, sites, index) if load.is_joined else None
                ready = self._group(load, site, ready, is_first, adds_up)
        self._work = work
        return max(min(ready), *(self.busy[name] for name in self.links), self.busy["disk:0"])

    def _group(
        self, load: Load, site: Site, ready: list[float], is_first: bool, adds_up: int | None
    ) -> list[float]:
        """When its output is at each side. adds_up: the side where all of it is added up first."""
        world, machine = self._world, self._world.machine
        parts = self._parts(load, site)
        begin_s = min(ready)
        ends: list[tuple[int, float]] = []
        for index, card in enumerate(machine.cards):
            resident, brought, flops = parts.card(site.over[index])
            if resident + brought + flops <= 0.0:
                continue
            work_s = (
                max(_bent(resident + brought, card.vram_bytes_per_s), flops / card.flops)
                / world.card_rate
            )
            work_s = work_s * world.jitter()
            # A floor per layer: five groups' launches are paid with its first.
            launch_s = card.launch_s * (FIRST_OF_LAYER if is_first else REST_OF_LAYER)
            end_s = max(ready[1 + index], self._through_s[1 + index]) + work_s + launch_s
            if brought:
                arrived_s = self._bring(index, load, brought, begin_s, parts.is_late)
                end_s = max(end_s, arrived_s + CHUNK_NBYTES / card.vram_bytes_per_s)
            self._count(self.cards[index], load, work_s + launch_s)
            if self._spans is not None:
                self._record(self.cards[index], load, end_s, work_s + launch_s)
            ends.append((1 + index, end_s))
            self._cross(1 + index, self._made)
        if parts.cpu_nbytes + parts.cpu_flops > 0.0:
            port = machine.dram_bytes_per_s - self._load_beside(parts, ready[0])
            rate = min(machine.cpu_bytes_per_s, max(port, machine.dram_bytes_per_s * LEAST_PART))
            work_s = max(_bent(parts.cpu_nbytes, rate), parts.cpu_flops / machine.cpu_flops)
            work_s = work_s * world.jitter() + machine.cpu_launch_s
            work_s += world.core_off_s(work_s)
            end_s = max(ready[0], self._through_s[0]) + work_s
            if parts.read_nbytes:
                end_s = max(end_s, self._read(load, parts.read_nbytes, begin_s, parts.is_late))
            if parts.asked_nbytes:
                end_s = max(end_s, self._read(load, parts.asked_nbytes, begin_s, True))
            self._count("cpu:0", load, work_s)
            if self._spans is not None:
                self._record("cpu:0", load, end_s, work_s)
            ends.append((0, end_s))
            self._cross(0, self._made)
        elif parts.read_nbytes:
            late_s = self._read(load, parts.read_nbytes, begin_s, parts.is_late)
            ends = [(side, max(end_s, late_s)) for side, end_s in ends]
        if not ends:
            return ready
        for side, end_s in ends:
            self._through_s[side] = end_s
        leaving = [(end_s, world.jitter(), self._hops[side]) for side, end_s in ends]
        if adds_up is not None:
            joined_s = max([end_s + jitter * hops[adds_up] for end_s, jitter, hops in leaving])
            self._cross(adds_up, [(ends[at][0], leaving[at][1]) for at in range(len(ends))])
            if all(side != adds_up for side, _ in ends):  # it has launches, if nothing to compute
                adder = machine.cards[adds_up - 1] if adds_up else None
                joined_s += machine.cpu_launch_s if adder is None else adder.launch_s
            leaving = [(joined_s, world.jitter(), self._hops[adds_up])]
            ends = [(adds_up, joined_s)]
            self._through_s[adds_up] = joined_s
        self._made = [
            (side, jitter) for (side, _), (_, jitter, _) in zip(ends, leaving, strict=True)
        ]
        return [
            max([end_s + jitter * hops[there] for end_s, jitter, hops in leaving])
            for there in range(len(ready))
        ]

    def traffic(self, seconds: float) -> _Traffic:
        """What went through the DRAM port ahead of its use, when the step took so long."""
        return _Traffic(self._plan, self._work, seconds, self._ahead)

    def _load_beside(self, parts: _Parts, begin_s: float) -> float:
        """Bytes per second that links and disk take from the DRAM port while the cores compute.

        What comes ahead of its use comes when it came in the step before; what a router has just
        chosen, as long as it is on its way.
        """
        world = self._world
        cores_s = max(parts.cpu_nbytes / world.machine.cpu_bytes_per_s, 1e-9)
        late = 0.0
        if parts.is_late:
            rates = [world.rate(link) for link in self.links] if parts.brought_nbytes else []
            late = min(sum(rates), parts.brought_nbytes / cores_s)
            late += min(world.rate("disk:0"), parts.read_nbytes / cores_s)
        if self._before is None:
            return late + self._most_load
        return late + self._before.load(begin_s, begin_s + cores_s)

    def _cross(self, side: int, made: Sequence[tuple[int, float]]) -> None:
        """A side waits for what others made; from card to card it goes over two links."""
        for other, jitter in made:
            for card in {side, other} - {0} if other != side else ():
                seconds, count = self.crossed.get(self.cards[card - 1], (0.0, 0))
                seconds += jitter * self._cross_s[card]
                self.crossed[self.cards[card - 1]] = seconds, count + 1

    def _count(self, lane: str, load: Load, busy_s: float) -> None:
        self.busy[lane] += busy_s
        kinds = self.kinds[lane]
        kinds[load.kind] = kinds.get(load.kind, 0.0) + busy_s

    def _record(self, lane: str, load: Load, end_s: float, busy_s: float) -> None:
        """What waits is drawn at its end: it works then."""
        assert self._spans is not None
        self._spans.append(Span(lane, load.name, load.kind, end_s - busy_s, end_s))

    def _bring(self, index: int, load: Load, nbytes: float, begin_s: float, is_late: bool) -> float:
        """When the last chunk is there: ahead while there is room, the rest from `begin_s` on."""
        card = self._world.machine.cards[index]
        rate = card.h2d_bytes_per_s * self._world.state.link
        seconds = nbytes / rate * self._world.jitter() + nbytes / CHUNK_NBYTES * CHUNK_S
        self.busy[self.links[index]] += seconds
        free_s = self._link_free_s[index]
        ahead_s = 0.0 if is_late else stage_nbytes(card) / rate
        start_s = max(free_s, begin_s - ahead_s)
        self._link_free_s[index] = start_s + seconds
        if not is_late:
            self._ahead.append((start_s, start_s + seconds, nbytes / seconds))
        if self._spans is not None:
            self._record(self.links[index], load, start_s + seconds, seconds)
        return self._link_free_s[index]

    def _read(self, load: Load, nbytes: float, begin_s: float, is_late: bool) -> float:
        """When it is in RAM: on demand, or ahead of its use, in a ring that was full at first."""
        rate = self._world.machine.disk_bytes_per_s * self._world.state.disk
        seconds = nbytes / rate * self._world.jitter()
        self.busy["disk:0"] += seconds
        if self._spans is not None:
            # What is read ahead, for this step or the next: the disk works without a pause.
            end_s = begin_s + READ_S + seconds if is_late else self.busy["disk:0"]
            self._record("disk:0", load, end_s, seconds)
        if is_late:
            return begin_s + READ_S + seconds
        arrived_s = self.busy["disk:0"] - self._ring_nbytes / rate
        self._ahead.append((arrived_s - seconds, arrived_s, nbytes / seconds))
        return arrived_s

    def _parts(self, load: Load, site: Site) -> _Parts:
        work = self._work
        is_decode = work.phase == "decode"
        flops = flops_of(load, work)
        if load.kind == "attn":
            kv = read_kv_nbytes(load, work)
            off = 1.0 - site.vram
            return _Parts(kv * site.vram, 0.0, flops * site.vram, kv * off, flops * off, 0.0, False)
        if not load.experts:
            brought = (1.0 - site.vram) * site.brought_in(work.phase)
            off = max(0.0, 1.0 - site.vram - brought)
            on_disk = max(0.0, 1.0 - site.vram - site.ram)
            return _Parts(
                load.nbytes * site.vram,
                load.nbytes * brought,
                flops * (site.vram + brought),
                load.nbytes * off,
                flops * off,
                load.nbytes * on_disk,
                False,
            )
        chosen = expected_distinct(load.experts, load.top_k, work.rows)
        if is_decode and work.rows == 1:
            hits = float(self._world.draw_hits(load, site.vram))
        else:
            hits = chosen * (self._world.hit_rate(site.vram) if is_decode else site.vram)
        if is_decode:  # most of a chunk's rows choose everything in the end
            self.chosen += chosen
            self.hits += hits
        lost = (chosen - hits) * self._lost(site)
        missing = chosen - hits
        per_expert = flops / chosen
        part = site.brought_in(work.phase)
        brought, off = missing * part, missing * (1.0 - part)
        # Of a prompt our disk reads ahead what links bring; a processor asks for what it lacks.
        asked = max(0.0, lost - brought) if load.is_joined and not is_decode else 0.0
        unchosen = load.experts - chosen if load.comes and not is_decode else 0.0
        on_disk = max(0.0, 1.0 - site.vram - site.ram)
        more = unchosen * (1.0 - site.vram) * part  # that come all the same, some off the disk
        return _Parts(
            load.nbytes * hits,
            load.nbytes * (brought + more),
            per_expert * (hits + brought),
            load.nbytes * off,
            per_expert * off,
            load.nbytes * (lost - asked + unchosen * min(on_disk, (1.0 - site.vram) * part)),
            is_decode,
            load.nbytes * asked,
        )

    def _lost(self, site: Site) -> float:
        """Of the chosen experts that are not on cards, the part that is only on disk."""
        rate = self._world.hit_rate if self._work.phase == "decode" else float
        on_cards, in_memory = rate(site.vram), rate(min(1.0, site.vram + site.ram))
        return (1.0 - in_memory) / (1.0 - on_cards) if on_cards < 1.0 else 0.0


@dataclass(frozen=True, slots=True)
class _Parts:
    """What one group is to each side."""

    card_nbytes: float
    brought_nbytes: float
    card_flops: float
    cpu_nbytes: float
    cpu_flops: float
    read_nbytes: float
    is_late: bool  # known only when a router has chosen
    asked_nbytes: float = 0.0  # read besides, once it has

    def card(self, share: float) -> tuple[float, float, float]:
        return self.card_nbytes * share, self.brought_nbytes * share, self.card_flops * share


def _bent(nbytes: float, rate: float) -> float:
    """Seconds of reading a matrix: small ones reach less of the rate."""
    return (nbytes + SMALL * (nbytes > 0.0)) / rate
