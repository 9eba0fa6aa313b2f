"""Packed copies of models, run: near the model they were made of; probabilities from logits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from inprocess import running
from tiny import FAMILIES, reference_logits, tiny_tokens

from shadowlane.actors.blueprint import Options
from shadowlane.actors.hosts import ThreadHost
from shadowlane.actors.service import Service
from shadowlane.ops.expand import expand_rows
from shadowlane.ops.files import open_model
from shadowlane.ops.pack import pack_rows
from shadowlane.ops.pack_model import pack_model

REFUSED = ("llama-dynamic", "qwen2-window", "qwen3-window")


def write_rounded(model: Path, copy: Path) -> Path:
    """The same model, its matrices rounded to what q8_0 can say."""
    shutil.copytree(model, copy)
    tensors = safetensors.numpy.load_file(copy / "model.safetensors")
    for name, values in tensors.items():
        if values.ndim == 2:
            packed = pack_rows("q8_0", values)
            tensors[name] = expand_rows("q8_0", packed.reshape(-1), *values.shape)
    safetensors.numpy.save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


@pytest.mark.parametrize(
    "family",
    [name for name, options in FAMILIES.items() if name not in REFUSED and "dtype" not in options],
)
def test_a_packed_model_has_the_logits_of_its_rounded_weights(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Rotary pairs, scaled positions, biases, windows: a mistake in any would show."""
    model = tiny_model(family, hidden_size=96)
    out = tmp_path / "packed.gguf"
    pack_model(open_model(model), "q8_0", out, tmp_path, lambda done: None)
    tokens = tiny_tokens(40)
    with running(out, options=Options(dtype="float32", prefill_chunk=64, logit_rows=40)) as engine:
        ours = engine.logits(tokens)
    theirs = reference_logits(write_rounded(model, tmp_path / "rounded"), tokens)
    errors = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    # only the inputs of the last product are rounded to bytes here
    assert errors.max() < 0.01


def test_log_probabilities_are_those_of_the_logits(tiny_model: Callable[..., Path]) -> None:
    tokens = tiny_tokens(30)
    with running(tiny_model("llama2"), options=Options(prefill_chunk=64, logit_rows=7)) as engine:
        logits = engine.logits(tokens).astype(np.float64)
        service = Service(ThreadHost())
        service._engine = engine.engine
        found = service.log_probabilities(tokens)
        later = service.log_probabilities(tokens, 15)
        with pytest.raises(ValueError, match="first must be 0 to 28 for 30 tokens; got 29"):
            service.log_probabilities(tokens, 29)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = expected[np.arange(29), tokens[1:]]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(later, found[15:])
