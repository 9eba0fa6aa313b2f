"""Measuring this machine with this model: the figures a profile holds.

Operators are timed where they run: a one-layer cut of the model goes through the real lane code on
the lane's own cores, and the spans that the workers write are what is read. A disk is timed with
the lane's own kind of reads on the model's own files.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shadowlane.actors.arena import Arena
from shadowlane.actors.blueprint import PAGE, BlockSource, Blueprint, cut_model
from shadowlane.actors.disk_lane import BUSY_NS, EXPERT_NBYTES, ModelFile
from shadowlane.actors.engine import Engine
from shadowlane.actors.hosts import ThreadHost
from shadowlane.actors.records import Row, StepPlan
from shadowlane.actors.spec import EngineSettings, Options
from shadowlane.ops import table as t
from shadowlane.ops.files import open_model
from shadowlane.planner.placement import Placement
from shadowlane.planner.profile import DiskFigure, GroupFigure, Phase
from shadowlane.planner.search import least_slots
from shadowlane.sizes import free_ram

DECODE_ROWS = (1, 2, 4, 8)
DECODE_CONTEXTS = (64, 1024)
REPEATS = 5
LONG_REPEATS = 2  # of a chunk of two sub-chunks, which is there for what is not done twice in it
DISK_SECONDS = 0.5
BRIEF_S = 1.0
SLACK = 8 << 20
MISS_STEPS, MISS_CHUNKS = 32, 3  # with experts missing
COLD_NBYTES = 48 << 20  # weights of the layers that are run: more than the cores' own caches hold


def measure_groups(
    cores: Sequence[int], root: Path, options: Options, ram: int, *, brief: bool = False
) -> dict[str, Any]:
    """Figures of one compute lane. `brief`: only what DRAM gives, for use beside others.

    Returns {"groups": [GroupFigure], "dram_bytes_per_s", "instruction_s", "step_s",
    "copies_save_s_per_byte", "miss_s", "chunk_miss_s", "experts": DiskFigure}; all but the first
    None where they could not be told.
    """
    files = open_model(root)
    cut = cut_model(files, options, len(cores), layers=1)
    layer = sum(block.nbytes for block in cut.catalog.blocks if block.group.startswith("0."))
    if cut.catalog.experts is not None:
        layer += cut.catalog.experts.per_layer * cut.catalog.experts.nbytes
    if layer < COLD_NBYTES:
        cut = cut_model(files, options, len(cores), layers=-(-COLD_NBYTES // max(1, layer)))
    engine = _engine(cut, root, options, cores, ram, brief)
    try:
        found, clock_s = _measure(engine, cut, len(cores), brief)
        held = engine.placement.expert_slots
    finally:
        engine.close()
    if not brief and cut.catalog.experts is not None and held == cut.catalog.experts.total:
        found |= _measure_misses(cut, root, options, cores, ram, clock_s)
    return found


def _measure_misses(
    cut: Blueprint,
    root: Path,
    options: Options,
    cores: Sequence[int],
    ram: int,
    clock_s: Mapping[Phase, float],
) -> dict[str, Any]:
    """What missing experts cost, told from steps with half of the experts in RAM.

    A missing expert is looked for, read and waited for while workers and readers share cores, and
    no figure of a disk alone tells what that takes. So it is measured where it happens.

    clock_s: seconds of a decode step of one row and of a chunk, with everything in RAM.
    """
    experts = cut.catalog.experts
    assert experts is not None, "a dense model misses nothing"
    slots = max(least_slots(experts), experts.total // 2)
    if slots >= experts.total:
        return {}
    engine = _engine(cut, root, options, cores, ram, True, missing=experts.total - slots)
    context = engine.placement.context_tokens
    chunk = min(cut.options.prefill_chunk, context)
    found: dict[str, Any] = {}
    try:
        work: list[tuple[Phase, int, int, int]] = [
            ("decode", 1, min(DECODE_CONTEXTS[0], context), MISS_STEPS)
        ]
        if "prefill" in clock_s:
            work.append(("prefill", chunk, chunk, MISS_CHUNKS))
        for phase, rows, tokens, repeats in work:
            step_s: list[float] = []
            missed = 0
            before = engine.gauges.disk_statistics().copy()
            for repeat in range(repeats + 1):
                began = time.monotonic()
                step = _step(rows, tokens, phase, repeat, cut.config.vocab_size, chunk)
                engine.run_unheard(step)
                if repeat == 0:
                    continue
                step_s.append(time.monotonic() - began)
                resident, chosen = engine.gauges.newest_use()
                missed += chosen - resident
            if not missed:
                continue
            added_s = statistics.mean(step_s) - clock_s[phase]
            name = "miss_s" if phase == "decode" else "chunk_miss_s"
            found[name] = max(0.0, added_s * repeats / missed)
            if phase == "decode":
                read, busy = (
                    int(engine.gauges.disk_statistics()[field] - before[field])
                    for field in (EXPERT_NBYTES, BUSY_NS)
                )
                rate = read / max(1, busy) * 1e9
                found["experts"] = DiskFigure(
                    experts.held_nbytes, engine.settings.depth, rate, contended_bytes_per_s=rate
                )
            elif "experts" in found:  # the noise of a chunk is more than what a few reads add
                read_s = experts.held_nbytes / found["experts"].bytes_per_s
                found[name] = max(found[name], read_s)
    finally:
        engine.close()
    return found


def _engine(
    cut: Blueprint,
    root: Path,
    options: Options,
    cores: Sequence[int],
    ram: int,
    brief: bool,
    missing: int = 0,
) -> Engine:
    """An engine on the cut, with expanded copies where there is room for them too.

    missing: experts that shall not be in RAM; they are read on demand then.
    """
    catalog = cut.catalog
    context = min(cut.context_limit, max(*DECODE_CONTEXTS, options.prefill_chunk))
    pages = -(-context // catalog.page_tokens)
    needed = (
        catalog.constants_nbytes
        + catalog.scratch_nbytes
        + sum(block.held_nbytes for block in catalog.blocks)
        + (pages + 1) * options.max_batch * catalog.page_nbytes
        + SLACK
    )
    if catalog.experts is not None:
        needed += (catalog.experts.total - missing) * catalog.experts.slot_nbytes
    subchunks, longer = 1, dict(catalog.chunk_scratch).get(2)
    if longer is not None and not brief:
        more = needed + longer - catalog.scratch_nbytes
        if more <= min(ram, free_ram().free_nbytes):
            subchunks, needed = 2, more
    if missing:  # no byte more, and none for embedding rows, or experts would have it
        needed -= SLACK - PAGE
        needed -= sum(
            catalog.blocks[index].held_nbytes
            for group in catalog.groups
            if group.kind == "embed"
            for index in group.blocks
        )
    copies = 0 if brief else sum(block.expanded_nbytes for block in catalog.blocks)
    if needed + copies > min(ram, free_ram().free_nbytes):
        copies = 0
    settings = EngineSettings(
        min(ram, needed + copies),
        (tuple(cores),),
        expand="always" if copies else "never",
        subchunks=subchunks,
        replan=False,  # a planner knows nothing of the placement without copies, and may re-plan
        prefetch=not missing,
    )
    engine = Engine(root, replace(options, context=context), settings, ThreadHost(), cut)
    engine.start(None)
    return engine


def _measure(
    engine: Engine, cut: Blueprint, threads: int, brief: bool
) -> tuple[dict[str, Any], dict[Phase, float]]:
    """What `measure_groups` returns, of dense models; seconds of a one-row step and of a chunk."""
    copied = engine.placement
    plain = _without_copies(engine) if copied.expanded else copied
    context = plain.context_tokens
    chunk = min(cut.options.prefill_chunk, context)
    work: list[tuple[Phase, int, int]] = [("decode", 1, min(DECODE_CONTEXTS[0], context))]
    if not brief:
        work += [("decode", rows, min(DECODE_CONTEXTS[0], context)) for rows in DECODE_ROWS[1:]]
        work.append(("decode", 1, min(DECODE_CONTEXTS[1], context)))
        if chunk > t.MAX_DECODE_ROWS:
            work.append(("prefill", chunk, chunk))
            longer = plain.subchunks * chunk
            if chunk < longer <= context:
                work.append(("prefill", longer, longer))
    figures: list[GroupFigure] = []
    gaps: list[float] = []
    outside: list[float] = []
    save: float | None = None
    whole_s: dict[Phase, float] = {}  # of a step, of the first kind of each phase
    for phase, rows, tokens in dict.fromkeys(work):
        times: dict[int, list[float]] = defaultdict(list)
        compares = phase == "prefill" and rows == chunk and bool(copied.expanded)
        busy_s: list[float] = []  # of the processor in a step, over all threads
        copied_busy_s: list[float] = []  # the same with expanded copies, in turn
        clock_s: list[float] = []
        # Others take a moment to begin, and what counts is how fast it is while all are at it.
        until = time.monotonic() + BRIEF_S if brief else 0.0
        is_long = phase == "prefill" and rows > chunk
        repeat, repeats = -1, LONG_REPEATS if is_long else REPEATS
        while repeat < repeats or time.monotonic() < until:
            repeat += 1
            step = _step(rows, tokens, phase, repeat, cut.config.vocab_size, chunk)
            if compares:
                engine.crew.switch(copied)
                copied_busy_s.append(_processor_s(engine, step))
                engine.crew.switch(plain)
            began = time.monotonic_ns()
            busy_s.append(_processor_s(engine, step))
            ended = time.monotonic_ns()
            if repeat == 0:
                continue  # warms caches, and compiles what no one has compiled yet
            clock_s.append((ended - began) / 1e9)
            spans = _spans(engine, threads)
            for group, (start, end, waited) in spans.items():
                times[group].append((end - start - waited) / 1e9)
            if phase == "decode" and rows == 1:
                edges = sorted(spans.values())
                gaps += [
                    max(0.0, (later[0] - earlier[1]) / 1e9) for earlier, later in pairwise(edges)
                ]
                outside.append((ended - began - (edges[-1][1] - edges[0][0])) / 1e9)
        whole_s.setdefault(phase, statistics.median(clock_s))
        if compares:
            save = _saved_s_per_byte(copied, busy_s[1:], copied_busy_s[1:], clock_s)
        alike: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for number, seconds in times.items():
            group = cut.catalog.groups[number]
            alike[group.kind, group.layout, group.units, group.cols] += seconds
        for (kind, layout, units, cols), seconds in alike.items():
            figures.append(
                GroupFigure(
                    lane_kind="cpu",
                    threads=threads,
                    kind=kind,
                    layout=layout,
                    units=units,
                    cols=cols,
                    phase=phase,
                    rows=rows,
                    context=tokens if kind == "attn" else 0,
                    seconds=statistics.median(seconds),
                )
            )
    heads = [each for each in figures if each.kind == "lm_head" and each.phase == "decode"]
    nbytes = sum(cut.catalog.blocks[index].nbytes for index in cut.catalog.groups[-1].blocks)
    single = [each.seconds for each in heads if each.rows == 1]
    found = {
        "groups": figures,
        "dram_bytes_per_s": nbytes / single[0] if single and single[0] > 0 else None,
        "instruction_s": statistics.median(gaps) if gaps else None,
        "step_s": statistics.median(outside) if outside else None,
        "copies_save_s_per_byte": save,
    }
    return found, whole_s


def _without_copies(engine: Engine) -> Placement:
    """Make the engine run under its placement without expanded copies; those stay, for later."""
    copied = engine.placement
    plain = replace(copied, placement_id=engine.crew.newest_id + 1, expanded=(), expanded_nbytes=0)
    for answer in engine.crew.publish(plain):
        answer.pending.result()
    engine.crew.switch(plain)
    return plain


def _saved_s_per_byte(
    copied: Placement,
    plain_busy_s: Sequence[float],
    copied_busy_s: Sequence[float],
    plain_clock_s: Sequence[float],
) -> float:
    """Seconds by which expanded copies shorten a chunk, per byte of them; steps were run in pairs.

    What is looked for is a few per cent, and whoever else runs takes more of the clock than that.
    So the part that is spared is told from the time of the processor, in which reading a copy of
    several times the bytes is too: a core that waits for DRAM counts as busy.
    """
    pairs = zip(copied_busy_s, plain_busy_s, strict=True)
    part = 1.0 - statistics.median(copy / plain for copy, plain in pairs)
    return max(0.0, part * statistics.median(plain_clock_s) / copied.expanded_nbytes)


def _processor_s(engine: Engine, step: StepPlan) -> float:
    """Run a step. Returns what it took of the processor, all threads of this process together."""
    began = time.process_time()
    engine.run_unheard(step)
    return time.process_time() - began


def _step(rows: int, tokens: int, phase: Phase, repeat: int, vocab: int, subchunk: int) -> StepPlan:
    """A step whose last row attends to `tokens` tokens; what is in the cache does not matter.

    Each repeat has tokens of its own: of a mixture it goes to other experts, not to those that the
    processor's caches still hold.
    """
    first = max(0, tokens - rows)
    made = tuple(
        Row(
            token=(repeat * rows + index) * 7919 % vocab,
            position=first + index,
            slot=0,
            wants_logits=index == rows - 1,
        )
        for index in range(rows)
    )
    is_decode = phase == "decode"
    return StepPlan(made, rows if is_decode else 0, is_decode, subchunk_rows=subchunk)


def _spans(engine: Engine, threads: int) -> dict[int, tuple[int, int, int]]:
    """Of the newest step: group -> (first start, last end, longest wait for the disk), in ns."""
    step = engine.step
    found: dict[int, tuple[int, int, int]] = {}
    for worker in range(threads):
        for span in engine.gauges.worker_spans(0, worker):
            if span[0] != step:
                continue
            _, group, start, end, waited = (int(value) for value in span)
            old = found.get(group, (start, end, 0))
            found[group] = (min(old[0], start), max(old[1], end), max(old[2], waited))
    return found


def measure_disk(
    sources: Sequence[BlockSource], depth: int, direct: bool, seconds: float = DISK_SECONDS
) -> DiskFigure:
    """Bandwidth of reads of the model's own blocks, `depth` at a time, for about `seconds`.

    Raises OSError, or ValueError if a file ends early.
    """
    files = {path: ModelFile(path, direct) for path in {source.path for source in sources}}
    held = max(source.held_nbytes for source in sources)
    buffers = Arena.create(depth * held)
    lock = threading.Lock()
    state = {"next": 0, "nbytes": 0}
    failures: list[Exception] = []
    until = time.monotonic() + seconds

    def work(slot: int) -> None:
        while time.monotonic() < until and not failures:
            with lock:
                number = state["next"]
                state["next"] += 1
            source = sources[number % len(sources)]
            try:
                files[source.path].read_block(source, buffers.memory, slot * held)
            except Exception as error:  # raised below, by the caller's thread
                failures.append(error)
                return
            with lock:
                state["nbytes"] += source.held_nbytes

    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - began
    buffers.close()
    for file in files.values():
        file.close()
    if failures:
        raise failures[0]
    typical = int(np.median([source.held_nbytes for source in sources]))
    return DiskFigure(max(PAGE, typical), depth, state["nbytes"] / elapsed)
