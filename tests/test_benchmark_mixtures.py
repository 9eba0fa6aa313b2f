"""Synthetic mixtures: what `benchmarks/synthesize.py --moe` writes is what readers take it for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TINY = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts import one another as siblings, as they do when they are run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_default_is_the_model_it_is_named_after() -> None:
    from mixtures import MoeShape

    assert MoeShape().num_parameters == 30_532_122_624  # Qwen3-30B-A3B


def test_directory_is_a_mixture_with_finite_logits(tmp_path: Path) -> None:
    import torch
    from mixtures import MoeShape
    from synthesize import write_model
    from transformers import AutoModelForCausalLM

    from shadowlane.ops.decoder import read_decoder, read_experts
    from shadowlane.ops.files import open_model

    write_model(MoeShape(**TINY), tmp_path / "moe", seed=3, shard_nbytes=1_000_000)
    assert len(list((tmp_path / "moe").glob("model-*.safetensors"))) > 1
    files = open_model(tmp_path / "moe")
    cfg = read_decoder(files)
    assert cfg.moe is not None
    assert (cfg.moe.num_experts, cfg.moe.top_k, cfg.moe.inner) == (6, 2, 256)
    assert cfg.moe.norm_topk
    experts = read_experts(cfg, files)
    assert [len(layer) for layer in experts] == [6, 6]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[3, 4, 5]])).logits
    assert torch.isfinite(logits).all()
    assert 0.1 < logits.std().item() < 10


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_0", "Q8_0", "BF16"])
def test_gguf_has_experts_in_the_chosen_type(tmp_path: Path, name: str) -> None:
    import gguf
    from mixtures import TYPES, MoeShape, write_moe_gguf

    from shadowlane.ops.decoder import read_decoder, read_experts
    from shadowlane.ops.files import open_model

    path = tmp_path / "moe.gguf"
    write_moe_gguf(MoeShape(**TINY), path, TYPES[name])
    files = open_model(path)
    cfg = read_decoder(files)
    assert cfg.moe is not None
    assert cfg.moe.num_experts == 6
    matrices = {}
    for layer in read_experts(cfg, files):
        for expert in layer:
            assert expert.down.layout == TYPES[name]
            raw = np.fromfile(path, np.uint8, expert.down.nbytes, offset=expert.down.offset)
            matrices[raw.tobytes()] = raw.reshape(expert.down.rows, -1)
    assert len(matrices) == 2 * 6  # no two experts are alike
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert stored["blk.1.ffn_down_exps.weight"].tensor_type.name == name
    values = np.stack(
        [
            gguf.dequantize(rows, gguf.GGMLQuantizationType[name]).astype(np.float32)
            for rows in matrices.values()
        ]
    )
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(256**-0.5, rel=0.3)
    assert stored["blk.0.ffn_gate_inp.weight"].tensor_type.name == "F32"


def test_gguf_in_bfloat16_has_the_weights_of_the_directory(tmp_path: Path) -> None:
    from mixtures import MoeShape, write_moe_gguf
    from synthesize import write_model

    from shadowlane.ops.decoder import ExpertMatrix, read_decoder, read_experts
    from shadowlane.ops.files import open_model

    def content(matrix: ExpertMatrix) -> bytes:
        return np.fromfile(matrix.path, np.uint8, matrix.nbytes, offset=matrix.offset).tobytes()

    shape = MoeShape(**TINY)
    write_model(shape, tmp_path / "moe", seed=5)
    write_moe_gguf(shape, tmp_path / "moe.gguf", "bf16", seed=5)
    found = []
    for path in (tmp_path / "moe", tmp_path / "moe.gguf"):
        files = open_model(path)
        experts = [expert for layer in read_experts(read_decoder(files), files) for expert in layer]
        found.append([content(getattr(each, part)) for each in experts for part in ("gate", "up")])
        found[-1] += [content(each.down) for each in experts]
    assert found[0] == found[1]


def test_shapes_and_types_that_cannot_be_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    from mixtures import MoeShape, write_moe_gguf

    shape = MoeShape(**TINY)
    with pytest.raises(ValueError, match=r"num_experts_per_tok must be at most num_experts \(6\)"):
        replace(shape, num_experts_per_tok=7)
    with pytest.raises(ValueError, match="num_experts must be positive; got 0"):
        replace(shape, num_experts=0)
    with pytest.raises(ValueError, match=r"ffn_down_exps\.weight must have a multiple of 256"):
        write_moe_gguf(replace(shape, moe_intermediate_size=96), tmp_path / "moe.gguf", "q4_K")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--moe"], "--out or --gguf must be given"),
        (["--shape", "tiny"], "--out must be given"),
        (["--moe", "--shape", "tiny", "--out", "x"], "--shape must not go with --moe"),
        (["--experts", "4", "--out", "x"], "--experts must go with --moe"),
        (["--moe", "--type", "Q4_K", "--out", "x"], "--type must go with --gguf"),
        (["--moe", "--top-k", "500", "--gguf", "x.gguf"], "num_experts_per_tok must be at most"),
        (["--moe", "--layers", "4800", "--gguf", "x.gguf"], "GB are free"),
    ],
)
def test_flags_that_cannot_be_are_one_line(tmp_path: Path, flags: list[str], message: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "synthesize.py"), *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
