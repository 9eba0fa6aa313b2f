"""Write a random-weight model of any size: Llama-shaped, or a mixture of experts.

    python benchmarks/synthesize.py --shape 3b --out /data/llama-3b-bf16
    python benchmarks/synthesize.py --shape 1b --layers 8 --out DIR --gguf FILE
    python benchmarks/synthesize.py --moe --layers 4 --experts 16 --vocab 32000 --out DIR
    python benchmarks/synthesize.py --moe --gguf /data/moe-q4_k.gguf --type Q4_K

Directories are bfloat16. A mixture is shaped like Qwen3-30B-A3B (48 layers of 128 experts, 17 GB
in Q4_K) where no flag says otherwise, and is written as a directory, as a GGUF or as both.

Drawing billions of normal numbers takes minutes, and nobody looks at them: what matters to a
benchmark is that each byte exists on the disk, that logits stay finite and that rows differ. So
one pool of normal values is drawn, scaled to 1/sqrt(cols) for each width, and every tensor is the
pool read round and round from an offset of its own. The pool's length is prime: no two rows of a
tensor start at the same place, and no two pages of the files are alike.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from shapes import SHAPES, Shape, TensorSpec

if TYPE_CHECKING:
    from mixtures import MoeShape

POOL_COUNT = 8_388_617  # values; a prime just above 8 Mi (16 MiB in bfloat16)
SHARD_NBYTES = 1_500_000_000
SPARE_NBYTES = 1 << 30  # free space that stays free


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits (uint16), to nearest, ties to even; no NaNs expected."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class WeightPool:
    """Random bfloat16 values for any tensor: the same seed and name give the same bytes."""

    def __init__(self, seed: int, count: int = POOL_COUNT) -> None:
        self._seed = seed
        self._normal = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
        self._scaled: dict[int, np.ndarray] = {}  # cols -> the pool scaled by 1/sqrt(cols)

    def pieces(self, spec: TensorSpec) -> Iterator[np.ndarray]:
        """The values of a tensor as consecutive runs of uint16, without copying."""
        offset = zlib.crc32(f"{self._seed} {spec.name}".encode()) % len(self._normal)
        if len(spec.shape) == 1:
            # A norm's weights scatter a little around one.
            wanted = np.take(self._normal, np.arange(offset, offset + spec.count), mode="wrap")
            yield to_bfloat16(1.0 + 0.05 * wanted)
            return
        pool = self._scaled_pool(spec.shape[1])
        left = spec.count
        while left:
            piece = pool[offset : offset + left]
            yield piece
            left -= len(piece)
            offset = 0

    def _scaled_pool(self, cols: int) -> np.ndarray:
        if cols not in self._scaled:
            self._scaled[cols] = to_bfloat16(self._normal * np.float32(cols**-0.5))
        return self._scaled[cols]


def into_shards(shape: Shape | MoeShape, shard_nbytes: int) -> list[list[TensorSpec]]:
    """Tensors in order, cut into files of at most `shard_nbytes` (or of one larger tensor)."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in shape.tensors():
        if shards[-1] and filled + spec.nbytes > shard_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def safetensors_header(specs: list[TensorSpec]) -> bytes:
    """Length, JSON and padding of a safetensors file that holds these tensors one after another."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": "BF16",
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_room(folder: Path, nbytes: int) -> None:
    """Refuse before the first byte what would fill the disk."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < nbytes + SPARE_NBYTES:
        raise ValueError(
            f"{folder} needs {nbytes / 1e9:.1f} GB and {SPARE_NBYTES / 1e9:.1f} GB to spare; "
            f"{free / 1e9:.1f} GB are free"
        )


class Progress:
    """A bar on standard error; silent when that is not a terminal, except for its last line."""

    def __init__(self, total_nbytes: int, label: str) -> None:
        self._total, self._label = total_nbytes, label
        self._done, self._shown = 0, -1
        self._began = time.monotonic()

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        percent = 100 * self._done // self._total
        if percent == self._shown or not (sys.stderr.isatty() or self._done >= self._total):
            return
        self._shown = percent
        elapsed = max(time.monotonic() - self._began, 1e-9)
        sys.stderr.write(
            f"\r{self._label} [{'#' * (percent // 4):25}] {percent:3d} %  "
            f"{self._done / 1e9:.2f} GB  {self._done / elapsed / 1e9:.2f} GB/s"
        )
        if self._done >= self._total:
            sys.stderr.write("\n")
        sys.stderr.flush()


def write_model(
    shape: Shape | MoeShape,
    out: Path,
    seed: int = 0,
    shard_nbytes: int = SHARD_NBYTES,
) -> None:
    """Write config.json and the safetensors shards (with their index if there are several).

    Refuses a folder that already holds something other than an earlier model of this kind.
    """
    if out.exists() and any(out.iterdir()) and not (out / "config.json").exists():
        raise ValueError(f"{out} must be empty or an earlier model; it holds other files")
    check_room(out, shape.nbytes)
    out.mkdir(parents=True, exist_ok=True)
    for earlier in [*out.glob("model*.safetensors"), *out.glob("model*.index.json")]:
        earlier.unlink()

    shards = into_shards(shape, shard_nbytes)
    pool = WeightPool(seed)
    progress = Progress(shape.nbytes, out.name)
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(shards, start=1):
        name = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        with open(out / name, "wb", buffering=0) as file:
            file.write(safetensors_header(specs))
            for spec in specs:
                weight_map[spec.name] = name
                for piece in pool.pieces(spec):
                    write_all(file, memoryview(piece).cast("B"))
                progress.add(spec.nbytes)
    if len(shards) > 1:
        index = {"metadata": {"total_size": shape.nbytes}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    # Last, so that a directory with a config.json is a complete one.
    (out / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")


def write_all(file, data: memoryview) -> None:  # type: ignore[no-untyped-def]
    """Unbuffered writes may be short; go on until everything is out."""
    while data:
        data = data[file.write(data) :]


def shape_from(arguments: argparse.Namespace) -> Shape:
    """The named shape, with each dimension that was given in its place."""
    given = {
        "hidden_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "intermediate_size": arguments.intermediate,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.kv_heads,
        "head_dim": arguments.head_dim,
        "vocab_size": arguments.vocab,
        "tie_word_embeddings": arguments.tied,
        "rope_theta": arguments.rope_theta,
        "max_position_embeddings": arguments.context,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(SHAPES[arguments.shape or "3b"], **changes)


def check_flags(arguments: argparse.Namespace) -> None:
    """Flags that would do nothing are refused, and so is a run without anything to write."""
    only_dense = {"--shape": arguments.shape, "--intermediate": arguments.intermediate}
    only_moe = {
        "--experts": arguments.experts,
        "--top-k": arguments.top_k,
        "--inner": arguments.inner,
        "--type": arguments.type,
    }
    for flag, value in (only_dense if arguments.moe else only_moe).items():
        if value is not None:
            raise ValueError(f"{flag} must {'not ' if arguments.moe else ''}go with --moe")
    if arguments.out is None and not (arguments.moe and arguments.gguf):
        raise ValueError(f"--out {'or --gguf ' if arguments.moe else ''}must be given")
    if arguments.type is not None and not arguments.gguf:
        raise ValueError("--type must go with --gguf; a directory is bfloat16")


def write_mixture(arguments: argparse.Namespace) -> None:
    """Write what the flags of a mixture say, and print a line for each file."""
    from mixtures import TYPES, moe_shape_from, write_moe_gguf

    shape = moe_shape_from(arguments)
    if arguments.out:
        began = time.monotonic()
        write_model(shape, arguments.out, arguments.seed, arguments.shard_bytes)
        report(arguments.out, shape.num_parameters, shape.nbytes, time.monotonic() - began)
    if arguments.gguf:
        began = time.monotonic()
        layout = TYPES[arguments.type or "BF16"]
        write_moe_gguf(shape, arguments.gguf, layout, arguments.seed)
        nbytes = arguments.gguf.stat().st_size
        report(arguments.gguf, shape.num_parameters, nbytes, time.monotonic() - began)


def report(path: Path, num_parameters: int, nbytes: int, elapsed_s: float) -> None:
    print(
        f"{path}: {num_parameters / 1e9:.3f} B parameters, {nbytes / 1e9:.2f} GB, {elapsed_s:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of a Llama; 3b if not given")
    parser.add_argument("--moe", action="store_true", help="a mixture, shaped like Qwen3-MoE")
    parser.add_argument("--out", type=Path, help="directory to write")
    parser.add_argument("--gguf", type=Path, help="GGUF to write; of a Llama: the same tensors")
    parser.add_argument(
        "--type",
        choices=("Q4_K", "Q6_K", "Q4_0", "Q8_0", "BF16"),
        help="of a mixture's matrices in GGUF; BF16 if not given: those of the directory",
    )
    for flag in ("experts", "top-k", "inner"):
        parser.add_argument(f"--{flag}", type=int, help="of a mixture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-bytes", type=int, default=SHARD_NBYTES)
    for flag in ("hidden", "layers", "intermediate", "heads", "kv-heads", "head-dim", "vocab"):
        parser.add_argument(f"--{flag}", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--rope-theta", type=float)
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=None)
    arguments = parser.parse_args()
    try:
        check_flags(arguments)
        if arguments.moe:
            write_mixture(arguments)
            return
        shape = shape_from(arguments)
        began = time.monotonic()
        if arguments.gguf:
            check_room(arguments.out, 2 * shape.nbytes)
        write_model(shape, arguments.out, arguments.seed, arguments.shard_bytes)
        elapsed = time.monotonic() - began
        if arguments.gguf:
            from gguf_twin import write_gguf

            write_gguf(arguments.out, arguments.gguf)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    report(arguments.out, shape.num_parameters, shape.nbytes, elapsed)


if __name__ == "__main__":
    main()
