"""A packed file opens again as the model that it was made of."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny import FAMILIES, write_tiny_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from shadowlane.ops.decoder import read_decoder
from shadowlane.ops.errors import ModelError
from shadowlane.ops.expand import expand_rows
from shadowlane.ops.files import ModelFiles, TensorSource, open_model
from shadowlane.ops.pack_model import PackedModel, pack_model
from shadowlane.ops.tokenizer import HUGGING_FACE_FIELD, load_tokenizer
from shadowlane.ops.tokenizer_sentencepiece import Sentencepiece, build_sentencepiece
from shadowlane.ops.tokenizer_to_gguf import PROBE

REFUSED = ("llama-dynamic", "qwen2-window", "qwen3-window")
PACKED = [name for name in FAMILIES if name not in REFUSED]


def values_of(source: TensorSource) -> np.ndarray:
    with open(source.path, "rb") as file:
        file.seek(source.offset)
        raw = np.frombuffer(file.read(source.nbytes), np.uint8)
    rows, cols = (1, *source.shape) if len(source.shape) == 1 else source.shape
    return expand_rows(source.layout, raw, rows, cols).reshape(source.shape)


def write(model: Path, layout: str, out: Path) -> tuple[ModelFiles, ModelFiles, PackedModel]:
    files = open_model(model)
    made = pack_model(files, layout, out, out.parent / "cache", lambda done: None)  # type: ignore[arg-type]
    assert made.nbytes == out.stat().st_size
    return files, open_model(out), made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(family: str) -> Path:
        # with a width of 96 all matrices have whole blocks, also those of heads of 24
        return write_tiny_model(tmp_path_factory.mktemp("model"), family, hidden_size=96)

    return make


@pytest.mark.parametrize("family", PACKED)
def test_configuration_and_weights_come_back(
    models: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    model = models(family)
    files, again, made = write(model, "q8_0", tmp_path / "packed.gguf")
    assert any("no tokenizer" in note for note in made.notes)
    assert load_tokenizer(again, tmp_path) is None
    before, after = read_decoder(files), read_decoder(again)
    for field in dataclasses.fields(before):
        if field.name in ("rope", "norm_eps", "dtype"):
            continue
        found, expected = getattr(after, field.name), getattr(before, field.name)
        if field.name == "family" and before.windows[0] is None:
            expected = expected.replace("mistral", "llama")  # without a window they are the same
        assert found == expected, field.name
    assert after.norm_eps == pytest.approx(before.norm_eps, rel=1e-6)
    pairs = before.head_dim // 2
    for name, source in again.tensors.items():
        found, expected = values_of(source), values_of(files.tensors[name])
        if again.rope_pairing == "interleaved" and ("q_proj" in name or "k_proj" in name):
            # row 2 i + j of a head is row i + j * pairs of the other order
            heads = len(found) // before.head_dim
            rows = [
                head * 2 * pairs + row // 2 + row % 2 * pairs
                for head in range(heads)
                for row in range(2 * pairs)
            ]
            expected = expected[rows]
        if found.ndim == 1:
            assert source.layout == "f32"
            assert np.array_equal(found, expected)
        else:
            assert source.layout == "q8_0"
            assert np.abs(found - expected).max() <= np.abs(expected).max() / 200


@pytest.mark.parametrize("family", PACKED)
def test_rotary_frequencies_come_back(
    models: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    from shadowlane.ops.rope import inv_freq

    files, again, _ = write(models(family), "q8_0", tmp_path / "packed.gguf")
    for length in (1, 500):
        expected, scale = inv_freq(read_decoder(files).rope, length)
        found, found_scale = inv_freq(read_decoder(again).rope, length)
        np.testing.assert_allclose(found, expected, rtol=3e-7)
        assert found_scale == pytest.approx(scale, rel=1e-6)


def test_four_bits_are_for_the_layers(models: Callable[[str], Path], tmp_path: Path) -> None:
    _, again, _ = write(models("llama2"), "q4_0", tmp_path / "packed.gguf")
    layouts = {name: source.layout for name, source in again.tensors.items()}
    assert layouts["model.embed_tokens.weight"] == layouts["lm_head.weight"] == "q8_0"
    assert layouts["model.layers.0.mlp.down_proj.weight"] == "q4_0"
    assert gguf.GGUFReader(tmp_path / "packed.gguf").get_field("general.file_type").parts[-1] == 2


@pytest.mark.parametrize("family", REFUSED)
def test_what_gguf_cannot_say_is_refused(
    models: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    with pytest.raises(ModelError, match=r"rope_type must be|sliding window of"):
        write(models(family), "q8_0", tmp_path / "packed.gguf")
    assert list(tmp_path.iterdir()) == []


def test_rows_of_odd_length_are_refused_by_name(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "llama2", intermediate_size=72)
    rule = r"layers.0.mlp.down_proj.weight: rows in q4_0 must hold a multiple of 32 .*; got 72"
    with pytest.raises(ModelError, match=rule):
        write(model, "q4_0", tmp_path / "packed.gguf")


def test_a_full_disk_and_a_failure_leave_nothing(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = models("llama2"), tmp_path / "packed.gguf"
    files = open_model(model)

    def stop(done: float) -> None:
        if done > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_model(files, "q8_0", out, tmp_path, stop)
    assert list(tmp_path.iterdir()) == []
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(ModelError, match=r"has 1000 free, \d+ too few"):
        pack_model(files, "q8_0", out, tmp_path, lambda done: None)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_or_gone_are_named(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models("llama2"), model)
    name = "model.layers.1.mlp.up_proj.weight"
    source = open_model(model).tensors[name]
    with open(source.path, "r+b") as file:
        file.seek(source.offset + 400)
        file.write(np.float32(np.nan).tobytes())
    with pytest.raises(ModelError, match=rf"{name}: values must be finite"):
        write(model, "q8_0", tmp_path / "packed.gguf")
    files = open_model(model)
    Path(source.path).unlink()
    with pytest.raises(ModelError, match=r"model.safetensors: cannot be read"):
        pack_model(files, "q8_0", tmp_path / "packed.gguf", tmp_path, lambda done: None)
    assert not (tmp_path / "packed.gguf").exists()


def test_a_packed_file_is_not_packed_again(models: Callable[[str], Path], tmp_path: Path) -> None:
    _, again, _ = write(models("llama2"), "q8_0", tmp_path / "packed.gguf")
    with pytest.raises(ModelError, match="this is GGUF already"):
        pack_model(again, "q4_0", tmp_path / "more.gguf", tmp_path, lambda done: None)


# -- tokenizers

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(split: str) -> Tokenizer:
    """A small BPE tokenizer trained on the probe, which splits as one of the known kinds do."""
    backend = Tokenizer(BPE(ignore_merges=split == "llama-bpe"))
    if split == "gpt-2":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        first = {
            "smollm": pre_tokenizers.Digits(individual_digits=True),
            "llama-bpe": pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
            "unknown": pre_tokenizers.Split(Regex(r"\p{N}|\s|[^\p{N}\s]+"), behavior="isolated"),
        }[split]
        second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "smollm")
        backend.pre_tokenizer = pre_tokenizers.Sequence([first, second])
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=310,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator([PROBE] * 3, trainer)
    backend.add_tokens([AddedToken("<|x|>", special=False)])
    return backend


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe", "unknown"])
def test_tokenizers_and_chat_templates_come_back(
    models: Callable[[str], Path], tmp_path: Path, split: str, adds_bos: bool
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models("llama2"), model)
    backend = byte_level(split)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    (model / "tokenizer.json").write_text(backend.to_str())
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    template = "{{ bos_token }}{% for m in messages %}<|x|>{{ m.content }}{% endfor %}"
    settings = {**named, "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    files, again, made = write(model, "q8_0", tmp_path / "packed.gguf")
    before, after = load_tokenizer(files, tmp_path), load_tokenizer(again, tmp_path)
    assert before is not None
    assert after is not None
    for text in ("", "It's 12345 o'clock", PROBE, "a<|x|>b</s>"):
        ids = before.encode(text)
        assert after.encode(text) == ids
        assert after.decode(ids) == before.decode(ids)
    messages = [{"role": "user", "content": "hello 42"}]
    assert after.apply_chat_template(messages) == before.apply_chat_template(messages)
    assert after.eos_token_ids == before.eos_token_ids == (2,)
    assert again.gguf_metadata is not None
    if split == "unknown":
        assert HUGGING_FACE_FIELD in again.gguf_metadata
        assert "llama.cpp does not read" in made.notes[0]
    else:
        assert again.gguf_metadata["tokenizer.ggml.pre"] == split
        assert made.notes == ()


@pytest.mark.parametrize("adds_space", [False, True])
def test_sentencepiece_tokenizers_come_back(
    models: Callable[[str], Path], tmp_path: Path, adds_space: bool
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models("llama2"), model)
    words = ["▁t", "▁th", "▁the", "he", "in", "▁in", "en", "▁do", "12", "34", "1234", "▁▁"]
    letters = sorted(set("".join(words)) | set("etaoinshrdlu"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *([6] * 256), *([1] * (len(words) + len(letters)))]
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(words))]
    vocabulary = Sentencepiece(
        tokens=[*tokens, *words, *letters],
        scores=[*scores, *([-1e6] * len(letters))],
        types=types,
        unknown_id=0,
        adds_space=adds_space,
    )
    (model / "tokenizer.json").write_text(build_sentencepiece(vocabulary).to_str())
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    files, again, made = write(model, "q8_0", tmp_path / "packed.gguf")
    before, after = load_tokenizer(files, tmp_path), load_tokenizer(again, tmp_path)
    assert before is not None
    assert after is not None
    for text in ("", "the end in 1234 doings", "thenen", PROBE):
        ids = before.encode(text)
        assert ids[0] == 1
        assert after.encode(text) == ids
        assert after.decode(ids) == before.decode(ids)
    assert again.gguf_metadata is not None
    assert again.gguf_metadata["tokenizer.ggml.model"] == "llama"
    assert made.notes == ()
