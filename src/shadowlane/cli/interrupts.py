"""Ctrl-C where nothing has been started that would have to be ended: exit code 130, no traceback.

Python turns it into an exception at whatever line runs, which may be in the middle of an import: of
hundreds of files before a command runs, and of the libraries that clean up after it has.
"""

from __future__ import annotations

import os
import signal

_is_ours = False


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process. Nothing where it is handled otherwise, or ignored."""
    global _is_ours
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
        _is_ours = True


def unwind_again() -> None:
    """From now on Ctrl-C is KeyboardInterrupt again, so that what was started is ended."""
    global _is_ours
    if _is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _is_ours = False
