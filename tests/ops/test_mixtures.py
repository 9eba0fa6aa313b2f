"""Mixtures of experts: their configurations, their experts in every layout, their logits."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from mixture_files import (
    expert_stacks,
    load_model,
    round_experts,
    write_mixture_gguf,
    write_published_gpt_oss,
    write_stacked,
)
from plain_forward import PlainForward, load_experts, load_weights
from tiny import MIXTURES, reference_logits, tiny_tokens

from shadowlane.ops.decoder import (
    DecoderConfig,
    check_tensors,
    describe_groups,
    expected_tensors,
    read_config,
    read_decoder,
    read_experts,
)
from shadowlane.ops.errors import ModelError
from shadowlane.ops.files import ModelFiles, open_model
from shadowlane.ops.moe_config import MoeConfig
from shadowlane.ops.pack_model import check_packable
from shadowlane.ops.scattered_experts import read_scattered_experts

# One of each family that GGUF can express: how its router weighs is part of the architecture.
IN_GGUF = [
    "mixtral",
    "qwen2-moe",
    "qwen2-moe-plain",
    "qwen3-moe-norm",
    "olmoe",
    "olmoe-ungrouped",
    "gpt-oss",
    "gpt-oss-plain",
]
MXFP4 = gguf.GGMLQuantizationType.MXFP4

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 128,
}
MIXTRAL = {"model_type": "mixtral", "shared_expert_intermediate_size": None}
GPT_OSS = {**MIXTRAL, "model_type": "gpt_oss"}


@dataclass(frozen=True, slots=True)
class Source:
    """As much of a tensor of a weight file as the check looks at."""

    shape: tuple[int, ...]
    layout: str = "f32"


def sources(cfg: DecoderConfig) -> dict[str, Source]:
    """What a directory with each expert's matrices apart holds."""
    found = {name: Source(shape) for name, shape in expected_tensors(cfg).items()}
    assert cfg.moe is not None
    for layer in cfg.moe.sparse_layers:
        for expert in range(cfg.moe.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            wide, narrow = (cfg.moe.inner, cfg.hidden_size), (cfg.hidden_size, cfg.moe.inner)
            found[f"{prefix}.gate_proj.weight"] = Source(wide)
            found[f"{prefix}.up_proj.weight"] = Source(wide)
            found[f"{prefix}.down_proj.weight"] = Source(narrow)
    return found


def check_experts_are(cfg: DecoderConfig, files: ModelFiles, model: Any) -> None:
    """Each matrix, read from where it is said to lie, is the one of transformers' model."""
    assert cfg.moe is not None
    experts = load_experts(cfg, files)
    assert len(experts) == len(cfg.moe.sparse_layers)
    for layer, found in zip(cfg.moe.sparse_layers, experts, strict=True):
        stacks = expert_stacks(model, layer)
        assert len(found) == cfg.moe.num_experts == len(stacks["gate"])
        for number, matrices in enumerate(found):
            for name, matrix in zip(("gate", "up", "down"), matrices, strict=True):
                assert torch.equal(matrix, stacks[name][number].float()), (layer, number, name)


def check_logits(cfg: DecoderConfig, files: ModelFiles, reference: Path) -> None:
    """The description, computed plainly and in chunks, gives transformers' logits."""
    token_ids, chunks = tiny_tokens(33), [19, 1, 1, 12]
    forward = PlainForward(cfg, load_weights(files), load_experts(cfg, files))
    rows, start = [], 0
    for length in chunks:
        rows.append(forward(token_ids[start : start + length]))
        start += length
    expected = reference_logits(reference, token_ids, chunks, dtype="float32")
    np.testing.assert_allclose(np.concatenate(rows), expected, rtol=0, atol=5e-5)
    assert expected.std() > 0.5  # otherwise the tolerance would say little


@pytest.mark.parametrize("family", MIXTURES)
def test_reads_what_transformers_reads(tiny_model, family):
    directory = tiny_model(family)
    cfg = read_config(json.loads((directory / "config.json").read_text()))
    model = load_model(directory)
    reference, layers = model.config, model.model.layers
    sparse = [index for index, layer in enumerate(layers) if hasattr(layer.mlp, "experts")]
    assert cfg.family == reference.model_type
    assert cfg.head_dim == layers[0].self_attn.head_dim
    assert cfg.full_width_qk_norm == (reference.model_type == "olmoe")
    assert cfg.attention_sinks == hasattr(layers[0].self_attn, "sinks")
    assert cfg.moe is not None
    assert cfg.moe.sparse_layers == tuple(sparse)
    mlp = layers[sparse[0]].mlp
    router = mlp.router if reference.model_type == "gpt_oss" else mlp.gate
    assert (cfg.moe.num_experts, cfg.moe.top_k) == (router.num_experts, router.top_k)
    assert cfg.moe.router_bias == hasattr(router, "bias")
    if hasattr(router, "norm_topk_prob"):
        assert cfg.moe.norm_topk == router.norm_topk_prob
    assert cfg.moe.has_shared_gate == hasattr(mlp, "shared_expert_gate")
    stacks = expert_stacks(model, sparse[0])
    assert stacks["gate"].shape[1:] == (cfg.moe.inner, cfg.hidden_size)
    assert cfg.moe.expert_bias == ("gate_bias" in stacks)
    if cfg.moe.expert_bias:
        assert cfg.moe.swiglu_limit == mlp.experts.limit
        assert cfg.moe.swiglu_alpha == mlp.experts.alpha
    dense = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if ".experts." not in name
    }
    if cfg.tied_embeddings:
        del dense["lm_head.weight"]
    stacked = (".gate_proj_bias", ".up_proj_bias", ".down_proj_bias")
    expected = expected_tensors(cfg)
    assert {name: expected[name] for name in expected if not name.endswith(stacked)} == dense


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_lie_where_they_are_said_to(tiny_model, family):
    directory = tiny_model(family)
    files = open_model(directory)
    assert check_tensors(read_config(files.config), files.tensors) == []
    check_experts_are(read_decoder(files), files, load_model(directory))


@pytest.mark.parametrize("family", MIXTURES)
def test_description_gives_transformers_logits(tiny_model, family):
    directory = tiny_model(family)
    files = open_model(directory)
    check_logits(read_decoder(files), files, directory)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe-plain", "qwen3-moe-bfloat16", "olmoe"])
def test_stacked_experts_are_cut_in_place(tiny_model, tmp_path, family, is_fused):
    directory = tiny_model(family)
    files = open_model(write_stacked(directory, tmp_path / "stacked", is_fused=is_fused))
    cfg = read_decoder(files)
    assert check_tensors(cfg, files.tensors) == []
    check_experts_are(cfg, files, load_model(directory))


def test_a_model_in_shards_has_its_experts_in_several_files(tiny_model):
    directory = tiny_model("qwen3-moe", max_shard_size="100KB")
    files = open_model(directory)
    cfg = read_decoder(files)
    matrices = [expert.down for layer in read_experts(cfg, files) for expert in layer]
    assert len({matrix.path for matrix in matrices}) > 1
    check_experts_are(cfg, files, load_model(directory))


@pytest.mark.parametrize("family", IN_GGUF)
def test_gguf_gives_transformers_logits(tiny_model, tmp_path, family):
    directory = tiny_model(family)
    files = open_model(write_mixture_gguf(directory, tmp_path / "mixture.gguf"))
    cfg = read_decoder(files)
    assert check_tensors(cfg, files.tensors) == []
    original = read_config(open_model(directory).config).moe
    if family == "gpt-oss":  # a lower limit than the one that llama.cpp has built in
        assert cfg.moe == replace(original, swiglu_limit=7.0)
        cfg = replace(cfg, moe=original)
    assert cfg.moe == original
    check_experts_are(cfg, files, load_model(directory))
    check_logits(cfg, files, directory)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4", "BF16"])
@pytest.mark.parametrize("family", ["qwen3-moe-norm", "gpt-oss-plain"])
def test_packed_experts_of_gguf(tiny_model, tmp_path, family, kind):
    packed = gguf.GGMLQuantizationType[kind]
    rounded = round_experts(tiny_model(family), tmp_path / "rounded", packed)
    files = open_model(write_mixture_gguf(rounded, tmp_path / "mixture.gguf", kind=packed))
    cfg = read_decoder(files)
    assert read_experts(cfg, files)[0][0].up.layout == kind.lower()
    check_experts_are(cfg, files, load_model(rounded))
    check_logits(cfg, files, rounded)


def test_gguf_of_2023_has_experts_apart(tiny_model, tmp_path):
    directory = tiny_model("mixtral")
    files = open_model(write_mixture_gguf(directory, tmp_path / "old.gguf", is_apart=True))
    check_experts_are(read_decoder(files), files, load_model(directory))


def test_groups_come_in_execution_order():
    cfg = read_config(CONFIG | {"mlp_only_layers": [0]})
    groups = describe_groups(cfg)
    dense = ["qkv", "attn", "o", "gate_up", "down"]
    sparse = ["qkv", "attn", "o", "router", "shared_gate_up", "experts", "shared_down"]
    expected = [*(f"0.{name}" for name in dense)]
    expected += [f"{layer}.{name}" for layer in (1, 2) for name in sparse]
    assert [group.name for group in groups] == ["embed", *expected, "lm_head"]
    by_name = {group.name: group for group in groups}
    router, experts = by_name["1.router"], by_name["1.experts"]
    assert (router.kind, experts.kind) == ("router", "experts")
    assert [(part.tensor, part.rows, part.cols) for part in router.parts] == [
        ("model.layers.1.mlp.gate.weight", 4, 64),
        ("model.layers.1.mlp.shared_expert_gate.weight", 1, 64),
    ]
    assert experts.parts == ()
    assert by_name["1.shared_gate_up"].kind == "gate_up"
    assert by_name["1.shared_down"].kind == "down"
    assert [part.rows for part in by_name["1.shared_gate_up"].parts] == [128, 128]
    norm = "model.layers.1.post_attention_layernorm.weight"
    assert router.norm == experts.norm == by_name["1.shared_gate_up"].norm == norm
    assert by_name["1.shared_down"].norm is None
    names = [group.name for group in describe_groups(read_config(CONFIG | MIXTRAL))]
    assert names[4:6] == ["0.router", "0.experts"]


def test_gpt_oss_has_biases_and_sinks():
    cfg = read_config(CONFIG | GPT_OSS)
    by_name = {group.name: group for group in describe_groups(cfg)}
    assert by_name["1.attn"].sinks == "model.layers.1.self_attn.sinks"
    assert by_name["1.router"].parts[0].tensor == "model.layers.1.mlp.router.weight"
    assert by_name["1.router"].parts[0].bias == "model.layers.1.mlp.router.bias"
    shapes = expected_tensors(cfg)
    assert [shapes[name] for name in by_name["1.experts"].expert_biases] == [
        (4, 160),
        (4, 160),
        (4, 64),
    ]
    assert cfg.windows == (128, None, 128)
    assert cfg.rope.rope_type == "yarn"
    assert (cfg.rope.theta, cfg.rope.truncate) == (150_000.0, False)
    assert cfg.moe == MoeConfig(4, 2, 160, (0, 1, 2), False, True, True, 0, False, True, 7.0, 1.702)


def test_which_layers_are_sparse():
    def sparse(**changes: object) -> tuple[int, ...]:
        moe = read_config(CONFIG | {"num_hidden_layers": 6} | changes).moe
        assert moe is not None
        return moe.sparse_layers

    assert sparse() == (0, 1, 2, 3, 4, 5)
    assert sparse(decoder_sparse_step=2) == (1, 3, 5)
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[3]) == (1, 5)
    assert sparse(mlp_only_layers=[0, 9]) == (1, 2, 3, 4, 5)


def test_a_mixture_without_sparse_layers_is_dense():
    cfg = read_config(CONFIG | {"decoder_sparse_step": 4})
    assert cfg.moe is None
    assert "0.gate_up" in [group.name for group in describe_groups(cfg)]


def test_windows_of_qwen2_moe_end_before_max_window_layers():
    sliding = {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 5}
    assert read_config(CONFIG | sliding | {"max_window_layers": 3}).windows == (
        9, None, 9, None, None,
    )  # fmt: skip
    assert read_config(CONFIG | sliding | {"use_sliding_window": False}).windows == (None,) * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, r"num_experts \(or num_local_experts\) is missing"),
        ({"num_experts": 0}, "num_experts must be positive; got 0"),
        ({"num_local_experts": 8}, r"must be the same as num_experts \(4\); got 8"),
        ({"num_experts_per_tok": 5}, r"at most the number of experts \(4\); got 5"),
        ({"num_experts_per_tok": 2.0}, "num_experts_per_tok must be an integer; got 2.0"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size must be positive; got -1"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be pos"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false; got 'yes'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be positive; got 0"),
        ({"mlp_only_layers": [1.5]}, r"mlp_only_layers must be a list .*got \[1.5\]"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layer numbers; got 3"),
        ({"n_group": 8}, "n_group must be absent or 1 for qwen2_moe; got 8"),
        ({"scoring_func": "sigmoid"}, "scoring_func must be absent or softmax .*got 'sigmoid'"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor must be absent or 1.0"),
        ({"model_type": "qwen3_moe"}, "shared_expert_intermediate_size must be absent for qwen3"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv must be absent or None for olmoe"),
        (MIXTRAL | {"norm_topk_prob": False}, "norm_topk_prob must be true for mixtral"),
        (MIXTRAL | {"decoder_sparse_step": 2}, "decoder_sparse_step must be absent for mixtral"),
        (MIXTRAL | {"mlp_only_layers": [1]}, "mlp_only_layers must be absent for mixtral"),
        (GPT_OSS | {"sliding_window": None}, "sliding_window must be set for gpt_oss"),
        (GPT_OSS | {"swiglu_limit": -1.0}, "swiglu_limit must be a positive number; got -1.0"),
        (GPT_OSS | {"quantization_config": {"quant_method": "gptq"}}, "absent or mxfp4 .*'gptq'"),
        (MIXTRAL | {"quantization_config": {"quant_method": "mxfp4"}}, "be absent .*'mxfp4'"),
    ],
)  # fmt: skip
def test_refuses_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        read_config(CONFIG | changes)


def test_experts_that_do_not_fit_the_configuration_are_named():
    cfg = read_config(CONFIG)
    assert check_tensors(cfg, sources(cfg)) == []
    one = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = sources(cfg)
    del tensors[one]
    with pytest.raises(ModelError, match=f"with 4 experts must have {one}; not in its files"):
        check_tensors(cfg, tensors)
    with pytest.raises(ModelError, match=rf"{one} must be \[96, 64\], got \[64, 96\]"):
        check_tensors(cfg, sources(cfg) | {one: Source((64, 96))})
    with pytest.raises(ModelError, match=f"{one}: rows in q4_K must hold a multiple of 256"):
        check_tensors(cfg, sources(cfg) | {one: Source((96, 64), "q4_K")})
    more = "model.layers.1.mlp.experts.4.up_proj.weight"
    with pytest.raises(ModelError, match=f"{more}: num_experts must cover every expert .*got 4"):
        check_tensors(cfg, sources(cfg) | {more: Source((96, 64))})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.experts.0.up_proj.bias",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.shared_experts.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ],
)
def test_tensors_that_would_take_part_are_refused(name):
    cfg = read_config(CONFIG)
    with pytest.raises(ModelError, match=f"{name}: present in the files, but the qwen2_moe config"):
        check_tensors(cfg, sources(cfg) | {name: Source((64,))})


def test_fused_shapes_that_do_not_fit_are_named():
    cfg = read_config(CONFIG)
    apart = sources(cfg)
    prefix = "model.layers.0.mlp.experts"
    others = {name: source for name, source in apart.items() if not name.startswith(prefix)}
    down = {f"{prefix}.down_proj": Source((4, 64, 96))}
    fused = {f"{prefix}.gate_up_proj": Source((4, 192, 64))}
    assert check_tensors(cfg, others | down | fused) == []
    for shape in ((4, 96, 64), (8, 192, 64), (4, 64, 192)):
        wrong = {f"{prefix}.gate_up_proj": Source(shape)}
        with pytest.raises(ModelError, match=r"gate_up_proj must be \[4, 192, 64\], got"):
            check_tensors(cfg, others | down | wrong)
    with pytest.raises(ModelError, match=f"with 4 experts must have {prefix}.down_proj"):
        check_tensors(cfg, others | fused)
    both = f"{prefix}.0.up_proj.weight"
    with pytest.raises(ModelError, match=f"{both}: present in the files, but"):
        check_tensors(cfg, others | down | fused | {both: apart[both]})


@pytest.mark.parametrize("shards", ["5GB", "60KB"])
@pytest.mark.parametrize("options", [{}, {"hidden_size": 96, "swiglu_limit": 7.0}])
def test_published_experts_of_gpt_oss(tiny_model, tmp_path, options, shards):
    """MXFP4 in blocks and scales, which transformers expands when it loads them."""
    directory = write_published_gpt_oss(
        tiny_model("gpt-oss", **options), tmp_path / "published", max_shard_size=shards
    )
    files = open_model(directory)
    cfg = read_decoder(files)
    assert check_tensors(cfg, files.tensors) == []
    first = read_scattered_experts(cfg, files)[0][0]
    assert (first.gate_up.layout, first.down.layout) == ("mxfp4", "mxfp4")
    assert len({source.path for source in files.tensors.values()}) == 1 or shards == "60KB"
    check_experts_are(cfg, files, load_model(directory, torch.float32))
    check_logits(cfg, files, directory)


def test_the_embedding_says_the_type_where_the_config_does_not(tiny_model, tmp_path):
    for family, dtype in (("gpt-oss", "float32"), ("gpt-oss-bfloat16", "bfloat16")):
        directory = write_published_gpt_oss(tiny_model(family), tmp_path / family)
        path = directory / "config.json"
        config = json.loads(path.read_text())
        del config["dtype"]
        path.write_text(json.dumps(config))
        assert read_decoder(open_model(directory)).dtype == dtype


def test_gate_and_up_of_gpt_oss_are_apart_in_gguf():
    cfg = read_config(CONFIG | GPT_OSS)
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    with pytest.raises(ModelError, match=f"{fused}: gate and up of gpt_oss must be tensors of th"):
        check_tensors(cfg, sources(cfg) | {fused: Source((4, 320, 64))})


def gpt_oss_sources(cfg: DecoderConfig, changes: dict[str, Source | None]) -> dict[str, Source]:
    """What a published directory holds, with some tensors of layer 1's experts changed."""
    found = {name: Source(shape) for name, shape in expected_tensors(cfg).items()}
    for layer in range(cfg.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        found[f"{prefix}.gate_up_proj_blocks"] = Source((4, 320, 2, 16), "u8")
        found[f"{prefix}.gate_up_proj_scales"] = Source((4, 320, 2), "u8")
        found[f"{prefix}.down_proj_blocks"] = Source((4, 64, 5, 16), "u8")
        found[f"{prefix}.down_proj_scales"] = Source((4, 64, 5), "u8")
    for name, source in changes.items():
        if source is None:
            del found[f"model.layers.1.mlp.experts.{name}"]
        else:
            found[f"model.layers.1.mlp.experts.{name}"] = source
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"down_proj_scales": None}, r"with 4 experts must have .*\.1\..*down_proj_scales; not in"),
        (
            {"gate_up_proj_blocks": Source((4, 320, 1, 16), "u8")},
            r"gate_up_proj_blocks must be \[4, 320, 2, 16\], got \[4, 320, 1, 16\]",
        ),
        (
            {"gate_up_proj_scales": Source((4, 320, 3), "u8")},
            r"gate_up_proj_scales must be \[4, 320, 2\], got \[4, 320, 3\]",
        ),
        ({"down_proj_blocks": Source((4, 64, 5, 16), "bf16")}, "dtype must be U8; got BF16"),
        (
            {"down_proj_transposed": Source((4, 64, 160))},
            r"experts\.down_proj must be \[4, 160, 64\], got \[4, 64, 160\]",
        ),
        (
            {"down_proj_transposed": Source((4, 160, 64))},
            "down_proj_(blocks|scales): present in the files, but the gpt_oss config",
        ),
        (
            {f"down_proj_{part}": None for part in ("blocks", "scales")},
            "with 4 experts must have .*down_proj_blocks; not in its files",
        ),
    ],
)
def test_published_experts_that_do_not_fit_are_named(changes, message):
    cfg = read_config(CONFIG | GPT_OSS)
    assert check_tensors(cfg, gpt_oss_sources(cfg, {})) == []
    with pytest.raises(ModelError, match=message):
        check_tensors(cfg, gpt_oss_sources(cfg, changes))


def test_rows_of_published_experts_are_whole_groups():
    cfg = read_config(CONFIG | GPT_OSS | {"intermediate_size": 100})
    with pytest.raises(ModelError, match="down_proj_blocks: rows in mxfp4 must hold a multiple of"):
        check_tensors(cfg, gpt_oss_sources(cfg, {}))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("self_attn.q_proj.weight", torch.zeros(64, 64, dtype=torch.uint8), "dtype must be F32, F"),
        ("mlp.experts.gate_up_proj_bias", torch.zeros(6, 191), "gate and up in turn.*got 191"),
        ("mlp.experts.down_proj", torch.zeros(6, 64, 96), r"down_proj must be \[6, 96, 64\], got"),
        ("mlp.experts.gate_up_proj_bias", torch.zeros(6, 96), r"gate_proj_bias must be \[6, 96\]"),
    ],
)
def test_directories_of_gpt_oss_that_do_not_fit(tiny_model, tmp_path, name, tensor, message):
    from safetensors.torch import load_file, save_file

    directory = tiny_model("gpt-oss")
    tensors = load_file(directory / "model.safetensors")
    tensors[f"model.layers.1.{name}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        read_decoder(open_model(tmp_path))


def test_biases_of_experts_are_not_packed():
    cfg = read_config(CONFIG | GPT_OSS)
    bias = "model.layers.2.mlp.experts.down_proj_bias"
    with pytest.raises(ModelError, match=f"{bias}: a vector must be f32, f16 or bf16; got q8_0"):
        check_tensors(cfg, sources(cfg) | {bias: Source((4, 64), "q8_0")})


def test_names_of_mixtral_must_not_meet(tiny_model, tmp_path):
    from safetensors.torch import load_file, save_file

    directory = tiny_model("mixtral")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(5, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.gate\.weight is there twice"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3-moe", {"expert_count": None}, "qwen3moe.expert_count must be a positive whole"),
        ("qwen3-moe", {"expert_used_count": 0}, "qwen3moe.expert_used_count must be a positive"),
        ("qwen3-moe", {"expert_group_count": 4}, r"expert_group_count must be absent or one of"),
        ("qwen3-moe", {"expert_gating_func": 2}, r"expert_gating_func must be .*\(0, 1\).*got 2"),
        ("qwen3-moe", {"expert_weights_norm": False}, r"expert_weights_norm must be .*\(True,\)"),
        ("qwen3-moe", {"leading_dense_block_count": 1}, "leading_dense_block_count must be"),
        ("gpt-oss", {"expert_gating_func": 1}, r"expert_gating_func must be .*\(0, 3\).*got 1"),
        ("gpt-oss", {"attention.sliding_window": None}, "sliding_window must be a positive whole"),
    ],
)
def test_routers_of_other_gguf_files_are_refused(tiny_model, tmp_path, family, fields, message):
    path = write_mixture_gguf(tiny_model(family), tmp_path / "mixture.gguf", fields=fields)
    with pytest.raises(ModelError, match=message):
        open_model(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_count": 5}, r"mlp\.gate\.weight must be \[5, 64\], got \[6, 64\]"),
        ({"expert_used_count": 7}, r"at most the number of experts \(6\); got 7"),
        (
            {"expert_feed_forward_length": 64},
            r"layers\.0\.mlp\.experts\.gate_proj must be \[6, 64, 64\], got \[6, 96, 64\]",
        ),
    ],
)
def test_gguf_that_does_not_fit_its_fields(tiny_model, tmp_path, fields, message):
    path = write_mixture_gguf(tiny_model("qwen3-moe"), tmp_path / "mixture.gguf", fields=fields)
    with pytest.raises(ModelError, match=message):
        read_decoder(open_model(path))


def test_mixtures_are_not_packed(tiny_model):
    with pytest.raises(ModelError, match="only a dense model can be packed; qwen3_moe is not"):
        check_packable(open_model(tiny_model("qwen3-moe")), "q4_0")


def test_dense_models_have_no_experts(tiny_model):
    files = open_model(tiny_model("llama2"))
    cfg = read_decoder(files)
    assert cfg.moe is None
    assert read_experts(cfg, files) == ()
