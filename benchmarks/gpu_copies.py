"""Copies between host and card: pinning, contexts, sharing, rates, and what overlaps with what."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
from gpu_rig import CONTROL_NBYTES, Feeder, Peer, Rig, Row, note, row

from shadowlane.actors.cuda.pinned import PinnedMemory
from shadowlane.actors.cuda.streams import CardStream

PIN_NBYTES = 256 << 20
RATE_NBYTES = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
OVERLAP_S = 0.5
CHUNK_NBYTES = 4 << 20
MATVEC = (4096, 4096)


def device(rig: Rig) -> Iterator[Row]:
    """What the driver says of the card."""
    card = rig.device
    free, _ = rig.driver.memory_info()
    yield note(
        "device",
        card=card.name,
        uuid=card.uuid,
        capability=".".join(map(str, card.capability)),
        nbytes=card.nbytes,
        free_nbytes=free,
        copy_engines=card.copy_engines,
        multiprocessors=card.multiprocessors,
        wsl2=card.is_wsl2,
        can_register_host=card.can_register_host,
        counters=rig.streams.mode,
        counters_reason=rig.streams.reason,
        pinned_nbytes=rig.pinned.nbytes,
        pin_error=rig.pin_error,
    )


def pinning(rig: Rig) -> Iterator[Row]:
    """What it costs to pin and unpin memory whose pages are there."""
    nbytes = min(PIN_NBYTES, rig.nbytes)
    pinned_s, unpinned_s = [], []
    for _ in range(min(5, rig.repeats)):
        memory = mmap.mmap(-1, nbytes)
        view = ctypes.c_uint8.from_buffer(memory)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
        pinned = PinnedMemory(rig.driver)
        began = time.perf_counter()
        pinned.register(ctypes.addressof(view), nbytes)
        middle = time.perf_counter()
        pinned.close()
        pinned_s.append((middle - began) * (1 << 30) / nbytes)
        unpinned_s.append((time.perf_counter() - middle) * (1 << 30) / nbytes)
        del view
    yield row("pin 1 GiB", pinned_s, "s", sample_nbytes=nbytes)
    yield row("unpin 1 GiB", unpinned_s, "s", sample_nbytes=nbytes)


def contexts(rig: Rig) -> Iterator[Row]:
    """Memory of the card and time that a second process takes, with torch and without."""
    for has_torch in (False, True):
        name = f"context of a second process {'with' if has_torch else 'without'} torch"
        before, _ = rig.driver.memory_info()
        with Peer(rig, "context", torch=has_torch) as peer:
            try:
                answer = peer.answer()
            except RuntimeError as error:
                yield note(name, error=str(error))
                continue
            after, _ = rig.driver.memory_info()
        yield row(name, [(before - after) / (1 << 20)], "MiB", seconds=answer["seconds"])


def sharing(rig: Rig) -> Iterator[Row]:
    """Have a second process open this one's memory of the card and write it; then look."""
    data = np.random.default_rng(0).integers(0, 255, rig.nbytes, np.uint8)
    rig.arena.memory[CONTROL_NBYTES:][: rig.nbytes] = data
    blob = rig.card.export(rig.device.uuid).blob.hex()
    with Peer(rig, "ipc", blob=blob) as peer:
        answer = peer.answer()
    rig.arena.memory[CONTROL_NBYTES:][: rig.nbytes] = 0
    with rig.limit():
        rig.main.copy_d2h(rig.weights, rig.card.address, rig.nbytes)
        rig.finish(rig.main)
    is_same = bool((rig.arena.memory[CONTROL_NBYTES:][: rig.nbytes] == data).all())
    yield row("sharing: open", [1e3 * answer["opened_s"]], "ms", counters=answer["mode"])
    rate = rig.nbytes / answer["copied_s"]
    yield row("sharing: write", [rate / 1e9], "GB/s", is_same=is_same)


def rates(rig: Rig) -> Iterator[Row]:
    """Rates by size, each way alone and both at once."""
    half = rig.nbytes // 2

    def up(stream: CardStream, nbytes: int) -> Callable[[], None]:
        return lambda: stream.copy_h2d(rig.card.at(0, nbytes), rig.weights, nbytes)

    def down(stream: CardStream, nbytes: int) -> Callable[[], None]:
        return lambda: stream.copy_d2h(rig.weights + half, rig.card.at(half, nbytes), nbytes)

    for nbytes in RATE_NBYTES:
        if nbytes > half:
            continue
        count = max(3, min(rig.repeats, (256 << 20) // nbytes))
        for way, work in (("h2d", up(rig.main, nbytes)), ("d2h", down(rig.main, nbytes))):
            with rig.limit():
                seconds = [rig.timed(rig.main, work) for _ in range(count)]
            yield row(
                f"{way} {nbytes >> 10} KiB", [nbytes / each / 1e9 for each in seconds], "GB/s"
            )
    nbytes = max((each for each in RATE_NBYTES if each <= half), default=half)
    samples = []
    for _ in range(5):
        with rig.limit():
            began = time.perf_counter()
            up(rig.main, nbytes)()
            down(rig.second, nbytes)()
            rig.finish(rig.main)
            rig.finish(rig.second)
            samples.append(2 * nbytes / (time.perf_counter() - began) / 1e9)
    yield row("h2d and d2h at once, both together", samples, "GB/s", copy_nbytes=nbytes)


def overlap(rig: Rig) -> Iterator[Row]:
    """A replayed graph of a matrix-vector product beside copies, by a thread or by a process."""
    run, _ = rig.kernels.matvec("bf16", *MATVEC)
    with rig.limit(10.0):
        rig.main.submit(run)  # a first call loads what a capture must not
        rig.finish(rig.main)
        graph = rig.main.capture(run)
    chunk = min(CHUNK_NBYTES, rig.nbytes)

    def replayed_us() -> list[float]:
        samples = []
        until = time.perf_counter() + OVERLAP_S
        while time.perf_counter() < until and len(samples) < rig.repeats:
            samples.append(1e6 * rig.timed(rig.main, lambda: rig.main.replay(graph)))
        return samples

    try:
        with rig.limit():
            alone = replayed_us()
        yield row("graph alone", alone, "us")
        with rig.limit():
            feeder = Feeder(rig, rig.second, chunk)
            try:
                beside = replayed_us()
            finally:
                rate = feeder.stop()
        yield row("graph beside copies of a thread", beside, "us", copied_gb_per_s=rate / 1e9)
        blob = rig.card.export(rig.device.uuid).blob.hex()
        with ExitStack() as closing:
            peer = closing.enter_context(Peer(rig, "copies", blob=blob))
            peer.answer()
            with rig.limit():
                beside = replayed_us()
            peer.end()
            rate = peer.answer()["bytes_per_s"]
        yield row("graph beside copies of a process", beside, "us", copied_gb_per_s=rate / 1e9)
    finally:
        rig.driver.destroy_graph(graph)
