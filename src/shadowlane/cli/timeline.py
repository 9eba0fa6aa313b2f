"""`shadowlane timeline`: the last run, row by row, in the form that Perfetto opens."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from shadowlane.cli import options
from shadowlane.ops.errors import ModelError
from shadowlane.paths import last_timeline_path

EPILOG = options.epilog("shadowlane run -p hello", "shadowlane timeline out.json")


def timeline(
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.json",
            help="File to write; open it at https://ui.perfetto.dev.",
        ),
    ],
) -> None:
    """Write what each worker did in the last run, with its waits, as a Perfetto timeline."""
    source = last_timeline_path()
    try:
        content = source.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"there is no last run: {source} does not exist yet") from None
    num_spans = count_spans(content, source)
    if out.is_dir():
        raise ValueError(f"OUT.json must be a file; {out} is a directory")
    _write(out, content)
    print(
        f"{num_spans} spans written to {out}; open it at https://ui.perfetto.dev", file=sys.stderr
    )


def count_spans(content: bytes, source: Path) -> int:
    """How many finished spans the timeline holds. Raises ModelError if Perfetto would refuse it."""
    try:
        loaded = json.loads(content)
        events = loaded["traceEvents"] if isinstance(loaded, dict) else loaded
        num_spans = 0
        for event in events:
            # Perfetto wants whole numbers for rows; strings are refused without a message.
            is_span = event["ph"] == "X"
            names = ("pid", "tid") if is_span else {"pid", "tid"} & event.keys()
            if not all(isinstance(event[name], int) for name in names):
                raise ValueError("pid and tid of each event must be whole numbers")
            if is_span and event["dur"] < 0:
                raise ValueError(f"dur must not be negative; got {event['dur']}")
            num_spans += is_span
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{source} must be a timeline of trace events; {reason}") from error
    return num_spans


def _write(out: Path, content: bytes) -> None:
    """All of the file or none of it, also when the disk fills up."""
    handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, out)
    except BaseException:
        os.unlink(name)
        raise
