"""The command line. Nothing here imports ray, torch or numba before a command needs the engine.

NOTE: nor does this file import anything else: a Ctrl-C before `main` runs would be a traceback.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shadowlane.cli.commands import app

    return app


def main() -> None:
    """Entry point of the `shadowlane` command."""
    from shadowlane.cli.interrupts import leave_at_once

    leave_at_once()
    from shadowlane.cli.commands import start

    start()
