"""How a command ends: one line and exit code 2 for what a person can mend, never a traceback.

| code | when |
|---|---|
| 0 | done |
| 1 | a fault of Shadowlane itself (or the reader of a pipe went away) |
| 2 | bad argument, bad file, no room, no network, Ray did not start or a lane died |
| 130, 143 | interrupted by Ctrl-C, ended by SIGTERM |
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from typer.core import TyperGroup
from typer.exceptions import TyperException

from shadowlane.cli import naming
from shadowlane.cli.environment import SWITCH_RULE, check_environment, is_debugging
from shadowlane.cli.interrupts import leave_at_once
from shadowlane.cli.plain_help import PlainHelp
from shadowlane.ops.errors import ModelError


class OneLineErrors(PlainHelp, TyperGroup):
    """The command group, with every error printed as one `error:` line on standard error."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        naming.forget()
        try:
            check_text(sys.argv[1:] if args is None else args)
            if "_SHADOWLANE_COMPLETE" not in os.environ:  # by which a shell asks for words
                check_environment(self.commands)
            with _termination_unwinds():
                code = super().main(args, prog_name, complete_var, False, **extra)
                sys.stdout.flush()  # here, or Python reports a closed pipe when it exits
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        except Exception as error:
            code = report_error(error)
        leave_at_once()  # what cleans up after us at the exit would be interrupted with a traceback
        sys.exit(code if isinstance(code, int) else 0)


def check_text(args: Sequence[str]) -> None:
    """Raises ValueError for bytes that are no UTF-8: no part of what follows could pass them on."""
    for each in args:
        try:
            each.encode()
        except UnicodeEncodeError:
            raise ValueError(f"arguments must be UTF-8; got {os.fsencode(each)!r}") from None


def report_error(error: BaseException) -> int:
    """Prints `error` as one line and returns the exit code that belongs to it."""
    with suppress(ValueError):
        if is_debugging():
            traceback.print_exception(error)
    error = _cause(error)
    code = exit_code(error)
    message = one_line(error)
    if code == 1:
        message = f"a fault in shadowlane, {type(error).__name__}: {message}"
        message += " (SHADOWLANE_DEBUG=1 shows where)"
    print(f"error: {message}", file=sys.stderr)
    return code


def exit_code(error: BaseException) -> int:
    expected = (ModelError, ValueError, OSError, MemoryError, ImportError, TyperException)
    # What the actors raise by a name of their own is a lane or an engine that cannot go on.
    is_expected = _is_from(error, "ray") or _is_from(error, "shadowlane.actors")
    return 2 if is_expected or isinstance(error, expected) else 1


def one_line(error: BaseException) -> str:
    """What `error` says, without line breaks, error numbers or Ray's collected tracebacks."""
    message = _message(error)
    return message if isinstance(error, TyperException) else message + naming.origin(message)


def _message(error: BaseException) -> str:
    if isinstance(error, TyperException):
        return _misused(error)
    if isinstance(error, UnicodeDecodeError):
        return f"text must be UTF-8; {error.reason} at byte {error.start}"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {os.fsdecode(error.filename)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, MemoryError) and not str(error):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # Ray's messages go on for pages; their first line says what happened.
    if _is_from(error, "ray"):
        return lines[0]
    # A ModelError's names are those of a model's files.
    return naming.typed_error(" ".join(lines)) if isinstance(error, ValueError) else " ".join(lines)


def _misused(error: TyperException) -> str:
    """What is wrong with an option, in our own form where it is about a value."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    # "Value error" is a word of the validating library
    message = " ".join(error.message.split()).removeprefix("Value error, ").rstrip(".")
    if context is not None and parameter is not None and message:
        name = naming.label(parameter, context)
        if getattr(parameter, "is_flag", False):  # only a variable gives it a value
            return f"{name} {SWITCH_RULE}; got {os.environ.get(parameter.envvar)!r}{hint}"
        if message.startswith("must "):
            return f"{name} {message}{hint}"
    return " ".join(error.format_message().split()).rstrip(".") + hint


def _cause(error: BaseException) -> BaseException:
    """The exception a remote function raised, out of the one that Ray carried it home in."""
    while _is_from(error, "ray") and isinstance(
        cause := getattr(error, "cause", None), BaseException
    ):
        error = cause
    return error


def _is_from(error: BaseException, package: str) -> bool:
    # By name, since importing the package to ask would cost more than the command.
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(error).__mro__)


@contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that engines are closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received: list[int] = []

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        received.append(number)
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    except SystemExit:
        # NOTE: where Ray was waiting, it makes an exit of its own out of ours, with code 1.
        if received:
            raise SystemExit(128 + received[-1]) from None
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
