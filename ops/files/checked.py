"""Opening files so that each failure is one line, and telling later whether they are the same."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from shadowlane.ops.errors import ModelError


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells whether a file is still the one that was opened."""

    path: str
    nbytes: int
    modified_ns: int
    inode: int
    device: int

    def check_unchanged(self) -> None:
        """Raise ModelError if the file was replaced, written or removed since it was opened."""
        try:
            now = make_stamp(self.path, os.stat(self.path))
        except OSError as error:
            raise ModelError(
                f"{self.path}: a model file must not change while it is used; "
                f"it cannot be found any more ({error.strerror})"
            ) from error
        if now == self:
            return
        if now.nbytes != self.nbytes:
            change = f"it had {self.nbytes} bytes and has {now.nbytes}"
        elif (now.inode, now.device) != (self.inode, self.device):
            change = "it was replaced by another file"
        else:
            change = "it was written to"
        raise ModelError(f"{self.path}: a model file must not change while it is used; {change}")


def make_stamp(path: str, found: os.stat_result) -> FileStamp:
    return FileStamp(path, found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)


class CheckedFile:
    """A regular file opened for reading, whose failures are ModelErrors. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: a named pipe in the place of a file must not make the open wait
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._descriptor)
            raise ModelError(f"{path}: must be a regular file")
        self.stamp = make_stamp(str(path), found)
        self.nbytes = found.st_size

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes from `offset`, fewer only where the file ends."""
        parts = []
        try:
            while nbytes > 0 and (part := os.pread(self._descriptor, nbytes, offset)):
                parts.append(part)
                offset += len(part)
                nbytes -= len(part)
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read: {error.strerror}") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)
