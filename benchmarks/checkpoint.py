"""What a model directory holds, by its headers: tensors, files, bytes that one token reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One bfloat16 tensor of a directory and where its bytes begin."""

    name: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return 2 * prod(self.shape)


def read_headers(folder: Path) -> list[StoredTensor]:
    """All tensors of a bfloat16 directory, shard by shard. Raises ValueError for other types."""
    found = []
    for path in weight_files(folder):
        with open(path, "rb") as file:
            header_nbytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_nbytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] != "BF16":
                raise ValueError(f"{path.name}: {name} must be BF16; got {entry['dtype']}")
            offset = 8 + header_nbytes + entry["data_offsets"][0]
            found.append(StoredTensor(name, tuple(entry["shape"]), path, offset))
    return found


def weight_files(path: Path) -> list[Path]:
    """The weight files of a model directory, or the file itself."""
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} must be a file or hold .safetensors files; it does not")
    return files


def decode_nbytes(folder: Path) -> int:
    """Bytes of weights that each decoded token reads: all, except a table of embeddings that is
    only gathered from (an untied one). Of a model directory, or of a GGUF file."""
    if folder.is_file():
        import gguf

        sizes = {each.name: int(each.n_bytes) for each in gguf.GGUFReader(folder).tensors}
        gathered = sizes["token_embd.weight"] if "output.weight" in sizes else 0
        return sum(sizes.values()) - gathered
    tensors = read_headers(folder)
    is_untied = any(tensor.name == "lm_head.weight" for tensor in tensors)
    return sum(
        tensor.nbytes
        for tensor in tensors
        if not (is_untied and tensor.name == "model.embed_tokens.weight")
    )


def vocab_size(model: Path) -> int:
    """Of a model directory, or of a GGUF file: the rows of its table of embeddings."""
    if model.is_dir():
        return int(json.loads((model / "config.json").read_text())["vocab_size"])
    import gguf

    tensors = gguf.GGUFReader(model).tensors
    return next(int(each.shape[-1]) for each in tensors if each.name == "token_embd.weight")
