"""A Ray cluster to run on: the one that is there, or a small one of our own on this machine."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Set before Ray starts, where we start it; see each value's reason.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # workers would start at nice 15, below everything else
    "RAY_memory_monitor_refresh_ms": "0",  # the plan bounds memory; the monitor would kill lanes
    "RAY_task_events_max_num_profile_events_per_task": "100000",  # a lane is one long task
    "RAY_task_events_max_num_profile_events_buffer_on_worker": "200000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # bound to loopback; no token file in the user's home
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
OBJECT_STORE_NBYTES = 80 << 20  # handles and texts only; Ray's least is 75 MiB
DEFAULT_SHM = Path("/dev/shm")


class ClusterError(Exception):
    """Ray did not start, or the running cluster does not answer."""


def running_address() -> str | None:
    """Address of a cluster to join: RAY_ADDRESS, or the one that `ray start` left a note about."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        return note.read_text().strip() or None
    except OSError:
        return None


def join_cluster(*, dashboard: bool = False) -> bool:
    """Connect this process to Ray. Returns whether the cluster is our own, to be shut down by us.

    Raises ClusterError with the first line of what Ray says.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return False
    quiet = {
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "configure_logging": True,
    }
    address = running_address()
    if address is not None:
        try:
            with _deaths_untold():
                ray.init(address=address, **quiet)
            return False
        except Exception as error:  # Ray raises many kinds; a stale note is the usual reason
            if os.environ.get("RAY_ADDRESS"):
                raise ClusterError(
                    f"RAY_ADDRESS {address} does not answer: {first_line(error)}"
                ) from error
    options = {}
    if _free_nbytes(DEFAULT_SHM) < 2 * OBJECT_STORE_NBYTES:
        options["_plasma_directory"] = tempfile.gettempdir()
    try:
        with _deaths_untold():
            ray.init(
                address="local",
                num_cpus=os.cpu_count(),
                include_dashboard=dashboard,
                dashboard_host="127.0.0.1",
                object_store_memory=OBJECT_STORE_NBYTES,
                **options,
                **quiet,
            )
    except Exception as error:  # whatever it was, the user wants its first line
        raise ClusterError(f"Ray did not start: {first_line(error)}") from error
    return True


@contextmanager
def _deaths_untold() -> Iterator[None]:
    """Keep Ray from printing each death of a worker to standard output, where our text goes.

    Ray listens for them in a thread of the driver and has no setting for it. Who dies is told by
    the request that it fails.
    """
    from ray._private import worker

    listen = getattr(worker, "listen_error_messages", None)
    if listen is None:  # private to Ray: a page of its words is no reason to fail
        yield
        return
    worker.listen_error_messages = lambda *_: None
    try:
        yield
    finally:
        worker.listen_error_messages = listen


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _free_nbytes(path: Path) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
