"""The machine under test: what it is, a cold page cache, a memory limit, a witness of disk reads.

A memory limit needs root and a control group; the whole process tree of a command (Ray's daemons
too) lives and dies in it. Both versions of control groups are known.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def benchmark_environment() -> dict[str, str]:
    """The environment for measured commands.

    OPENBLAS_CORETYPE would force a foreign processor's kernels on numpy; the number of threads is
    each engine's own setting, given on its command line.
    """
    unwanted = {"OPENBLAS_CORETYPE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def hardware_line(path: Path | None = None) -> str:
    """Processor, cores, memory, disk (of `path`), kernel: one line for the head of a table."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor() or "unknown processor",
    )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = [
        f"{model}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        f"{total / (1 << 30):.0f} GiB RAM",
    ]
    if path is not None and (disk := _block_device(path)) is not None:
        parts.append(f"disk {disk.name}")
    parts.append(f"Linux {platform.release()}")
    return "; ".join(parts)


def versions(*packages: str) -> str:
    """`Python 3.11.7, ray 2.60.0, ...`; what is not installed here is left out."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _block_device(path: Path) -> Path | None:
    """The whole-disk folder in /sys that a file lies on, if it lies on one."""
    device = path.stat().st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    return folder if (folder / "queue").exists() else None


def disk_bytes_read(path: Path) -> int | None:
    """Bytes read so far from the disk that holds `path`, by the kernel's own count.

    The independent witness of "disk bytes per token"; other programs' reads are in it too.
    """
    disk = _block_device(path)
    if disk is None:
        return None
    sectors_read = int((disk / "stat").read_text().split()[2])
    return 512 * sectors_read


def drop_page_cache() -> None:
    """Write back and forget cached file pages, so that each run finds the disk cold. Needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


class MemoryGroup:
    """A memory control group for one command at a time."""

    def __init__(self, folder: Path, is_v1: bool, limit_nbytes: int | None) -> None:
        self._folder = folder
        self._peak_file = "memory.max_usage_in_bytes" if is_v1 else "memory.peak"
        self._limit_file = "memory.limit_in_bytes" if is_v1 else "memory.max"
        if limit_nbytes is not None:
            (folder / self._limit_file).write_text(str(limit_nbytes))
        if not is_v1 and (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")

    def wrap(self, command: list[str]) -> list[str]:
        """The command, entering the group before it starts: all its children inherit it."""
        enter = f'echo $$ > {self._folder}/cgroup.procs && exec "$@"'
        return ["/bin/sh", "-c", enter, "sh", *command]

    @property
    def peak_nbytes(self) -> int:
        """Most memory charged so far, page cache included."""
        return int((self._folder / self._peak_file).read_text())

    @property
    def num_kills(self) -> int:
        """How often the kernel killed a process here for want of memory."""
        for name in ("memory.oom_control", "memory.events"):
            if (self._folder / name).exists():
                for line in (self._folder / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        """End what is left in the group and remove it."""
        deadline = time.monotonic() + 10
        while (left := self.pids()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        while time.monotonic() < deadline:
            try:
                self._folder.rmdir()
                return
            except OSError:  # the last process is still being taken down
                time.sleep(0.05)
        raise RuntimeError(f"the control group {self._folder} could not be removed")


@contextmanager
def memory_group(limit_nbytes: int | None) -> Iterator[MemoryGroup]:
    """A fresh group under the root of this machine's hierarchy, removed afterwards."""
    is_v1 = (_V1 / "memory.limit_in_bytes").exists()
    folder = (_V1 if is_v1 else _V2) / f"shadowlane-bench-{os.getpid()}"
    try:
        if not is_v1:
            (_V2 / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as error:
        raise ValueError(
            f"a memory limit needs root and writable control groups; {error}"
        ) from None
    group = MemoryGroup(folder, is_v1, limit_nbytes)
    try:
        yield group
    finally:
        group.close()


def run_limited(
    command: list[str], limit_nbytes: int | None, timeout_s: float
) -> tuple[subprocess.CompletedProcess[str], int | None, bool]:
    """Run to the end within a memory limit (none: no group). Returns the outcome, the group's peak
    in bytes, and whether the kernel killed something there."""
    if limit_nbytes is None:
        return _run(command, timeout_s), None, False
    with memory_group(limit_nbytes) as group:
        done = _run(group.wrap(command), timeout_s)
        return done, group.peak_nbytes, group.num_kills > 0


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run to the end in a session of its own; nothing of it is left when this returns or raises."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=benchmark_environment(),
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
            return subprocess.CompletedProcess(command, process.returncode, output, errors)
        except subprocess.TimeoutExpired:
            said = f"not done after {timeout_s:.0f} s"
            return subprocess.CompletedProcess(command, 124, "", said)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
