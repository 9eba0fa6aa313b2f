"""The example that makes a mixture of a dense model: what it writes, and what that computes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_forward import PlainForward, load_experts, load_weights

from shadowlane.ops.decoder import read_decoder, read_experts
from shadowlane.ops.files import open_model

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
HIDDEN, INNER, LAYERS = 32, 48, 2
TOKENS = [5, 99, 17, 254, 3, 3, 60, 41, 200, 128, 7, 77]


@pytest.fixture(autouse=True)
def _examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script imports its parts as siblings, as it does when it is run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer of bytes; its weights are whole bfloat16 numbers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("dense")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    generator = torch.Generator().manual_seed(11)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if weight.ndim == 1 else 0.3 * noise)
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((EXAMPLES / "split_mixture.py").read_text())
    return path


def split(dense: Path, text: Path, out: Path, *flags: str) -> Path:
    from split_mixture import arguments, run

    command = ["--model", str(dense), "--text", str(text), "--out", str(out)]
    command += ["--tokens", "1024", "--window", "32", "--experts", "8", "--shared", "0.33"]
    command += ["--top-k", "3"]
    run(arguments().parse_args([*command, *flags]))
    return out


def reference_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def plain_logits(folder: Path) -> np.ndarray:
    files = open_model(folder)
    cfg = read_decoder(files)
    return PlainForward(cfg, load_weights(files), load_experts(cfg, files))(TOKENS)


def distance(folder: Path, dense: Path) -> float:
    """How far logits are from the dense model's, in parts of their spread."""
    wanted = reference_logits(dense)
    return ((reference_logits(folder) - wanted).std() / wanted.std()).item()


def test_the_directory_is_a_mixture_with_its_tokenizer(
    dense: Path, text: Path, tmp_path: Path
) -> None:
    from shadowlane.ops.tokenizer import load_tokenizer

    files = open_model(split(dense, text, tmp_path / "mixture", "--top-k", "2"))
    cfg = read_decoder(files)
    assert cfg.moe is not None
    assert (cfg.family, cfg.moe.num_experts, cfg.moe.top_k) == ("qwen2_moe", 8, 2)
    assert (cfg.moe.inner, cfg.moe.shared_inner) == (4, 16)
    assert not cfg.moe.norm_topk
    assert not cfg.qkv_bias
    assert cfg.tied_embeddings
    assert cfg.rope == read_decoder(open_model(dense)).rope
    tokenizer = load_tokenizer(files, tmp_path / "cache")
    original = load_tokenizer(open_model(dense), tmp_path / "cache")
    assert tokenizer is not None
    assert original is not None
    assert tokenizer.encode("any text") == original.encode("any text")
    assert tokenizer.settings == original.settings


def test_an_expert_lies_in_one_piece(dense: Path, text: Path, tmp_path: Path) -> None:
    files = open_model(split(dense, text, tmp_path / "mixture"))
    for layer in read_experts(read_decoder(files), files):
        for expert in layer:
            places = sorted((each.offset, each.nbytes) for each in (expert.gate, expert.up))
            places = sorted([*places, (expert.down.offset, expert.down.nbytes)])
            ends = [offset + nbytes for offset, nbytes in places]
            assert ends[:2] == [offset for offset, _ in places[1:]]


def test_all_experts_together_are_the_dense_model(dense: Path, text: Path, tmp_path: Path) -> None:
    folder = split(dense, text, tmp_path / "mixture", "--top-k", "8")
    assert distance(folder, dense) < 0.01  # weights are 1 / experts only within the router's spread


def test_the_number_of_chosen_experts_can_be_changed_afterwards(
    dense: Path, text: Path, tmp_path: Path
) -> None:
    folder = split(dense, text, tmp_path / "mixture", "--top-k", "3", "--no-refit")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    found = []
    for top_k in (1, 4, 8):
        path.write_text(json.dumps(config | {"num_experts_per_tok": top_k}))
        found.append(distance(folder, dense))
    assert found[2] < 0.01 < 0.05 < found[1] < found[0]


@pytest.mark.parametrize("top_k", ["1", "3"])
def test_reader_and_transformers_compute_the_same(
    dense: Path, text: Path, tmp_path: Path, top_k: str
) -> None:
    folder = split(dense, text, tmp_path / "mixture", "--top-k", top_k)
    np.testing.assert_allclose(
        plain_logits(folder), reference_logits(folder).numpy(), atol=1e-4, rtol=0
    )


def test_a_refit_makes_up_for_part_of_what_is_left_out(dense: Path, tmp_path: Path) -> None:
    from split_mixture import arguments, split_layer
    from split_parts.dense import read_dense
    from torch.nn.functional import silu

    model = read_dense(dense, lambda _: None)
    rows = torch.randn(8, 32, HIDDEN, generator=torch.Generator().manual_seed(6))
    gate, up, down = model.mlp(1)
    # Each routed neuron follows from a shared one: it does the same, less loudly.
    down[:] = torch.nn.functional.normalize(down, dim=0)
    gate[24:] = gate[:24]
    up[24:] = 0.1 * up[:24]
    inputs = model.mlp_input(1, rows)
    wanted = (silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T
    command = ["--out", str(tmp_path / "unused"), "--experts", "8", "--top-k", "1"]
    errors, tensors = [], []
    for flags in ([], ["--no-refit"]):
        args = arguments().parse_args([*command, *flags])
        update, found, _ = split_layer(model, 1, rows, 3, args)
        errors.append((update - wanted).norm().item())
        tensors.append(found)
    assert errors[0] < 0.8 * errors[1]
    changed = {name for name in tensors[0] if not tensors[0][name].equal(tensors[1][name])}
    assert changed == {"model.layers.1.mlp.shared_expert.down_proj.weight"}


def test_the_same_seed_gives_the_same_bytes(dense: Path, text: Path, tmp_path: Path) -> None:
    first, second, other = (
        (split(dense, text, tmp_path / name, "--seed", seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", "4"), ("b", "4"), ("c", "5"))
    )
    assert first == second
    assert first != other


def test_clusters_find_groups_that_are_there_and_have_one_size() -> None:
    from split_parts.splitting import balanced_clusters

    generator = torch.Generator().manual_seed(2)
    centres = torch.nn.functional.normalize(torch.randn(4, 30, generator=generator), dim=1)
    truth = torch.arange(24) % 4
    rows = centres[truth] + 0.02 * torch.randn(24, 30, generator=generator)
    labels = balanced_clusters(torch.nn.functional.normalize(rows, dim=1), 4, seed=1)
    assert torch.bincount(labels).tolist() == [6, 6, 6, 6]
    pairs = {(int(label), int(group)) for label, group in zip(labels, truth, strict=True)}
    assert len(pairs) == 4
    with pytest.raises(ValueError, match="rows must be a multiple of 5 clusters; got 24"):
        balanced_clusters(rows, 5, seed=1)


def test_each_neuron_has_one_place_and_the_largest_are_shared() -> None:
    from split_parts.splitting import partition

    activations = torch.randn(200, 20, generator=torch.Generator().manual_seed(3))
    activations[:, [3, 11, 4, 19]] *= 10
    down = torch.ones(6, 20)
    down[:, 7] = 1000.0
    down[:, 3] = 0.0  # large activations that go nowhere
    parts = partition(activations, down, 4, 4, seed=0)
    assert parts.shared.tolist() == [4, 7, 11, 19]
    assert sorted([*parts.shared.tolist(), *parts.experts.flatten().tolist()]) == list(range(20))


def test_a_router_ranks_as_the_norms_do_and_its_softmax_is_flat() -> None:
    from split_parts.splitting import fit_router

    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(500, 12, generator=generator)
    norms = inputs @ torch.randn(12, 5, generator=generator)
    router = fit_router(inputs, norms, 2.0**-10)
    logits = inputs @ router.T
    agree = (logits.argmax(1) == norms.argmax(1)).float().mean()
    assert agree > 0.95
    np.testing.assert_allclose(logits.softmax(1).numpy(), 0.2, rtol=0.01)


def test_windows_come_from_every_text() -> None:
    from split_parts.texts import cut_windows

    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    windows = cut_windows(["a" * 9, "b" * 100, "c" * 100], Letters(), 11, 4)  # type: ignore[arg-type]
    assert windows.shape == (11, 4)
    counts = [(windows[:, 0] == ord(letter)).sum().item() for letter in "abc"]
    assert counts[0] == 2  # all there are
    assert min(counts[1:]) >= 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-k", "9", "--experts", "8"], "--top-k must be from 1 to --experts (8); got 9"),
        (["--experts", "0"], "--experts must be positive; got 0"),
        (["--experts", "400", "--top-k", "1"], "--experts must leave each a neuron of 48; got 400"),
        (["--shared", "1"], "--shared must be between 0 and 1; got 1.0"),
        (["--tokens", "10"], "--tokens must be at least one window (512); got 10"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--model", "nothing.gguf"], "no such model"),
    ],
)
def test_what_cannot_be_is_one_line(
    dense: Path,
    tmp_path: Path,
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from split_mixture import main

    monkeypatch.chdir(tmp_path)
    argv = ["split_mixture.py", "--out", "out", "--model", str(dense), *flags]
    monkeypatch.setattr("sys.argv", argv)
    assert main() == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert sum(not line.startswith("reading ") for line in lines) == 1
    assert not (tmp_path / "out").exists()


def test_a_directory_that_holds_something_is_left_alone(
    dense: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(ValueError, match="--out must be a new or empty directory"):
        split(dense, text, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
