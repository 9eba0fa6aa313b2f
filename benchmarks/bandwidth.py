"""What the machine can do: reading from memory with pinned threads, and from disk with fio.

    python benchmarks/bandwidth.py --dram
    python benchmarks/bandwidth.py --disk /data/llama-3b-bf16 --block 2MiB --depth 4

Other benchmarks call the two functions within their own run, so that "90 % of the bandwidth" means
the bandwidth of that hour on that machine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from checkpoint import weight_files
from machine import benchmark_environment, hardware_line
from measure import as_json, spread

from shadowlane.sizes import parse_size

MADV_HUGEPAGE = 14  # mmap.MADV_HUGEPAGE exists only where Python was built with it


def _memory(nbytes: int, kind: str) -> np.ndarray:
    """`nbytes` of touched memory as int64: `huge` pages, or a `memfd` like the engine's arenas."""
    if kind == "memfd":
        handle = os.memfd_create("bandwidth")
        os.ftruncate(handle, nbytes)
        area = mmap.mmap(handle, nbytes)
        os.close(handle)
    else:
        area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(MADV_HUGEPAGE)
    values = np.frombuffer(area, dtype=np.int64)
    values[:] = 1
    return values


def dram_bytes_per_s(
    cores: Sequence[int], nbytes: int = 4 << 30, repeats: int = 7, kind: str = "huge"
) -> list[float]:
    """Bytes per second of each pass in which all `cores` together read `nbytes` once.

    One pinned thread per core sums its share as int64: an exact sum that compilers vectorise
    without leave to reorder floats, so it does nothing but read.
    """
    import numba

    @numba.njit(numba.int64(numba.int64[::1]), nogil=True)
    def total(values):  # type: ignore[no-untyped-def]
        result = np.int64(0)
        for index in range(values.shape[0]):
            result += values[index]
        return result

    values = _memory(nbytes // 8 * 8, kind)
    nbytes = values.nbytes
    shares = [np.ascontiguousarray(share) for share in np.array_split(values, len(cores))]
    gate = threading.Barrier(len(cores) + 1)
    sums = [0] * len(cores)

    def read(member: int) -> None:
        os.sched_setaffinity(0, {cores[member]})  # of this thread alone
        for _ in range(repeats + 1):
            gate.wait()
            sums[member] = total(shares[member])
            gate.wait()

    threads = [threading.Thread(target=read, args=(member,)) for member in range(len(cores))]
    for thread in threads:
        thread.start()
    rates = []
    for _ in range(repeats + 1):
        gate.wait()
        began = time.perf_counter()
        gate.wait()
        rates.append(nbytes / (time.perf_counter() - began))
    for thread in threads:
        thread.join()
    if sum(sums) != len(values):
        raise RuntimeError(f"the sum must be {len(values)}; got {sum(sums)}")
    return rates[1:]  # the first pass warms up


def fio_command(
    files: Sequence[Path], block: int, depth: int, engine: str, seconds: float
) -> list[str]:
    """Direct reads of existing files, `depth` requests of `block` bytes in flight.

    `libaio` keeps the depth from one thread, in file order; `psync` from `depth` threads, each at
    random blocks of all files, as threads that read in order would soon drift apart anyway.
    """
    if engine not in ("libaio", "psync"):
        raise ValueError(f"engine must be libaio or psync; got {engine}")
    is_async = engine == "libaio"
    return [
        "fio",
        "--name=read",
        "--readonly",
        "--direct=1",
        f"--ioengine={engine}",
        f"--rw={'read' if is_async else 'randread'}",
        f"--file_service_type={'sequential' if is_async else 'random'}",
        f"--filename={':'.join(str(path) for path in files)}",
        f"--bs={block}",
        f"--iodepth={depth if is_async else 1}",
        f"--numjobs={1 if is_async else depth}",
        "--thread",
        "--group_reporting",
        "--time_based",
        f"--runtime={seconds:g}",
        "--output-format=json",
    ]


def disk_bytes_per_s(
    files: Sequence[Path],
    block: int = 2 << 20,
    depth: int = 4,
    engine: str = "libaio",
    seconds: float = 10.0,
) -> float:
    """Bytes per second that fio reads from `files` with direct I/O."""
    if shutil.which("fio") is None:
        raise ValueError("fio must be installed (apt-get install fio); it is not on the path")
    command = fio_command(files, block, depth, engine, seconds)
    done = subprocess.run(
        command, capture_output=True, text=True, env=benchmark_environment(), check=False
    )
    if done.returncode != 0:
        raise ValueError(f"fio must exit with 0; got {done.returncode}: {done.stderr.strip()}")
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def best_disk_bytes_per_s(
    files: Sequence[Path], block: int = 2 << 20, depth: int = 4, seconds: float = 10.0
) -> dict[str, float]:
    """Both ways of asking, and the better of them under `best`: the bar to be measured against."""
    rates = {
        engine: disk_bytes_per_s(files, block, depth, engine, seconds)
        for engine in ("libaio", "psync")
    }
    return {**rates, "best": max(rates.values())}


def best_dram_bytes_per_s(cores: Sequence[int], nbytes: int = 4 << 30) -> dict[str, object]:
    """Both kinds of memory, and the better median under `best`: the bar to be measured against."""
    rates = {kind: spread(dram_bytes_per_s(cores, nbytes, kind=kind)) for kind in ("huge", "memfd")}
    return {**rates, "best": max(rate.median for rate in rates.values() if rate is not None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dram", action="store_true", help="measure memory")
    parser.add_argument("--disk", type=Path, help="measure the disk by reading this file or model")
    parser.add_argument(
        "--size", default="4GiB", help="memory to read; large server caches hold 1 GiB"
    )
    parser.add_argument("--cores", help="comma-separated; default: all this process may use")
    parser.add_argument("--block", default="2MiB", help="bytes per disk request")
    parser.add_argument("--depth", type=int, default=4, help="disk requests in flight")
    parser.add_argument("--seconds", type=float, default=10.0, help="per way of reading the disk")
    given = parser.parse_args()
    if not (given.dram or given.disk):
        parser.error("one of --dram and --disk must be given")
    try:
        result: dict[str, object] = {"hardware": hardware_line(given.disk)}
        if given.dram:
            cores = [int(core) for core in given.cores.split(",")] if given.cores else None
            cores = cores or sorted(os.sched_getaffinity(0))
            result["dram_bytes_per_s"] = best_dram_bytes_per_s(cores, parse_size(given.size))
            result["dram_cores"] = cores
        if given.disk:
            block = parse_size(given.block)
            result["disk_bytes_per_s"] = best_disk_bytes_per_s(
                weight_files(given.disk), block, given.depth, given.seconds
            )
            result["disk_request"] = {"block": block, "depth": given.depth, "direct": True}
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(as_json(result))


if __name__ == "__main__":
    main()
