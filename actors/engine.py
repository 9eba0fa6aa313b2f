"""The engine: owns the arena, forms steps, fills their records, samples, and obeys the planner.

A plain class; `ray_host.py` wraps it in an actor. One thread (`serve`) runs the step loop; requests
come in and outputs go out through queues, from any thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any

import numpy as np

from shadowlane.actors import disk_lane as disk
from shadowlane.actors.arena import (
    DISK_SPAN_FIELDS,
    DISK_SPAN_RING,
    DISK_STATISTICS,
    STEP_COUNTER,
    Arena,
    check_room,
    plan_layout,
)
from shadowlane.actors.blueprint import Blueprint, read_blueprint
from shadowlane.actors.homes import Homes
from shadowlane.actors.hosts import Host, LaneDied, LaneFailed, Pending
from shadowlane.actors.lowering import lane_number
from shadowlane.actors.records import RecordWriter, Row, StepPlan
from shadowlane.actors.recovery import (
    find_failure,
    kill_quietly,
    set_abort,
    settle_counters,
    wait_until_parked,
)
from shadowlane.actors.sequence import Sequence, TextSink
from shadowlane.actors.spec import EngineSettings, Options
from shadowlane.ops import table as t
from shadowlane.ops.atomics import WAIT_OK, publish, wait_counter
from shadowlane.ops.errors import ModelError
from shadowlane.ops.expand import expand_rows
from shadowlane.ops.rope import inv_freq
from shadowlane.ops.sampling import SamplingParams
from shadowlane.ops.warm import is_warm
from shadowlane.planner import events as ev
from shadowlane.planner.cost import CostModel
from shadowlane.planner.placement import DISK_LANE, LaneSpec, Placement, Request
from shadowlane.planner.profile import Profile
from shadowlane.planner.program import build_programs
from shadowlane.planner.search import place

Progress = Callable[[str, float | None], None]
CHECK_NS = 100_000_000  # how often a wait for a step looks after the lanes
EVENT_PERIOD_S = 0.05  # measurements go to the planner in batches this far apart
DELAY_PERIOD_S = 0.2
IDLE_S = 0.2  # how often an idle engine looks after its lanes
RESTARTS = 3  # how often lanes are started again before the engine gives up
CLOSED = "the engine was closed"


class EngineError(Exception):
    """The engine cannot go on; the text says why."""


class Engine:
    """See the module. Life: `start`, `submit` any number of times while `serve` runs, `close`."""

    def __init__(
        self,
        root: Path,
        options: Options,
        settings: EngineSettings,
        host: Host,
        blueprint: Blueprint | None = None,
    ) -> None:
        """`blueprint`: a part of the model instead of all of it, for measurements."""
        workers = sum(len(cores) for cores in settings.cores)
        whole, self.files = read_blueprint(root, options, workers)
        self.blueprint = blueprint or whole
        self.settings = settings
        self._host = host
        self.lanes = tuple(
            LaneSpec(f"cpu:{number}", len(cores)) for number, cores in enumerate(settings.cores)
        )
        self.request = Request(
            ram=settings.ram,
            lanes=self.lanes,
            context=options.context,
            max_batch=options.max_batch,
            num_slots=settings.num_slots,
        )
        self.notes: list[str] = list(self.blueprint.notes)
        self.load_s = 0.0
        self.replans = 0
        self.error: str | None = None
        self._ids = itertools.count(1)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._slots: list[list[int]] = []  # tokens whose keys each slot holds
        self._changed = threading.Condition()
        self._stopping = False
        self._events: list[ev.Event] = []
        self._acknowledging: list[tuple[str, Placement, Pending]] = []
        self._thinking: Pending | None = None
        self._commands: deque[ev.Command] = deque()  # of the planner, still to be obeyed
        self._has_planner = settings.replan and settings.shares is None
        self._planner_restarts = 0
        self._last_failure: tuple[str, int] | None = None  # (reason, steps retired until then)
        self._sent_at = 0.0
        self._step = 0
        self._lane_bases = [0] * len(self.lanes)
        self._disk_base = 0
        self._published: dict[int, Placement] = {}
        self._newest_id = 0  # the highest id that any placement had
        self._lengths: dict[int, list[int]] = {}
        self._runs: dict[str, Pending] = {}
        self.steps_retired = 0
        self.decisions: deque[str] = deque(maxlen=100)  # what the planner decided, and why
        self.eos_token_ids = frozenset(self.blueprint.config.eos_token_ids)
        self._is_launched = False
        self._cpu_nbytes = [0] * len(self.lanes)  # weights multiplied by each lane so far
        self._rope_cache: dict[int, tuple[np.ndarray, float]] = {}
        self._carried: list[Sequence] = []
        self._delays_seen: tuple[float, dict[tuple[int, int], int]] | None = None

    # -- starting

    def start(self, profile: Profile | None, progress: Progress | None = None) -> None:
        """Plan, make the arena, load what is resident, and set the lanes going.

        Raises InfeasiblePlan, MemoryError, ModelError, OSError, LaneDied; then nothing is left
        running but the host's own processes.
        """
        tell = progress or (lambda stage, fraction: None)
        began = time.monotonic()
        tell("planning", None)
        self._profile = profile
        self.launch()
        self.planner.call("open", self.blueprint.catalog, self.request, profile).result()
        first = self._first_placement(profile)
        self.placement = first
        self.layout = plan_layout(self.blueprint, first)
        check_room(self.layout.nbytes)
        self.arena = Arena.create(self.layout.nbytes)
        self._counter_base = self.arena.base
        self._records = RecordWriter(self.arena, self.layout)
        self._slots = [[] for _ in range(self.blueprint.options.max_batch)]
        self._logits = self.arena.view(
            self.layout.scratch["logits"],
            np.float32,
            self.blueprint.options.logit_rows,
            self.blueprint.config.vocab_size,
        )
        self._write_constants()
        self.set_spin_us(None, self.settings.spin_us)
        layouts = {source.layout for source in self.blueprint.sources}
        tell("starting the lanes" if is_warm(layouts) else "compiling kernels, once", None)
        opened = self._open_lanes()
        self.homes = Homes(self.layout.weights, self.layout.weights_nbytes, self.blueprint.sources)
        self._load(first, tell)
        if not is_warm(layouts):
            tell("compiling kernels, once", None)
        for each in opened:
            each.result()
        acknowledged: list[ev.Event] = []
        for name, _, pending in self._publish(first):
            pending.result()
            acknowledged.append(ev.PlacementAcknowledged(name, first.placement_id))
        self._switch(first)
        acknowledged.append(ev.PlacementAcknowledged(DISK_LANE, first.placement_id))
        if self._has_planner:
            self.planner.call("handle", acknowledged).result()
        self._events.append(ev.PlacementAnnounced(first.placement_id, self._step + 1))
        self._run_lanes()
        if self._disk_statistics()[disk.BUFFERED]:
            self.notes.append(
                "the file system of the model refuses direct reads: reading through the page cache"
            )
        self.notes.extend(first.notes)
        self.load_s = time.monotonic() - began

    def launch(self) -> None:
        """Start the lanes' processes; they come up while the caller goes on."""
        if self._is_launched:
            return
        self._is_launched = True
        self.cpus = [
            self._host.start_cpu(number, cores) for number, cores in enumerate(self.settings.cores)
        ]
        self.disk = self._host.start_disk(
            self.settings.depth, self.settings.direct, self.settings.prefetch
        )
        self.planner = self._host.start_planner()

    def _open_lanes(self) -> list[Pending]:
        """Every lane maps the arena; the compute lanes may still be at it."""
        opened = [
            lane.call("open", self.blueprint, self.layout, self.arena.handle) for lane in self.cpus
        ]
        self.disk.call(
            "open", self.blueprint, self.layout, self.arena.handle, self.files.stamps
        ).result()
        return opened

    def _run_lanes(self) -> None:
        self._runs = {lane.name: lane.call("run") for lane in [*self.cpus, self.disk]}

    def _first_placement(self, profile: Profile | None) -> Placement:
        shares = self.settings.shares
        if shares is not None:
            if len(shares) != len(self.lanes) or min(shares) < 0 or not any(shares):
                raise ValueError(
                    f"shares must be one number of at least 0 for each of {len(self.lanes)} lanes, "
                    f"and not all 0; got {list(shares)}"
                )
            weights = {lane.name: part for lane, part in zip(self.lanes, shares, strict=True)}
            cost = CostModel(profile)
            return place(
                self.blueprint.catalog, self.request, cost, placement_id=1, weights=weights
            )
        for command in self.planner.call("handle", [ev.EngineStarted()]).result():
            if isinstance(command, ev.PublishPlacement):
                return command.placement
        raise EngineError("the planner gave no placement to start with")

    def _write_constants(self) -> None:
        layout = self.layout
        self.arena.view(layout.norm_eps, np.float32, 1)[0] = self.blueprint.config.norm_eps
        for source in self.blueprint.constants:
            raw = np.fromfile(source.path, np.uint8, source.nbytes, offset=source.offset)
            values = expand_rows(source.layout, raw, 1, source.shape[0])
            self.arena.view(layout.constant_offsets[source.name], np.float32, source.shape[0])[
                :
            ] = values[0]

    def _load(self, placement: Placement, tell: Progress) -> None:
        wanted = [index for index, kept in enumerate(placement.resident) if kept]
        homes = self.homes.take(wanted)
        total = sum(self.blueprint.sources[block].nbytes for block in homes)
        loading = self.disk.call("load", homes)
        statistics = self._disk_statistics()
        while not loading.is_done():
            done = int(statistics[disk.LOAD_NBYTES])
            tell("loading weights", done / total if total else None)
            try:
                loading.result(timeout=0.1)
            except TimeoutError:
                continue
        loading.result()
        tell("loading weights", 1.0)

    # -- placements

    def _publish(self, placement: Placement) -> list[tuple[str, Placement, Pending]]:
        """Give a placement to every lane; returns who is to acknowledge."""
        programs = build_programs(self.blueprint.catalog, placement)
        self._published[placement.placement_id] = placement
        self._newest_id = max(self._newest_id, placement.placement_id)
        self._lengths[placement.placement_id] = [
            len(programs[lane.name].instructions) for lane in self.lanes
        ]
        homes = self._homes_of(placement)
        return [
            (lane.name, placement, lane.call("adopt", placement, programs[lane.name], homes))
            for lane in self.cpus
        ]

    def _switch(self, placement: Placement) -> None:
        """Make `placement` the one that the next step runs under. Between steps only."""
        before = self.placement
        keeps_ring = before.sweep == placement.sweep and before is not placement
        self._start_sweep(placement, keeps_ring)
        self.placement = placement
        self._step_nbytes = self._nbytes_per_step(placement)
        stale = [block for block in self.homes.offsets if not placement.resident[block]]
        self._drop_homes(stale)

    def _start_sweep(self, placement: Placement, keeps_ring: bool) -> None:
        """Tell the disk lane what to read from now on. `keeps_ring`: what was read ahead counts."""
        programs = build_programs(self.blueprint.catalog, placement)
        base = self._disk_base if keeps_ring else self.disk.call("park").result()
        self._disk_base = base
        sweep = disk.Sweep.of(
            programs[DISK_LANE],
            placement.num_slots,
            base,
            self._lane_bases,
            self._lengths[placement.placement_id],
        )
        homes = self._homes_of(placement)
        self.disk.call("adopt", sweep, homes, placement.placement_id).result()

    def _homes_of(self, placement: Placement) -> dict[int, int]:
        return {
            index: self.homes.offsets[index]
            for index, kept in enumerate(placement.resident)
            if kept
        }

    def _drop_homes(self, blocks: Iterable[int]) -> None:
        for offset, nbytes in self.homes.drop(blocks):
            self.arena.release(offset, nbytes)

    def _nbytes_per_step(self, placement: Placement) -> list[int]:
        """Weight bytes that each compute lane multiplies in one step, by its share of units."""
        catalog = self.blueprint.catalog
        total = [0.0] * len(self.lanes)
        for group in catalog.groups:
            if group.kind == "embed":
                continue
            nbytes = sum(catalog.blocks[index].nbytes for index in group.blocks)
            for share in placement.shares[group.name]:
                part = (share.last_unit - share.first_unit) / group.units
                total[lane_number(share.lane)] += nbytes * part
        return [round(each) for each in total]

    def set_spin_us(self, lane: str | None, spin_us: int) -> None:
        """How long the waits of a lane (None: of all) may spin before they sleep."""
        for number, spec in enumerate(self.lanes):
            if lane in (None, spec.name):
                word = self.arena.view(self.layout.spins + 64 * number, np.int64, 1)
                word[0] = spin_us * 1000

    # -- requests, from any thread

    def submit(
        self,
        prompt: Tokens[int],
        params: SamplingParams,
        text: TextSink | None = None,
        wants_logits: bool = False,
        reuses_cache: bool = False,
    ) -> Sequence:
        """Queue a request. Its outputs come through `Sequence.outputs`.

        reuses_cache: keys and values that the prompt shares with an earlier request need not be
        computed again. They are what that request computed, in other chunks and so with other
        rounding; without it, the same prompt always gives the same tokens.

        Raises ValueError for an empty prompt, an unknown id, or a prompt that leaves no room;
        EngineError if the engine has given up, or was closed.
        """
        context, vocab = self.placement.context_tokens, self.blueprint.config.vocab_size
        room = context if wants_logits else context - 1
        if not prompt:
            raise ValueError("prompt must hold at least one token; got none")
        if len(prompt) > room:
            raise ValueError(
                f"prompt must leave room in the context of {context} tokens; "
                f"it has {len(prompt)} tokens"
            )
        for token in prompt:
            if not 0 <= token < vocab:
                raise ValueError(f"token ids must be between 0 and {vocab - 1}; got {token}")
        sequence = Sequence(
            next(self._ids), prompt, params, self.eos_token_ids, text, wants_logits, reuses_cache
        )
        with self._changed:
            if self._stopping or self.error is not None:
                raise EngineError(self.error or CLOSED)
            self._waiting.append(sequence)
            self._changed.notify_all()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a request at the next step boundary; its listener gets "cancelled"."""
        sequence.is_cancelled = True
        with self._changed:
            self._changed.notify_all()

    # -- the step loop

    def serve(self) -> None:
        """Run steps until `close`. Errors of lanes fail the running requests and are mended."""
        try:
            while self._wait_for_work():
                try:
                    self._look_after_lanes()
                    self._admit()
                    if self._running:
                        self._run_step(self._form_step())
                        self._reap()
                    self._talk_to_planner()
                except LaneDied as error:
                    self._recover(error)
        except Exception as error:  # our own fault: whoever waits for an answer must be told
            self._give_up(f"the engine failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._fail_all(self.error or CLOSED)

    def _wait_for_work(self) -> bool:
        """Wait for a request, or until it is time to look after the lanes; False: the end."""
        with self._changed:
            if not (self._waiting or self._running or self._stopping):
                self._changed.wait(IDLE_S)
            return not self._stopping and self.error is None

    def _admit(self) -> None:
        with self._changed:
            for sequence in [each for each in self._waiting if each.is_cancelled]:
                self._waiting.remove(sequence)
                sequence.finish("cancelled")
            used = {sequence.slot for sequence in self._running}
            free = [slot for slot in range(len(self._slots)) if slot not in used]
            while free and self._waiting:
                sequence = self._waiting.pop(0)
                slot = max(free, key=lambda each: common_prefix(self._slots[each], sequence.prompt))
                free.remove(slot)
                kept = common_prefix(self._slots[slot], sequence.prompt)
                # the last token must go through a step again: its logits are wanted
                kept = min(kept, len(sequence.prompt) - 1) if sequence.reuses_cache else 0
                sequence.slot = slot
                sequence.known = list(sequence.prompt[:kept])
                sequence.pending = list(sequence.prompt[kept:])
                sequence.timing.cached_tokens = kept
                sequence.start(self._lane_use)
                self._slots[slot] = sequence.known
                self._running.append(sequence)

    def _form_step(self) -> StepPlan:
        """One token of each decoding sequence, and the next chunk of one prompt.

        A chunk's length depends on its prompt alone, so nobody else's requests change its bits.
        """
        prompts = [sequence for sequence in self._running if not sequence.is_decoding]
        if prompts:
            sequence = prompts[0]
            limit = self.blueprint.options.prefill_chunk
            if sequence.wants_logits:
                limit = min(limit, self.blueprint.options.logit_rows)
            if len(sequence.pending[:limit]) <= t.MAX_DECODE_ROWS:
                rows = self._rows(sequence, limit)
                self._carried = [sequence]
                return StepPlan(rows, len(rows), same_sequence=True)
        decoding = [sequence for sequence in self._running if sequence.is_decoding]
        rows = tuple(row for sequence in decoding for row in self._rows(sequence, 1))
        num_decode = len(rows)
        self._carried = decoding
        if prompts:
            rows += self._rows(sequence, limit)
            self._carried = [*decoding, sequence]
        return StepPlan(rows, num_decode, same_sequence=False)

    def _rows(self, sequence: Sequence, limit: int) -> tuple[Row, ...]:
        position = len(sequence.known)
        tokens = sequence.take(limit)
        assert sequence.slot is not None
        return tuple(
            Row(
                token,
                position + index,
                sequence.slot,
                sequence.wants_logits or (index == len(tokens) - 1 and not sequence.pending),
            )
            for index, token in enumerate(tokens)
        )

    def _run_step(self, plan: StepPlan) -> None:
        began = time.monotonic()
        before = self._busy_ns()
        self._step += 1
        lengths: dict[int, int] = {}
        for row in plan.rows:
            lengths[row.slot] = max(lengths.get(row.slot, 0), row.position + 1)
        frequencies = {slot: self._frequencies(length) for slot, length in lengths.items()}
        placement = self.placement
        self._records.write(
            self._step,
            placement.placement_id,
            plan,
            self._disk_base,
            self._lane_bases,
            frequencies,
        )
        publish(self._address(STEP_COUNTER), np.int32(self._step & 0x7FFFFFFF))
        abort = self.arena.base + self.layout.abort
        lengths_of_lanes = self._lengths[placement.placement_id]
        for number, count in enumerate(lengths_of_lanes):
            self._lane_bases[number] += count
            if not count:
                continue
            wanted = np.int32(np.uint32(self._lane_bases[number] & 0xFFFFFFFF))
            while wait_counter(self._address(number), wanted, abort, 0, CHECK_NS) != WAIT_OK:
                self._look_after_lanes()
        self._disk_base += len(placement.sweep)
        self.steps_retired += 1
        seconds = time.monotonic() - began
        for number, nbytes in enumerate(self._step_nbytes):
            self._cpu_nbytes[number] += nbytes
        self._give_results(plan)
        if plan.is_decode and not plan.same_sequence:
            for sequence in self._carried:
                sequence.decode_seconds.append(seconds)
        after = self._busy_ns()
        self._events.append(
            ev.StepRetired(
                step=self._step,
                placement_id=placement.placement_id,
                phase="decode" if plan.is_decode else "prefill",
                rows=len(plan.rows),
                context=plan.context,
                seconds=seconds,
                busy_s={name: (after[name][0] - before[name][0]) / 1e9 for name in after},
                wait_s={name: (after[name][1] - before[name][1]) / 1e9 for name in after},
            )
        )

    def _frequencies(self, length: int) -> tuple[np.ndarray, float]:
        """Rotary frequencies of a sequence of so many tokens, and their attention scaling."""
        rope = self.blueprint.config.rope
        if rope.depends_on_length:
            return inv_freq(rope, length)
        if not self._rope_cache:
            self._rope_cache[0] = inv_freq(rope, length)
        return self._rope_cache[0]

    def run_unheard(self, plan: StepPlan) -> None:
        """Run a step that belongs to no request; for measurements, while `serve` does not run."""
        self._carried = []
        self._run_step(plan)
        self._events.clear()

    def _give_results(self, plan: StepPlan) -> None:
        place = 0
        context = self.placement.context_tokens
        for sequence in self._carried:
            if sequence.wants_logits:
                count = sum(row.wants_logits and row.slot == sequence.slot for row in plan.rows)
                sequence.give_logits(self._logits[place : place + count])
                place += count
            elif not sequence.pending:
                try:
                    sequence.give_token(self._logits[place], context)
                except FloatingPointError as error:
                    sequence.fail(str(error))
                place += 1

    def _reap(self) -> None:
        for sequence in list(self._running):
            if sequence.is_cancelled and not sequence.is_over:
                sequence.finish("cancelled")
            if sequence.is_over:
                assert sequence.slot is not None
                self._slots[sequence.slot] = list(sequence.known)
                self._running.remove(sequence)

    # -- the planner

    def _talk_to_planner(self) -> None:
        """Send what was measured, obey what came back, and switch when all have acknowledged."""
        now = time.monotonic()
        if self._acknowledging:
            still = []
            for name, placement, pending in self._acknowledging:
                if pending.is_done():
                    pending.result()
                    self._events.append(ev.PlacementAcknowledged(name, placement.placement_id))
                else:
                    still.append((name, placement, pending))
            self._acknowledging = still
        if self._thinking is not None and self._thinking.is_done():
            thinking, self._thinking = self._thinking, None
            self._hear_planner(thinking)
        while self._commands:
            self._obey(self._commands[0])  # one that a dying lane cut short is obeyed again
            self._commands.popleft()
        if not self._has_planner:
            self._events = []
        elif self._thinking is None and self._events and now - self._sent_at >= EVENT_PERIOD_S:
            self._note_delays(now)
            self._thinking = self.planner.call("handle", self._events)
            self._events = []
            self._sent_at = now

    def _hear_planner(self, thinking: Pending) -> None:
        """Take the planner's commands. Steps go on whatever became of it: only the shadow is lost.

        One whose process died is started again, and told what is running; one that failed by its
        own fault would fail again.
        """
        try:
            self._commands.extend(thinking.result())
            return
        except LaneDied as error:
            reason = str(error)
            self._planner_restarts += 1
            self._has_planner = self._planner_restarts <= RESTARTS
        except Exception as error:  # a fault of the planner must not become one of the engine
            reason = f"planner: {type(error).__name__}: {error}"
            self._has_planner = False
        # what the lost planner had set going comes to no end: nobody will announce it
        current = self.placement.placement_id
        for placement_id in [each for each in self._published if each != current]:
            self._obey(ev.RetirePlacement(placement_id))
        self._acknowledging, self._events = [], []
        self._commands.clear()
        resident = self.placement.resident
        self._drop_homes([block for block in self.homes.offsets if not resident[block]])
        if not self._has_planner:
            self.notes.append(f"{reason}; going on without a shadow")
            return
        self.decisions.append(f"{reason}; started again under the plan in force")
        self.set_spin_us(None, self.settings.spin_us)
        self.planner = self._host.start_planner()
        self._thinking = self.planner.call(
            "resume",
            self.blueprint.catalog,
            self.request,
            self._profile,
            self.placement,
            self._newest_id,
        )

    def _obey(self, command: ev.Command) -> None:
        if isinstance(command, ev.SetSpin):
            self.set_spin_us(command.lane, command.spin_us)
        elif isinstance(command, ev.Note):
            self.decisions.append(command.text)
        elif isinstance(command, ev.PublishPlacement):
            placement = command.placement
            self.decisions.append(command.reason)
            new = [
                block
                for block, kept in enumerate(placement.resident)
                if kept and block not in self.homes.offsets
            ]
            if new:
                why = self._load_more(new)
                if why is not None:
                    self._events.append(ev.PlacementRefused(placement.placement_id, why))
                    return
            self._acknowledging += self._publish(placement)
            self._acknowledging.append((DISK_LANE, placement, _Already(placement.placement_id)))
        elif isinstance(command, ev.AnnouncePlacement):
            placement = self._published[command.placement_id]
            self._switch(placement)
            self.replans += 1
            self._events.append(ev.PlacementAnnounced(placement.placement_id, self._step + 1))
        elif isinstance(command, ev.RetirePlacement):
            self._published.pop(command.placement_id, None)
            self._lengths.pop(command.placement_id, None)
            for lane in self.cpus:
                lane.call("retire", command.placement_id)

    def _load_more(self, blocks: list[int]) -> str | None:
        """Bring blocks into RAM beside those that are there. Returns why not, if it cannot be."""
        homes = self.homes.take(blocks)
        if not homes:
            return "no room to move blocks before old copies are dropped"
        try:
            self.disk.call("load", homes).result()
        except LaneDied:
            self._drop_homes(homes)  # they are read again when the lane is back
            raise
        except (ModelError, ValueError, OSError) as error:
            self._drop_homes(homes)
            return str(error)
        return None

    def _note_delays(self, now: float) -> None:
        """Events for lanes whose threads had to wait for their core since the last look."""
        seen = self._delays_seen
        current = {
            (number, worker): int(self._worker_statistics(number, worker)[t.RUN_DELAY_NS])
            for number, spec in enumerate(self.lanes)
            for worker in range(spec.threads)
        }
        if seen is None or now - seen[0] >= DELAY_PERIOD_S:
            self._delays_seen = (now, current)
            if seen is not None and now - seen[0] < 5 * DELAY_PERIOD_S:
                for number, spec in enumerate(self.lanes):
                    worst = max(
                        current[number, worker] - seen[1][number, worker]
                        for worker in range(spec.threads)
                    )
                    fraction = worst / 1e9 / (now - seen[0])
                    self._events.append(ev.RunQueueDelayed(spec.name, min(1.0, fraction)))

    # -- lanes that fail

    def _look_after_lanes(self) -> None:
        """Raise LaneDied if a lane's loop has ended, or is to end."""
        if self._stopping:
            raise LaneDied(CLOSED)
        is_aborted = bool(self.arena.view(self.layout.abort, np.int32, 1)[0])
        failure = find_failure(self._runs, is_aborted)
        if failure is not None:
            raise failure

    def _recover(self, failure: LaneDied) -> None:
        """Fail the running requests, park every lane, start the dead ones again, and go on.

        Where the cause lasts (a model file was changed, the same error comes again before a step
        got through) there is nothing to go on with: the engine refuses whatever comes, and says so.
        """
        set_abort(self.arena, self.layout, True)
        reason = CLOSED if self._stopping else str(failure)
        for sequence in self._running:
            sequence.fail(reason)
            assert sequence.slot is not None
            self._slots[sequence.slot] = []  # what it had cached may be half a step's
        self._running.clear()
        this = (reason, self.steps_retired)
        if isinstance(failure, LaneFailed) and (
            this == self._last_failure or not self._is_model_unchanged()
        ):
            self._give_up(reason)
            return
        self._last_failure = this
        for _ in range(RESTARTS):
            if self._stopping:
                return
            try:
                self._start_lanes_again()
                if self._stopping:  # closed meanwhile: what has just been set going ends again
                    set_abort(self.arena, self.layout, True)
                    return
                self.decisions.append(f"{reason}; started again under the plan in force")
                return
            except LaneDied as error:
                reason = str(error)
                set_abort(self.arena, self.layout, True)
            except (ModelError, ValueError, OSError) as error:
                reason = str(error)
                break
        self._give_up(reason)

    def _is_model_unchanged(self) -> bool:
        try:
            self.files.check_unchanged()
        except ModelError:
            return False
        return True

    def _start_lanes_again(self) -> None:
        """Every lane maps the arena anew and gets the placements that are published.

        Blocks in RAM stay; what the ring held is read again. Raises LaneDied, or what a lane raised
        while it opened the model.
        """
        lost = wait_until_parked(self._runs)
        self._runs = {}
        for number, cores in enumerate(self.settings.cores):
            if self.cpus[number].name in lost:
                kill_quietly([self.cpus[number]])
                self.cpus[number] = self._host.start_cpu(number, cores)
        if self.disk.name in lost:
            kill_quietly([self.disk])
            self.disk = self._host.start_disk(
                self.settings.depth, self.settings.direct, self.settings.prefetch
            )
        set_abort(self.arena, self.layout, False)
        settle_counters(self.arena, self.layout, self._step, self._lane_bases)
        for each in self._open_lanes():
            each.result()
        self._acknowledging = []
        for placement in list(self._published.values()):
            self._acknowledging += self._publish(placement)
            self._acknowledging.append((DISK_LANE, placement, _Already(placement.placement_id)))
        for _, _, pending in self._acknowledging:
            pending.result()
        self._start_sweep(self.placement, keeps_ring=False)
        self._run_lanes()

    def _give_up(self, reason: str) -> None:
        """Fail all requests, those that wait as well, and refuse every new one with `reason`."""
        with self._changed:
            self.error = reason
        if hasattr(self, "arena"):
            set_abort(self.arena, self.layout, True)
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        with self._changed:
            sequences = [*self._waiting, *self._running]
            self._waiting.clear()
            self._running.clear()
        for sequence in sequences:
            if not sequence.is_over:
                sequence.fail(reason)

    # -- what may be asked

    def process_ids(self) -> dict[str, int]:
        """Process of each lane and of the planner."""
        remotes = [*self.cpus, self.disk, self.planner]
        return {remote.name: remote.process_id() for remote in remotes}

    def _address(self, counter: int) -> int:
        return self.arena.base + self.layout.counter(counter)

    def _disk_statistics(self) -> np.ndarray:
        return self.arena.view(self.layout.disk, np.int64, DISK_STATISTICS)

    def _worker_statistics(self, lane: int, worker: int) -> np.ndarray:
        place = self.layout.workers[lane] + worker * t.WORKER_NBYTES
        return self.arena.view(place, np.int64, t.WORKER_HEADER_NBYTES // 8)

    def _lane_use(self) -> dict[str, tuple[int, int]]:
        """(busy ns, bytes) of each lane since the start."""
        busy = self._busy_ns()
        use = {
            spec.name: (busy[spec.name][0], self._cpu_nbytes[number])
            for number, spec in enumerate(self.lanes)
        }
        statistics = self._disk_statistics()
        use[DISK_LANE] = (
            busy[DISK_LANE][0],
            int(statistics[disk.SWEEP_NBYTES] + statistics[disk.GATHER_NBYTES]),
        )
        return use

    def lane_use(self, sequence: Sequence) -> dict[str, tuple[float, int]]:
        """Per lane, busy seconds and bytes while a finished request ran (others' work included)."""
        return {
            name: (
                (busy - sequence.use_before[name][0]) / 1e9,
                nbytes - sequence.use_before[name][1],
            )
            for name, (busy, nbytes) in sequence.use_after.items()
        }

    @property
    def step(self) -> int:
        """Number of the newest step."""
        return self._step

    def worker_spans(self, lane: int, worker: int) -> np.ndarray:
        """The spans that a worker's ring still holds, oldest first: int64 [n, SPAN_FIELDS]."""
        place = self.layout.workers[lane] + worker * t.WORKER_NBYTES + t.WORKER_HEADER_NBYTES
        ring = self.arena.view(place, np.int64, t.SPAN_RING, t.SPAN_FIELDS)
        return ordered(ring, int(self._worker_statistics(lane, worker)[t.NUM_SPANS]))

    def disk_spans(self) -> np.ndarray:
        """The same of the disk lane: int64 [n, DISK_SPAN_FIELDS]."""
        place = self.layout.disk + DISK_STATISTICS * 8
        ring = self.arena.view(place, np.int64, DISK_SPAN_RING, DISK_SPAN_FIELDS)
        return ordered(ring, int(self._disk_statistics()[disk.NUM_SPANS]))

    def _busy_ns(self) -> dict[str, tuple[int, int]]:
        """(busy, waiting) ns of each lane since the start, a mean over its workers."""
        result = {}
        for number, spec in enumerate(self.lanes):
            rows = [self._worker_statistics(number, worker) for worker in range(spec.threads)]
            busy = sum(int(row[t.BUSY_NS]) for row in rows) // spec.threads
            waiting = sum(int(row[t.WAIT_NS] + row[t.DISK_WAIT_NS]) for row in rows)
            result[spec.name] = (busy, waiting // spec.threads)
        result[DISK_LANE] = (int(self._disk_statistics()[disk.BUSY_NS]), 0)
        return result

    def close(self) -> None:
        """Stop the loop and the lanes. Nothing of the arena survives its last mapping."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if hasattr(self, "arena"):
            set_abort(self.arena, self.layout, True)
        lanes = [*getattr(self, "cpus", ()), *([self.disk] if hasattr(self, "disk") else [])]
        for remote in lanes:
            remote.call("stop")
        self._fail_all(CLOSED)
        wait_until_parked(self._runs)
        kill_quietly([*lanes, *([self.planner] if hasattr(self, "planner") else [])])
        if hasattr(self, "arena"):
            self.arena.close()


class _Already:
    """A Pending whose result is there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def is_done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        return self._value


def ordered(ring: np.ndarray, written: int) -> np.ndarray:
    """A copy of a ring's rows, oldest first, when `written` have been written in all."""
    if written <= len(ring):
        return ring[:written].copy()
    return np.roll(ring, -(written % len(ring)), axis=0)


def common_prefix(left: Tokens[int], right: Tokens[int]) -> int:
    """Number of leading tokens that are the same."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
