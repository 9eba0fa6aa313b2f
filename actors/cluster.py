"""A Ray cluster to run on: the one that is there, or a small one of our own on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from shadowlane.actors.imports import quick_imports

# Of any process that talks to Ray.
CLIENT_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Of a cluster that we start; cluster.yaml sets the same for one that is started by hand.
CLUSTER_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # workers would start at nice 15, below everything else
    "RAY_memory_monitor_refresh_ms": "0",  # the plan bounds memory; the monitor would kill lanes
    "RAY_task_events_max_num_profile_events_per_task": "100000",  # a lane is one long task
    "RAY_task_events_max_num_profile_events_buffer_on_worker": "200000",
    "RAY_AUTH_MODE": "token",  # NOTE: Ray listens on all interfaces, whatever it is told
}
# Of our own cluster only. Ray's agents outlive a driver that was killed, since they wait this long
# (a minute, if nobody says otherwise) for a server that went with it.
OWN_ENVIRONMENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
OBJECT_STORE_NBYTES = 80 << 20  # handles and texts only; Ray's least is 75 MiB
DEFAULT_SHM = Path("/dev/shm")
PROCESSES = 4  # that Ray may start at once: engine, compute, disk, planner
KILLED_S = 5.0  # after which processes that do not go are left alone
LOOK_S = 0.05  # between two looks at processes
ANSWER_S = 2.0  # a cluster that does not take a connection in this time is not there
SESSION_PREFIX = "shadowlane-ray-"
LOCK = "in-use"
SESSION_LENGTH = 70  # of the longest socket path below Ray's directory for temporary files
SOCKET_PATH = 107  # bytes that a unix socket's path may have


class ClusterError(Exception):
    """Ray did not start, or the running cluster does not answer."""


@dataclass(slots=True)
class Cluster:
    """The connection of this process to Ray. `leave` ends it, and the cluster if it is our own."""

    is_ours: bool = False
    directory: Path | None = None  # of our own cluster's session, removed with it
    lock: IO[str] | None = field(default=None, repr=False)  # held as long as the directory is used

    def leave(self) -> None:
        """Shut our own cluster down and remove what it left; a joined one is left as it is."""
        import ray

        if not self.is_ours:
            return
        self.is_ours = False
        if not _is_whole():
            self._remove()  # at once: Ray's shutdown may end this process
        ray.shutdown()
        self._remove()
        if self.lock is not None:
            self.lock.close()

    def _remove(self) -> None:
        if self.directory is not None:
            _kill_session(self.directory)  # what a start that was cut short has left running
            shutil.rmtree(self.directory, ignore_errors=True)


def running_address() -> str | None:
    """Address of a cluster to join: RAY_ADDRESS, or the one that `ray start` left a note about.

    None where a note is about a cluster that is gone. Raises ClusterError if RAY_ADDRESS is.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address == "local":
        return None
    if address and address != "auto":
        if not _takes_connections(address):
            raise ClusterError(f"RAY_ADDRESS {address} does not answer")
        return address
    place = os.environ.get("RAY_TMPDIR")
    for note in ([Path(place) / "ray_current_cluster"] if place else []) + [
        Path(place or "/tmp") / "ray" / "ray_current_cluster"
    ]:
        with suppress(OSError):
            noted = note.read_text().strip()
            if noted and _takes_connections(noted):
                return noted
    if address == "auto":
        raise ClusterError("RAY_ADDRESS auto names no cluster: none is running on this machine")
    return None


def is_joined() -> bool:
    """Whether this process is connected to Ray already, without importing it to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def join_cluster(address: str | None, *, dashboard: bool = False) -> Cluster:
    """Connect this process to the cluster at `address`, or to a new one of our own.

    Raises ClusterError with the first line of what Ray says.
    """
    environment = dict(CLIENT_ENVIRONMENT)
    if address is None:
        environment.update(CLUSTER_ENVIRONMENT | OWN_ENVIRONMENT)
        if not _has_token():  # one of our own then, which is written nowhere
            environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    else:
        environment["RAY_AUTH_MODE"] = _auth_mode(address)
    if is_joined():
        return Cluster()
    _set_environment(environment)
    with quick_imports():
        import ray

    quiet = {
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "configure_logging": True,
    }
    if address is not None:
        try:
            with _quiet_connection():
                ray.init(address=address, **quiet)
        except Exception as error:  # Ray raises many kinds
            why = first_line(error)
            raise ClusterError(f"the Ray cluster at {address} refuses: {why}") from error
        return Cluster()
    remove_stale_sessions()
    cluster = _make_session_directory()
    options = {}
    if _free_nbytes(DEFAULT_SHM) < 2 * OBJECT_STORE_NBYTES:
        options["_plasma_directory"] = tempfile.gettempdir()
    try:
        with _quiet_connection(waits=False):
            ray.init(
                address="local",
                num_cpus=PROCESSES,  # not a share of the machine: lanes are pinned by us
                include_dashboard=dashboard,
                dashboard_host="127.0.0.1",
                object_store_memory=OBJECT_STORE_NBYTES,
                _temp_dir=str(cluster.directory),
                **options,
                **quiet,
            )
    except BaseException as error:  # a signal, too, leaves nothing running
        cluster.leave()
        if not isinstance(error, Exception):
            raise
        raise ClusterError(f"Ray did not start: {first_line(error)}") from error
    return cluster


def _is_whole() -> bool:
    """Whether all daemons of our own cluster live, or none has been started.

    Otherwise Ray's shutdown waits for them, and a thread of Ray's ends this process meanwhile.
    """
    from ray._private import worker

    node = getattr(worker, "_global_node", None)  # private to Ray
    return node is None or not node.dead_processes()


def dashboard_url() -> str | None:
    """Where the dashboard of the joined cluster is; None where it has none."""
    import ray

    url = ray._private.worker.get_dashboard_url()
    return f"http://{url}" if url else None


def auth_token() -> str | None:
    """What the dashboard asks for; None on a cluster that asks for nothing."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return None
    return os.environ.get("RAY_AUTH_TOKEN") or _token_file().read_text().strip()


def _takes_connections(address: str) -> bool:
    """Whether anybody listens there; asking Ray of an address where nobody does takes it 20 s."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdigit():
        return True  # of a kind that only Ray can follow
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _set_environment(environment: Mapping[str, str]) -> None:
    """Where the user said nothing else. Ray reads it at its import, which may be behind us."""
    was_imported = "ray" in sys.modules
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if not was_imported:
        return
    with suppress(ImportError, AttributeError):  # private to Ray, which does the same itself
        from ray._raylet import AuthenticationTokenLoader, Config

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


def _auth_mode(address: str) -> str:
    """Whether a cluster wants a token. Both sides must be of one mode, or actors never start."""
    environment = process_environment("gcs_server", f"--gcs_server_port={address.split(':')[-1]}")
    if environment is not None:
        return environment.get("RAY_AUTH_MODE", "disabled")
    return "token" if _has_token() else "disabled"  # not ours to look into: what Ray would guess


def process_environment(program: str, argument: str) -> dict[str, str] | None:
    """Environment of a process of Ray on this machine, by its name and a part of its arguments.

    None where there is none, or it is another user's.
    """
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if (process / "comm").read_text().strip() != program:
                continue
            if os.fsencode(argument) not in (process / "cmdline").read_bytes():
                continue
            pairs = (process / "environ").read_bytes().split(b"\0")
            named = (os.fsdecode(pair).partition("=") for pair in pairs if b"=" in pair)
            return {name: value for name, _, value in named}
    return None


def _has_token() -> bool:
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or _token_file().is_file()


def _token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def _session_parent() -> Path:
    """Where sessions are kept: the usual place, unless its path is too long for Ray's sockets."""
    usual = Path(tempfile.gettempdir())
    used = len(os.fsencode(usual / SESSION_PREFIX)) + 8 + SESSION_LENGTH
    return usual if used <= SOCKET_PATH else Path("/tmp")


def _make_session_directory() -> Cluster:
    """A directory for Ray's own files, marked as in use for as long as this process lives."""
    directory = Path(tempfile.mkdtemp(prefix=SESSION_PREFIX, dir=_session_parent()))
    lock = (directory / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Cluster(True, directory, lock)


def remove_stale_sessions() -> None:
    """Remove what clusters of ours left whose process was killed before it could clean up."""
    for directory in _session_parent().glob(f"{SESSION_PREFIX}*"):
        with contextlib.suppress(OSError), (directory / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where it is in use
            shutil.rmtree(directory, ignore_errors=True)


def _kill_session(directory: Path) -> None:
    """End every process of Ray that has this session's directory among its arguments.

    They start each other, so none is left once two looks in turn have found none.
    """
    quiet_looks, until = 0, time.monotonic() + KILLED_S
    while quiet_looks < 2 and time.monotonic() < until:
        found = [
            process
            for process in Path("/proc").glob("[0-9]*")
            if int(process.name) != os.getpid() and _mentions(process, directory)
        ]
        for process in found:
            with suppress(OSError):
                os.kill(int(process.name), signal.SIGKILL)
        quiet_looks = 0 if found else quiet_looks + 1
        time.sleep(LOOK_S)


def _mentions(process: Path, directory: Path) -> bool:
    """Whether a process is this user's and has the directory in its arguments."""
    try:
        if process.stat().st_uid != os.getuid():
            return False
        return os.fsencode(directory) in (process / "cmdline").read_bytes()
    except OSError:
        return False


@contextmanager
def _quiet_connection(*, waits: bool = True) -> Iterator[None]:
    """Keep Ray from printing each death of a worker to standard output, where our text goes, and
    from taking SIGTERM away from a program that handles it.

    Ray listens for deaths in a thread of the driver and has no setting for it. Who dies is told by
    the request that it fails.
    """
    from ray._private import worker

    listen = getattr(worker, "listen_error_messages", None)
    if listen is not None:  # private to Ray: a page of its words is no reason to fail
        worker.listen_error_messages = lambda *_: None
    try:
        with _signals(waits=waits):
            yield
    finally:
        if listen is not None:
            worker.listen_error_messages = listen


@contextmanager
def _signals(*, waits: bool) -> Iterator[None]:
    """Signals reach a program that handles them, and not Ray, whose own handler of SIGTERM would
    print a stack and exit with 15.

    waits: after this and not in between, unless it is a second Ctrl-C. Otherwise at once, also
    again after this where Ray went on in spite of what a handler raised.
    """
    from ray._private import utils

    handlers = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        if callable(handler := signal.getsignal(number))
    }
    if not handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    set_handler = getattr(utils, "set_sigterm_handler", None)
    if set_handler is not None:
        utils.set_sigterm_handler = lambda *_: None

    def note(number: int, frame: FrameType | None) -> None:
        if waits and number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.append(number)
        if not waits:
            handlers[signal.Signals(number)](number, frame)
            received.remove(number)  # it was not raised, and so is done

    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        if set_handler is not None:
            utils.set_sigterm_handler = set_handler
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[-1])


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _free_nbytes(path: Path) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
