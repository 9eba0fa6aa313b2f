"""Hugging Face directories: what `safetensors` writes is read as it is, nothing damaged passes."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from filemaking import random_tensors, safetensors_bytes, write_directory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowlane.ops.errors import ModelError
from shadowlane.ops.files import ModelFiles, open_model

INDEX = "model.safetensors.index.json"


def check_contents(files: ModelFiles, tensors: dict) -> None:
    assert files.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        source = files.tensors[name]
        assert source.shape == tensor.shape
        assert source.layout == {"float16": "f16", "float32": "f32"}[str(tensor.dtype)]
        content = Path(source.path).read_bytes()
        assert content[source.offset : source.offset + source.nbytes] == tensor.tobytes()


def two_shards() -> dict[str, dict]:
    tensors = random_tensors()
    names = list(tensors)
    return {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[::2]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[1::2]},
    }


def test_a_single_file(tmp_path: Path) -> None:
    tensors = write_directory(tmp_path / "model")
    files = open_model(tmp_path / "model")
    check_contents(files, tensors)
    assert files.kind == "safetensors"
    assert files.config == {"model_type": "llama", "hidden_size": 64}
    assert files.rope_pairing == "half"
    assert files.gguf_metadata is None
    with pytest.raises(ModelError, match="must have the metadata field"):
        files.gguf_field("general.name")


def test_bfloat16_scalars_and_empty_tensors(tmp_path: Path) -> None:
    write_directory(tmp_path)
    tensors = {
        "weight": torch.randn(6, 5).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = open_model(tmp_path)
    assert (files.tensors["weight"].layout, files.tensors["weight"].nbytes) == ("bf16", 60)
    assert (files.tensors["scalar"].shape, files.tensors["scalar"].nbytes) == ((), 4)
    assert files.tensors["empty"].nbytes == 0


def test_shards_and_files_that_the_index_does_not_name(tmp_path: Path) -> None:
    tensors = write_directory(tmp_path, two_shards())
    (tmp_path / "consolidated.safetensors").write_bytes(b"not for us")
    (tmp_path / "pytorch_model.bin").write_bytes(b"nor this")
    check_contents(open_model(tmp_path), tensors)


def test_a_tensor_that_the_index_does_not_name_may_be_of_any_type(tmp_path: Path) -> None:
    write_directory(tmp_path, two_shards())
    shard = "model-00001-of-00002.safetensors"
    extra = {"positions": torch.arange(4), "weight": torch.ones(2)}
    safetensors.torch.save_file(extra, tmp_path / shard)
    index = {"weight_map": {"weight": shard}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert list(open_model(tmp_path).tensors) == ["weight"]
    index["weight_map"]["positions"] = shard
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="'positions': dtype must be F32, F16 or BF16; got 'I64'"):
        open_model(tmp_path)


def test_every_missing_shard_is_listed(tmp_path: Path) -> None:
    write_directory(tmp_path, two_shards())
    for shard in two_shards():
        (tmp_path / shard).unlink()
    with pytest.raises(ModelError, match=r"2 of 2 missing: model-00001.*, model-00002"):
        open_model(tmp_path)


def test_a_truncated_shard_is_named_with_the_bytes_it_lacks(tmp_path: Path) -> None:
    write_directory(tmp_path, two_shards())
    shard = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 13)
    with pytest.raises(ModelError, match=r"model-00002-of.* 13 bytes are missing"):
        open_model(tmp_path)


def test_a_shard_without_a_tensor_the_index_puts_there(tmp_path: Path) -> None:
    write_directory(tmp_path, two_shards())
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["absent.weight"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00001.* 1 missing: 'absent.weight'"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/x.safetensors",
        "a\\b.safetensors",
        "x.bin",
        3,
        "\ud800.safetensors",
    ],
)
def test_an_index_may_not_lead_elsewhere(tmp_path: Path, shard: object) -> None:
    write_directory(tmp_path, two_shards())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": shard}}))
    with pytest.raises(ModelError, match="'weight' is said to be in"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "must be a JSON object; it is a list"),
        ('{"a": ' + "9" * 5000 + "}", "must be JSON"),
        (b"\xff\xfe", "must be JSON"),
    ],
)
def test_damaged_config(tmp_path: Path, content: str | bytes, message: str) -> None:
    write_directory(tmp_path)
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        open_model(tmp_path)


def test_directories_without_safetensors_say_what_they_hold(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither is there"):
        open_model(tmp_path)
    with open(tmp_path / "pytorch_model.bin", "wb") as file:
        pickle.dump({}, file)
    with pytest.raises(ModelError, match=r"pickle files are never loaded.*pytorch_model\.bin"):
        open_model(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"found only model-00001"):
        open_model(tmp_path)
    (tmp_path / "weights.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"give the \.gguf file itself: weights\.gguf"):
        open_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: No such file"):
        open_model(tmp_path)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be opened: No such file"):
        open_model(tmp_path / "absent")
    with pytest.raises(ModelError, match="must be a path"):
        open_model("a\0b")
    with pytest.raises(ModelError, match="File name too long"):
        open_model(tmp_path / ("x" * 300))
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="must be a regular file"):
        open_model(tmp_path / "pipe.gguf")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="give the directory"):
        open_model(tmp_path / "model.safetensors")
    write_directory(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read: No such file"):
        open_model(tmp_path / "model")


def test_no_read_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_directory(tmp_path)
    open_file = os.open

    def refuse(path: Path, flags: int) -> int:  # permissions do not bind root, who may run this
        if str(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied")
        return open_file(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read: Permission denied"):
        open_model(tmp_path)


def test_a_replaced_shard_is_noticed_and_changes_the_fingerprint(tmp_path: Path) -> None:
    write_directory(tmp_path, two_shards())
    files = open_model(tmp_path)
    files.check_unchanged()
    shard = tmp_path / "model-00001-of-00002.safetensors"
    found = shard.stat()
    copy = tmp_path / "copy"
    copy.write_bytes(shard.read_bytes())
    os.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))
    os.replace(copy, shard)
    with pytest.raises(ModelError, match="replaced by another file"):
        files.check_unchanged()
    assert open_model(tmp_path).fingerprint == files.fingerprint  # the same model, byte for byte
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 65}')
    assert open_model(tmp_path).fingerprint != files.fingerprint


def entry(dtype: object, shape: object, *span: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(span)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at least 8 bytes; it has 0"),
        (safetensors_bytes("{}", claimed_nbytes=2**63), "at most 100000000 bytes"),
        (safetensors_bytes("{}", claimed_nbytes=50), "needs 58 bytes, 48 are missing"),
        (safetensors_bytes("{"), "must be JSON"),
        (safetensors_bytes("[" * 50_000), "must be JSON"),
        (safetensors_bytes('{"a": {}, "a": {}}'), "'a' appears twice"),
        (safetensors_bytes({}), "must hold tensors"),
        (safetensors_bytes({"a": 3}), "'a': must have dtype, shape and data_offsets; got 3"),
        (safetensors_bytes({"a": entry(None, [1], 0, 4)}, bytes(4)), "dtype must be a name"),
        (safetensors_bytes({"a": entry("F64", [1], 0, 8)}, bytes(8)), "got 'F64'"),
        (safetensors_bytes({"a": entry("F32", [-1], 0, 4)}, bytes(4)), "list of at most 8 counts"),
        (safetensors_bytes({"a": entry("F32", [True], 0, 4)}, bytes(4)), "at most 8 counts"),
        (safetensors_bytes({"a": entry("F32", [1], 0)}, bytes(4)), r"must be \[start, end\]"),
        (safetensors_bytes({"a": entry("F32", [1], 4, 0)}, bytes(4)), r"must be \[start, end\]"),
        (safetensors_bytes({"a": entry("F32", [1], 0, 4.0)}, bytes(4)), r"must be \[start, end\]"),
        (
            safetensors_bytes({"a": entry("F32", [2**62] * 8, 0, 4)}, bytes(4)),
            "its data_offsets span 4",
        ),
        (safetensors_bytes({"a": entry("F32", [1], 4, 8)}, bytes(8)), "at byte 0 of the data"),
        (
            safetensors_bytes(
                {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, bytes(8)
            ),
            "'b' must begin where the one before ends, at byte 8 of the data; it begins at 4",
        ),
        (safetensors_bytes({"a": entry("F32", [1], 0, 4)}, bytes(3)), "1 bytes are missing"),
        (safetensors_bytes({"a": entry("F32", [1], 0, 4)}, bytes(5)), "holds 1 bytes more"),
    ],
)
def test_damaged_headers_are_refused_in_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    write_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        open_model(tmp_path)
    assert "\n" not in str(caught.value)


def open_or_refuse(root: Path) -> ModelFiles | None:
    """Open a directory that may be damaged. Whatever is accepted lies inside the file."""
    refusal = ""
    try:
        files = open_model(root)
    except ModelError as error:
        files, refusal = None, str(error)
    assert "\n" not in refusal
    if files is None:
        return None
    size = (root / "model.safetensors").stat().st_size
    for source in files.tensors.values():
        assert 8 <= source.offset <= source.offset + source.nbytes <= size
    return files


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
DESCRIPTION = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8"]) | JSON,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON,
    }
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    header=st.dictionaries(st.text(max_size=4), DESCRIPTION | JSON, max_size=3),
    data=st.binary(max_size=40),
)
def test_any_header_is_accepted_or_refused(tmp_path: Path, header: dict, data: bytes) -> None:
    write_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    open_or_refuse(tmp_path)


@pytest.fixture(scope="module")
def sound_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("sound")
    write_directory(root)
    return (root / "model.safetensors").read_bytes()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=6)), min_size=1, max_size=4
    )
)
def test_mutated_headers_never_raise_anything_else(
    sound_bytes: bytes, tmp_path: Path, changes: list[tuple[int, bytes]]
) -> None:
    write_directory(tmp_path)
    header_nbytes = 8 + struct.unpack_from("<Q", sound_bytes)[0]
    content = bytearray(sound_bytes)
    for position, replacement in changes:
        position %= header_nbytes
        content[position : position + len(replacement)] = replacement
    (tmp_path / "model.safetensors").write_bytes(content)
    open_or_refuse(tmp_path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_truncated_files_are_always_refused(
    sound_bytes: bytes, tmp_path: Path, fraction: float
) -> None:
    write_directory(tmp_path)
    content = sound_bytes[: int(fraction * len(sound_bytes))]
    (tmp_path / "model.safetensors").write_bytes(content)
    assert open_or_refuse(tmp_path) is None
