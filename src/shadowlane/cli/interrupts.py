"""Ctrl-C where nothing has been started that would have to be ended: exit code 130, no traceback.

Python turns it into an exception at whatever line runs, which may be in the middle of an import: of
hundreds of files before a command runs, and of the libraries that clean up after it has.
"""

from __future__ import annotations

import atexit
import os
import signal

_is_ours = False
_ends_quietly = False


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process. Nothing where it is handled otherwise, or ignored."""
    global _is_ours, _ends_quietly
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    _is_ours = True
    if not _ends_quietly:  # the first that is registered is the last that runs
        atexit.register(_ignore)
        _ends_quietly = True


def unwind_again() -> None:
    """From now on Ctrl-C is KeyboardInterrupt again, so that what was started is ended."""
    global _is_ours
    if _is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _is_ours = False


def _ignore() -> None:
    """The interpreter ends without our handlers, and nothing is left that could be interrupted."""
    if _is_ours:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
