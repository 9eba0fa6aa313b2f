"""Whether memory of a card may be asked for at all, before anything is measured."""

from __future__ import annotations

from pathlib import Path

from shadowlane.sizes import format_size, parse_size


def check_card_budget(gpu_memory: str | int) -> None:
    """Raise ValueError, in one line, for a budget of cards on a machine that has none.

    Costs no import of a driver: the command line asks before everything else.
    """
    sizes = [part.strip() for part in str(gpu_memory).split(",")]
    asked = [
        part if part in ("auto", "0") else format_size(parse_size(part, "gpu_memory"))
        for part in sizes
    ]
    if all(part == "0" for part in asked):
        return
    if not (Path("/proc/driver/nvidia").exists() or Path("/dev/dxg").exists()):
        raise ValueError(
            "gpu_memory must be 0 without hardware: this machine has no card; "
            f"got {','.join(asked)}"
        )
