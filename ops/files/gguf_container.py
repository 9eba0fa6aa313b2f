"""The GGUF container: metadata fields and where each tensor lies. Versions 2 and 3, little endian.

Written for opening, not for loading: only the header is read, and long arrays (the tokens and
merges of a tokenizer, hundreds of thousands of strings) are stepped over and read when asked for.
Every length and count comes from the file and is held against its size before it is followed.

A file is: magic, version, number of tensors, number of fields; the fields (key, type, value); the
tensor descriptions (name, extents with the fastest first, type, offset); padding; the tensors.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowlane.ops.errors import ModelError
from shadowlane.ops.files.checked import CheckedFile, FileStamp
from shadowlane.ops.layouts import LAYOUTS

MAX_HEADER_NBYTES = 1 << 30
MAX_STRING_NBYTES = 1 << 26
MAX_NAME_NBYTES = 65535  # of a key, by the format's definition
MAX_DIMENSIONS = 4
LONG_ARRAY_COUNT = 256  # arrays with more elements are read on demand
DEFAULT_ALIGNMENT = 32

_FIRST_READ_NBYTES = 16 << 20  # holds the headers of today's tokenizers whole
_MIN_FIELD_NBYTES = 8 + 1 + 4 + 1  # key of one letter, type, the smallest value
_MIN_TENSOR_NBYTES = 8 + 1 + 4 + 8 + 4 + 8  # name of one letter, one extent, type, offset

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]

_LAYOUT_OF_TYPE = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    12: "q4_K",
    13: "q5_K",
    14: "q6_K",
    30: "bf16",
    39: "mxfp4",
}
TYPE_OF_LAYOUT = {layout: number for number, layout in _LAYOUT_OF_TYPE.items()}
_OTHER_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}


@dataclass(frozen=True, slots=True)
class LongArray:
    """A metadata array that was stepped over: where it lies and what it holds."""

    key: str
    element_type: int  # GGUF's number of the type
    count: int
    offset: int  # of the first element in the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as the container describes it, checked to lie inside the file."""

    name: str  # GGUF's name
    shape: tuple[int, ...]  # slowest first: (rows, cols)
    layout: str
    offset: int  # in the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufContainer:
    metadata: dict[str, Any]  # numbers, bools, strings, short lists, and LongArray
    tensors: dict[str, GgufTensor]
    header: bytes  # everything before the tensors
    stamp: FileStamp


class _EndOfBufferError(Exception):
    """The header goes on behind the bytes read so far, at least up to `needed`."""

    def __init__(self, needed: int) -> None:
        self.needed = needed


class _Cursor:
    """A position in the first bytes of the file."""

    def __init__(self, path: Path, buffer: bytes, file_nbytes: int) -> None:
        self.path = path
        self.buffer = buffer
        self.file_nbytes = file_nbytes
        self.position = 0

    def refuse(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")

    def take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if end > len(self.buffer):
            raise _EndOfBufferError(end)
        taken = self.buffer[self.position : end]
        self.position = end
        return taken

    def number(self, kind: struct.Struct) -> Any:
        if self.position + kind.size > len(self.buffer):
            raise _EndOfBufferError(self.position + kind.size)
        (value,) = kind.unpack_from(self.buffer, self.position)
        self.position += kind.size
        return value

    def count(self, what: str, smallest_nbytes: int) -> int:
        """A count of things of which each takes at least some bytes of what is left of the file."""
        value = int(self.number(_U64))
        limit = (self.file_nbytes - self.position) // smallest_nbytes
        if value > limit:
            raise self.refuse(
                f"{what}: the {self.file_nbytes} bytes of the file hold at most {limit}; "
                f"the header claims {value}"
            )
        return value

    def string(self, what: str, limit: int = MAX_STRING_NBYTES) -> str:
        nbytes = int(self.number(_U64))
        if nbytes > limit:
            raise self.refuse(f"{what}: must be at most {limit} bytes long; claims {nbytes}")
        try:
            return self.take(nbytes).decode()
        except UnicodeDecodeError as error:
            raise self.refuse(f"{what}: must be UTF-8; {error.reason}") from error

    def skip_strings(self, count: int) -> None:
        """Step over strings. The one loop here that is long: hundreds of thousands of them."""
        read_length, buffer, position = _U64.unpack_from, self.buffer, self.position
        try:
            for _ in range(count):
                position += 8 + read_length(buffer, position)[0]
        except (struct.error, IndexError, OverflowError):  # behind the end, however far
            raise _EndOfBufferError(position + 8) from None
        if position > len(buffer):
            raise _EndOfBufferError(position)
        self.position = position


def read_container(path: Path) -> GgufContainer:
    """Read and check the header of a GGUF file. Raises ModelError for whatever is wrong with it."""
    with CheckedFile(path) as file:
        nbytes = min(file.nbytes, _FIRST_READ_NBYTES)
        while True:
            buffer = file.read(0, nbytes)
            if len(buffer) < nbytes:
                raise ModelError(f"{path}: a model file must not change while it is opened")
            try:
                return _parse(_Cursor(path, buffer, file.nbytes), file.stamp)
            except _EndOfBufferError as end:
                if end.needed > file.nbytes:
                    raise ModelError(
                        f"{path}: truncated: the header goes on to byte {end.needed} at least, "
                        f"the file has {file.nbytes}"
                    ) from None
                if end.needed > MAX_HEADER_NBYTES:
                    raise ModelError(
                        f"{path}: a header has at most {MAX_HEADER_NBYTES} bytes; "
                        f"this one claims {end.needed}"
                    ) from None
                nbytes = min(file.nbytes, max(end.needed, 4 * nbytes))


def read_long_array(path: Path, array: LongArray) -> list[Any]:
    """The elements of an array that was stepped over when the file was opened."""
    with CheckedFile(path) as file:
        content = file.read(array.offset, array.nbytes)
    cursor = _Cursor(path, content, len(content))
    try:
        return _elements(cursor, array.key, array.element_type, array.count)
    except _EndOfBufferError:
        raise ModelError(f"{path}: {array.key}: a model file must not change while used") from None


def _parse(cursor: _Cursor, stamp: FileStamp) -> GgufContainer:
    num_tensors, num_fields = _parse_start(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string("a metadata key", MAX_NAME_NBYTES)
        if key in metadata:
            raise cursor.refuse(f"a metadata key must appear once; {key!r} appears twice")
        metadata[key] = _parse_value(cursor, key)
    descriptions = [_parse_description(cursor) for _ in range(num_tensors)]

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power_of_two = type(alignment) is int and alignment > 0 and not alignment & (alignment - 1)
    if not is_power_of_two:
        raise cursor.refuse(f"general.alignment must be a power of two; got {alignment!r:.60}")
    start_of_data = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, layout, offset, nbytes in descriptions:
        if name in tensors:
            raise cursor.refuse(f"a tensor must appear once; {name!r} appears twice")
        if offset % alignment:
            raise cursor.refuse(
                f"tensor {name!r}: its offset must be a multiple of {alignment}; got {offset}"
            )
        tensors[name] = GgufTensor(name, shape, layout, start_of_data + offset, nbytes)
    _check_spans(cursor, tensors)
    return GgufContainer(metadata, tensors, cursor.buffer[: cursor.position], stamp)


def _parse_start(cursor: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of metadata fields)"""
    if cursor.file_nbytes < 24:
        raise cursor.refuse(f"a GGUF file has at least 24 bytes; it has {cursor.file_nbytes}")
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise cursor.refuse(f"must be a GGUF file and begin with b'GGUF'; begins with {magic!r}")
    version = cursor.number(_U32)
    if version & 0xFFFF == 0:
        raise cursor.refuse("must be little endian; this GGUF file is big endian")
    if version not in (2, 3):
        raise cursor.refuse(f"the GGUF version must be 2 or 3; got {version}")
    num_tensors = cursor.count("number of tensors", _MIN_TENSOR_NBYTES)
    num_fields = cursor.count("number of metadata fields", _MIN_FIELD_NBYTES)
    return num_tensors, num_fields


def _parse_value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.number(_U32)
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.string(f"metadata field {key!r}")
    if kind != _ARRAY:
        raise cursor.refuse(f"metadata field {key!r}: its type must be 0 to 12; got {kind}")
    element_type = cursor.number(_U32)
    if element_type not in _SCALARS and element_type != _STRING:
        raise cursor.refuse(
            f"metadata field {key!r}: an array must hold numbers, bools or strings; "
            f"got type {element_type}"
        )
    smallest = 8 if element_type == _STRING else _SCALARS[element_type].size
    count = cursor.count(f"metadata field {key!r}: number of elements", smallest)
    if count <= LONG_ARRAY_COUNT:
        return _elements(cursor, key, element_type, count)
    start = cursor.position
    if element_type == _STRING:
        cursor.skip_strings(count)
    else:
        end = start + count * smallest
        if end > len(cursor.buffer):
            raise _EndOfBufferError(end)
        cursor.position = end
    return LongArray(key, element_type, count, start, cursor.position - start)


def _elements(cursor: _Cursor, key: str, element_type: int, count: int) -> list[Any]:
    if element_type == _STRING:
        what = f"metadata field {key!r}"
        return [cursor.string(what) for _ in range(count)]
    kind = _SCALARS[element_type]
    packed = cursor.take(count * kind.size)
    return list(struct.unpack(f"<{count}{kind.format[1:]}", packed))


def _parse_description(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
    """(name, shape with the slowest extent first, layout, offset in the data, bytes)"""
    name = cursor.string("a tensor name", MAX_NAME_NBYTES)
    num_dimensions = cursor.number(_U32)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.refuse(
            f"tensor {name!r}: must have 1 to {MAX_DIMENSIONS} dimensions; got {num_dimensions}"
        )
    extents = tuple(int(cursor.number(_U64)) for _ in range(num_dimensions))
    kind = cursor.number(_U32)
    offset = int(cursor.number(_U64))
    if 0 in extents:
        raise cursor.refuse(f"tensor {name!r}: its extents must be positive; got {extents}")
    if kind not in _LAYOUT_OF_TYPE:
        supported = ", ".join(layout.upper() for layout in LAYOUTS)
        type_name = _OTHER_TYPES.get(kind, f"number {kind}")
        raise cursor.refuse(
            f"tensor {name!r}: its type must be one of {supported}; got {type_name}"
        )
    layout = LAYOUTS[_LAYOUT_OF_TYPE[kind]]
    try:
        nbytes = layout.row_nbytes(extents[0])
    except ValueError as error:
        raise cursor.refuse(f"tensor {name!r}: {error}") from error
    for extent in extents[1:]:
        nbytes *= extent
    return name, extents[::-1], layout.name, offset, nbytes


def _check_spans(cursor: _Cursor, tensors: dict[str, GgufTensor]) -> None:
    """Tensors lie apart from one another and inside the file."""
    end_of_last, last_name = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end_of_last:
            raise cursor.refuse(
                f"tensor {tensor.name!r}: must not overlap {last_name!r}, which ends at byte "
                f"{end_of_last}; begins at {tensor.offset}"
            )
        end_of_last, last_name = tensor.offset + tensor.nbytes, tensor.name
    if end_of_last > cursor.file_nbytes:
        raise cursor.refuse(
            f"truncated: tensor {last_name!r} ends at byte {end_of_last}, the file has "
            f"{cursor.file_nbytes}; {end_of_last - cursor.file_nbytes} bytes are missing"
        )
