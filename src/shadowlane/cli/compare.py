"""`shadowlane bench --compare`: layouts by hand beside ours, on an emulated machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shadowlane.cli.stages import Stages
from shadowlane.models import resolve_model
from shadowlane.ops.errors import ModelError

if TYPE_CHECKING:
    from shadowlane.compare import Comparison
    from shadowlane.compare_world import Job
    from shadowlane.planner.hardware import Hardware
    from shadowlane.planner.hybrid import Model

ROOM = 4096  # tokens, where neither the work nor --ctx-size asks for more
CONTEXTS, PROMPTS = (512, 3968), (512, 2048, 8192)  # as far as the model allows
ANSWER = 128  # tokens that follow a context


@dataclass(frozen=True, slots=True)
class Asked:
    """What was typed, for the most part as it was."""

    compare: str
    hardware: Path
    contexts: str | None
    prompts: str | None
    ctx_size: int | None
    ram: str | None
    gpu_memory: str | None
    routing: Path | None
    plot: Path | None
    seed: int
    output: str


def compare_on(model: str, asked: Asked) -> None:
    """Prints the tables or the rows, and draws the picture."""
    # What can be told before anything is read, first.
    contexts = _numbers("contexts", asked.contexts)
    prompts = _numbers("prompts", asked.prompts)
    _check_plot(asked.plot)
    if asked.routing is not None:
        from shadowlane.planner.routing_files import READ_ENDINGS, check_ending

        check_ending(asked.routing, READ_ENDINGS, "routing")
        with asked.routing.open("rb"):
            pass
    from shadowlane.compare import compare, rows_of
    from shadowlane.emulate import sizes_of_cards
    from shadowlane.planner.recorded_hits import RecordedHits
    from shadowlane.shapes import load_hardware
    from shadowlane.sizes import parse_size
    from shadowlane.what_if import load_model, with_budgets

    names = _strategies(asked.compare)
    ram = None if asked.ram is None else parse_size(asked.ram, "ram")
    machine = load_hardware(asked.hardware)
    machine = with_budgets(machine, ram, sizes_of_cards(asked.gpu_memory, machine))
    with Stages() as stages:
        path = _path_of(model, stages)
        most = _longest_context(model, path)
        if asked.ctx_size is not None and asked.ctx_size > most:
            raise ValueError(f"ctx_size must be at most the model's {most}; got {asked.ctx_size}")
        jobs = _jobs(contexts, prompts, asked.ctx_size, most)
        stages("reading shapes")
        loaded = load_model(model, path, max(job.room for job in jobs))
        _check_names(names, loaded, machine)
        recorded = None
        if asked.routing is not None:
            from shadowlane.planner.routing_files import read_trace

            recorded = RecordedHits(read_trace(asked.routing), loaded)
        found = compare(
            loaded,
            machine,
            jobs,
            strategies=names or _all(),
            seed=asked.seed,
            recorded=recorded,
            progress=stages,
        )
    if asked.plot is not None:
        asked.plot.write_text(_picture(found))
    if asked.output == "json":
        print(json.dumps(rows_of(found)))
    else:
        from shadowlane.compare_report import compare_markdown

        print(compare_markdown(found))


def _path_of(model: str, stages: Stages) -> Path | None:
    """None for a model that is known by its shape."""
    from shadowlane.shapes import known_shapes

    if model in known_shapes():
        return None
    try:
        return resolve_model(model, stages)
    except ModelError as error:
        known = ", ".join(known_shapes())
        raise ModelError(f"{error}; with --hardware also: {known}") from None


def _longest_context(model: str, path: Path | None) -> int:
    if path is None:
        from shadowlane.shapes import longest_context

        return longest_context(model)
    from shadowlane.ops.files import open_model

    most = open_model(path).config.get("max_position_embeddings")
    return most if isinstance(most, int) else ROOM


def _numbers(name: str, given: str | None) -> tuple[int, ...] | None:
    """Of a list with commas; 0: none. Raises ValueError."""
    if given is None:
        return None
    try:
        numbers = tuple(dict.fromkeys(int(each) for each in given.split(",")))
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0 or (0 in numbers and len(numbers) > 1):
        raise ValueError(
            f"{name} must be numbers of tokens with commas between, such as 512,2048, or 0 for "
            f"none; got {given!r}"
        )
    return () if numbers == (0,) else numbers


def _jobs(
    contexts: Sequence[int] | None,
    prompts: Sequence[int] | None,
    ctx_size: int | None,
    most: int,
) -> list[Job]:
    """What is asked for, or what of the usual the context allows. Raises ValueError."""
    from shadowlane.compare_world import Job

    limit = ctx_size or most
    jobs = []
    for name, given, usual, after in (
        ("contexts", contexts, CONTEXTS, ANSWER),
        ("prompts", prompts, PROMPTS, 0),
    ):
        too_long = [tokens for tokens in given or () if tokens + after > limit]
        if too_long:
            answer = f", an answer of {after} included" if after else ""
            what = f"--ctx-size {ctx_size}" if ctx_size else f"the model's context of {most}"
            raise ValueError(f"{name} must fit {what}{answer}; got {too_long[0]}")
        for tokens in usual if given is None else given:
            if tokens + after <= limit:
                room = ctx_size or min(most, max(ROOM, tokens + after))
                jobs.append(Job("prefill" if name == "prompts" else "decode", tokens, room))
    if not jobs:
        raise ValueError(
            "one of --contexts and --prompts must ask for something that fits the context of "
            f"{limit} tokens; none does"
        )
    return jobs


def _all() -> tuple[str, ...]:
    from shadowlane.compare import STRATEGIES

    return STRATEGIES


def _strategies(given: str) -> tuple[str, ...]:
    """Names with commas between, of which some have one themselves; (): all. Raises ValueError."""
    if given.strip() == "all":
        return ()
    names: list[str] = []
    for each in (part.strip() for part in given.split(",")):
        if names and f"{names[-1]}, {each}" in _all():
            names[-1] += f", {each}"
        else:
            names.append(each)
    known = _all()
    for name in names:
        if name not in known:
            listed = "; ".join(known)
            raise ValueError(
                f"compare must be all, or some of these with commas between: {listed}; got {name!r}"
            )
    # In the order of the tables, and each once.
    return tuple(name for name in known if name in names)


def _check_names(names: Sequence[str], model: Model, machine: Hardware) -> None:
    """Raises ValueError for a layout that was asked for by name and cannot be here."""
    from shadowlane.compare import why_not

    for name in names:
        lacks = why_not(name, model, machine)
        if lacks:
            raise ValueError(f"compare must name what there is: {name} needs {lacks}")


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix != ".svg":
        raise ValueError(f"plot must end in .svg; got {plot}")
    if plot.is_dir() or not plot.parent.is_dir():
        raise ValueError(f"plot must be a file in a directory that exists; got {plot}")


def _picture(found: Comparison) -> str:
    """Of the first job: the best by hand and ours, or all that were asked for if they are few."""
    from shadowlane.compare import told
    from shadowlane.lanes_plot import Panel, lanes_svg

    first = found.rounds[0]
    shown = first.reached
    if len(shown) > 3:
        shown = tuple(dict.fromkeys((first.reference, shown[-1])))
    panels = []
    for each in shown:
        spans, seconds = found.arena.spans(each.setting, first.job)
        setting = told(each)
        name = f"{each.strategy}: {setting}" if setting else each.strategy
        panels.append(Panel(name, spans, seconds))
    cards = range(len(found.arena.machine.cards))
    used = {span.lane for panel in panels for span in panel.spans}
    lanes = ["cpu:0", *(f"{kind}:{card}" for card in cards for kind in ("gpu", "h2d")), "disk:0"]
    model, machine = found.arena.model.name, found.arena.machine.name
    title = f"{model} on {machine}: {first.job.label}"
    return lanes_svg(title, panels, [lane for lane in lanes if lane in used])
