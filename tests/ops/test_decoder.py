"""The description of a decoder against transformers: its configs, its tensors, its logits."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_forward import PlainForward
from safetensors import safe_open
from tiny import FAMILIES, reference_logits, tiny_tokens
from transformers import AutoConfig

from shadowlane.ops.decoder import (
    DecoderConfig,
    check_tensors,
    describe_groups,
    expected_tensors,
    read_config,
    read_decoder,
)
from shadowlane.ops.errors import ModelError
from shadowlane.ops.files import TensorSource, open_model

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


@dataclass(frozen=True, slots=True)
class Source:
    """As much of a tensor of a weight file as the check looks at."""

    shape: tuple[int, ...]
    layout: str = "f32"


def load(directory: Path) -> tuple[DecoderConfig, dict[str, torch.Tensor]]:
    cfg = read_config(json.loads((directory / "config.json").read_text()))
    with safe_open(directory / "model.safetensors", "pt") as file:
        return cfg, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def sources(cfg: DecoderConfig) -> dict[str, Source]:
    return {name: Source(shape) for name, shape in expected_tensors(cfg).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_what_transformers_reads(tiny_model, family):
    directory = tiny_model(family)
    cfg, weights = load(directory)
    reference = AutoConfig.from_pretrained(directory)
    heads = reference.num_attention_heads
    assert cfg.family == reference.model_type
    assert cfg.head_dim == (getattr(reference, "head_dim", None) or reference.hidden_size // heads)
    assert cfg.num_kv_heads == reference.num_key_value_heads
    assert cfg.tied_embeddings == reference.tie_word_embeddings
    assert cfg.dtype == str(reference.dtype).removeprefix("torch.")
    assert cfg.norm_eps == reference.rms_norm_eps
    assert cfg.eos_token_ids == (2,)
    assert cfg.bos_token_id == 1
    assert len(cfg.windows) == cfg.num_layers == reference.num_hidden_layers
    expected = expected_tensors(cfg)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, cfg.dtype)}
    assert check_tensors(cfg, sources(cfg)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_description_gives_transformers_logits(tiny_model, family):
    directory = tiny_model(family)
    cfg, weights = load(directory)
    token_ids = tiny_tokens(33)
    chunks = [19, 1, 1, 12]
    forward, start, rows = PlainForward(cfg, weights), 0, []
    for length in chunks:
        rows.append(forward(token_ids[start : start + length]))
        start += length
    reference = reference_logits(directory, token_ids, chunks, dtype="float32")
    np.testing.assert_allclose(np.concatenate(rows), reference, rtol=0, atol=5e-5)
    assert reference.std() > 0.5  # otherwise the tolerance would say little


def test_windows_follow_each_family():
    qwen, mistral = CONFIG | QWEN2, CONFIG | MISTRAL
    sliding = {"use_sliding_window": True, "sliding_window": 9}
    assert read_config(CONFIG).windows == (None, None)
    assert read_config(mistral).windows == (4096, 4096)
    assert read_config(mistral | {"sliding_window": None}).windows == (None, None)
    assert read_config(mistral | {"sliding_window": 7}).windows == (7, 7)
    assert read_config(qwen | {"sliding_window": 9}).windows == (None, None)
    assert read_config(qwen | sliding | {"max_window_layers": 1}).windows == (None, 9)
    assert read_config(qwen | sliding).windows == (None, None)  # max_window_layers is 28
    layer_types = {"layer_types": ["sliding_attention", "full_attention"]}
    assert read_config(qwen | sliding | layer_types).windows == (9, None)


def test_groups_come_in_execution_order():
    cfg = read_config(CONFIG)
    groups = describe_groups(cfg)
    layer = ["qkv", "attn", "o", "gate_up", "down"]
    names = ["embed", *(f"{i}.{kind}" for i in range(2) for kind in layer), "lm_head"]
    assert [group.name for group in groups] == names
    by_name = {group.name: group for group in groups}
    assert [part.rows for part in by_name["1.qkv"].parts] == [64, 32, 32]
    assert by_name["1.qkv"].norm == "model.layers.1.input_layernorm.weight"
    assert by_name["1.gate_up"].norm == "model.layers.1.post_attention_layernorm.weight"
    assert by_name["lm_head"].norm == "model.norm.weight"
    assert by_name["lm_head"].parts[0].tensor == "lm_head.weight"
    assert by_name["embed"].parts[0].tensor == "model.embed_tokens.weight"


def test_tied_embeddings_are_one_matrix():
    groups = describe_groups(read_config(CONFIG | {"tie_word_embeddings": True}))
    assert groups[0].parts == ()
    assert groups[-1].parts[0].tensor == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type must be one of llama, .*; got 'gemma2'"),
        ({"model_type": None}, "model_type must be one of"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures must be"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu; got 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config .*'gptq'"),
        ({"hidden_size": 0}, "hidden_size must be positive; got 0"),
        ({"hidden_size": 64.0}, "hidden_size must be an integer; got 64.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer; got True"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be positive; got -1"),
        ({"num_key_value_heads": 3}, r"num_attention_heads .* num_key_value_heads \(3\); got 4"),
        ({"hidden_size": 66}, "hidden_size must be a multiple"),
        ({"head_dim": 15}, "head_dim must be even; got 15"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a positive number; got 0.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number; got nan"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1; got 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type must be one of .*'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing from the config"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a positive number"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters must be the same"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"sliding_window": 64}, "sliding_window must be absent for llama; got 64"),
        ({"layer_types": ["full_attention"]}, "layer_types must have 2 entries"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types must be .*chunked"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types must all be full_attention"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false; got 'yes'"),
        ({"dtype": "float8_e4m3fn"}, "dtype must be .*; got 'float8_e4m3fn'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        (MISTRAL | {"attention_bias": True}, "attention_bias"),
        (QWEN2 | {"mlp_bias": True}, "mlp_bias must be false"),
        (
            QWEN2 | {"layer_types": ["sliding_attention"] * 2},
            "use_sliding_window and sliding_window must be set",
        ),
    ],
)  # fmt: skip
def test_refuses_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        read_config(CONFIG | changes)


@pytest.mark.parametrize("key", sorted(CONFIG.keys() - {"architectures", "num_key_value_heads"}))
def test_a_missing_key_is_named(key):
    config = {name: value for name, value in CONFIG.items() if name != key}
    with pytest.raises(ModelError, match=key):
        read_config(config)


def test_both_spellings_of_the_data_type_and_of_lists_of_ids():
    assert read_config(CONFIG).dtype == "float32"
    assert read_config(CONFIG, default_dtype="float16").dtype == "float16"
    assert read_config(CONFIG | {"torch_dtype": "torch.bfloat16"}).dtype == "bfloat16"
    assert read_config(CONFIG | {"eos_token_id": [5, 9]}).eos_token_ids == (5, 9)
    assert read_config(CONFIG | {"pretraining_tp": 2}).eos_token_ids == ()


def test_context_counts_the_scaling():
    def context(parameters: dict) -> int:
        return read_config(CONFIG | {"rope_parameters": parameters}).max_context

    assert context({}) == 512
    assert context({"rope_type": "dynamic", "factor": 4.0}) == 2048
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert context(yarn) == 1024
    low_high = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert context({"rope_type": "llama3", "factor": 8.0, **low_high}) == 512


def test_qwen2_has_biases_whatever_the_config_says():
    for says in ({}, {"attention_bias": True}, {"attention_bias": False}):
        cfg = read_config(CONFIG | QWEN2 | says)
        assert (cfg.qkv_bias, cfg.o_bias) == (True, False)


def test_reads_files_and_the_factors_beside_them(tiny_model, tmp_path):
    files = open_model(tiny_model("qwen3-window"))
    assert read_decoder(files) == read_config(files.config)
    path = tmp_path / "factors.bin"
    path.write_bytes(b"ggml" + np.arange(1, 9, dtype="<f4").tobytes())
    files = open_model(tiny_model("llama2"))
    factors = TensorSource("rope_freqs.weight", str(path), 4, 32, (8,), "f32")
    cfg = read_decoder(replace(files, rope_factors=factors))
    assert cfg.rope.factors == (1, 2, 3, 4, 5, 6, 7, 8)


def test_rope_factors_are_kept_and_counted():
    assert read_config(CONFIG, rope_factors=[1.0] * 8).rope.factors == (1.0,) * 8
    with pytest.raises(ModelError, match="rope_freqs must have 8 values; got 4"):
        read_config(CONFIG, rope_factors=[1.0] * 4)


def test_missing_and_misshaped_tensors_are_named():
    cfg = read_config(CONFIG)
    tensors = sources(cfg)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ModelError, match=r"must have model.layers.1.self_attn.k_proj.weight; not"):
        check_tensors(cfg, tensors)
    tensors = sources(cfg) | {"lm_head.weight": Source((64, 320))}
    with pytest.raises(ModelError, match=r"lm_head.weight must be \[320, 64\], got \[64, 320\]"):
        check_tensors(cfg, tensors)
    tensors = sources(cfg)
    del tensors["lm_head.weight"]
    with pytest.raises(ModelError, match=r"must have lm_head\.weight"):
        check_tensors(cfg, tensors)


def test_unexpected_tensors():
    cfg = read_config(CONFIG)
    tied = replace(cfg, tied_embeddings=True)
    assert check_tensors(tied, sources(cfg)) == []
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": Source((8,)),
        "score.weight": Source((2, 64)),
    }
    assert check_tensors(cfg, sources(cfg) | harmless) == ["score.weight"]
    for name in (
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.k_norm.weight",
        "lm_head.bias",
        "model.layers.2.mlp.up_proj.weight",
    ):
        with pytest.raises(ModelError, match=name):
            check_tensors(cfg, sources(cfg) | {name: Source((64,))})


def test_rows_are_whole_packed_blocks():
    cfg = read_config(CONFIG)  # rows of 64 and 160 elements
    packed = {
        name: Source(shape, "q4_1") if len(shape) == 2 else Source(shape)
        for name, shape in expected_tensors(cfg).items()
    }
    assert check_tensors(cfg, packed) == []
    down = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(ModelError, match=f"{down}: rows in q6_K must hold a multiple of 256"):
        check_tensors(cfg, packed | {down: Source((64, 160), "q6_K")})
    norm = {"model.norm.weight": Source((64,), "q8_0")}
    with pytest.raises(ModelError, match=r"model.norm.weight: a vector must be f32"):
        check_tensors(cfg, packed | norm)
