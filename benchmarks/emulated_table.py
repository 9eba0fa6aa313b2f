"""Every shipped shape on every hardware file, emulated: ours beside layouts tuned by hand.

Two tables. Decode: our plan for the file's figures (static) and with its shadow, over the best of
all layouts by hand, each at the setting that measures fastest in that very world; for mixtures also
over the better of layer-split and cpu-moe alone; and per cent of the path bound of the machine as
it really is. Prefill: the same over layer-stream, at its best chunk and number of layers. Each pair
is a world of its own, whose rates are off from the file by factors that no planner is told.

    python benchmarks/emulated_table.py --routing qwen3-30b-a3b=TRACE.csv.gz --keep rows.jsonl

Hours on one core. --keep adds a line for each pair to a file and goes on from what is there;
--read makes the tables of such files. `shadowlane bench MODEL --compare all --hardware FILE --seed
WORLD` shows one pair in full. docs/emulated-table.md has the tables and what they mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from shadowlane.compare import BY_HAND, OURS, STATIC, Comparison, compare, rows_of
from shadowlane.compare_world import Job
from shadowlane.planner.hybrid_layouts import TooLarge
from shadowlane.planner.recorded_hits import RecordedHits
from shadowlane.planner.routing_files import read_trace
from shadowlane.shapes import known_shapes, load_hardware, longest_context, shape_model

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "examples" / "hardware").glob("*.yaml"))
ROOM = 4096
CONTEXTS = (512, 3968)
PROMPTS = (512, 2048, 8192, 32768)
STREAM = "layer-stream"
LAYERWISE = "layer-split"  # whole layers with their keys and values: what ATSInfer is measured by
TUNED_MIXTURE = (
    "layer-split",
    "layer-split, KV in RAM",
    "cpu-moe",
    "cpu-moe, KV in RAM",
    "layer-split + cpu-moe",
)
CHANCE = 0.005  # two layouts that differ by no more are as fast
NEAR = 2.0  # streaming and computing are near each other within this factor

Row = dict[str, Any]


def jobs_of(name: str) -> list[Job]:
    most = longest_context(name)
    decode = [Job("decode", tokens, ROOM) for tokens in CONTEXTS]
    return decode + [
        Job("prefill", tokens, max(ROOM, tokens)) for tokens in PROMPTS if tokens <= most
    ]


def world_of(name: str, file: Path) -> int:
    """The seed of a pair: the same whichever pairs are asked for, however the file is named."""
    machines = [each.stem for each in FILES]
    number = machines.index(file.stem) if file.stem in machines else 0
    return known_shapes().index(name) * len(FILES) + number


def pair(name: str, file: Path, seed: int, routing: Path | None) -> Row:
    """What all strategies came to, as JSON can hold it."""
    jobs = jobs_of(name)
    model = shape_model(name, max(job.room for job in jobs))
    machine = load_hardware(file)
    recorded = None if routing is None else RecordedHits(read_trace(routing), model)
    row: Row = {
        "model": name,
        "machine": file.stem,
        "seed": seed,
        "is_mixture": any(load.experts for load in model.loads),
        "recorded": recorded is not None,
        "emulated": True,
        "too_large": [],
        "rows": [],
    }
    for job in jobs:  # one by one: a long context may be too large where a short one is not
        try:
            found = compare(model, machine, [job], seed=seed, recorded=recorded)
        except TooLarge:
            row["too_large"].append(job.label)
            continue
        for each in rows_of(found):
            each["balance"] = balance(found, each["strategy"]) if job.phase == "prefill" else None
            row["rows"].append(each)
    return row


def balance(found: Comparison, strategy: str) -> float | None:
    """Seconds of the busiest link over those of the busiest card, in a step of this strategy."""
    first = found.rounds[0]
    reached = first.of(strategy)
    assert reached is not None
    busy = found.arena.world().step(reached.setting.plan, first.job.work(reached.setting.rows))
    link, card = (
        max((s for lane, s in busy.busy_s.items() if lane.startswith(kind)), default=0.0)
        for kind in ("h2d", "gpu")
    )
    return link / card if card else None


# -- figures of one pair


def speeds(row: Row, phase: str, tokens: int) -> dict[str, Row]:
    return {
        each["strategy"]: each
        for each in row["rows"]
        if (each["phase"], each["context"]) == (phase, tokens)
    }


def fastest(found: dict[str, Row], names: Sequence[str]) -> Row | None:
    return max(
        (found[name] for name in names if name in found),
        key=lambda each: each["tok_per_s"],
        default=None,
    )


def over(found: dict[str, Row], ours: str, names: Sequence[str]) -> float | None:
    """How many times as fast as the fastest of `names`."""
    best = fastest(found, names)
    if best is None or ours not in found:
        return None
    return float(found[ours]["tok_per_s"] / best["tok_per_s"])


def of_path(found: dict[str, Row]) -> float | None:
    return found[OURS]["tok_per_s"] / found[OURS]["path_bound"] if OURS in found else None


# -- tables


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def part(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(titles)} |",
        "|" + "---|" * len(titles),
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]


def decode_cells(row: Row) -> list[str]:
    cells = [row["model"], row["machine"], str(row["seed"])]
    for tokens in CONTEXTS:
        found = speeds(row, "decode", tokens)
        best = fastest(found, BY_HAND)
        if tokens == CONTEXTS[0]:
            name = best["strategy"].removesuffix(", KV in RAM") if best else "-"
            star = "*" if best and best["strategy"].endswith("KV in RAM") else ""
            cells.append(f"{name} {best['setting']}{star}".strip() if best else "-")
        cells += [ratio(over(found, STATIC, BY_HAND)), ratio(over(found, OURS, BY_HAND))]
        if tokens == CONTEXTS[0]:
            mixture = over(found, OURS, TUNED_MIXTURE) if row["is_mixture"] else None
            cells.append(ratio(mixture) if row["is_mixture"] else "")
        cells.append(part(of_path(found)))
    return cells


def prefill_cells(row: Row) -> list[str]:
    cells = [row["model"], row["machine"]]
    for tokens in PROMPTS:
        found = speeds(row, "prefill", tokens)
        if OURS not in found:
            cells.append("")
            continue
        text = ratio(over(found, OURS, [STREAM]))
        cells.append(text + ("~" if is_near(found) else "") + f" {part(of_path(found))}")
    return cells


def layerwise_cells(row: Row) -> list[str]:
    """Over layers placed whole, decode and prompts."""
    works = [("decode", tokens) for tokens in CONTEXTS]
    works += [("prefill", tokens) for tokens in PROMPTS]
    found = [over(speeds(row, *work), OURS, [LAYERWISE]) for work in works]
    return [
        row["model"],
        row["machine"],
        *("" if each is None else ratio(each) for each in found),
    ]


def is_near(found: dict[str, Row]) -> bool:
    """Whether streaming takes about as long as computing, in layer-stream."""
    value = found[STREAM]["balance"] if STREAM in found else None
    return value is not None and 1 / NEAR <= value <= NEAR


def markdown(rows: list[Row]) -> str:
    short, long = CONTEXTS
    lines = table(
        (
            "model",
            "machine",
            "world",
            "best by hand",
            f"static, {short}",
            "shadow",
            "over layer-split, cpu-moe",
            "of path bound",
            f"static, {long}",
            "shadow",
            "of path bound",
        ),
        map(decode_cells, rows),
    )
    lines.append("")
    lines += table(("model", "machine", *map(str, PROMPTS)), map(prefill_cells, rows))
    lines.append("")
    works = [f"decode {tokens}" for tokens in CONTEXTS] + list(map(str, PROMPTS))
    lines += table(("model", "machine", *works), map(layerwise_cells, rows))
    return "\n".join([*lines, "", *marks(rows)])


def marks(rows: list[Row]) -> list[str]:
    """How many pairs and works keep each promise; a line for each that does not."""
    decode = [
        (row, speeds(row, "decode", tokens), f"decode {tokens}")
        for row in rows
        for tokens in CONTEXTS
    ]
    prefill = [
        (row, speeds(row, "prefill", tokens), f"prefill {tokens}")
        for row in rows
        for tokens in PROMPTS
    ]
    decode, prefill = ([each for each in found if OURS in each[1]] for found in (decode, prefill))
    laptop = [
        each
        for each in decode
        if each[0]["is_mixture"] and each[0]["recorded"] and "8gb" in each[0]["machine"]
    ]
    near = [each for each in prefill if is_near(each[1])]

    def over_hand(found: dict[str, Row]) -> float | None:
        return over(found, OURS, BY_HAND)

    def over_stream(found: dict[str, Row]) -> float | None:
        return over(found, OURS, [STREAM])

    def over_tuned(found: dict[str, Row]) -> float | None:
        return over(found, OURS, TUNED_MIXTURE)

    def over_layers(found: dict[str, Row]) -> float | None:
        return over(found, OURS, [LAYERWISE])

    of_mixtures = "mixtures, recorded routing, 8 GB laptop, over layer-split and cpu-moe"
    told = [
        (of_mixtures, laptop, 1.3, over_tuned),
        ("decode, over the best by hand", decode, 0.99, over_hand),
        ("prefill, over the best by hand", prefill, 0.99, over_hand),
        ("prefill, over layer-stream", prefill, 1.0 - CHANCE, over_stream),
        ("prefill, over layer-stream, streaming near computing", near, 1.3, over_stream),
        ("decode, of the path bound", decode, 0.9, of_path),
        ("prefill, of the path bound", prefill, 0.9, of_path),
        ("decode, over whole layers (the paper's kind of baseline)", decode, 0.99, over_layers),
        ("prefill, over whole layers (the paper's kind of baseline)", prefill, 0.99, over_layers),
    ]
    lines = []
    for title, works, least, figure in told:
        lines += mark(title, works, least, figure)
    for phase, works in (("decode", decode), ("prefill", prefill)):
        lines.append(
            f"- {phase}, predicted less measured, median and most: "
            + "; ".join(
                f"{name} {off(works, strategy)}"
                for name, strategy in (("by the file", STATIC), ("as learned", OURS))
            )
        )
    return lines


def off(works: Sequence[tuple[Row, dict[str, Row], str]], strategy: str) -> str:
    """How far speeds were predicted from how they were measured."""
    errors = sorted(
        abs(found[strategy]["predicted_tok_per_s"] / found[strategy]["tok_per_s"] - 1.0)
        for _, found, _ in works
        if strategy in found
    )
    return f"{errors[len(errors) // 2]:.1%}, {errors[-1]:.0%}" if errors else "-"


def mark(
    title: str,
    works: Sequence[tuple[Row, dict[str, Row], str]],
    least: float,
    figure: Callable[[dict[str, Row]], float | None],
) -> list[str]:
    known = [(value, row, work) for row, found, work in works if (value := figure(found))]
    if not known:
        return []
    missed = sorted(
        (value, f"{row['model']} on {row['machine']}, {work}")
        for value, row, work in known
        if value < least
    )
    values = sorted(value for value, _, _ in known)
    lines = [
        f"- {title}: {len(known) - len(missed)} of {len(known)} are at least {least:.3g}; "
        f"median {values[len(values) // 2]:.2f}, least {values[0]:.2f}, most {values[-1]:.2f}"
    ]
    return lines + [f"  - {value:.2f}: {where}" for value, where in missed[:8]]


# -- the command


def kept(paths: Iterable[Path]) -> list[Row]:
    return [
        json.loads(line)
        for path in paths
        if path.exists()
        for line in path.read_text().splitlines()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=known_shapes(), metavar="NAME")
    parser.add_argument("--machines", nargs="+", type=Path, default=FILES, metavar="FILE")
    parser.add_argument("--routing", nargs="+", default=[], metavar="MODEL=FILE")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="JSON lines, one for each pair")
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="FILE", help="those of earlier runs"
    )
    asked = parser.parse_args()
    if asked.read:
        print(markdown(in_order(kept(asked.read), asked.models, asked.machines)))
        return
    routing = {
        name: Path(file) for name, _, file in (each.partition("=") for each in asked.routing)
    }
    rows = kept([asked.keep]) if asked.keep else []
    done = {(row["model"], row["machine"]) for row in rows}
    began = time.monotonic()
    total = len(asked.models) * len(asked.machines)
    for name in asked.models:
        for file in asked.machines:
            if (name, file.stem) in done:
                continue
            rows.append(pair(name, file, world_of(name, file), routing.get(name)))
            if asked.keep:
                with asked.keep.open("a") as out:
                    out.write(json.dumps(rows[-1]) + "\n")
            told = f"\r{len(rows)} of {total}, {time.monotonic() - began:.0f} s"
            print(told, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(markdown(in_order(rows, asked.models, asked.machines)))


def in_order(rows: list[Row], models: Sequence[str], files: Sequence[Path]) -> list[Row]:
    machines = [file.stem for file in files]
    wanted = [row for row in rows if row["model"] in models and row["machine"] in machines]
    return sorted(
        wanted, key=lambda row: (models.index(row["model"]), machines.index(row["machine"]))
    )


if __name__ == "__main__":
    main()
