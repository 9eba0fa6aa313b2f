"""Devices, memory of the card, pinned memory and staging, on a card that is not there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from recording_driver import RecordingDriver
from recording_memory import CARD, MAPPED

from shadowlane.actors.arena import Arena
from shadowlane.actors.blueprint import PAGE
from shadowlane.actors.copier import CopyError, StreamCopier
from shadowlane.actors.cuda.devices import find_devices, free_nbytes, uuid_text
from shadowlane.actors.cuda.driver import CudaDriver, CudaError, Direction, Driver
from shadowlane.actors.cuda.memory import CardMemory
from shadowlane.actors.cuda.pinned import PinnedMemory, pin_arena
from shadowlane.actors.cuda.streams import CardStreams
from shadowlane.ops.atomics import WAIT_OK, counter_value, publish, wait_counter
from shadowlane.ops.table import COUNTER_NBYTES

CONTROL = 4 * PAGE
NBYTES = 64 * PAGE
CHUNK = 8 * PAGE
ABORT, WORDS, COUNTERS = 0, PAGE, 2 * PAGE
PATIENCE_NS = 30 * 10**9


@pytest.fixture
def driver() -> Iterator[RecordingDriver]:
    driver = RecordingDriver()
    driver.set_device(0)
    yield driver
    driver.shut_down()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(NBYTES)
    yield arena
    arena.close()


# -- devices


def test_devices_are_described(driver: RecordingDriver) -> None:
    (device,) = find_devices(driver)
    assert str(device) == "recording card, 64.0 MiB, capability 8.6, 2 copy engines"
    assert device.uuid == "GPU-01010101-0101-0101-0101-010101010101"
    assert free_nbytes(driver, 0) == 64 << 20
    assert uuid_text(bytes(range(16))) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def test_a_machine_without_cards_says_so() -> None:
    with pytest.raises(CudaError, match=r"^cudaGetDeviceCount: no CUDA card$"):
        find_devices(RecordingDriver(num_devices=0))


# -- memory of the card


def test_too_much_memory_tells_what_is_free(driver: RecordingDriver) -> None:
    card = CardMemory.allocate(driver, 48 << 20)
    with pytest.raises(CudaError, match=r"16\.0 MiB of 64\.0 MiB are free") as raised:
        CardMemory.allocate(driver, 32 << 20)
    assert raised.value.call == "allocate"
    assert raised.value.is_out_of_memory
    assert driver.last_error is None, "a failure that was dealt with must not come up later"
    card.close()
    card.close()
    assert driver.left()["card"] == 0


def test_ranges_stay_within_the_memory(driver: RecordingDriver) -> None:
    card = CardMemory.allocate(driver, PAGE)
    assert card.at(PAGE - 8, 8) == card.address + PAGE - 8
    for offset, nbytes in ((0, PAGE + 1), (-1, 1), (PAGE, 1), (0, -1)):
        with pytest.raises(ValueError, match="must lie within 4096 bytes"):
            card.at(offset, nbytes)
    array = card.array(16, 32).__cuda_array_interface__
    assert array["shape"] == (32,)
    assert array["data"] == (card.address + 16, False)
    assert (array["typestr"], array["version"]) == ("|u1", 3)
    with pytest.raises(ValueError, match="must be positive"):
        CardMemory.allocate(driver, 0)


def test_memory_that_cannot_be_shared_says_so() -> None:
    driver = RecordingDriver(has_ipc=False)
    driver.set_device(0)
    card = CardMemory.allocate(driver, PAGE)
    with pytest.raises(CudaError, match="cudaErrorNotSupported"):
        card.export("GPU")
    assert driver.last_error is None


def test_memory_is_not_opened_where_it_was_made(driver: RecordingDriver) -> None:
    card = CardMemory.allocate(driver, PAGE)
    with pytest.raises(CudaError, match="cudaErrorMapBufferObjectFailed"):
        CardMemory.open(driver, card.export("GPU"))
    assert driver.last_error is None


# -- pinned memory


def test_an_arena_is_pinned_in_pieces_and_given_back(driver: RecordingDriver, arena: Arena) -> None:
    pinned = PinnedMemory(driver, CHUNK)
    pinned.register(arena.base + PAGE, 20 * PAGE)
    pinned.register(arena.base + 40 * PAGE, 2 * PAGE)
    sizes = [arguments[1] for name, arguments in driver.calls if name == "register_host"]
    assert sizes == [8 * PAGE, 8 * PAGE, 4 * PAGE, 2 * PAGE]
    assert pinned.nbytes == 22 * PAGE
    assert arena.resident_nbytes() >= 22 * PAGE, "pages are touched before they are locked"
    base = arena.base
    assert pinned.mapped(base + 9 * PAGE + 5) == (base + 9 * PAGE + 5) | MAPPED
    assert pinned.split(base + 8 * PAGE, 3 * PAGE) == [
        (base + 8 * PAGE, PAGE),
        (base + 9 * PAGE, 2 * PAGE),
    ]
    assert pinned.holds(base + PAGE, 20 * PAGE)
    for address, nbytes in ((base, 1), (base + PAGE, 21 * PAGE), (base + 30 * PAGE, 1)):
        assert not pinned.holds(address, nbytes)
    pinned.close()
    assert driver.left()["pinned"] == 0


def test_pinning_is_all_or_nothing(arena: Arena) -> None:
    driver = RecordingDriver(pin_limit=20 * PAGE)
    driver.set_device(0)
    pinned = PinnedMemory(driver, CHUNK)
    with pytest.raises(CudaError, match=r"cudaErrorMemoryAllocation; 64\.0 KiB went before"):
        pinned.register(arena.base, NBYTES)
    assert driver.left()["pinned"] == 0
    assert driver.last_error is None
    pinned.register(arena.base, 16 * PAGE)  # what is left may be used
    for address, nbytes in ((arena.base + 1, PAGE), (arena.base, 1), (arena.base, 0)):
        with pytest.raises(ValueError, match="whole pages"):
            pinned.register(address, nbytes)


@pytest.mark.parametrize(
    ("limit", "staging"), [(64 * PAGE, None), (40 * PAGE, 32), (12 * PAGE, 8), (7 * PAGE, 2)]
)
def test_what_cannot_be_pinned_goes_through_a_ring(
    arena: Arena, limit: int, staging: int | None
) -> None:
    """The ring is found by trying half of what was refused; 64 pages are wanted first."""
    driver = RecordingDriver(pin_limit=limit)
    driver.set_device(0)
    control, weights = (arena.base, CONTROL), (arena.base + CONTROL, NBYTES - CONTROL)
    access = pin_arena(
        driver,
        control,
        weights,
        PAGE,
        chunk_nbytes=CHUNK,
        most_staging_nbytes=64 * PAGE,
        least_staging_nbytes=PAGE,
    )
    assert access.pinned.holds(*control)
    assert access.pinned.holds(*weights) == (staging is None)
    if staging is None:
        assert access.staging is None
        assert access.reason == ""
    else:
        assert access.staging is not None
        assert access.staging.nbytes == staging * PAGE
        assert "cudaErrorMemoryAllocation" in access.reason
    access.close()
    assert not any(driver.left().values())
    assert driver.last_error is None


def test_a_system_that_pins_nothing_is_refused(arena: Arena) -> None:
    driver = RecordingDriver(pin_limit=PAGE)
    driver.set_device(0)
    whole = (arena.base, CONTROL), (arena.base + CONTROL, NBYTES - CONTROL)
    with pytest.raises(CudaError, match="allocate_host: cudaErrorMemoryAllocation"):
        pin_arena(driver, *whole, PAGE, most_staging_nbytes=8 * PAGE, least_staging_nbytes=PAGE)
    assert not any(driver.left().values())


# -- a copier through staging


@pytest.mark.parametrize("has_memops", [True, False])
@pytest.mark.parametrize("limit", [10 * PAGE, 1 << 30])
def test_copies_arrive_pinned_or_staged(arena: Arena, has_memops: bool, limit: int) -> None:
    driver = RecordingDriver(pin_limit=limit, has_memops=has_memops)
    driver.set_device(0)
    driver.delays["copy"] = 1e-3
    access = pin_arena(
        driver,
        (arena.base, CONTROL),
        (arena.base + CONTROL, NBYTES - CONTROL),
        2 * PAGE,
        chunk_nbytes=CHUNK,
        least_staging_nbytes=PAGE,
    )
    assert (access.staging is None) == (limit == 1 << 30)
    card = CardMemory.allocate(driver, NBYTES)
    streams = CardStreams(driver, 0, access.pinned, arena.base + ABORT, arena.base + WORDS)
    copier = StreamCopier(
        streams.open(), arena, card, ABORT, staging=access.staging, chunk_nbytes=3 * PAGE
    )
    data = np.random.default_rng(3).integers(0, 255, 20 * PAGE, np.uint8)
    arena.memory[CONTROL : CONTROL + 20 * PAGE] = data
    free, filled = COUNTERS, COUNTERS + COUNTER_NBYTES
    publish(arena.base + free, 1)
    copier.wait(free, 1)
    copier.copy(CONTROL, 77, 20 * PAGE, filled, 1)
    copier.copy(77 + PAGE, CONTROL + 30 * PAGE, 19 * PAGE, filled, 2, "d2h")
    at = arena.base + filled
    assert wait_counter(at, 2, arena.base + ABORT, 0, PATIENCE_NS) == WAIT_OK
    assert (arena.memory[CONTROL + 30 * PAGE :][: 19 * PAGE] == data[PAGE:]).all()
    largest = max(arguments[2] for _, name, arguments in driver.done if name == "copy")
    assert largest <= (3 * PAGE if access.staging is None else 2 * PAGE)
    copier.close()
    streams.close()
    card.close()
    access.close()
    assert not any(driver.left().values())
    assert driver.hazards == []
    assert driver.num_pageable == 0


def test_an_abort_ends_a_staged_copy_that_waits(arena: Arena) -> None:
    driver = RecordingDriver(pin_limit=10 * PAGE)
    driver.set_device(0)
    access = pin_arena(
        driver,
        (arena.base, CONTROL),
        (arena.base + CONTROL, NBYTES - CONTROL),
        2 * PAGE,
        least_staging_nbytes=PAGE,
    )
    card = CardMemory.allocate(driver, NBYTES)
    streams = CardStreams(driver, 0, access.pinned, arena.base + ABORT, arena.base + WORDS)
    stream = streams.open()
    copier = StreamCopier(stream, arena, card, ABORT, staging=access.staging)
    stream.wait_counter(arena.base + COUNTERS, 1)  # by somebody else on the same stream
    arena.view(ABORT, np.int64, 1)[0] = 1
    with pytest.raises(CopyError, match="an abort ended"):
        copier.wait(COUNTERS, 1)
    with pytest.raises(CopyError, match="an abort ended"):
        copier.copy(CONTROL, 0, 20 * PAGE, COUNTERS + COUNTER_NBYTES, 1)
    streams.close()
    assert counter_value(arena.base + COUNTERS + COUNTER_NBYTES) == 0
    card.close()
    access.close()
    assert driver.hazards == []


# -- the recording driver is as strict as a card


def test_the_fake_tells_the_two_sides_apart(driver: RecordingDriver, arena: Arena) -> None:
    card = driver.allocate(PAGE)
    assert card & CARD
    stream = driver.create_stream()
    for target, source, direction in (
        (arena.base, card, Direction.H2D),
        (card, arena.base, Direction.D2H),
        (card, arena.base | MAPPED, Direction.H2D),
    ):
        with pytest.raises(CudaError, match="cudaErrorInvalidMemcpyDirection"):
            driver.copy(target, source, 8, direction, stream)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.write_value(stream, arena.base, 1)  # a host address, and not pinned
    driver.register_host(arena.base, PAGE)
    driver.register_host(arena.base + PAGE, PAGE)
    with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
        driver.copy(card, arena.base + PAGE - 8, 16, Direction.H2D, stream)
    driver.copy(card, arena.base + 4 * PAGE, 8, Direction.H2D, stream)
    assert driver.num_pageable == 1
    driver.settle()


def test_the_fake_sees_what_would_stall_a_card(driver: RecordingDriver, arena: Arena) -> None:
    driver.register_host(arena.base, PAGE)
    stream = driver.create_stream()
    driver.wait_value(stream, arena.base | MAPPED, 1)
    while driver.stuck() != {stream: (arena.base, 1)}:
        pass
    driver.allocate(PAGE)
    assert driver.hazards == [f"allocate while stream {stream} waits for a counter"]
    publish(arena.base, 1)
    driver.settle()
    assert driver.stuck() == {}


# -- the real driver, without a card


def arguments_of(method: Callable[..., object]) -> list[object]:
    """Something of the right type for each parameter of a method."""
    values: dict[str, object] = {
        "Direction": Direction.H2D,
        "bytes": bytes(64),
        "int": 16,
    }
    return [
        values[str(each.annotation)]
        for each in inspect.signature(method).parameters.values()
        if each.kind is not inspect.Parameter.KEYWORD_ONLY
    ]


CALLS = [name for name in vars(Driver) if not name.startswith("_")]


@pytest.mark.parametrize("name", CALLS)
def test_real_calls_fail_with_one_line_where_there_is_no_card(name: str) -> None:
    """The bindings accept what they are given; only the card is missing."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings are not installed")
    if has_driver():
        pytest.skip("a driver is present; tests/gpu tries the calls with a card")
    driver = unopened_driver()
    method = getattr(driver, name)
    if name == "clear_error":
        method()
        return
    with pytest.raises(CudaError) as raised:
        method(*arguments_of(method))
    assert "\n" not in str(raised.value)


def has_driver() -> bool:
    try:
        CudaDriver()
    except CudaError:
        return False
    return True


def unopened_driver() -> CudaDriver:
    """The real driver, though it cannot be initialised here."""
    from cuda.bindings import driver as bindings

    real, bindings.cuInit = bindings.cuInit, lambda flags: (bindings.CUresult.CUDA_SUCCESS,)
    try:
        return CudaDriver()
    finally:
        bindings.cuInit = real


def test_a_missing_driver_or_missing_bindings_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CudaError, match=r"pip install 'shadowlane\[gpu\]'") as raised:
        CudaDriver()
    assert "\n" not in str(raised.value)


def test_both_drivers_have_every_call() -> None:
    for name in CALLS:
        expected = inspect.signature(getattr(Driver, name))
        for driver in (CudaDriver, RecordingDriver):
            assert inspect.signature(getattr(driver, name)) == expected, (driver, name)
