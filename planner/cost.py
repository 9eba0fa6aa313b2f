"""Seconds, predicted: what a share of a group costs on a lane, and what a read costs.

A figure of the profile where there is one, otherwise an estimate from bytes and operations at
rates that are *assumed*, and said to be. Drift multiplies what a lane was predicted to take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shadowlane.planner.catalog import Catalog, Experts, Group
from shadowlane.planner.hit_rate import expected_distinct, missing_of_layer
from shadowlane.planner.placement import DISK_LANE, LaneSpec
from shadowlane.planner.profile import DiskFigure, GroupFigure, Phase, Profile

# Assumed where nothing was measured: an ordinary desktop of two cores with a SATA-class disk.
ASSUMED_THREAD_BYTES_PER_S = 8e9  # one core reading weights
ASSUMED_DRAM_BYTES_PER_S = 20e9  # all cores together
ASSUMED_THREAD_FLOPS = 30e9  # one core in prefill
ASSUMED_DISK_BYTES_PER_S = 1e9
ASSUMED_INSTRUCTION_S = 2e-6
ASSUMED_STEP_S = 200e-6
ASSUMED_GATHER_S = 150e-6
ASSUMED_MISS_S = 100e-6  # of a missing expert, beside its bytes


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step carries: the planner's default is one sequence in the middle of a short text."""

    phase: Phase = "decode"
    rows: int = 1  # activation rows, over all sequences
    context: int = 256  # tokens attended, per sequence


DECODE = Workload()


@dataclass(frozen=True, slots=True)
class CostTable:
    """One workload priced: shares cost in proportion to their units, plus the fixed costs."""

    full_s: Mapping[str, tuple[float, ...]]  # lane -> seconds of each whole group, by its index
    read_s_per_byte: float  # while the compute lanes are at work
    idle_read_s_per_byte: float  # while they wait
    gather_s: float  # all embedding rows of the step, if none of them is in RAM
    instruction_s: float
    step_s: float

    def share_s(self, lane: str, group_index: int, units: int, of_units: int) -> float:
        return self.full_s[lane][group_index] * units / of_units + self.instruction_s

    def mean_read_s_per_byte(self, nbytes: float, computing_s: float) -> float:
        """Of reading `nbytes` while the compute lanes work for `computing_s`, and wait after it."""
        beside = min(nbytes, computing_s / self.read_s_per_byte)
        total_s = beside * self.read_s_per_byte + (nbytes - beside) * self.idle_read_s_per_byte
        return total_s / nbytes if nbytes else self.read_s_per_byte


class CostModel:
    """Predicts from `profile` (None: everything is assumed), corrected by `drift` per lane.

    A drift of 1.2 means: this lane takes 1.2 times what the profile says.
    """

    def __init__(
        self, profile: Profile | None, drift: Mapping[str, float] | None = None, depth: int = 4
    ) -> None:
        self.profile = profile
        self._known = profile or Profile(hardware="", model="")
        self.drift = dict(drift or {})
        self.depth = depth  # reads that the disk lane keeps in flight
        self._figures: dict[tuple[object, ...], list[GroupFigure]] = {}
        for figure in self._known.groups:
            key = (figure.kind, figure.layout, figure.cols, figure.threads, figure.phase)
            self._figures.setdefault(key, []).append(figure)

    @property
    def measured(self) -> bool:
        """Whether predictions stand on any measurement."""
        return self.profile is not None

    @property
    def disk_drift(self) -> float:
        return self.drift.get(DISK_LANE, 1.0)

    def with_drift(self, drift: Mapping[str, float]) -> CostModel:
        """The same profile under these multipliers (they replace, not multiply, the old ones)."""
        return CostModel(self.profile, drift, self.depth)

    @property
    def measured_chunk(self) -> int | None:
        """Rows of the shortest chunk of a prompt that was measured: one sub-chunk."""
        chunks = (figure.rows for figure in self._known.groups if figure.phase == "prefill")
        return min(chunks, default=None)

    @property
    def copies_save_s_per_byte(self) -> float | None:
        """What a chunk gains per byte of expanded copies on one lane; None: unmeasured."""
        return self._known.copies_save_s_per_byte

    def unmeasured(self, catalog: Catalog, lanes: Iterable[LaneSpec]) -> tuple[str, ...]:
        """What a prediction for this model has to assume, by name, each once."""
        missing = list(self.profile.unmeasured) if self.profile else ["everything"]
        if not any(block.expanded_nbytes for block in catalog.blocks):
            missing = [each for each in missing if each != "copies_save_s_per_byte"]
        if catalog.experts is None:
            missing = [each for each in missing if each not in ("miss_s", "chunk_miss_s")]
        if self.profile:
            for group in catalog.groups:
                for lane in lanes:
                    name = f"{group.kind} {group.layout} {group.cols} on {lane.threads} threads"
                    found = self._measured_points(group, lane, "decode")
                    if not found and group.kind != "embed" and name not in missing:
                        missing.append(name)
        return tuple(missing)

    def table(
        self,
        catalog: Catalog,
        lanes: Iterable[LaneSpec],
        workload: Workload = DECODE,
        *,
        streaming: bool,
        block_nbytes: int = 0,
    ) -> CostTable:
        """Price every group on each of `lanes`, which are taken to work at the same time.

        `streaming` charges what the lanes lose to each other at the DRAM port; `block_nbytes`
        chooses the measured read size (0: a slot).
        """
        lanes = tuple(lanes)
        all_threads = sum(lane.threads for lane in lanes)
        full_s: dict[str, tuple[float, ...]] = {}
        for lane in lanes:
            by_shape: dict[tuple[object, ...], float] = {}
            seconds: list[float] = []
            for group in catalog.groups:
                shape = (group.kind, group.layout, group.units, group.cols, len(group.blocks))
                if shape not in by_shape:
                    by_shape[shape] = self._group_s(
                        catalog, group, lane, all_threads, workload, streaming
                    ) * self.drift.get(lane.name, 1.0)
                seconds.append(by_shape[shape])
            full_s[lane.name] = tuple(seconds)
        read_nbytes = block_nbytes or catalog.slot_nbytes
        read_s, idle_read_s = (
            1.0 / self.disk_bytes_per_s(read_nbytes, contended=contended)
            for contended in (True, False)
        )
        return CostTable(
            full_s=full_s,
            read_s_per_byte=read_s * self.disk_drift,
            idle_read_s_per_byte=idle_read_s * self.disk_drift,
            gather_s=_or(self._known.gather_s, ASSUMED_GATHER_S) * workload.rows,
            instruction_s=_or(self._known.instruction_s, ASSUMED_INSTRUCTION_S),
            step_s=_or(self._known.step_s, ASSUMED_STEP_S),
        )

    def disk_bytes_per_s(self, nbytes: int, *, contended: bool) -> float:
        """Of reads of `nbytes`, from the figure nearest in size, then in depth; no drift."""
        figures = self._known.disk
        if not figures:
            return ASSUMED_DISK_BYTES_PER_S

        def distance(figure: DiskFigure) -> tuple[float, int]:
            ratio = max(figure.nbytes, nbytes) / max(1, min(figure.nbytes, nbytes))
            return ratio, abs(figure.depth - self.depth)

        best = min(figures, key=distance)
        if contended and best.contended_bytes_per_s is not None:
            return best.contended_bytes_per_s
        return best.bytes_per_s

    def experts_read_s(self, experts: Experts, nbytes: float) -> float:
        """Seconds that the disk lane is at work for `nbytes` of experts; no drift."""
        return nbytes / self.disk_bytes_per_s(experts.held_nbytes, contended=True)

    def missing_s(self, catalog: Catalog, slots: int, workload: Workload) -> float:
        """Seconds that missing experts add to one layer of a step, beyond computing with them."""
        experts = catalog.experts
        if experts is None or slots >= experts.total:
            return 0.0
        is_decode = workload.phase == "decode"
        missing = missing_of_layer(experts, slots, workload.rows, is_decode=is_decode)
        known = self._known.miss_s if is_decode else self._known.chunk_miss_s
        reading_s = self.experts_read_s(experts, experts.held_nbytes)
        return missing * _or(known, reading_s + ASSUMED_MISS_S) * self.disk_drift

    def dram_bytes_per_s(self, *, streaming: bool) -> float:
        """What all compute lanes together can read."""
        if streaming and self._known.dram_contended_bytes_per_s is not None:
            return self._known.dram_contended_bytes_per_s
        return _or(self._known.dram_bytes_per_s, ASSUMED_DRAM_BYTES_PER_S)

    def _group_s(
        self,
        catalog: Catalog,
        group: Group,
        lane: LaneSpec,
        all_threads: int,
        workload: Workload,
        streaming: bool,
    ) -> float:
        if group.kind == "embed":
            return 0.0  # rows in RAM cost nothing worth counting; others cost `gather_s`
        nbytes = touched_nbytes(catalog, group, workload)
        points = self._measured_points(group, lane, workload.phase)
        work = _work(group.kind, workload.rows, workload.context)
        if points:
            seconds = _interpolate(points, work)
            # NOTE: a lane measured alone had the DRAM port to itself; with others it has a part.
            port = self.dram_bytes_per_s(streaming=streaming) * lane.threads / all_threads
            return max(seconds, nbytes / port) if workload.phase == "decode" else seconds
        rate = min(
            ASSUMED_THREAD_BYTES_PER_S * lane.threads,
            self.dram_bytes_per_s(streaming=streaming) * lane.threads / all_threads,
        )
        flops = group.flops_per_row * workload.rows
        if group.kind == "attn":
            flops *= workload.context
        return max(nbytes / rate, flops / (ASSUMED_THREAD_FLOPS * lane.threads))

    def _measured_points(
        self, group: Group, lane: LaneSpec, phase: Phase
    ) -> list[tuple[float, float]]:
        """(work, seconds of the whole group) by rising work; empty where unmeasured."""
        key = (group.kind, group.layout, group.cols, lane.threads, phase)
        by_work: dict[float, float] = {}
        for figure in self._figures.get(key, ()):
            seconds = figure.seconds * group.units / figure.units
            work = _work(group.kind, figure.rows, figure.context)
            by_work[work] = min(seconds, by_work.get(work, seconds))
        return sorted(by_work.items())


def _work(kind: str, rows: int, context: int) -> float:
    """What a group's time grows with: rows, and for attention also the tokens each attends to."""
    return float(rows * max(1, context)) if kind == "attn" else float(rows)


def touched_nbytes(catalog: Catalog, group: Group, workload: Workload) -> float:
    """Bytes read from DRAM: the weights once, or the keys and values of every decode row."""
    if group.kind == "experts" and catalog.experts is not None:
        experts = catalog.experts
        return experts.nbytes * expected_distinct(experts.per_layer, experts.top_k, workload.rows)
    if group.kind != "attn":
        return float(sum(catalog.blocks[index].nbytes for index in group.blocks))
    num_attn = sum(1 for each in catalog.groups if each.kind == "attn")
    token_nbytes = catalog.page_nbytes / catalog.page_tokens / num_attn
    sequences = workload.rows if workload.phase == "decode" else 1
    return token_nbytes * workload.context * sequences


def _interpolate(points: list[tuple[float, float]], work: float) -> float:
    """Piecewise linear; outside the points the nearest slope, and never below half the nearest."""
    if len(points) == 1:
        (only_work, seconds) = points[0]
        return seconds * max(work / only_work, 0.5)
    upper = next((i for i, point in enumerate(points) if point[0] >= work), len(points) - 1)
    upper = max(1, upper)
    (low_work, low_s), (high_work, high_s) = points[upper - 1], points[upper]
    value = low_s + (high_s - low_s) * (work - low_work) / (high_work - low_work)
    nearest = min(points, key=lambda point: abs(point[0] - work))[1]
    return max(value, nearest / 2)


def _or(figure: float | None, assumed: float) -> float:
    return assumed if figure is None else figure
