"""What an engine may be asked for, checked by type and range before anything is fetched or started.

A value that only the engine would refuse costs the seconds that Ray takes to start, and a name that
is wrong in a program deserves more than the error of whatever meets it first.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

from shadowlane.models import is_dense

Dtype = Literal["float32", "bfloat16", "float16"]
PackName = Literal["q8_0", "q4_0", "q4_1"]
KvName = Literal["q8_0"]
DTYPES: tuple[str, ...] = get_args(Dtype)
PACK_NAMES: tuple[str, ...] = get_args(PackName)
KV_NAMES: tuple[str, ...] = get_args(KvName)

MAX_SPIN_US = 10**9
SHOWN = 60  # characters of a value that an error quotes


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` as an int, also one of numpy's. Raises ValueError; True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number; got {shown(value)}")
    number = int(value)
    if most is not None and not least <= number <= most:
        raise ValueError(f"{name} must be between {least} and {most}; got {number}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}")
    return number


def number(name: str, value: Any, least: float, most: float) -> float:
    """`value` as a float. Raises ValueError; True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number; got {shown(value)}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least:.0f} to {most:.0f}; got {value:g}")
    return float(value)


def file_name(name: str, value: Any) -> str | Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError(f"{name} must be the path of a file; got {shown(value)}")
    return value


def switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False; got {shown(value)}")
    return value


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    if not isinstance(value, str) or value not in choices:
        rule = "must be" if len(choices) == 1 else "must be one of"
        raise ValueError(f"{name} {rule} {', '.join(choices)}; got {shown(value)}")
    return value


def lane_shares(value: Any, num_lanes: int) -> tuple[float, ...]:
    """Rows of each compute lane, on any scale: one finite number per lane, and not all 0."""
    given = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
    if (
        given is None
        or len(given) != num_lanes
        or not all(isinstance(part, Real) and not isinstance(part, bool) for part in given)
        or not all(math.isfinite(part) and part >= 0 for part in given)
        or not any(given)
    ):
        lanes = "the one lane" if num_lanes == 1 else f"each of {num_lanes} lanes"
        raise ValueError(
            f"shares must be one number of at least 0 for {lanes} (cpu_workers), "
            f"and not all 0; got {shown(value if given is None else given)}"
        )
    return tuple(float(part) for part in given)


def named_pins(value: Any) -> tuple[tuple[str, str], ...]:
    """(pattern of groups, home) of a mapping, or of texts such as "experts=cpu".

    Raises ValueError for what is neither, and for one pattern with two homes.
    """
    from shadowlane.planner.placement import HOMES

    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        given = list(value)
        if not all(isinstance(each, str) for each in given):
            raise ValueError(f"pins must be texts such as experts=cpu; got {shown(given)}")
        pairs = [tuple(each.rpartition("=")[::2]) for each in given]
    else:
        raise ValueError(f"pins must be a mapping or a list of texts; got {shown(value)}")
    found: dict[str, str] = {}
    for pattern, home in pairs:
        if not isinstance(pattern, str) or not isinstance(home, str) or not pattern:
            text = f"{pattern}={home}" if pattern else home
            raise ValueError(f"pins must be REGEX=HOME, such as experts=cpu; got {shown(text)}")
        home = home.strip()
        if not HOMES.fullmatch(home):
            raise ValueError(f"pins must name gpu:0, gpu:1, ..., cpu or disk; got {home!r}")
        if found.setdefault(pattern, home) != home:
            raise ValueError(f"pins must agree: '{pattern}' is on {found[pattern]} and on {home}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"pins must be regular expressions; got '{pattern}': {error}"
            ) from None
    return tuple(found.items())


def check_model(model: Any) -> str:
    if not isinstance(model, str | Path) or not str(model):
        raise ValueError(
            "model must be a known name, a directory, a .gguf file or a Hugging Face id; "
            f"got {shown(model)}"
        )
    return str(model)


def check_routing(model: Any, trace: Any, replay: Any) -> None:
    """Refuse files of routing that cannot be, and models that are known to have no experts.

    trace: the file to be written, replay: the file to be read, where there are. Of a model that is
    not here yet no more than its config.json is fetched. What only the contents of either tell is
    for the engine to say. Raises ValueError, OSError.
    """
    if trace is None and replay is None:
        return
    from shadowlane.planner.routing_files import READ_ENDINGS, WRITTEN_ENDINGS, check_ending

    if replay is not None:
        replay = file_name("replay_routing", replay)
        check_ending(Path(replay), READ_ENDINGS, "replay_routing")
        with Path(replay).open("rb"):
            pass
    if trace is not None:
        path = Path(file_name("trace_routing", trace))
        check_ending(path, WRITTEN_ENDINGS, "trace_routing")
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"trace_routing must be a file in a directory that exists; got {path}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"trace_routing must be a file that may be written; got {path}")
    if is_dense(str(model)):
        raise ValueError(f"routing is of mixtures of experts; {model} has none")


def check_progress(progress: Any) -> Callable[[str, float | None], None]:
    """What to tell stages to; something that does nothing for None."""
    if progress is None:
        return _silent
    if not callable(progress):
        raise ValueError(
            f"progress must be a function of a stage and a fraction, or None; got {shown(progress)}"
        )
    return progress  # type: ignore[no-any-return]


def _silent(stage: str, fraction: float | None = None) -> None:
    return


def shown(value: Any) -> str:
    """A value as an error quotes it: in one line, and not all of a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
