"""Writes a GGUF file (version 3) whose tensors come piece by piece, so that none is held whole.

The file grows under a temporary name beside its own and gets that name when all of it is on the
disk: a reader sees all of it or nothing. Free space is asked for before the first byte.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowlane.ops.errors import ModelError
from shadowlane.ops.files.base import tensor_nbytes
from shadowlane.ops.files.gguf_container import DEFAULT_ALIGNMENT, TYPE_OF_LAYOUT

_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written: what it is, and where its bytes come from."""

    name: str  # GGUF's
    shape: tuple[int, ...]  # slowest first: (rows, cols)
    layout: str
    pieces: Callable[[], Iterator[bytes]]  # called once, when it is this tensor's turn

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.layout, self.shape)


def write_gguf(
    path: Path,
    fields: Mapping[str, Any],
    tensors: Iterable[NewTensor],
    progress: Callable[[int, int], None],
) -> int:
    """Write the file and return its size. `progress` gets bytes written and bytes in all.

    A field is a bool, a whole number below 2^32, a float, a text, or a list of one of these.
    Raises ModelError where the disk has no room or cannot be written.
    """
    tensors = list(tensors)
    header = _header(fields, tensors)
    total = len(header) + sum(_aligned(tensor.nbytes) for tensor in tensors)
    try:
        free = shutil.disk_usage(path.parent).free
        if total > free:
            raise ModelError(
                f"{path}: the file will have {total} bytes; {path.parent} has {free} free, "
                f"{total - free} too few"
            )
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header)
            written = len(header)
            for tensor in tensors:
                start = written
                for piece in tensor.pieces():
                    file.write(piece)
                    written += len(piece)
                    progress(written, total)
                if written - start != tensor.nbytes:
                    raise AssertionError(
                        f"{tensor.name}: {written - start} bytes of {tensor.nbytes} came"
                    )
                padding = _aligned(tensor.nbytes) - tensor.nbytes
                file.write(bytes(padding))
                written += padding
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the name on an empty file
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise ModelError(f"{path}: cannot be written: {error.strerror}") from error
        raise
    return total


def _aligned(nbytes: int) -> int:
    return -(-nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _header(fields: Mapping[str, Any], tensors: list[NewTensor]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(fields))]
    for key, value in fields.items():
        kind, packed = _value(value)
        parts += [_text(key), struct.pack("<I", kind), packed]
    offset = 0
    for tensor in tensors:
        extents = tensor.shape[::-1]  # the fastest first
        parts.append(_text(tensor.name))
        parts.append(struct.pack(f"<I{len(extents)}Q", len(extents), *extents))
        parts.append(struct.pack("<IQ", TYPE_OF_LAYOUT[tensor.layout], offset))
        offset += _aligned(tensor.nbytes)
    header = b"".join(parts)
    return header + bytes(_aligned(len(header)) - len(header))


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return _UINT32, struct.pack("<I", value)
    if isinstance(value, float):
        return _FLOAT32, struct.pack("<f", value)
    if isinstance(value, str):
        return _STRING, _text(value)
    if not isinstance(value, list) or not value:
        raise TypeError(f"a GGUF field must be a number, a text or a list of these; got {value!r}")
    count = len(value)
    if isinstance(value[0], str):
        kind, packed = _STRING, b"".join(_text(each) for each in value)
    elif isinstance(value[0], float):
        kind, packed = _FLOAT32, struct.pack(f"<{count}f", *value)
    else:
        kind, packed = _INT32, struct.pack(f"<{count}i", *value)
    return _ARRAY, struct.pack("<IQ", kind, count) + packed
