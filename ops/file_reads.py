"""Reads of files from compiled code: straight to an address, without the GIL."""

from __future__ import annotations

from numba import types

from shadowlane.ops.atomics import read_i32
from shadowlane.ops.compiled import njit

PAGE = 4096  # direct reads begin at whole ones
EINTR = 4
POSIX_FADV_DONTNEED = 4

_pread = types.ExternalFunction(
    "pread", types.int64(types.int32, types.int64, types.int64, types.int64)
)
_posix_fadvise = types.ExternalFunction(
    "posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32)
)
_errno_location = types.ExternalFunction("__errno_location", types.int64())


@njit
def read_range(
    descriptor: int, offset: int, wanted: int, held: int, address: int, is_direct: int
) -> int:
    """Read at least `wanted` bytes at `offset` to `address`, where there is room for `held`.

    offset, held and address are whole pages. Returns 0, -errno, or by how many bytes the file ends
    early.
    """
    done = 0
    while done < wanted:
        # NOTE: after a short read the rest begins again at a page, as direct reads must.
        done -= done % PAGE
        count = _pread(types.int32(descriptor), address + done, held - done, offset + done)
        if count < 0:
            error = read_i32(_errno_location())
            if error == EINTR:
                continue
            return -types.int64(error)
        if done + count < wanted and count < PAGE:
            return wanted - done - count
        done += count
    if is_direct == 0:
        # what was read lives in the arena now; a second copy in the page cache helps nobody
        _posix_fadvise(types.int32(descriptor), offset, held, types.int32(POSIX_FADV_DONTNEED))
    return 0
