"""GGUF files: what the `gguf` package writes is read as it is, and nothing damaged gets through."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from filemaking import (
    HEAD_DIM,
    HIDDEN,
    VOCAB,
    decoder_shapes,
    gguf_bytes,
    gguf_field,
    gguf_string,
    gguf_tensor,
    write_gguf,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowlane.ops.errors import ModelError
from shadowlane.ops.files import ModelFiles, TensorSource, open_model
from shadowlane.ops.files.gguf_container import _LAYOUT_OF_TYPE, _OTHER_TYPES, LongArray
from shadowlane.ops.layouts import LAYOUTS

Kind = gguf.GGMLQuantizationType


def read(source: TensorSource) -> bytes:
    with open(source.path, "rb") as file:
        file.seek(source.offset)
        return file.read(source.nbytes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(
    "kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.MXFP4]
)
def test_bytes_shapes_and_names_are_those_the_package_wrote(path: Path, kind: Kind) -> None:
    stored = write_gguf(path, kind=kind)
    files = open_model(path)
    assert files.kind == "gguf"
    assert files.tensors.keys() == {name for _, name in decoder_shapes()}
    for (theirs, ours), shape in decoder_shapes().items():
        source = files.tensors[ours]
        assert source.shape == shape
        assert source.layout == (kind.name.lower() if len(shape) == 2 else "f32")
        assert read(source) == stored[theirs].tobytes()


def test_every_layout_agrees_with_the_package_on_type_numbers_and_sizes() -> None:
    for number, name in _LAYOUT_OF_TYPE.items():
        assert Kind(number).name.lower() == name.lower()
        block = (LAYOUTS[name].block_elements, LAYOUTS[name].block_nbytes)
        assert gguf.GGML_QUANT_SIZES[Kind(number)] == block
    assert set(_LAYOUT_OF_TYPE.values()) == LAYOUTS.keys()
    for number, name in _OTHER_TYPES.items():
        assert Kind(number).name == name


def test_config_is_in_the_words_of_hugging_face(path: Path) -> None:
    write_gguf(
        path,
        fields={
            "rope.freq_base": 500000.0,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.eot_token_id": 7,
        },
        leave_out=("output.weight",),
    )
    files = open_model(path)
    assert files.rope_pairing == "interleaved"
    assert files.rope_factors is None
    assert files.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": float(np.float32(1e-6)),
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "pad_token_id": None,
    }


def test_what_the_metadata_leaves_out_has_its_default(path: Path) -> None:
    write_gguf(path, architecture="qwen2", fields={"attention.head_count_kv": None}, kind=Kind.BF16)
    config = open_model(path).config
    assert config["rope_theta"] == 10000.0
    assert config["num_key_value_heads"] == 4
    assert config["eos_token_id"] is None
    assert config["tie_word_embeddings"] is False
    assert config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_pairs_halves_and_has_its_own_tensors(path: Path, architecture: str) -> None:
    extra = {
        "blk.0.attn_q.bias": np.ones(HIDDEN, np.float32),
        "blk.0.attn_k_norm.weight": np.ones(HEAD_DIM, np.float32),
    }
    write_gguf(path, architecture=architecture, extra=extra)
    files = open_model(path)
    assert files.rope_pairing == "half"
    assert files.config["model_type"] == architecture
    assert files.config["attention_bias"] is True
    assert files.tensors["model.layers.0.self_attn.q_proj.bias"].shape == (HIDDEN,)
    assert files.tensors["model.layers.0.self_attn.k_norm.weight"].shape == (HEAD_DIM,)


def test_a_window_makes_llama_a_mistral(path: Path) -> None:
    write_gguf(path, fields={"attention.sliding_window": 32})
    config = open_model(path).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 32)
    assert config["architectures"] == ["MistralForCausalLM"]


def test_rope_factors_of_llama_3_are_set_apart(path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    write_gguf(path, extra={"rope_freqs.weight": factors})
    files = open_model(path)
    assert files.rope_factors is not None
    assert read(files.rope_factors) == factors.tobytes()
    assert "rope_freqs.weight" not in files.tensors


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
            },
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.attn_factor": 0.5,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "attention_factor": pytest.approx(0.5 * (1 + 0.1 * np.log(4))),
            },
        ),
    ],
)
def test_rope_scaling(path: Path, fields: dict, expected: dict | None) -> None:
    write_gguf(path, fields=fields)
    assert open_model(path).config["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "must be none, linear or yarn; got 'longrope'"),
        ({"rope.dimension_count": 8}, "must be the head dimension 16"),
        ({"attention.value_length": 32}, "must be the head dimension 16"),
        ({"block_count": None}, "llama.block_count must be a positive whole number; got None"),
        ({"block_count": 2.0}, "llama.block_count must be a positive whole number; got 2.0"),
        ({"attention.head_count": [4, 2]}, r"head_count must be a positive whole number; got \[4"),
        ({"attention.layer_norm_rms_epsilon": None}, "rms_epsilon must be a positive number"),
        ({"rope.freq_base": float("nan")}, "freq_base must be a positive number; got nan"),
        ({"split.count": 3}, "one part of 3"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id must be a token id; got 'x'"),
    ],
)
def test_metadata_that_cannot_be_run_is_refused(path: Path, fields: dict, message: str) -> None:
    write_gguf(path, fields=fields)
    with pytest.raises(ModelError, match=message):
        open_model(path)


def test_a_head_count_for_each_layer_may_stand_if_all_are_the_same(path: Path) -> None:
    write_gguf(path, fields={"attention.head_count": [4, 4]})
    assert open_model(path).config["num_attention_heads"] == 4


def test_unknown_architectures_and_tensors_are_refused_by_name(path: Path) -> None:
    write_gguf(path, architecture="gemma3")
    with pytest.raises(ModelError, match=r"must be one of llama, qwen2, qwen3, .*; got 'gemma3'"):
        open_model(path)
    write_gguf(path, extra={"blk.0.ffn_gate_inp.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_gate_inp\.weight' has none"):
        open_model(path)
    write_gguf(path, leave_out=("token_embd.weight",))
    with pytest.raises(ModelError, match=r"token_embd.weight must be .* got None"):
        open_model(path)


def test_long_arrays_are_read_when_asked_for(path: Path) -> None:
    tokens = [f"token {index} ä" for index in range(3000)]
    write_gguf(path, tokens=tokens, fields={"tokenizer.ggml.merges": ["a b", "c d"]})
    files = open_model(path)
    assert files.gguf_metadata is not None
    stepped_over = files.gguf_metadata["tokenizer.ggml.tokens"]
    assert isinstance(stepped_over, LongArray)
    assert stepped_over.count == 3000
    assert files.gguf_field("tokenizer.ggml.tokens") == tokens
    assert files.gguf_field("tokenizer.ggml.scores") == [-float(index) for index in range(3000)]
    assert files.gguf_field("tokenizer.ggml.merges") == ["a b", "c d"]
    with pytest.raises(ModelError, match=r"must have the metadata field no\.such"):
        files.gguf_field("no.such")


def test_a_header_longer_than_the_first_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [f"token {index}" for index in range(3000)]
    stored = write_gguf(path, tokens=tokens)
    monkeypatch.setattr("shadowlane.ops.files.gguf_container._FIRST_READ_NBYTES", 100)
    files = open_model(path)
    assert files.gguf_field("tokenizer.ggml.tokens") == tokens
    assert read(files.tensors["lm_head.weight"]) == stored["output.weight"].tobytes()


def test_a_changed_file_is_noticed(path: Path) -> None:
    write_gguf(path, tokens=["a"] * 300)
    files = open_model(path)
    files.check_unchanged()
    first = files.fingerprint
    assert open_model(path).fingerprint == first

    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelError, match="it was written to"):
        files.check_unchanged()
    assert open_model(path).fingerprint != first
    with pytest.raises(ModelError, match="it was written to"):
        files.gguf_field("tokenizer.ggml.tokens")

    files = open_model(path)
    with open(path, "ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match="bytes and has"):
        files.check_unchanged()

    files = open_model(path)
    path.unlink()
    with pytest.raises(ModelError, match="cannot be found any more"):
        files.check_unchanged()


def test_opening_imports_nothing_heavy_and_writes_nothing(path: Path) -> None:
    write_gguf(path)
    path.chmod(0o444)
    path.parent.chmod(0o555)
    program = (
        "import sys; from shadowlane.ops.files import open_model; open_model(sys.argv[1]);"
        "heavy = {'numpy', 'numba', 'torch', 'transformers'}; print(heavy & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
    )
    path.parent.chmod(0o755)
    assert done.stdout == "set()\n"
    assert os.listdir(path.parent) == [path.name]


ONE_TENSOR = (gguf_tensor("output_norm.weight", (8,), 0, 0),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has at least 24 bytes; it has 0"),
        (gguf_bytes(magic=b"GGML"), "begins with b'GGML'"),
        (gguf_bytes(version=1), "version must be 2 or 3; got 1"),
        (gguf_bytes(version=3 << 24), "big endian"),
        (gguf_bytes(num_tensors=2**63), "hold at most 0; the header claims 9223372036854775808"),
        (gguf_bytes(num_fields=10**9), "number of metadata fields.*claims 1000000000"),
        (
            gguf_bytes(fields=(struct.pack("<QQ", 2**62, 0),)),
            "key: must be at most 65535 bytes",
        ),
        (gguf_bytes(fields=(gguf_field("k", 8, struct.pack("<Q", 2**40)),)), "at most 67108864"),
        (gguf_bytes(fields=(gguf_field("k", 8, struct.pack("<Q", 10**6)),)), "truncated: the head"),
        (gguf_bytes(fields=(gguf_field("k", 8, gguf_string(b"\xff")),)), "'k': must be UTF-8"),
        (gguf_bytes(fields=(gguf_field("k", 13, b""),)), "'k': its type must be 0 to 12; got 13"),
        (gguf_bytes(fields=(gguf_field("k", 0, b"\0"),) * 2), "'k' appears twice"),
        (
            gguf_bytes(fields=(gguf_field("k", 9, struct.pack("<IQ", 4, 2**40)),)),
            "'k': number of elements: .* claims 1099511627776",
        ),
        (
            gguf_bytes(fields=(gguf_field("k", 9, struct.pack("<IQ", 9, 1)),)),
            "an array must hold numbers, bools or strings; got type 9",
        ),
        (
            gguf_bytes(
                fields=(gguf_field("k", 9, struct.pack("<IQQ", 8, 300, 2**64 - 1) + bytes(3000)),)
            ),
            "truncated: the header goes on to byte 18446744073709551680 at least",
        ),
        (
            gguf_bytes(
                fields=(gguf_field("k", 9, struct.pack("<IQQ", 8, 300, 2**60) + bytes(3000)),)
            ),
            "truncated: the header goes on to byte 1152921504606847041 at least",
        ),
        (
            gguf_bytes(fields=(gguf_field("general.alignment", 4, struct.pack("<I", 24)),)),
            "alignment must be a power of two; got 24",
        ),
        (gguf_bytes(tensors=(gguf_tensor("w", (8,), 0, 4),)), "multiple of 32; got 4"),
        (gguf_bytes(tensors=(gguf_tensor("w", (8,), 16, 0),)), "'w': its type .* got IQ2_XXS"),
        (gguf_bytes(tensors=(gguf_tensor("w", (8,), 99, 0),)), "'w': its type .* got number 99"),
        (gguf_bytes(tensors=(gguf_tensor("w", (40,), 8, 0),)), "multiple of 32 elements; got 40"),
        (gguf_bytes(tensors=(gguf_tensor("w", (0,), 0, 0),)), "extents must be positive"),
        (gguf_bytes(tensors=(gguf_tensor("w", (1,) * 5, 0, 0),)), "1 to 4 dimensions; got 5"),
        (gguf_bytes(tensors=ONE_TENSOR * 2, data=bytes(64)), "'output_norm.weight' appears twice"),
        (gguf_bytes(tensors=ONE_TENSOR, data=bytes(31)), "truncated: .*; 1 bytes are missing"),
        (
            gguf_bytes(tensors=(gguf_tensor("w", (2**63, 2**63), 0, 0),)),
            "truncated: tensor 'w' ends at",
        ),
        (
            gguf_bytes(
                tensors=(gguf_tensor("v", (16,), 0, 0), gguf_tensor("w", (8,), 0, 32)),
                data=bytes(64),
            ),
            "'w': must not overlap 'v'",
        ),
        (gguf_bytes(tensors=ONE_TENSOR, data=bytes(32)), "general.architecture must be a text"),
        (gguf_bytes(version=2), "general.architecture must be a text; got None"),
    ],
)
def test_damaged_files_are_refused_in_one_line(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        open_model(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_with_line_breaks_still_gives_one_line(path: Path) -> None:
    path.write_bytes(gguf_bytes(tensors=(gguf_tensor("a\n\x1b[31mb", (8,), 99, 0),)))
    with pytest.raises(ModelError, match=r"tensor 'a\\n\\x1b\[31mb'") as caught:
        open_model(path)
    assert str(caught.value).isprintable()


def open_or_refuse(path: Path) -> ModelFiles | None:
    """Open a file that may be damaged. Whatever is accepted lies inside the file."""
    refusal = ""
    try:
        files = open_model(path)
    except ModelError as error:
        files, refusal = None, str(error)
    assert "\n" not in refusal
    if files is None:
        return None
    size = path.stat().st_size
    for source in files.tensors.values():
        assert source.offset >= 0
        assert source.offset + source.nbytes <= size
    return files


@pytest.fixture(scope="module")
def sound_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "sound.gguf"
    write_gguf(path, tokens=[f"t{index}" for index in range(300)])
    return path.read_bytes()


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_mutated_headers_never_raise_anything_else(
    sound_bytes: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    header_nbytes = 6000  # metadata, descriptions and the first weights
    content = bytearray(sound_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header_nbytes))
        replacement = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([0, 1, 2**31, 2**32, 2**63, 2**64 - 1]).map(
                    lambda number: struct.pack("<Q", number)
                ),
            )
        )
        content[position : position + len(replacement)] = replacement
    path = tmp_path / "mutated.gguf"
    path.write_bytes(content)
    open_or_refuse(path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_truncated_files_are_always_refused(
    sound_bytes: bytes, tmp_path: Path, fraction: float
) -> None:
    path = tmp_path / "truncated.gguf"
    path.write_bytes(sound_bytes[: int(fraction * len(sound_bytes))])
    assert open_or_refuse(path) is None
