"""Where Shadowlane keeps things on this machine: one folder, and nothing beside a model's files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$SHADOWLANE_CACHE`, else `$XDG_CACHE_HOME/shadowlane`, else `~/.cache/shadowlane`.

    Raises ValueError where the variable cannot be a folder.
    Not created here: whoever writes does that, so that reading commands leave no trace.
    """
    chosen = os.environ.get("SHADOWLANE_CACHE")
    if chosen:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError:  # the home of somebody who is not there
            raise ValueError(f"SHADOWLANE_CACHE must be a folder; got {chosen!r}") from None
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    parent = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return parent / "shadowlane"


def models_dir() -> Path:
    """Model files that Shadowlane fetched itself; Hugging Face downloads stay in that cache."""
    return cache_dir() / "models"


def last_timeline_path() -> Path:
    """The timeline of the last run, in Perfetto's format, written when an engine closes."""
    return cache_dir() / "last-timeline.json"
