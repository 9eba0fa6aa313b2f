"""The lanes of an engine: their processes, the placements they hold, and what lives in the arena.

Starts them, gives them placements, moves the sweep from one placement to the next, and sets all
going again when one has failed. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shadowlane.actors import disk_lane as disk
from shadowlane.actors.arena import Arena, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.homes import Homes
from shadowlane.actors.hosts import Host, LaneDied, Pending, Remote, Settled
from shadowlane.actors.recovery import (
    find_failure,
    kill_quietly,
    set_abort,
    settle_counters,
    wait_until_parked,
)
from shadowlane.actors.spec import EngineSettings
from shadowlane.ops.errors import ModelError
from shadowlane.ops.files import ModelFiles
from shadowlane.planner.heat import Heat
from shadowlane.planner.placement import DISK_LANE, LaneSpec, Placement
from shadowlane.planner.program import Program, build_programs

Progress = Callable[[str, float | None], None]
PARCEL_NBYTES = 256 << 20  # of expanded copies, made between two reports of how far it is


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A lane's answer to a placement, perhaps still to come."""

    lane: str
    placement_id: int
    pending: Pending


@dataclass(frozen=True, slots=True)
class Published:
    """A placement that the lanes know, and its programs."""

    placement: Placement
    programs: dict[str, Program]
    lengths: tuple[int, ...]  # instructions of each compute lane in one step


class Crew:
    """See the module. `placement` is the one that steps run under."""

    placement: Placement

    def __init__(
        self, host: Host, settings: EngineSettings, blueprint: Blueprint, files: ModelFiles
    ) -> None:
        self.lanes = tuple(
            LaneSpec(f"cpu:{number}", len(cores)) for number, cores in enumerate(settings.cores)
        )
        self._host = host
        self._settings = settings
        self._blueprint = blueprint
        self._files = files
        self._published: dict[int, Published] = {}
        self.newest_id = 0  # the highest id that any placement had
        self.lane_bases = [0] * len(self.lanes)  # instructions retired before the next step
        self.disk_base = 0  # the same of blocks read
        self._heat: Heat | None = None
        self.runs: dict[str, Pending] = {}
        self.cpus: list[Remote] = []
        self.disk: Remote | None = None

    # -- processes

    def launch(self) -> None:
        """Start the lanes' processes; they come up while the caller goes on."""
        if self.disk is None:
            self.cpus = [
                self._host.start_cpu(number, cores)
                for number, cores in enumerate(self._settings.cores)
            ]
            self.disk = self._start_disk()

    def _start_disk(self) -> Remote:
        settings = self._settings
        return self._host.start_disk(settings.depth, settings.direct, settings.prefetch)

    @property
    def disk_lane(self) -> Remote:
        assert self.disk is not None, "the lanes must be launched first"
        return self.disk

    def open(self, arena: Arena, layout: ArenaLayout) -> list[Pending]:
        """Every lane maps the arena; the compute lanes may still be at it when this returns."""
        self._arena, self._layout = arena, layout
        self.homes = Homes(layout.weights, layout.weights_nbytes, self._blueprint.sources)
        self._copies: set[int] = set(layout.expanded)  # blocks whose expanded copy is there
        return self._open_lanes()

    def _open_lanes(self) -> list[Pending]:
        where = (self._blueprint, self._layout, self._arena.handle)
        opened = [lane.call("open", *where) for lane in self.cpus]
        self.disk_lane.call("open", *where, self._files.stamps).result()
        return opened

    def run(self) -> None:
        self.runs = {lane.name: lane.call("run") for lane in [*self.cpus, self.disk_lane]}

    def look_after(self) -> None:
        """Raise LaneDied if a lane's loop has ended, or is to end."""
        is_aborted = bool(self._arena.view(self._layout.abort, np.int32, 1)[0])
        failure = find_failure(self.runs, is_aborted)
        if failure is not None:
            raise failure

    def abort(self) -> None:
        """End every lane's loop."""
        set_abort(self._arena, self._layout, True)

    def restart(self, step: int) -> None:
        """Every lane maps the arena anew and gets the placements that are published.

        Blocks in RAM stay; what the ring held is read again. The abort word must be set. Raises
        LaneDied, or what a lane raised while it opened the model.
        """
        lost = wait_until_parked(self.runs)
        self.runs = {}
        for number, cores in enumerate(self._settings.cores):
            if self.cpus[number].name in lost:
                kill_quietly([self.cpus[number]])
                self.cpus[number] = self._host.start_cpu(number, cores)
        if self.disk_lane.name in lost:
            kill_quietly([self.disk_lane])
            self.disk = self._start_disk()
        set_abort(self._arena, self._layout, False)
        settle_counters(self._arena, self._layout, step, self.lane_bases)
        for each in self._open_lanes():
            each.result()
        if self._blueprint.experts is not None:
            self.disk_lane.call("keep_experts", self._heat, self._settings.expert_policy).result()
        for published in list(self._published.values()):
            for answer in self.publish(published.placement):
                answer.pending.result()
        self._start_sweep(self.placement, keeps_ring=False)
        self.run()

    def close(self) -> None:
        """Stop the lanes, those that do not answer as well."""
        lanes = [*self.cpus, *([self.disk] if self.disk is not None else [])]
        for lane in lanes:
            lane.call("stop")
        wait_until_parked(self.runs)
        kill_quietly(lanes)

    # -- placements

    def publish(self, placement: Placement) -> list[Acknowledgement]:
        """Give a placement to every lane; returns the answers to wait for."""
        programs = build_programs(self._blueprint.catalog, placement)
        lengths = tuple(len(programs[lane.name].instructions) for lane in self.lanes)
        self._published[placement.placement_id] = Published(placement, programs, lengths)
        self.newest_id = max(self.newest_id, placement.placement_id)
        homes, copies = self.homes_of(placement), self.copies_of(placement)
        answers = [
            Acknowledgement(
                lane.name,
                placement.placement_id,
                lane.call("adopt", placement, programs[lane.name], homes, copies),
            )
            for lane in self.cpus
        ]
        # the disk lane takes it up at the switch: what it reads is decided between steps
        answers.append(
            Acknowledgement(DISK_LANE, placement.placement_id, Settled(placement.placement_id))
        )
        return answers

    def published(self, placement_id: int) -> Placement:
        return self._published[placement_id].placement

    def retire(self, placement_id: int) -> None:
        """Forget a placement that no step will use again, and what was moved for it alone."""
        self._published.pop(placement_id, None)
        for lane in self.cpus:
            lane.call("retire", placement_id)
        kept = [each.placement for each in self._published.values()]
        self._drop_all_but(kept)
        self._drop_copies(self._copies.difference(*(each.expanded for each in kept)))

    def retire_all_but_current(self) -> None:
        """Nobody will announce what else is published: forget it, and what was moved for it."""
        current = self.placement.placement_id
        for placement_id in [each for each in self._published if each != current]:
            self.retire(placement_id)

    def switch(self, placement: Placement, *, is_first: bool = False) -> None:
        """Make `placement` the one that the next step runs under. Between steps only."""
        keeps_ring = not is_first and self.placement.sweep == placement.sweep
        self._start_sweep(placement, keeps_ring)
        self.placement = placement
        self._drop_all_but([placement])

    def _start_sweep(self, placement: Placement, keeps_ring: bool) -> None:
        """Tell the disk lane what to read from now on. `keeps_ring`: what was read ahead counts."""
        if not keeps_ring:
            self.disk_base = self.disk_lane.call("park").result()
        published = self._published[placement.placement_id]
        sweep = disk.Sweep.of(
            published.programs[DISK_LANE],
            placement.num_slots,
            self.disk_base,
            self.lane_bases,
            published.lengths,
        )
        homes = self.homes_of(placement)
        self.disk_lane.call("adopt", sweep, homes, placement.placement_id).result()

    def finish_step(self) -> None:
        """Count a whole step of the current placement as retired."""
        for number, length in enumerate(self.lengths):
            self.lane_bases[number] += length
        self.disk_base += len(self.placement.sweep)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Instructions of each compute lane in a step of the current placement."""
        return self._published[self.placement.placement_id].lengths

    # -- blocks

    def homes_of(self, placement: Placement) -> dict[int, int]:
        """Arena offset of each resident block of a placement."""
        return {
            index: self.homes.offsets[index]
            for index, kept in enumerate(placement.resident)
            if kept
        }

    def copies_of(self, placement: Placement) -> tuple[int, ...]:
        """Blocks that prefill reads from their expanded copies under a placement.

        Copies are made once. What a placement wants beyond those that are left is expanded in each
        chunk, which gives the same bits.
        """
        return tuple(block for block in placement.expanded if block in self._copies)

    def load_first(
        self, placement: Placement, statistics: np.ndarray, tell: Progress, heat: Heat | None
    ) -> None:
        """Read what a placement keeps in RAM; `statistics` are the disk lane's.

        heat: how often earlier runs chose each expert of a mixture.
        """
        self._heat = heat
        homes = self.homes.take(index for index, kept in enumerate(placement.resident) if kept)
        total = sum(self._blueprint.sources[block].nbytes for block in homes)
        jobs: list[tuple[str, tuple[object, ...]]] = [("load", (homes,))]
        if self._blueprint.experts is not None:
            policy = self._settings.expert_policy
            self.disk_lane.call("keep_experts", heat, policy).result()
            jobs.append(("load_experts", ()))
            total += placement.expert_slots * self._blueprint.experts.catalog.nbytes
        for method, arguments in jobs:
            loading = self.disk_lane.call(method, *arguments)
            while not loading.is_done():
                loaded = int(statistics[disk.LOAD_NBYTES])
                tell("loading weights", min(1.0, loaded / total) if total else None)
                try:
                    loading.result(timeout=0.1)
                except TimeoutError:
                    continue
            loading.result()
        tell("loading weights", 1.0)

    def expand_first(self, placement: Placement, tell: Progress) -> None:
        """Make the expanded copies of a placement that is published; before any step runs."""
        copies = self.copies_of(placement)
        done, total = 0, placement.expanded_nbytes
        for parcels in self._parcels(copies):
            tell("expanding weights", done / total)
            calls = [
                lane.call("expand", placement.placement_id, blocks)
                for lane, blocks in zip(self.cpus, parcels, strict=False)
            ]
            for call in calls:
                call.result()
            done += sum(self._copy_nbytes(block) for blocks in parcels for block in blocks)
        if copies:
            tell("expanding weights", 1.0)

    def _parcels(self, copies: Sequence[int]) -> Iterator[list[list[int]]]:
        """Rounds of blocks, so many for each lane as are told of at a time."""
        round_nbytes = 0
        parcels: list[list[int]] = [[] for _ in self.cpus]
        for number, block in enumerate(copies):
            parcels[number % len(parcels)].append(block)
            round_nbytes += self._copy_nbytes(block)
            if round_nbytes >= PARCEL_NBYTES:
                yield parcels
                round_nbytes, parcels = 0, [[] for _ in self.cpus]
        if round_nbytes:
            yield parcels

    def _copy_nbytes(self, block: int) -> int:
        return self._blueprint.catalog.blocks[block].expanded_nbytes

    def make_room_for(self, placement: Placement) -> str | None:
        """Bring what a placement adds into RAM, beside what is there; returns why it cannot be.

        The ring stays as it was laid out, so a placement that wants another is refused.
        """
        if placement.sweep and placement.num_slots != self._layout.num_slots:
            return (
                f"the ring has {self._layout.num_slots} slots, laid out at the start; "
                f"{placement.num_slots} are wanted"
            )
        new = [
            block
            for block, kept in enumerate(placement.resident)
            if kept and block not in self.homes.offsets
        ]
        if not new:
            return None
        homes = self.homes.take(new)
        if not homes:
            return "no room to move blocks before old copies are dropped"
        try:
            self.disk_lane.call("load", homes).result()
        except LaneDied:
            self._drop(homes)  # they are read again when the lane is back
            raise
        except (ModelError, ValueError, OSError) as error:
            self._drop(homes)
            return str(error)
        return None

    def _drop_all_but(self, placements: Sequence[Placement]) -> None:
        """Give back the homes of blocks that none of these keeps."""
        self._drop(
            [
                block
                for block in self.homes.offsets
                if not any(placement.resident[block] for placement in placements)
            ]
        )

    def _drop_copies(self, blocks: Iterable[int]) -> None:
        for block in list(blocks):
            self._copies.discard(block)
            self._arena.release(self._layout.expanded[block], self._copy_nbytes(block))

    def _drop(self, blocks: Iterable[int]) -> None:
        for offset, nbytes in self.homes.drop(blocks):
            self._arena.release(offset, nbytes)
