"""Variables that begin with SHADOWLANE_: which there are, and what is said of those there are not.

Each option has one, see `options.py`; a few belong to no option.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from shadowlane.cli.notes import say

PREFIX = "SHADOWLANE_"
#: Read without typer: the cache's folder, tracebacks, how bytes are multiplied, texts that stop.
OTHERS = ("SHADOWLANE_CACHE", "SHADOWLANE_DEBUG", "SHADOWLANE_DOT", "SHADOWLANE_STOP")
DOTS = ("vnni", "avx2", "plain")  # for SHADOWLANE_DOT; which of them it may be, the processor says
TRUE = ("1", "true", "t", "yes", "y", "on")
FALSE = ("0", "false", "f", "no", "n", "off")
SWITCH_RULE = "must be 1 or 0 (or true, false, yes, no, on, off)"


def check_environment(commands: Mapping[str, Any]) -> None:
    """Say which variables mean nothing; raise ValueError for one of no option with a bad value.

    `commands`: the command line's, by name. Those of options are read and refused with them.
    """
    warn_of_unknown(os.environ, {*OTHERS, *variables(commands)})
    is_debugging()
    dot = os.environ.get("SHADOWLANE_DOT")
    if dot is not None and dot not in DOTS:
        raise ValueError(f"SHADOWLANE_DOT must be one of {', '.join(DOTS)}; got {dot!r}")


def variables(commands: Mapping[str, Any]) -> set[str]:
    """Names of the variables that the options and arguments of all commands have."""
    named = {each.envvar for command in commands.values() for each in command.params}
    return {name for name in named if name is not None}


def warn_of_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    """One line on standard error for each name that is like ours and no variable of ours."""
    ends = sorted(name.removeprefix(PREFIX) for name in known)
    for name in sorted(names):
        end = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and end not in ends:
            near = difflib.get_close_matches(end, ends, n=1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            say(f"note: {name} is no variable of shadowlane{hint}")


def is_debugging() -> bool:
    """What SHADOWLANE_DEBUG says. Raises ValueError where that is neither yes nor no."""
    value = os.environ.get("SHADOWLANE_DEBUG", "")
    if value.strip().lower() in TRUE:
        return True
    if value.strip() and value.strip().lower() not in FALSE:
        raise ValueError(f"SHADOWLANE_DEBUG {SWITCH_RULE}; got {value!r}")
    return False
