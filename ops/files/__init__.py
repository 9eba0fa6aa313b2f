"""Weight files: Hugging Face directories of safetensors, and GGUF. See `open_model`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shadowlane.ops.errors import ModelError
from shadowlane.ops.files.base import ModelFiles, TensorSource
from shadowlane.ops.files.checked import FileStamp
from shadowlane.ops.files.gguf import open_gguf
from shadowlane.ops.files.safetensors import open_directory

__all__ = ["FileStamp", "ModelFiles", "TensorSource", "open_model"]


def open_model(path: Path | str) -> ModelFiles:
    """Check the headers of a Hugging Face directory or a GGUF file, and say where the tensors lie.

    Reads no weights and writes nothing. Raises ModelError, in one line, for whatever is missing,
    damaged or not supported.
    """
    path = Path(os.path.abspath(path))
    try:
        found = os.stat(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{str(path)!r}: must be a path; {error}") from error
    if stat.S_ISDIR(found.st_mode):
        return open_directory(path)
    if path.suffix == ".safetensors":
        raise ModelError(
            f"{path}: give the directory that holds config.json and the weights, "
            "not a single .safetensors file"
        )
    return open_gguf(path)
