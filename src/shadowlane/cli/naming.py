"""Errors speak of `ctx_size`, as is right in Python; who typed `--ctx-size` reads that instead.

The library's messages begin with the name of an argument, or have it inside. What an option was set
by, its flag or its variable, is known here alone, so the names are put in place when an error is
shown and no message is written twice.
"""

from __future__ import annotations

import os
import re
from typing import Any

from typer.core import TyperCommand

from shadowlane.cli.interrupts import unwind_again
from shadowlane.cli.plain_help import PlainHelp
from shadowlane.emulate import STRATEGIES

#: What the library calls an option that has another name on the command line.
ALIASES = {"temperature": "temp", "context": "ctx_size", "window": "ctx_size", "pin": "pins"}

_LEADING = re.compile(r"([a-z_]+)(?= (?:(?:\w+|'[^']*') )?(?:must|needs)\b)")
# A layout by hand, and its number of layers; each of these options may have asked for it.
_LAYOUT = re.compile(r"([a-z]+(?:-[a-z]+)*)( \d+)?(?= (?:must|needs)\b)")
_ASKED_BY = {
    "strategy": STRATEGIES,
    "gpu_layers": ("layer-split",),
    "cpu_moe": ("cpu-moe",),
    "n_cpu_moe": ("cpu-moe",),
}
# Not within a path, a flag or a quotation.
_INSIDE = re.compile(r"(?<![\w/.'\"-])[a-z]+(?:_[a-z]+)+(?![\w/'\"-]|\.\w)")

_labels: dict[str, str] = {}  # argument -> the flag or variable of the command that runs
_given: set[str] = set()  # arguments that were typed or set in the environment
_variables: dict[str, str] = {}  # variable -> its value, where one was used


class Command(PlainHelp, TyperCommand):
    """A command whose errors have the names that were typed."""

    def invoke(self, ctx: Any) -> Any:
        remember(ctx)
        unwind_again()
        return super().invoke(ctx)


def forget() -> None:
    """No command has been chosen yet."""
    for each in (_labels, _given, _variables):
        each.clear()


def remember(context: Any) -> None:
    """From now on names are those that the command of `context` has, as it was called."""
    forget()
    for parameter in context.command.params:
        _labels[parameter.name] = label(parameter, context)
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
            _given.add(parameter.name)
        if source is not None and source.name == "ENVIRONMENT":
            _variables[parameter.envvar] = os.environ.get(parameter.envvar, "")
    if "stop" in _labels and "stop" not in _given and os.environ.get("SHADOWLANE_STOP"):
        _labels["stop"] = "SHADOWLANE_STOP"  # which typer does not read, see options.py
        _given.add("stop")
    for alias, name in ALIASES.items():
        if name in _labels:
            _labels[alias] = _labels[name]
        if name in _given:
            _given.add(alias)


def label(parameter: Any, context: Any) -> str:
    """What the person sees of an option: its variable if it was set by that, else its long flag."""
    source = context.get_parameter_source(parameter.name)
    if source is not None and source.name == "ENVIRONMENT":
        return str(parameter.envvar)
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name)
    return str(max(parameter.opts, key=len))


def typed_note(text: str) -> str:
    """A note, or the inside of an error, with names of arguments as they are typed.

    Only names with an underscore: `weights` is also a word.
    """
    return _INSIDE.sub(lambda found: _labels.get(found[0], found[0]), text)


def typed_error(text: str) -> str:
    """An error about an argument, named as it was typed or set."""
    found = _LEADING.match(text)
    if found is not None and found[1] in _given:
        text = _labels[found[1]] + text[found.end() :]
    elif (layout := _LAYOUT.match(text)) is not None:
        text = _typed_layout(layout) + text[layout.end() :]
    return typed_note(text)


def _typed_layout(found: re.Match[str]) -> str:
    """A layout by hand as it was asked for: `--n-cpu-moe 4`, `--strategy cpu-moe`."""
    name, layers = found[1], found[2] or ""
    for argument, layouts in _ASKED_BY.items():
        if argument in _given and name in layouts:
            words = {"strategy": f" {name}{layers}", "cpu_moe": ""}
            return _labels[argument] + words.get(argument, layers)
    return found[0]


def origin(text: str) -> str:
    """Where an error quotes the value of a variable without naming that, which one it was."""
    for name, value in _variables.items():
        if len(value) > 1 and value in text and name not in text:
            return f" (from {name})"
    return ""
