"""Who wrote to the arena before: a lane that was killed may have a read under way.

A direct read goes on when its process is killed, straight into a slot that the arena's next user
takes for free. A thread in such a read cannot die before it ends, so nothing comes after the end
of the process; whoever takes over waits for that.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

import numpy as np

PATIENCE_S = 60.0  # a disk that takes longer for what is in its queue has failed


def take_over(owner: np.ndarray, patience_s: float = PATIENCE_S) -> None:
    """Wait until the process that `owner` names is gone, then put our own name there.

    owner: int64 [2] in the arena, process and when it was started; 0: nobody yet. Raises OSError
    if that process does not end.
    """
    process, born = owner.tolist()
    if process not in (0, os.getpid()) and not wait_until_gone(process, born, patience_s):
        raise TimeoutError(
            f"process {process} must end before its reads can be done again; "
            f"after {patience_s:.0f} s it has not"
        )
    owner[:] = os.getpid(), start_of(os.getpid())


def wait_until_gone(process: int, born: int, patience_s: float) -> bool:
    """Whether a process has ended, all of its threads, within `patience_s`."""
    try:
        descriptor = os.pidfd_open(process)
    except OSError:  # no such process; or a system that cannot tell
        return True
    try:
        if start_of(process) != born:
            return True  # another one, with the same number
        return bool(select.select([descriptor], [], [], patience_s)[0])
    finally:
        os.close(descriptor)


def start_of(process: int) -> int | None:
    """When a process was started, in ticks since the system was; None: there is none."""
    try:
        line = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    return int(line.rsplit(")", 1)[1].split()[19])
