"""Notes on standard error: what is worth knowing beside an answer, in lines that a terminal holds.

Where standard error is no terminal each note is one line, whatever its length, so that programs
find it.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable

from shadowlane.cli.naming import typed_note

LEAST_COLUMNS = 20


def say_notes(notes: Iterable[str]) -> None:
    """Each with names of arguments as they were typed."""
    for note in notes:
        say(f"note: {typed_note(note)}")


def say(text: str) -> None:
    """On standard error, broken between words as its terminal is wide."""
    columns = _columns()
    if columns is not None:
        text = textwrap.fill(
            text, max(LEAST_COLUMNS, columns), break_long_words=False, break_on_hyphens=False
        )
    print(text, file=sys.stderr, flush=True)


def _columns() -> int | None:
    """Of the terminal that standard error is; None: it is none, or does not say."""
    if not sys.stderr.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (OSError, ValueError):
        return None
