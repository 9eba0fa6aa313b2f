"""The calls of the CUDA driver that this project makes, one method each, and nothing else.

Everything above goes through a `Driver`, so that tests can put a recording one in its place, and so
that the bindings' tuples, enumerations and handle classes end here: addresses, streams, events and
graphs are ints, failures are `CudaError`.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any, Protocol

from shadowlane.sizes import format_size

NON_BLOCKING = 1  # of streams: does not synchronise with the default stream
NO_TIMING = 2  # of events
LAZY_PEER_ACCESS = 1  # the only flag that opening shared memory takes
GREATER_OR_EQUAL = 0  # cyclic: int32(*address - value) >= 0
IPC_HANDLE_NBYTES = 64
NAME_NBYTES = 256
OUT_OF_MEMORY = (  # the last by torch, in a thread that gives work to a stream
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "OutOfMemoryError",
)


class Direction(IntEnum):
    """Of a copy, as the runtime numbers them."""

    H2D = 1
    D2H = 2
    D2D = 3


class CudaError(RuntimeError):
    """A call that failed: one line with the call and the driver's own name of the error."""

    def __init__(self, call: str, name: str, more: str = "") -> None:
        super().__init__(f"{call}: {name}; {more}" if more else f"{call}: {name}")
        self.call = call
        self.name = name
        self.more = more

    def __reduce__(self) -> tuple[object, ...]:
        return CudaError, (self.call, self.name, self.more)

    @property
    def is_out_of_memory(self) -> bool:
        return self.name in OUT_OF_MEMORY


class Driver(Protocol):
    """What the rest asks of a card. Every method may raise CudaError.

    `set_device` comes first in every thread. All of a stream's work is asynchronous and in order.
    """

    # -- devices
    def set_device(self, ordinal: int) -> None: ...
    def device_count(self) -> int: ...
    def device_name(self, ordinal: int) -> str: ...
    def device_uuid(self, ordinal: int) -> bytes: ...
    def device_nbytes(self, ordinal: int) -> int: ...
    def device_attribute(self, ordinal: int, attribute: int) -> int: ...
    def memory_info(self) -> tuple[int, int]:
        """Bytes (free, in all) of this thread's device."""
        ...

    def clear_error(self) -> None:
        """Forget a failure that has been dealt with, or a later call reports it."""
        ...

    # -- memory of the card
    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def export_memory(self, address: int) -> bytes: ...
    def import_memory(self, blob: bytes) -> int: ...
    def close_imported(self, address: int) -> None: ...

    # -- memory of the host
    def register_host(self, address: int, nbytes: int) -> None: ...
    def unregister_host(self, address: int) -> None: ...
    def mapped_address(self, address: int) -> int:
        """The address under which the card sees registered host memory."""
        ...

    def allocate_host(self, nbytes: int) -> int: ...
    def free_host(self, address: int) -> None: ...

    # -- streams
    def create_stream(self) -> int: ...
    def destroy_stream(self, stream: int) -> None: ...
    def is_stream_idle(self, stream: int) -> bool: ...
    def copy(
        self, target: int, source: int, nbytes: int, direction: Direction, stream: int
    ) -> None: ...
    def wait_value(self, stream: int, address: int, value: int) -> None: ...
    def write_value(self, stream: int, address: int, value: int) -> None: ...
    def call_host(self, stream: int, function: int, data: int) -> None:
        """Call the C function `void (*)(void *data)` at this address when the stream is there."""
        ...

    # -- events
    def create_event(self, *, timing: bool = False) -> int: ...
    def destroy_event(self, event: int) -> None: ...
    def record_event(self, event: int, stream: int) -> None: ...
    def is_event_done(self, event: int) -> bool: ...
    def wait_event(self, stream: int, event: int) -> None: ...
    def elapsed_ms(self, start: int, end: int) -> float: ...

    # -- graphs
    def begin_capture(self, stream: int) -> None: ...
    def end_capture(self, stream: int) -> int:
        """An executable graph of what the stream was given since `begin_capture`."""
        ...

    def launch_graph(self, graph: int, stream: int) -> None: ...
    def destroy_graph(self, graph: int) -> None: ...


class CudaDriver:
    """The real driver, through cuda-bindings. Making one creates no context yet."""

    def __init__(self) -> None:
        """Raises CudaError where the bindings or the driver's library are missing."""
        try:
            from cuda.bindings import driver, runtime
        except ImportError as error:
            raise CudaError(
                "import cuda.bindings", f"{error} (pip install 'shadowlane[gpu]')"
            ) from None
        self._driver: Any = driver
        self._runtime: Any = runtime
        self._kinds = {each: runtime.cudaMemcpyKind(int(each)) for each in Direction}
        self._check("cuInit", driver.cuInit, 0)

    def _check(self, what: str, function: Any, *arguments: Any) -> Any:
        """Call; returns its result without the status, raises CudaError(what, name)."""
        try:
            status, *results = function(*arguments)
        except RuntimeError as error:  # the bindings find the library only at the first call
            raise CudaError(what, " ".join(str(error).split())) from None
        if int(status) != 0:
            raise CudaError(what, status.name)
        return results[0] if len(results) == 1 else results

    def _is_ready(self, what: str, function: Any, handle: int) -> bool:
        (status,) = function(handle)
        if status.name == "cudaErrorNotReady":
            return False
        if int(status) != 0:
            raise CudaError(what, status.name)
        return True

    # -- devices

    def set_device(self, ordinal: int) -> None:
        self._check(f"cudaSetDevice({ordinal})", self._runtime.cudaSetDevice, ordinal)

    def device_count(self) -> int:
        return int(self._check("cudaGetDeviceCount", self._runtime.cudaGetDeviceCount))

    def device_name(self, ordinal: int) -> str:
        device = self._check("cuDeviceGet", self._driver.cuDeviceGet, ordinal)
        name = self._check("cuDeviceGetName", self._driver.cuDeviceGetName, NAME_NBYTES, device)
        return bytes(name).split(b"\0")[0].decode(errors="replace")

    def device_uuid(self, ordinal: int) -> bytes:
        device = self._check("cuDeviceGet", self._driver.cuDeviceGet, ordinal)
        return bytes(self._check("cuDeviceGetUuid", self._driver.cuDeviceGetUuid, device).bytes)

    def device_nbytes(self, ordinal: int) -> int:
        device = self._check("cuDeviceGet", self._driver.cuDeviceGet, ordinal)
        return int(self._check("cuDeviceTotalMem", self._driver.cuDeviceTotalMem, device))

    def device_attribute(self, ordinal: int, attribute: int) -> int:
        kind = self._runtime.cudaDeviceAttr(attribute)
        what = "cudaDeviceGetAttribute"
        return int(self._check(what, self._runtime.cudaDeviceGetAttribute, kind, ordinal))

    def memory_info(self) -> tuple[int, int]:
        free, total = self._check("cudaMemGetInfo", self._runtime.cudaMemGetInfo)
        return int(free), int(total)

    def clear_error(self) -> None:
        self._runtime.cudaGetLastError()

    # -- memory of the card

    def allocate(self, nbytes: int) -> int:
        what = f"cudaMalloc of {format_size(nbytes)}"
        return int(self._check(what, self._runtime.cudaMalloc, nbytes))

    def free(self, address: int) -> None:
        self._check("cudaFree", self._runtime.cudaFree, address)

    def export_memory(self, address: int) -> bytes:
        what = "cudaIpcGetMemHandle"
        handle = self._check(what, self._runtime.cudaIpcGetMemHandle, address)
        # NOTE: the bindings give the handle no field; its bytes are where it lies.
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_NBYTES)

    def import_memory(self, blob: bytes) -> int:
        if len(blob) != IPC_HANDLE_NBYTES:
            raise ValueError(
                f"a memory handle must have {IPC_HANDLE_NBYTES} bytes; got {len(blob)}"
            )
        handle = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), blob, IPC_HANDLE_NBYTES)
        what = "cudaIpcOpenMemHandle"
        opened = self._runtime.cudaIpcOpenMemHandle
        return int(self._check(what, opened, handle, LAZY_PEER_ACCESS))

    def close_imported(self, address: int) -> None:
        self._check("cudaIpcCloseMemHandle", self._runtime.cudaIpcCloseMemHandle, address)

    # -- memory of the host

    def register_host(self, address: int, nbytes: int) -> None:
        what = f"cudaHostRegister of {format_size(nbytes)}"
        self._check(what, self._runtime.cudaHostRegister, address, nbytes, 0)

    def unregister_host(self, address: int) -> None:
        self._check("cudaHostUnregister", self._runtime.cudaHostUnregister, address)

    def mapped_address(self, address: int) -> int:
        what = "cudaHostGetDevicePointer"
        return int(self._check(what, self._runtime.cudaHostGetDevicePointer, address, 0))

    def allocate_host(self, nbytes: int) -> int:
        what = f"cudaHostAlloc of {format_size(nbytes)}"
        return int(self._check(what, self._runtime.cudaHostAlloc, nbytes, 0))

    def free_host(self, address: int) -> None:
        self._check("cudaFreeHost", self._runtime.cudaFreeHost, address)

    # -- streams

    def create_stream(self) -> int:
        return int(self._check("cuStreamCreate", self._driver.cuStreamCreate, NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        self._check("cuStreamDestroy", self._driver.cuStreamDestroy, stream)

    def is_stream_idle(self, stream: int) -> bool:
        return self._is_ready("cudaStreamQuery", self._runtime.cudaStreamQuery, stream)

    def copy(
        self, target: int, source: int, nbytes: int, direction: Direction, stream: int
    ) -> None:
        what = f"cudaMemcpyAsync of {format_size(nbytes)}"
        kind = self._kinds[direction]
        self._check(what, self._runtime.cudaMemcpyAsync, target, source, nbytes, kind, stream)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        what = "cuStreamWaitValue32"
        wait = self._driver.cuStreamWaitValue32
        self._check(what, wait, stream, address, value & 0xFFFFFFFF, GREATER_OR_EQUAL)

    def write_value(self, stream: int, address: int, value: int) -> None:
        what = "cuStreamWriteValue32"
        write = self._driver.cuStreamWriteValue32
        self._check(what, write, stream, address, value & 0xFFFFFFFF, 0)

    def call_host(self, stream: int, function: int, data: int) -> None:
        what = "cuLaunchHostFunc"
        launch = self._driver.cuLaunchHostFunc
        self._check(what, launch, stream, self._driver.CUhostFn(function), data)

    # -- events

    def create_event(self, *, timing: bool = False) -> int:
        what = "cudaEventCreateWithFlags"
        flags = 0 if timing else NO_TIMING
        return int(self._check(what, self._runtime.cudaEventCreateWithFlags, flags))

    def destroy_event(self, event: int) -> None:
        self._check("cudaEventDestroy", self._runtime.cudaEventDestroy, event)

    def record_event(self, event: int, stream: int) -> None:
        self._check("cudaEventRecord", self._runtime.cudaEventRecord, event, stream)

    def is_event_done(self, event: int) -> bool:
        return self._is_ready("cudaEventQuery", self._runtime.cudaEventQuery, event)

    def wait_event(self, stream: int, event: int) -> None:
        self._check("cudaStreamWaitEvent", self._runtime.cudaStreamWaitEvent, stream, event, 0)

    def elapsed_ms(self, start: int, end: int) -> float:
        what = "cudaEventElapsedTime"
        return float(self._check(what, self._runtime.cudaEventElapsedTime, start, end))

    # -- graphs

    def begin_capture(self, stream: int) -> None:
        # Other threads of this process go on calling the driver meanwhile.
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._check("cudaStreamBeginCapture", self._runtime.cudaStreamBeginCapture, stream, mode)

    def end_capture(self, stream: int) -> int:
        what = "cudaStreamEndCapture"
        graph = self._check(what, self._runtime.cudaStreamEndCapture, stream)
        try:
            what = "cudaGraphInstantiate"
            return int(self._check(what, self._runtime.cudaGraphInstantiate, graph, 0))
        finally:
            self._check("cudaGraphDestroy", self._runtime.cudaGraphDestroy, graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        self._check("cudaGraphLaunch", self._runtime.cudaGraphLaunch, graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._check("cudaGraphExecDestroy", self._runtime.cudaGraphExecDestroy, graph)
