"""What is said of a run when its text is written: a table of the lanes, and changes of plan."""

from __future__ import annotations

from shadowlane.cli.notes import say, say_notes


def show_decisions(stats: dict[str, object], *, is_by_hand: bool = False) -> None:
    """What the planner decided while the answer was written, and what came of it."""
    decisions = list(stats.get("decisions") or ())  # type: ignore[call-overload]
    if not decisions:
        why = "a layout by hand stays as it is" if is_by_hand else "nothing promised enough"
        say(f"the plan was never changed: {why}")
    for number, text in enumerate(decisions, 1):
        say(f"{number}. {text}")


def show_new_decisions(stats: dict[str, object], told: list[str]) -> list[str]:
    """Those that are not among the `told`; all there are now."""
    decisions = list(stats.get("decisions") or ())  # type: ignore[call-overload]
    is_grown = decisions[: len(told)] == told  # the engine keeps the newest alone
    for number, text in enumerate(decisions, 1):
        if not is_grown or number > len(told):
            say(f"{number}. {text}")
    return decisions


def show_summary(stats: dict[str, object]) -> None:
    """Notes and the table of what the lanes did, on standard error."""
    from rich.console import Console

    from shadowlane import report

    console = Console(stderr=True, highlight=False)
    console.print()
    say_notes(stats.get("notes") or ())  # type: ignore[arg-type]
    console.print(report.summary(stats))
