"""What is said of a run when its text is written: a table of the lanes, and changes of plan."""

from __future__ import annotations

import typer

from shadowlane.cli.naming import typed_note


def show_decisions(stats: dict[str, object]) -> None:
    """What the planner decided while the answer was written, and what came of it."""
    decisions = list(stats.get("decisions") or ())  # type: ignore[call-overload]
    if not decisions:
        typer.echo("the plan was never changed: nothing promised enough", err=True)
    for number, text in enumerate(decisions, 1):
        typer.echo(f"{number}. {text}", err=True)


def show_new_decisions(stats: dict[str, object], told: list[str]) -> list[str]:
    """Those that are not among the `told`; all there are now."""
    decisions = list(stats.get("decisions") or ())  # type: ignore[call-overload]
    is_grown = decisions[: len(told)] == told  # the engine keeps the newest alone
    for number, text in enumerate(decisions, 1):
        if not is_grown or number > len(told):
            typer.echo(f"{number}. {text}", err=True)
    return decisions


def show_summary(stats: dict[str, object]) -> None:
    """Notes and the table of what the lanes did, on standard error."""
    from rich.console import Console

    from shadowlane import report

    console = Console(stderr=True, highlight=False)
    console.print()
    for note in stats.get("notes") or ():  # type: ignore[attr-defined]
        typer.echo(f"note: {typed_note(note)}", err=True)
    console.print(report.summary(stats))
