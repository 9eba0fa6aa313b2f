"""Strategies compared in one emulated world, as Markdown: a table for each piece of work."""

from __future__ import annotations

from shadowlane.compare import CALIBRATED, Comparison, Reached, Round, told

CALIBRATION = "docs/calibration.md"


def compare_markdown(comparison: Comparison) -> str:
    arena = comparison.arena
    lines = [
        f"{arena.model.name} on {arena.machine.name}, world {comparison.seed}.",
        "Emulated: nothing was run. The machine's rates are off from its file by factors that no "
        "planner was told. Each layout by hand has the setting that measured fastest of all; "
        "`static` is our plan for the file's figures, `shadowlane` the same plan as its shadow has "
        f"changed it by what it measured. Bounds are those of the machine as it really is. "
        f"{CALIBRATION} says how far such figures are from published speeds; for prompts only "
        "ratios are shown.",
    ]
    for each in comparison.rounds:
        lines += ["", *_table(each)]
    return "\n".join(lines)


def _table(found: Round) -> list[str]:
    is_absolute = found.job.phase == CALIBRATED
    speed = ("emulated tok/s",) if is_absolute else ()
    titles = (
        "layout",
        "setting",
        *speed,
        "of the best by hand" if found.best_by_hand else "of the best",
        "predicted / measured",
        "of resource bound",
        "of path bound",
    )
    bounds = (
        f"; resource bound {found.bounds.resource:.3g}, path bound {found.bounds.path:.3g} tok/s"
        if is_absolute
        else ""
    )
    lines = [
        f"{found.job.label}, room for {found.job.room}, emulated{bounds}",
        "",
        f"| {' | '.join(titles)} |",
        "|---|---|" + "---:|" * (len(titles) - 2),
    ]
    reference = found.reference.timed.tok_per_s
    lines += [f"| {' | '.join(_cells(each, found, reference))} |" for each in found.reached]
    if found.left_out:
        lines += ["", f"Not for this model or machine, or too large: {', '.join(found.left_out)}."]
    return lines


def _cells(reached: Reached, found: Round, reference: float) -> list[str]:
    speed = reached.timed.tok_per_s
    cells = [reached.strategy, told(reached)]
    if found.job.phase == CALIBRATED:
        cells.append(f"{speed:.3g} ± {speed * reached.timed.spread:.1g}")
    return [
        *cells,
        f"{speed / reference:.2f}",
        f"{reached.predicted_tok_per_s / speed:.2f}",
        f"{speed / found.bounds.resource:.0%}",
        f"{speed / found.bounds.path:.0%}",
    ]
