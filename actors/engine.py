"""The engine: owns the arena, runs the step loop, and holds its parts together.

A plain class; `ray_host.py` wraps it in an actor. One thread (`serve`) runs the loop: a step is
formed (`batch.py`), written (`records.py`), run by the lanes (`crew.py`) and sampled, while the
planner is told and obeyed (`shadow_link.py`). Requests come in and outputs go out through queues,
from any thread.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from shadowlane.actors import disk_lane as disk
from shadowlane.actors.arena import STEP_COUNTER, Arena, check_room, plan_layout
from shadowlane.actors.batch import Batch, Step, check_prompt
from shadowlane.actors.blueprint import Blueprint, read_blueprint
from shadowlane.actors.card_full import CardFull, LaneFull, with_less
from shadowlane.actors.crew import Crew
from shadowlane.actors.cuda.driver import CudaError
from shadowlane.actors.emulator import Emulator
from shadowlane.actors.gauges import Gauges, mean_crossings_s
from shadowlane.actors.hosts import Host, LaneDied, LaneFailed
from shadowlane.actors.multiplied import Multiplied
from shadowlane.actors.records import RecordWriter, StepPlan
from shadowlane.actors.recovery import kill_quietly
from shadowlane.actors.requests import num_workers, request_of
from shadowlane.actors.routing import CardRoutes, RoutingTap, check_routing
from shadowlane.actors.sequence import (
    NO_EXPERTS,
    DecodeStep,
    ExpertUse,
    LaneUse,
    Sequence,
    TextSink,
    since,
)
from shadowlane.actors.shadow_link import ShadowLink
from shadowlane.actors.spec import EngineSettings, Options
from shadowlane.ops.atomics import WAIT_OK, publish, wait_counter
from shadowlane.ops.errors import ModelError
from shadowlane.ops.expand import expand_rows
from shadowlane.ops.rope import inv_freq
from shadowlane.ops.sampling import SamplingParams
from shadowlane.ops.warm import is_warm
from shadowlane.planner import events as ev
from shadowlane.planner.card_planner import first_over_cards
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel
from shadowlane.planner.hardware import Conditions
from shadowlane.planner.heat import Heat, informed
from shadowlane.planner.hit_rate import with_measured
from shadowlane.planner.hybrid import ACTIVATION_NBYTES
from shadowlane.planner.measured import HITS_STEPS
from shadowlane.planner.placement import Placement
from shadowlane.planner.profile import Profile
from shadowlane.planner.search import place

Progress = Callable[[str, float | None], None]
BusyTimes = dict[str, tuple[int, int]]  # lane -> (busy, waiting) ns
CHECK_NS = 100_000_000  # how often a wait for a step looks after the lanes
IDLE_S = 0.2  # how often an idle engine looks after its lanes
RESTARTS = 3  # how often lanes are started again before the engine gives up
HEAT_S = 2.0  # a disk lane that does not say by then what was chosen is not waited for
CLOSED = "the engine was closed"
# What one thread that stands in for a card is sure to do, where lanes are emulated.
KERNEL_BYTES_PER_S = 3e9
INSTRUCTION_S = 2e-4  # a wait, a hold and a barrier


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
        workers, are_cards = num_workers(settings), bool(settings.cards)
        whole, self.files = read_blueprint(root, options, workers, are_cards=are_cards)
        self.blueprint = blueprint or whole
        self._trace = check_routing(self.blueprint, settings)
        self.catalog = self.blueprint.catalog  # with what is known of the use of experts
        self.options, self.settings = options, settings
        self.batch = Batch(options, self.blueprint.few_rows)
        pages_in_use = self.batch.pages_in_use
        self.crew = Crew(host, settings, self.blueprint, self.files, pages_in_use)
        self.lanes = self.crew.lanes
        self.request = request_of(options, settings)
        self.shadow = ShadowLink(host, self.blueprint.catalog, self.request, self.crew, settings)
        self.arena: Arena | None = None
        self.emulator: Emulator | None = None
        self.notes: list[str] = list(self.blueprint.notes)
        self._who_copies: list[str] = []  # of the notes, those about copies to cards
        self.load_s = 0.0
        self.error: str | None = None
        self.eos_token_ids = frozenset(self.blueprint.config.eos_token_ids)
        self.step = 0  # number of the newest step
        self.steps_retired = 0
        self._ids = itertools.count(1)
        self._decode_steps = 0
        self._taken = (0.0, 0.0)  # of each emulated card and of RAM, by other programs
        self._stopping = False
        self._has_less = False  # of a card that has refused memory: that is mended once
        self._loaded_with: tuple[Profile | None, Heat | None] = None, None
        # Steps that have retired, what the planner is told of each once its times are known, and
        # how many instructions each lane had in it.
        self._unreported: deque[
            tuple[int, Callable[[BusyTimes], ev.StepRetired], tuple[int, ...]]
        ] = deque(maxlen=64)
        self._routing: RoutingTap | None = None
        self._card_routes: CardRoutes | None = None  # of a mixture beside cards
        self._experts_read = 0  # bytes, while decode steps ran
        self._last_failure: tuple[str, int] | None = None  # (reason, steps retired until then)
        self.multiplied = self._nothing_multiplied()
        self._rope_cache: tuple[np.ndarray, float] | None = None

    @property
    def slowed(self) -> float:
        """Seconds here for one second of the machine whose speed the lanes have."""
        return self.emulator.slowed if self.emulator is not None else 1.0

    @property
    def placement(self) -> Placement:
        """The plan in force."""
        return self.crew.placement

    # -- life

    def launch(self) -> None:
        """Start the processes of lanes and planner; they come up while the caller goes on."""
        self.crew.launch()
        self.shadow.launch()

    def start(
        self,
        profile: Profile | None,
        progress: Progress | None = None,
        heat: Heat | None = None,
    ) -> None:
        """Plan, make the arena, load what is resident, and set the lanes going.

        heat: how often earlier runs chose each expert of a mixture.

        Raises InfeasiblePlan, MemoryError, ModelError, OSError, LaneDied; then nothing is left
        running but the host's own processes.
        """
        tell = progress or (lambda stage, fraction: None)
        began = time.monotonic()
        try:
            self._load(profile, tell, heat)
        except CardFull as full:
            self._give_less(full)
            tell("planning for less of a card", None)
            self._load(profile, tell, heat)
        self._loaded_with = profile, heat
        self.load_s = time.monotonic() - began

    def _give_less(self, full: CardFull) -> None:
        """Take everything off lanes and cards, and ask for less of the one that refused memory.

        Raises `full` where that has been done before, ValueError where routes are being recorded.
        """
        if self._has_less or self._routing is not None:
            raise full
        self._has_less = True
        self.settings, note = with_less(self.settings, full)
        request = request_of(self.options, self.settings)
        if self.steps_retired:  # those that run have been promised as much
            request = replace(request, context=self.placement.context_tokens)
        self.request = request
        self.crew.abort()
        self.shadow.wait_for_moves()
        self.crew.begin_anew(self.settings)
        self.shadow.begin_anew(request)
        self.notes.append(note)
        self.shadow.decisions.append(note)
        assert self.arena is not None, "a lane has had it"
        # Lanes let go of it when they map another one, for which there may be no room before.
        self.arena.release(0, self.arena.handle.nbytes)
        self.arena.close()
        self.arena = None
        self.multiplied = self._nothing_multiplied()
        self._unreported.clear()
        self.step = 0

    def _load(self, profile: Profile | None, tell: Progress, heat: Heat | None) -> None:
        """All of `start` that is done again where a card has too little memory."""
        tell("planning", None)
        self.launch()
        self.catalog = informed(self.catalog, heat)
        first = self._first_placement(profile)
        emulated = self.settings.emulated
        self.layout = plan_layout(
            self.blueprint,
            first,
            is_emulated=emulated is not None,
            may_shrink=emulated is not None or self.settings.headroom is not None,
        )
        # Room for blocks that may come to RAM later is pinned, and so taken, where cards are here;
        # so is the ring that they may come through.
        touched = self.layout.weights_nbytes - first.weights_nbytes + self.layout.landing_nbytes
        if self.settings.are_cards_here:
            touched += self.layout.num_slots * self.layout.slot_nbytes - first.slots_nbytes
        if emulated is not None:  # cards' memory is here, too
            touched = sum(card.total_nbytes for card in first.cards)
        check_room(self.layout.budget_start + first.total_nbytes + touched)
        arena = self.arena = Arena.create(self.layout.nbytes, str(self.files.root))
        self.gauges = Gauges(arena, self.layout, self.lanes, self.blueprint.catalog)
        self._records = RecordWriter(arena, self.layout, self.blueprint.options.max_batch)
        self._open_routing(arena)
        self._logits = arena.view(
            self.layout.scratch["logits"],
            np.float32,
            self.blueprint.options.step_logits,
            self.blueprint.config.vocab_size,
        )
        layouts = self.blueprint.layouts
        tell("starting the lanes" if is_warm(layouts) else "compiling kernels, once", None)
        opened = self.crew.open(arena, self.layout)
        self._write_constants(arena)
        if emulated is not None:
            row_nbytes = self.blueprint.config.hidden_size * ACTIVATION_NBYTES
            self.emulator = Emulator(arena, self.layout, emulated, row_nbytes, self._slowed(first))
        self.set_spin_us(None, self.settings.spin_us)
        self.crew.load_first(first, self.gauges.disk_statistics(), tell, heat)
        if not is_warm(layouts):
            tell("compiling kernels, once", None)
        for each in opened:
            each.result()
        self.notes = [each for each in self.notes if each not in self._who_copies]
        self._who_copies = self.crew.choose_copiers()
        self.notes.extend(self._who_copies)
        self.crew.mover.load_cards(tell)
        answers = self.crew.publish(first)
        self.crew.switch(first, is_first=True)
        self.shadow.first_acknowledged(answers, self.step + 1)
        self.crew.expand_first(first, tell)
        self.crew.run()
        if self.gauges.disk_statistics()[disk.BUFFERED]:
            self.notes.append(
                "the file system of the model refuses direct reads: reading through the page cache"
            )
        self.notes.extend(first.notes)

    def _open_routing(self, arena: Arena) -> None:
        """Recording and replay of routes, where they were asked for."""
        if self.blueprint.experts is not None and self.layout.links:
            self._card_routes = CardRoutes(arena, self.layout, self.blueprint)
        record = self.settings.trace_routing
        if record is not None or self._trace is not None:
            self._routing = RoutingTap(arena, self.layout, self.blueprint, self._trace, record)
        if self._trace is not None:
            self.notes.append(
                "routers choose what a trace says: for measurements, what is written means nothing"
            )

    def _first_placement(self, profile: Profile | None) -> Placement:
        shares = self.settings.shares
        if shares is None and self.shadow.is_open:
            return self.shadow.first_placement(self.catalog, profile)
        if self.request.cards:
            return first_over_cards(self.catalog, self.request)
        cost = CostModel(profile)
        if shares is None:  # a plan that stays needs no planner beside it
            return place(self.catalog, self.request, cost, placement_id=1)
        if len(shares) != len(self.lanes) or min(shares) < 0 or not any(shares):
            raise ValueError(
                f"shares must be one number of at least 0 for each of {len(self.lanes)} lanes, "
                f"and not all 0; got {list(shares)}"
            )
        weights = {lane.name: part for lane, part in zip(self.lanes, shares, strict=True)}
        return place(self.catalog, self.request, cost, placement_id=1, weights=weights)

    def _write_constants(self, arena: Arena) -> None:
        layout = self.layout
        config = self.blueprint.config
        arena.view(layout.norm_eps, np.float32, 1)[0] = config.norm_eps
        if config.moe is not None:
            swiglu = arena.view(layout.swiglu, np.float32, 2)
            swiglu[:] = config.moe.swiglu_limit, config.moe.swiglu_alpha
        read = [
            np.fromfile(source.path, np.uint8, source.nbytes, offset=source.offset)
            for source in self.blueprint.constants
        ]
        self.files.check_unchanged()  # a file cut short meanwhile gave less than was asked for
        if self.blueprint.experts is not None:
            experts = self.blueprint.experts.sources
            places = arena.view(layout.scratch["expert_places"], np.int32, len(experts), 3)
            places[:] = [source.places for source in experts]
        for source, raw in zip(self.blueprint.constants, read, strict=True):
            count = math.prod(source.shape)
            values = arena.view(layout.constant_offsets[source.name], np.float32, count)
            held = (count - 1) * source.step + 1
            values[:] = expand_rows(source.layout, raw, 1, held)[0][:: source.step]

    def _slowed(self, placement: Placement) -> float:
        """How much slower than the emulated machine this one has to run, as was asked or guessed.

        Its kernels must be through before an instruction would end there.
        """
        emulated = self.settings.emulated
        assert emulated is not None
        if emulated.slowed is not None:
            return emulated.slowed
        nbytes = sum(block.nbytes for block in self.catalog.blocks)
        experts = self.catalog.experts
        if experts is not None:
            nbytes += experts.num_layers * experts.top_k * experts.nbytes
        here_s = nbytes / KERNEL_BYTES_PER_S + len(self.catalog.groups) * INSTRUCTION_S
        return max(1.0, round(here_s / max(placement.predicted_step_s, 1e-6)))

    def set_spin_us(self, lane: str | None, spin_us: int) -> None:
        """How long the waits of a lane (None: of all) may spin before they sleep."""
        assert self.arena is not None, "the engine must be started first"
        for number, spec in enumerate(self.lanes):
            if lane in (None, spec.name):
                word = self.arena.view(self.layout.spins + 64 * number, np.int64, 1)
                word[0] = spin_us * 1000

    def close(self) -> None:
        """Stop the loop and the lanes. Nothing of the arena survives its last mapping."""
        with self.batch.changed:
            self._stopping = True
            self.batch.changed.notify_all()
        if self.arena is not None:
            self.crew.abort()
        self.batch.fail_all(CLOSED)
        self.crew.close()
        kill_quietly([self.shadow.planner])
        if self._routing is not None:
            self._routing.close()
        if self.arena is not None:
            self.arena.close()

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
        vocab = self.blueprint.config.vocab_size
        check_prompt(prompt, self.placement.context_tokens, vocab, wants_logits)
        sequence = Sequence(
            next(self._ids), prompt, params, self.eos_token_ids, text, wants_logits, reuses_cache
        )
        with self.batch.changed:
            if self._stopping or self.error is not None:
                raise EngineError(self.error or CLOSED)
            self.batch.waiting.append(sequence)
            self.batch.changed.notify_all()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a request at the next step boundary; its listener gets "cancelled"."""
        self.batch.cancel(sequence)

    # -- the step loop

    def serve(self) -> None:
        """Run steps until `close`. Errors of lanes fail the running requests and are mended."""
        try:
            while self._wait_for_work():
                try:
                    self.batch.admit(self.lane_use_now)
                    for command in self.shadow.obey(self.step + 1):
                        self.set_spin_us(command.lane, command.spin_us)
                    if self.batch.running:
                        now = self.placement
                        self._run_step(self.batch.form_step(now.subchunks, now.beside_subchunks))
                    else:  # while steps run, the wait for them looks after the lanes
                        self._look_after_lanes()
                        self._report_step()
                        self.shadow.talk(self.gauges)
                except LaneDied as error:
                    self._recover(error)
        except Exception as error:  # our own fault: whoever waits for an answer must be told
            self._give_up(f"the engine failed: {type(error).__name__}: {error}")
            raise
        finally:
            self.batch.fail_all(self.error or CLOSED)

    def _wait_for_work(self) -> bool:
        """Wait for a request, or until it is time to look after the lanes; False: the end."""
        with self.batch.changed:
            if not (self.batch.has_work or self._stopping):
                self.batch.changed.wait(IDLE_S)
            return not self._stopping and self.error is None

    def run_unheard(self, plan: StepPlan) -> None:
        """Run a step that belongs to no request; for measurements, while `serve` does not run."""
        self._run_step(Step(plan, ()))

    def _run_step(self, step: Step) -> None:
        """One step from its record to its results.

        NOTE: between two steps the lanes idle, so what need not happen there happens while they
        work: the report on a step goes to the planner once the next one is on its way.
        """
        began = time.monotonic()
        before, crossed_before = self.gauges.busy_ns(), self.gauges.crossed()
        experts_before = self.gauges.expert_use()
        placement = self.placement
        if self._routing is not None:
            self._routing.before(step.plan)
        self._fill_record(step.plan, placement)
        self._report_step()
        self.shadow.talk(self.gauges)
        is_void = self._wait_for_lanes(step)
        self.crew.finish_step(step.plan.phase)
        self.steps_retired += 1
        self._follow_script(step.plan)
        if is_void:
            self.batch.drop(step)
            return
        if self._card_routes is not None:
            self._card_routes.after(self.step, step.plan, placement)
        if self._routing is not None:
            self._routing.after(step.plan)
        experts = NO_EXPERTS
        is_decode = step.plan.is_decode and not step.plan.same_sequence
        if is_decode:
            experts = since(experts_before, self.gauges.expert_use())
            self._experts_read += experts.read_nbytes
        seconds = time.monotonic() - began
        self.multiplied.step(placement, self.gauges, has_prompt=not is_decode)
        retired = partial(
            _retired,
            self.step,
            placement.placement_id,
            step.plan,
            seconds,
            before,
            self.gauges.busy_ns(),
            experts,
            self.slowed,
            mean_crossings_s(crossed_before, self.gauges.crossed()),
        )
        self._unreported.append((self.step, retired, self.crew.lengths(step.plan.phase)))
        took = DecodeStep(placement.placement_id, placement.predicted_step_s or None, seconds)
        self.batch.give_results(step, self._logits, placement.context_tokens, took)

    def _follow_script(self, plan: StepPlan) -> None:
        """Let other programs take of the emulated machine what the script says."""
        emulated = self.settings.emulated
        if self.emulator is None or emulated is None or not plan.is_decode:
            return
        self._decode_steps += 1
        for steps, state in emulated.script:
            if max(1, steps) == self._decode_steps:
                self.emulate(state)

    def to_come(self) -> tuple[str, ...]:
        """A note about the next disturbance of the script, if one has not begun."""
        emulated = self.settings.emulated
        script = () if emulated is None else emulated.script
        later = [steps for steps, _ in script if steps > max(1, self._decode_steps)]
        if not later:
            return ()
        steps = f"{self._decode_steps} step{'' if self._decode_steps == 1 else 's'}"
        return (f"the disturbance from token {later[0]} on has not begun: decode took {steps}",)

    def emulate(self, state: Conditions) -> None:
        """From now on other programs leave this of the emulated machine."""
        assert self.emulator is not None, "the machine is the one that is here"
        self.emulator.set(state)
        if (state.vram_taken_nbytes, state.ram_taken_nbytes) != self._taken:
            self._taken = state.vram_taken_nbytes, state.ram_taken_nbytes
            self.shadow.note(ev.MemoryLeft(*self._taken))

    def _report_step(self) -> None:
        """Tell the planner of steps that have retired, once it is known how long cards took."""
        while self._unreported and self.gauges.is_timed(self._unreported[0][0]):
            step, retired, lengths = self._unreported.popleft()
            event = retired(self.gauges.card_times(step))
            if self.settings.cards and event.phase == "decode" and event.rows == 1:
                kinds_s = self.gauges.kinds_s(step, lengths, self.slowed)
                event = replace(event, kinds_s=kinds_s)
            self.shadow.note(event)

    def _fill_record(self, plan: StepPlan, placement: Placement) -> None:
        self.step += 1
        lengths: dict[int, int] = {}
        for row in plan.rows:
            lengths[row.slot] = max(lengths.get(row.slot, 0), row.position + 1)
        link_bases = self.crew.begin_step(plan.phase)
        self._records.write(
            self.step,
            placement.placement_id,
            plan,
            self.crew.disk_base,
            self.crew.lane_bases,
            link_bases,
            {slot: self._frequencies(length) for slot, length in lengths.items()},
        )
        publish(self._address(STEP_COUNTER), np.int32(self.step & 0x7FFFFFFF))

    def _wait_for_lanes(self, step: Step) -> bool:
        """True: all that the step carried was cancelled meanwhile, and the rest was left out.

        That is for prefill steps, which may be long.
        """
        assert self.arena is not None
        is_void = False
        abort = self.arena.base + self.layout.abort
        for number, length in enumerate(self.crew.lengths(step.plan.phase)):
            if not length:
                continue
            wanted = np.int32(np.uint32((self.crew.lane_bases[number] + length) & 0xFFFFFFFF))
            while wait_counter(self._address(number), wanted, abort, 0, CHECK_NS) != WAIT_OK:
                self._look_after_lanes()
                if not is_void and not step.plan.is_decode and self.batch.is_unwanted(step):
                    self._records.make_void(self.step)
                    is_void = True
        return is_void

    def _address(self, counter: int) -> int:
        assert self.arena is not None
        return self.arena.base + self.layout.counter(counter)

    def _frequencies(self, length: int) -> tuple[np.ndarray, float]:
        """Rotary frequencies of a sequence of so many tokens, and their attention scaling."""
        rope = self.blueprint.config.rope
        if rope.depends_on_length:
            return inv_freq(rope, length)
        if self._rope_cache is None:
            self._rope_cache = inv_freq(rope, length)
        return self._rope_cache

    # -- lanes that fail

    def _look_after_lanes(self) -> None:
        """Raise LaneDied if a lane's loop has ended, or is to end."""
        if self._stopping:
            raise LaneDied(CLOSED)
        self.crew.look_after()

    def _recover(self, failure: LaneDied) -> None:
        """Fail the running requests, park every lane, start the dead ones again, and go on.

        Where the cause lasts (a model file was changed, the same error comes again before a step
        got through) there is nothing to go on with: the engine refuses whatever comes, and says so.
        """
        self.crew.abort()
        reason = CLOSED if self._stopping else str(failure)
        if isinstance(failure, LaneFull):
            if self._has_less or self._stopping:
                self._give_up(reason)
            else:
                self.batch.begin_anew(reason)
                self._plan_for_less(failure.full)
            return
        # What cards that are here hold of keys and values is given back with their lanes.
        self.batch.fail_running(reason, keeps_caches=not self.settings.are_cards_here)
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
                self._unreported.clear()  # who was to tell of them may be gone
                self.crew.restart(self.step)
                if self._stopping:  # closed meanwhile: what has just been set going ends again
                    self.crew.abort()
                    return
                self.shadow.lanes_restarted()
                self.shadow.decisions.append(f"{reason}; started again under the plan in force")
                return
            except LaneDied as error:
                reason = str(error)
                self.crew.abort()
            except (ModelError, ValueError, OSError) as error:
                reason = str(error)
                break
        self._give_up(reason)

    def _plan_for_less(self, full: CardFull) -> None:
        """A card had too little memory for a step: go on under a plan that takes less of it."""
        try:
            self._give_less(full)
            profile, heat = self._loaded_with
            self._load(profile, lambda stage, fraction: None, heat)
        except (LaneDied, ModelError, ValueError, OSError, MemoryError, CudaError) as error:
            self._give_up(str(error))
            return
        if self._stopping:
            self.crew.abort()

    def _is_model_unchanged(self) -> bool:
        try:
            self.files.check_unchanged()
        except ModelError:
            return False
        return True

    def _give_up(self, reason: str) -> None:
        """Fail all requests, those that wait as well, and refuse every new one with `reason`."""
        with self.batch.changed:
            self.error = reason
        if self.arena is not None:
            self.crew.abort()
        self.batch.fail_all(reason)

    def _nothing_multiplied(self) -> Multiplied:
        return Multiplied(self.blueprint.catalog, len(self.lanes), len(self.settings.cards))

    # -- what may be asked

    def process_ids(self) -> dict[str, int]:
        """Process of each lane and of the planner; without those that are gone."""
        found = {}
        for remote in [*self.crew.all_lanes, self.shadow.planner]:
            with suppress(LaneDied):
                if remote is not None:
                    found[remote.name] = remote.process_id()
        return found

    def lane_use_now(self) -> LaneUse:
        """What lanes and experts have done since the start."""
        used = self.gauges.expert_use()
        lanes = self.gauges.lane_use(self.multiplied.so_far(self.placement, used))
        use = used._replace(read_nbytes=self._experts_read)  # of prompts not
        overrun_s = {} if self.emulator is None else self.emulator.overrun_s()
        return LaneUse(lanes, use, overrun_s)

    def catalog_now(self) -> Catalog:
        """The catalog, with the hits of this run where it has had some."""
        experts = self.catalog.experts
        if experts is None or self.placement.cards:
            return self.catalog
        if self.placement.expert_slots == experts.total:
            return self.catalog
        use = self.gauges.expert_use()
        tokens = use.chosen // (experts.num_layers * experts.top_k)
        rate = use.resident / use.chosen if tokens >= HITS_STEPS else None
        return with_measured(self.catalog, self.placement.expert_slots, rate, tokens)

    def expert_heat(self) -> Heat | None:
        """What this run has chosen; None where it has not been watched."""
        experts = self.blueprint.catalog.experts
        if experts is None or self.arena is None:
            return None
        if self.placement.expert_slots == experts.total and not self.placement.cards:
            return None
        try:
            heat: Heat = self.crew.disk_lane.call("expert_heat").result(HEAT_S)
        except (LaneDied, TimeoutError):
            return None
        return heat


def _retired(
    step: int,
    placement_id: int,
    plan: StepPlan,
    seconds: float,
    before: BusyTimes,
    after: BusyTimes,
    experts: ExpertUse,
    slowed: float,
    crossings_s: Mapping[str, float],
    of_cards: BusyTimes,
) -> ev.StepRetired:
    """before, after: what each lane had done until then; of_cards: what these did in this step.

    slowed: seconds here for one second that the planner is told.
    """
    scale = 1e9 * slowed
    before, after = {**before, **dict.fromkeys(of_cards, (0, 0))}, {**after, **of_cards}
    return ev.StepRetired(
        step=step,
        placement_id=placement_id,
        phase=plan.phase,
        rows=len(plan.rows),
        context=plan.context,
        seconds=seconds / slowed,
        busy_s={name: (after[name][0] - before[name][0]) / scale for name in after},
        wait_s={name: (after[name][1] - before[name][1]) / scale for name in after},
        experts_chosen=experts.chosen,
        experts_resident=experts.resident,
        experts_read_nbytes=experts.read_nbytes,
        experts_on_cards=experts.on_cards,
        crossings_s=crossings_s,
    )
