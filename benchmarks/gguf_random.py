"""Write a random-weight Llama-shaped GGUF in the mixture that people call Q4_K_M.

    python benchmarks/gguf_random.py --shape 3b --out /data/llama-3b-q4_k_m.gguf

Q4_K for most matrices, Q6_K for the embeddings and for the values and down projections of half of
the layers, as llama.cpp's quantiser mixes them. Blocks are drawn, not quantised: any nibbles and
scales are a valid block, and the factors of a block are chosen so that weights scatter around 0 by
about 1/sqrt(cols). The file carries no tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf_twin import gguf_name, open_writer
from shapes import SHAPES, Shape, TensorSpec
from synthesize import Progress, check_room

Q4_K, Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
BLOCK_NBYTES = {Q4_K: 144, Q6_K: 210}
BLOCK = 256  # weights
POOL_BLOCKS = 65_537  # a prime: no two rows of a tensor start at the same place of the pool


def has_more_bits(layer: int, num_layers: int) -> bool:
    """The layers whose values and down projections get Q6_K: the outer eighths, and each third."""
    eighth = num_layers // 8
    return layer < eighth or layer >= num_layers - eighth or (layer - eighth) % 3 == 2


def format_of(spec: TensorSpec, num_layers: int) -> gguf.GGMLQuantizationType:
    if spec.name in ("model.embed_tokens.weight", "lm_head.weight"):
        return Q6_K
    if ".v_proj." in spec.name or ".down_proj." in spec.name:
        return Q6_K if has_more_bits(int(spec.name.split(".")[2]), num_layers) else Q4_K
    return Q4_K


def block_pool(kind: gguf.GGMLQuantizationType, cols: int, seed: int) -> np.ndarray:
    """Random blocks, uint8 [POOL_BLOCKS, block bytes], whose weights scatter by 1/sqrt(cols)."""
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 256, (POOL_BLOCKS, BLOCK_NBYTES[kind]), dtype=np.uint8)
    spread = cols**-0.5
    if kind == Q4_K:
        # d * scale * nibble - dmin * min, both 6-bit factors 31.5 on average, nibbles 7.5 +- 4.6
        factors = np.array([spread / 290, 7.5 * spread / 290], np.float16)
        pool[:, 0:4] = factors.view(np.uint8)
    else:
        # d * scale * (6 bits - 32), scales -128..127: 74 in the root mean square, times 18.5
        pool[:, 208:210] = np.array([spread / (74 * 18.5)], np.float16).view(np.uint8)
    return pool


def write_random(shape: Shape, out: Path, seed: int) -> None:
    """Raises ValueError where rows are no whole number of blocks, or the disk has no room."""
    specs = list(shape.tensors())
    formats = {}
    for spec in specs:
        if len(spec.shape) == 2:
            if spec.shape[1] % BLOCK:
                raise ValueError(f"{spec.name} must have a multiple of {BLOCK} columns; "
                                 f"got {spec.shape[1]}")  # fmt: skip
            formats[spec.name] = format_of(spec, shape.num_hidden_layers)

    def nbytes_of(spec: TensorSpec) -> int:
        if spec.name not in formats:
            return 4 * spec.count
        return spec.count // BLOCK * BLOCK_NBYTES[formats[spec.name]]

    total = sum(map(nbytes_of, specs))
    check_room(out.parent, total)
    writer = open_writer(out, out.stem, shape.config(), gguf.LlamaFileType.MOSTLY_Q4_K_M)
    for spec in specs:
        name, nbytes = gguf_name(spec.name), nbytes_of(spec)
        if spec.name not in formats:
            writer.add_tensor_info(name, spec.shape, np.dtype(np.float32), nbytes)
        else:
            announced = (spec.shape[0], nbytes // spec.shape[0])
            kind = formats[spec.name]
            writer.add_tensor_info(name, announced, np.dtype(np.uint8), nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    progress = Progress(total, out.name)
    rng = np.random.default_rng(seed)
    pools: dict[tuple[gguf.GGMLQuantizationType, int], np.ndarray] = {}
    for spec in specs:
        if spec.name not in formats:
            scattered = 1 + 0.05 * rng.standard_normal(spec.count, dtype=np.float32)
            writer.write_tensor_data(scattered)
        else:
            kind, cols = formats[spec.name], spec.shape[1]
            if (kind, cols) not in pools:
                pools[kind, cols] = block_pool(kind, cols, seed)
            start = int(rng.integers(POOL_BLOCKS))
            wanted = np.arange(start, start + spec.count // BLOCK) % POOL_BLOCKS
            writer.write_tensor_data(pools[kind, cols][wanted].reshape(spec.shape[0], -1))
        progress.add(nbytes_of(spec))
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="3b")
    parser.add_argument("--out", type=Path, required=True, help="GGUF file to write")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        write_random(SHAPES[given.shape], given.out, given.seed)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{given.out}: {given.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
