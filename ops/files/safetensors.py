"""Hugging Face directories: config.json, and safetensors in one file or in shards with an index.

A safetensors file is the length of a JSON header (8 bytes, little endian), the header, and the
tensors one after the other. Every claim of the header is checked before anything relies on it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from shadowlane.ops.errors import ModelError
from shadowlane.ops.files.base import (
    RAW,
    ModelFiles,
    TensorSource,
    make_fingerprint,
    tensor_nbytes,
)
from shadowlane.ops.files.checked import CheckedFile, FileStamp
from shadowlane.ops.files.gpt_oss import PACKED_PART, with_own_names

MAX_HEADER_NBYTES = 100_000_000  # the limit of the reference implementation
MAX_JSON_NBYTES = 100_000_000  # config.json and the index; real ones stay below 10 MB

_LAYOUT_OF_DTYPE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_MIXTRAL_EXPERT = re.compile(r"(.+\.mlp\.experts\.[0-9]+)\.(w1|w2|w3)\.weight")
_MIXTRAL_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def open_directory(root: Path) -> ModelFiles:
    """Open a Hugging Face directory. Raises ModelError for whatever is missing or damaged."""
    _refuse_other_formats(root)
    config, config_bytes, config_stamp = _read_json(root / "config.json")
    stamps, headers = [config_stamp], [config_bytes]
    # a single file wins over an index beside it, as in transformers
    if os.path.lexists(root / _SINGLE_FILE):
        tensors, header, stamp = read_safetensors_header(root / _SINGLE_FILE, wanted=None)
        stamps.append(stamp)
        headers.append(header)
    else:
        index, index_bytes, index_stamp = _read_json(root / _INDEX_FILE)
        stamps.append(index_stamp)
        headers.append(index_bytes)
        tensors = {}
        shards = _shards_of_index(root / _INDEX_FILE, index)
        _check_shards_exist(root, shards)
        for shard, names in shards.items():
            found, header, stamp = read_safetensors_header(root / shard, wanted=names)
            tensors.update(found)
            stamps.append(stamp)
            headers.append(header)
    if not tensors:
        raise ModelError(f"{root}: a model must hold tensors; its files name none")
    if config.get("model_type") == "mixtral":
        tensors = _with_common_names(root, tensors)
    elif config.get("model_type") == "gpt_oss":
        tensors = with_own_names(tensors)
    return ModelFiles(
        root=root,
        kind="safetensors",
        tensors=tensors,
        config=config,
        rope_pairing="half",
        rope_factors=None,
        gguf_metadata=None,
        fingerprint=make_fingerprint(stamps, headers),
        stamps=tuple(stamps),
    )


def _with_common_names(root: Path, tensors: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Mixtral's own names of router and experts in the words of the other mixtures."""
    renamed: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        common = name.replace(".block_sparse_moe.", ".mlp.")
        if match := _MIXTRAL_EXPERT.fullmatch(common):
            common = f"{match[1]}.{_MIXTRAL_MATRICES[match[2]]}.weight"
        if common in renamed:
            raise ModelError(f"{root}: a tensor must be there once; {common} is there twice")
        renamed[common] = source if common == name else replace(source, name=common)
    return renamed


def _refuse_other_formats(root: Path) -> None:
    """Say in one line what a directory without safetensors holds instead."""
    try:
        names = sorted(entry.name for entry in root.iterdir())
    except OSError as error:
        raise ModelError(f"{root}: cannot be read: {error.strerror}") from error
    if _SINGLE_FILE in names or _INDEX_FILE in names:
        return
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        raise ModelError(f"{root}: give the .gguf file itself: {', '.join(ggufs[:5])}")
    if shards := [name for name in names if name.endswith(".safetensors")]:
        raise ModelError(
            f"{root}: must hold {_SINGLE_FILE} or {_INDEX_FILE}; found only {', '.join(shards[:5])}"
        )
    if pickles := [name for name in names if Path(name).suffix in _PICKLE_SUFFIXES]:
        raise ModelError(
            f"{root}: weights must be safetensors or GGUF; pickle files are never loaded, since "
            f"loading one runs the code in it: {', '.join(pickles[:5])}"
        )
    raise ModelError(f"{root}: must hold {_SINGLE_FILE} or {_INDEX_FILE}; neither is there")


def _read_json(path: Path) -> tuple[dict[str, Any], bytes, FileStamp]:
    with CheckedFile(path) as file:
        if file.nbytes > MAX_JSON_NBYTES:
            raise ModelError(
                f"{path}: must be at most {MAX_JSON_NBYTES} bytes; it has {file.nbytes}"
            )
        content = file.read(0, file.nbytes)
        return _parse_json_object(content, str(path)), content, file.stamp


def _parse_json_object(content: bytes, what: str) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ModelError(f"{what}: a name must appear once; {twice!r:.100} appears twice")
        return unique

    try:
        value = json.loads(content.decode(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what}: must be JSON; {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{what}: must be a JSON object; it is a {type(value).__name__}")
    return value


def _shards_of_index(path: Path, index: dict[str, Any]) -> dict[str, set[str]]:
    """File name of each shard -> names of the tensors the index says it holds."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: must have a weight_map that names the file of each tensor")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        is_plain_name = (
            isinstance(shard, str)
            and shard.endswith(".safetensors")
            and shard.isprintable()
            and not any(separator in shard for separator in "/\\")
        )
        if not is_plain_name:
            raise ModelError(
                f"{path}: a shard must be a .safetensors file of the same directory; "
                f"{tensor!r:.100} is said to be in {shard!r:.100}"
            )
        shards.setdefault(shard, set()).add(tensor)
    return dict(sorted(shards.items()))


def _check_shards_exist(root: Path, shards: dict[str, set[str]]) -> None:
    missing = [shard for shard in shards if not os.path.exists(root / shard)]
    if missing:
        raise ModelError(
            f"{root}: every shard of the index must be there; {len(missing)} of {len(shards)} "
            f"missing: {', '.join(missing)}"
        )


def read_safetensors_header(
    path: Path, wanted: set[str] | None
) -> tuple[dict[str, TensorSource], bytes, FileStamp]:
    """Check the header of one file and return the tensors named by `wanted` (None: all of them).

    Raises ModelError if the header does not describe the file exactly.
    """
    with CheckedFile(path) as file:
        if file.nbytes < 8:
            raise ModelError(
                f"{path}: a safetensors file has at least 8 bytes; it has {file.nbytes}"
            )
        header_nbytes = int.from_bytes(file.read(0, 8), "little")
        if header_nbytes > MAX_HEADER_NBYTES:
            raise ModelError(
                f"{path}: a header has at most {MAX_HEADER_NBYTES} bytes; "
                f"this one claims {header_nbytes}"
            )
        if 8 + header_nbytes > file.nbytes:
            raise ModelError(
                f"{path}: truncated: the header needs {8 + header_nbytes} bytes, "
                f"{8 + header_nbytes - file.nbytes} are missing"
            )
        header = file.read(8, header_nbytes)
        stamp = file.stamp
    entries = _parse_json_object(header, f"{path}: header")
    entries.pop("__metadata__", None)
    start_of_data = 8 + header_nbytes
    spans = {
        name: _check_entry(path, name, entry, is_used=wanted is None or name in wanted)
        for name, entry in entries.items()
    }
    _check_spans(path, spans, stamp.nbytes - start_of_data)
    if wanted is not None and (absent := sorted(wanted - entries.keys())):
        raise ModelError(
            f"{path}: must hold the tensors that the index puts there; "
            f"{len(absent)} missing: {', '.join(map(repr, absent[:5]))}"
        )
    tensors = {}
    for name, (start, end) in spans.items():
        if wanted is None or name in wanted:
            entry = entries[name]
            tensors[name] = TensorSource(
                name=name,
                path=str(path),
                offset=start_of_data + start,
                nbytes=end - start,
                shape=tuple(entry["shape"]),
                layout=_layout_of(name, entry["dtype"]),
            )
    return tensors, header, stamp


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # a JSON true is an int to isinstance


def _check_entry(path: Path, name: str, entry: object, is_used: bool) -> tuple[int, int]:
    """The span of one tensor in the data. Tensors that nobody uses may have any data type."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise ModelError(f"{where}: must have dtype, shape and data_offsets; got {entry!r:.60}")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise ModelError(f"{where}: dtype must be a name; got {dtype!r:.60}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_count, shape)):
        raise ModelError(f"{where}: shape must be a list of at most 8 counts; got {shape!r:.60}")
    if (
        not isinstance(span, list)
        or len(span) != 2
        or not all(map(_is_count, span))
        or span[0] > span[1]
    ):
        raise ModelError(f"{where}: data_offsets must be [start, end]; got {span!r:.60}")
    if dtype in _LAYOUT_OF_DTYPE or _is_raw(name, dtype):
        layout = _layout_of(name, dtype)
        expected = math.prod(shape) if layout == RAW else tensor_nbytes(layout, shape)
        if span[1] - span[0] != expected:
            raise ModelError(
                f"{where}: {dtype} of shape {shape} has {expected} bytes; "
                f"its data_offsets span {span[1] - span[0]}"
            )
    elif is_used:
        raise ModelError(f"{where}: dtype must be F32, F16 or BF16; got {dtype!r:.60}")
    return span[0], span[1]


def _is_raw(name: str, dtype: str) -> bool:
    return dtype == "U8" and PACKED_PART.fullmatch(name) is not None


def _layout_of(name: str, dtype: str) -> str:
    return RAW if _is_raw(name, dtype) else _LAYOUT_OF_DTYPE[dtype]


def _check_spans(path: Path, spans: dict[str, tuple[int, int]], data_nbytes: int) -> None:
    """Tensors follow one another without gap or overlap, and end where the file ends."""
    position = 0
    for name, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        if start != position:
            raise ModelError(
                f"{path}: tensor {name!r} must begin where the one before ends, "
                f"at byte {position} of the data; it begins at {start}"
            )
        position = end
    if position > data_nbytes:
        raise ModelError(
            f"{path}: truncated: the header describes {position} bytes of tensors, the file holds "
            f"{data_nbytes}; {position - data_nbytes} bytes are missing"
        )
    if position < data_nbytes:
        raise ModelError(
            f"{path}: the header describes {position} bytes of tensors; "
            f"the file holds {data_nbytes - position} bytes more"
        )
