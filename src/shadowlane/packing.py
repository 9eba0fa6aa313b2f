"""Packed copies of a model: written once, to a file of the user's or into the cache, then run."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shadowlane.ops.errors import ModelError
from shadowlane.paths import cache_dir
from shadowlane.sizes import format_size

if TYPE_CHECKING:
    from shadowlane.ops.files import ModelFiles
    from shadowlane.ops.pack import PackLayout
    from shadowlane.ops.pack_model import PackedModel

Progress = Callable[[str, float | None], None]
FORMAT_VERSION = 1  # raised when the same model would be written otherwise


def packed_dir() -> Path:
    """Packed copies that `--weights` made; may be deleted whenever nothing runs from them."""
    return cache_dir() / "packed"


def write_packed(model: Path, weights: PackLayout, out: Path, progress: Progress) -> PackedModel:
    """Pack the safetensors directory `model` into the GGUF file `out`, atomically.

    Raises ModelError or ValueError, one line: unknown layouts, tensors that cannot be packed, no
    space, a file beside the model's own.
    """
    from shadowlane.ops.files import open_model
    from shadowlane.ops.pack_model import check_packable, pack_model

    files = open_model(model)
    check_packable(files, weights)
    if out.is_dir():
        raise ValueError(f"out must be a file; {out} is a directory")
    if out.absolute().parent.resolve() == files.root.resolve():
        raise ValueError(f"out must not lie in the model's own directory; got {out}")
    stage = f"packing {files.root.name} as {weights}"
    progress(stage, 0.0)
    return pack_model(
        files, weights, out.absolute(), cache_dir(), lambda done: progress(stage, done)
    )


def packed_model(model: Path, weights: PackLayout, progress: Progress) -> tuple[Path, str]:
    """The packed copy of `model` in the cache, made first where it has to be; and a note about it.

    Its key is made of the model's fingerprint, its tokenizer's files and the layout. Raises what
    `write_packed` does.
    """
    from shadowlane.ops.files import open_model
    from shadowlane.ops.pack_model import check_packable, pack_model

    files = open_model(model)
    check_packable(files, weights)
    folder = packed_dir()
    path = folder / f"{files.root.name}-{_key(files)}-{weights}.gguf"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / ".lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    progress("waiting for another process that packs a model", None)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    stage = f"packing {files.root.name} as {weights}, once, into {path}"
                    progress(stage, 0.0)
                    pack_model(
                        files, weights, path, cache_dir(), lambda done: progress(stage, done)
                    )
        except OSError as error:
            raise ModelError(f"{folder}: cannot be written: {error.strerror}") from error
    return path, f"weights are {weights}, from {path} ({format_size(path.stat().st_size)})"


def _key(files: ModelFiles) -> str:
    from shadowlane.ops.tokenizer import TOKENIZER_FILES

    digest = hashlib.sha256(f"{FORMAT_VERSION} {files.fingerprint}\n".encode())
    for name in ("tokenizer.json", *TOKENIZER_FILES):
        path = files.root / name
        if path.exists():
            found = path.stat()
            digest.update(f"{name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
