"""What every reader of model files returns: where each tensor's bytes lie, and the configuration.

Opening a model reads headers only. Weights are read later, by other processes, straight from
`TensorSource.path` at `TensorSource.offset`; nothing is ever written beside the model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shadowlane.ops.errors import ModelError
from shadowlane.ops.files.checked import FileStamp
from shadowlane.ops.files.gguf_container import LongArray, read_long_array
from shadowlane.ops.layouts import LAYOUTS

RAW = "u8"  # bytes that are no numbers by themselves: blocks and scales that lie apart


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where the bytes of one tensor lie in a file, checked to be inside it."""

    # As Hugging Face has it, "model.layers.0.self_attn.q_proj.weight", also for GGUF. Experts have
    # the names of Qwen-MoE in all families; those of a layer in one tensor (GGUF) are
    # "model.layers.0.mlp.experts.gate_proj", their biases "...gate_proj_bias".
    name: str
    path: str  # absolute
    offset: int  # of the first byte in that file
    nbytes: int
    shape: tuple[int, ...]  # (rows, cols), row after row; stacked experts: (experts, rows, cols)
    layout: str  # key of LAYOUTS, or RAW
    step: int = 1  # elements from one to the next: 2 where those of another lie between


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checked set of weight files. Made by `open_model`."""

    root: Path  # the directory, or the .gguf file
    kind: Literal["safetensors", "gguf"]
    tensors: dict[str, TensorSource]
    config: dict[str, Any]  # in the shape of Hugging Face's config.json
    rope_pairing: Literal["half", "interleaved"]  # how rotary pairs lie in the rows of q and k
    rope_factors: TensorSource | None  # GGUF `rope_freqs.weight`: divisors of the frequencies
    gguf_metadata: dict[str, Any] | None  # long arrays stand as LongArray
    fingerprint: str  # changes when the model does
    stamps: tuple[FileStamp, ...]  # of every file that belongs to the model

    def check_unchanged(self) -> None:
        """Raise ModelError if a file was replaced, written or removed since it was opened."""
        for stamp in self.stamps:
            stamp.check_unchanged()

    def gguf_field(self, key: str) -> Any:
        """A metadata field of a GGUF file, arrays as lists; long arrays are read now, not before.

        Raises ModelError if the file has no such field or is not a GGUF file.
        """
        if self.gguf_metadata is None or key not in self.gguf_metadata:
            raise ModelError(f"{self.root}: must have the metadata field {key}; it has not")
        value = self.gguf_metadata[key]
        if not isinstance(value, LongArray):
            return value
        self.check_unchanged()
        return read_long_array(self.root, value)


def tensor_nbytes(layout_name: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor. Raises ValueError if its rows hold no whole number of blocks."""
    if not shape:
        return LAYOUTS[layout_name].row_nbytes(1)
    num_rows = 1
    for extent in shape[:-1]:
        num_rows *= extent
    return num_rows * LAYOUTS[layout_name].row_nbytes(shape[-1])


def make_fingerprint(stamps: Sequence[FileStamp], headers: Sequence[bytes]) -> str:
    """32 hex digits from names, sizes, times and the bytes of all headers.

    Inodes are left out: a copied or restored model that is the same in all of these is the same.
    """
    digest = hashlib.sha256()
    for stamp in stamps:
        digest.update(
            f"{os.path.basename(stamp.path)}\0{stamp.nbytes}\0{stamp.modified_ns}\0".encode(
                errors="surrogateescape"
            )
        )
    for header in headers:
        digest.update(len(header).to_bytes(8, "little"))
        digest.update(header)
    return digest.hexdigest()[:32]
