"""The second process of `gpu.py`: a context of its own on the same card; no torch unless asked.

    python gpu_peer.py COMMAND JSON

Answers in JSON lines; ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from gpu_rig import (
    ABORT_WORD,
    CONTROL_NBYTES,
    PEER_HOPS,
    WORDS,
    load,
)
from hops import PING, PONG

from shadowlane.actors.arena import Arena, ArenaHandle
from shadowlane.actors.card_copier import CardCopier, Regions, ordinal_of
from shadowlane.actors.cuda.memory import CardMemoryHandle
from shadowlane.actors.cuda.pinned import PinnedMemory
from shadowlane.actors.cuda.streams import CardStreams

COPY_NBYTES = 4 << 20
COPY_COUNTER = 24 << 10  # offset in the arena
IN_FLIGHT = 4


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def until_told() -> None:
    sys.stdin.read()


def context(given: dict[str, Any]) -> None:
    """Make a context, with torch or without, and hold it."""
    began = time.perf_counter()
    if given["torch"]:
        import torch

        torch.zeros(1, device=f"cuda:{given['ordinal']}")
    else:
        driver = load(given["driver"])()
        driver.set_device(ordinal_of(driver, given["uuid"]))
        driver.memory_info()
    say(seconds=time.perf_counter() - began)
    until_told()


def open_copier(given: dict[str, Any]) -> tuple[Arena, CardCopier]:
    driver = load(given["driver"])()
    arena = Arena.attach(ArenaHandle(**given["arena"]))
    regions = Regions((0, CONTROL_NBYTES), (CONTROL_NBYTES, given["nbytes"]), ABORT_WORD, WORDS)
    handle = CardMemoryHandle(bytes.fromhex(given["blob"]), given["nbytes"], given["uuid"])
    return arena, CardCopier(driver, arena, regions, handle)


def ipc(given: dict[str, Any]) -> None:
    """Open the card's memory and copy the weights there."""
    began = time.perf_counter()
    _, copier = open_copier(given)
    opened_s = time.perf_counter() - began
    began = time.perf_counter()
    copier.copy(CONTROL_NBYTES, 0, given["nbytes"], COPY_COUNTER, 1)
    if not copier.streams.drain(30.0):
        raise TimeoutError("the copy must end within 30 s; it did not")
    say(opened_s=opened_s, copied_s=time.perf_counter() - began, mode=copier.streams.mode)
    copier.close()


def copies(given: dict[str, Any]) -> None:
    """Copy weights round and round until told to stop; then say how fast that was."""
    from threading import Thread

    from shadowlane.ops.atomics import counter_value, publish

    arena, copier = open_copier(given)
    told = Thread(target=until_told, daemon=True)
    told.start()
    at = arena.base + COPY_COUNTER
    publish(at, 0)
    chunk = min(COPY_NBYTES, given["nbytes"])
    number = 0
    say(ready=True)
    began = time.perf_counter()
    while told.is_alive():
        if number - counter_value(at) >= IN_FLIGHT:
            time.sleep(0)
            continue
        offset = number % (given["nbytes"] // chunk) * chunk
        number += 1
        copier.copy(CONTROL_NBYTES + offset, offset, chunk, COPY_COUNTER, number)
    copier.streams.drain(30.0)
    say(bytes_per_s=number * chunk / (time.perf_counter() - began))
    copier.close()


def memops(given: dict[str, Any]) -> None:
    """Answer hops by waits and writes on a stream of this process, all queued beforehand."""
    driver = load(given["driver"])()
    ordinal = ordinal_of(driver, given["uuid"])
    driver.set_device(ordinal)
    arena = Arena.attach(ArenaHandle(**given["arena"]))
    pinned = PinnedMemory(driver)
    pinned.register(arena.base, CONTROL_NBYTES)
    abort, words = arena.base + ABORT_WORD, arena.base + WORDS
    streams = CardStreams(driver, ordinal, pinned, abort, words)
    stream = streams.open()
    hops = arena.base + PEER_HOPS
    for value in range(1, given["count"] + 1):
        stream.wait_counter(hops + PING, value)
        stream.write_counter(hops + PONG, value)
    say(ready=True, mode=streams.mode)
    until_told()
    streams.close()
    pinned.close()


COMMANDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "context": context,
    "ipc": ipc,
    "copies": copies,
    "memops": memops,
}


def main() -> None:
    command, given = sys.argv[1], json.loads(sys.argv[2])
    try:
        COMMANDS[command](given)
    except Exception as error:  # the first process prints it as a row
        say(error=" ".join(f"{type(error).__name__}: {error}".split()))


if __name__ == "__main__":
    main()
