"""A dense Llama-shaped model in float32, run one layer at a time over many windows of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from shadowlane.ops.decoder import DecoderConfig, read_decoder
from shadowlane.ops.errors import ModelError
from shadowlane.ops.expand import expand_rows
from shadowlane.ops.files import ModelFiles, open_model
from shadowlane.ops.rope import inv_freq


@dataclass(frozen=True, slots=True)
class DenseModel:
    """Weights [rows, cols] in float32 under Hugging Face's names; rotary pairs lie in halves."""

    files: ModelFiles
    cfg: DecoderConfig
    weights: dict[str, torch.Tensor]

    def layer(self, layer: int, name: str) -> torch.Tensor:
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def mlp(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """gate and up [inner, hidden], down [hidden, inner]"""
        gate, up, down = (self.layer(layer, f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        return gate, up, down

    def norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(rows, rows.shape[-1:], weight, self.cfg.norm_eps)

    def mlp_input(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(rows, self.layer(layer, "post_attention_layernorm"))


def read_dense(path: Path, progress: Callable[[str], None]) -> DenseModel:
    """Every tensor of a model with plain MLPs. Raises ModelError for models of other kinds."""
    files = open_model(path)
    cfg = read_decoder(files)
    if cfg.family != "llama" or cfg.mlp_bias or cfg.qkv_bias or cfg.o_bias:
        raise ModelError(f"{path} must be a Llama model without biases; it is {cfg.family}")
    weights = {}
    for number, (name, source) in enumerate(files.tensors.items()):
        if number % 30 == 0:
            progress(f"reading {path.name}: {number} of {len(files.tensors)} tensors")
        raw = np.fromfile(source.path, np.uint8, source.nbytes, offset=source.offset)
        num_rows = int(np.prod(source.shape[:-1]))
        values = expand_rows(source.layout, raw, num_rows, source.shape[-1]).reshape(source.shape)
        if files.rope_pairing == "interleaved" and ("q_proj" in name or "k_proj" in name):
            pairs = values.reshape(-1, cfg.head_dim // 2, 2, source.shape[-1])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(source.shape)
        weights[name] = torch.from_numpy(values)
    return DenseModel(files, cfg, weights)


class Attention:
    """What a layer does before its MLP, on windows [windows, tokens, hidden] read from their start.

    Windows are independent of one another, as those of `shadowlane perplexity`.
    """

    def __init__(self, model: DenseModel, num_tokens: int) -> None:
        self._model = model
        frequencies, scale = inv_freq(model.cfg.rope, num_tokens)
        angles = torch.arange(num_tokens)[:, None] * torch.from_numpy(frequencies).float()
        self._cos, self._sin = angles.cos() * scale, angles.sin() * scale  # [tokens, head_dim / 2]

    def __call__(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """The residual stream with the layer's attention added."""
        return torch.cat([self._some(layer, part) for part in rows.split(4)])

    def _some(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        model, head_dim = self._model, self._model.cfg.head_dim
        inputs = model.norm(rows, model.layer(layer, "input_layernorm"))
        q, k, v = (
            (inputs @ model.layer(layer, f"self_attn.{name}_proj").T)
            .unflatten(-1, (-1, head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )  # [windows, heads, tokens, head_dim]
        mixed = functional.scaled_dot_product_attention(
            self._rotate(q), self._rotate(k), v, is_causal=True, enable_gqa=True
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        return rows + mixed @ model.layer(layer, "self_attn.o_proj").T

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        return torch.cat(
            (first * self._cos - second * self._sin, second * self._cos + first * self._sin), -1
        )
