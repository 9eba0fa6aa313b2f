"""A decoder in plain torch, float32: what the description of a model says, and nothing else."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from shadowlane.ops.arrange import arrange
from shadowlane.ops.decoder import (
    DecoderConfig,
    ExpertMatrix,
    GroupDescription,
    describe_groups,
    read_experts,
)
from shadowlane.ops.files import ModelFiles
from shadowlane.ops.files.base import RAW
from shadowlane.ops.rope import inv_freq
from shadowlane.ops.scattered_experts import (
    ScatteredTensor,
    has_scattered_experts,
    read_scattered_experts,
)

_KINDS = {
    name: gguf.GGMLQuantizationType[name.upper() if "_K" not in name else name.replace("q", "Q")]
    for name in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q4_K", "q6_K", "mxfp4")
}

Experts = tuple[tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...], ...]


def _values(raw: np.ndarray, layout: str) -> torch.Tensor:
    """Packed rows, uint8 [rows, row bytes], as float32 [rows, cols]."""
    kind = _KINDS[layout]
    if layout in ("f32", "f16"):
        raw = np.ascontiguousarray(raw).view("<f4" if layout == "f32" else "<f2")
    return torch.from_numpy(gguf.dequantize(raw, kind).astype(np.float32))


def load_weights(files: ModelFiles) -> dict[str, torch.Tensor]:
    """Every tensor in float32; rotary pairs of q and k that are neighbours become halves."""
    weights = {}
    head_dim = files.config.get("head_dim")
    for name, source in files.tensors.items():
        if source.layout == RAW:
            continue  # a part of experts
        raw = np.fromfile(source.path, np.uint8, source.nbytes, offset=source.offset)
        if source.step != 1:
            values = _values(raw.reshape(1, -1), source.layout)[0, :: source.step]
            weights[name] = values.reshape(source.shape)
            continue
        rows = int(np.prod(source.shape[:-1]))
        values = _values(raw.reshape(rows, -1), source.layout).reshape(source.shape)
        if files.rope_pairing == "interleaved" and (".q_proj." in name or ".k_proj." in name):
            pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[name] = values
    return weights


def load_matrix(matrix: ExpertMatrix) -> torch.Tensor:
    """One matrix of an expert [rows, cols], read from the place that is said, row by row."""
    rows = []
    with open(matrix.path, "rb") as file:
        for row in range(matrix.rows):
            file.seek(matrix.offset + row * matrix.row_stride)
            rows.append(np.frombuffer(file.read(matrix.row_nbytes), np.uint8))
    values = _values(np.stack(rows), matrix.layout)
    assert values.shape == (matrix.rows, matrix.cols)
    return values


def load_scattered(tensor: ScatteredTensor, height: int) -> list[torch.Tensor]:
    """The matrices of a tensor, arranged from `height` rows of the file at a time."""
    memory = np.zeros(2 << 20, np.uint8)
    values, scales, out = 3, (1 << 19) + 1, 1 << 20  # reads end up at odd addresses, too
    for first in range(0, tensor.file_rows, height):
        count = min(height, tensor.file_rows - first)
        for path, offset, row_nbytes, at in (
            (tensor.path, tensor.offset, tensor.file_row_nbytes, values),
            (tensor.scales_path, tensor.scales_offset, tensor.scales_row_nbytes, scales),
        ):
            if offset is not None and row_nbytes:
                raw = np.fromfile(
                    path, np.uint8, count * row_nbytes, offset=offset + first * row_nbytes
                )
                assert at + raw.size <= (scales if at == values else out)
                memory[at : at + raw.size] = raw
        arrange(tensor, first, count, memory, values, scales, out)
    rows = memory[out : out + tensor.nbytes].reshape(-1, tensor.row_nbytes)
    assert not memory[out + tensor.nbytes :].any()
    return list(_values(rows, tensor.layout).chunk(tensor.num_matrices))


def load_experts(cfg: DecoderConfig, files: ModelFiles) -> Experts:
    """(gate, up, down) of each expert, [sparse layer][expert]"""
    if has_scattered_experts(cfg, files.tensors):
        return tuple(
            tuple(
                (*load_scattered(expert.gate_up, 20), *load_scattered(expert.down, 500))
                for expert in layer
            )
            for layer in read_scattered_experts(cfg, files)
        )
    return tuple(
        tuple(
            (load_matrix(expert.gate), load_matrix(expert.up), load_matrix(expert.down))
            for expert in layer
        )
        for layer in read_experts(cfg, files)
    )


class PlainForward:
    """The groups in order; a call takes the next tokens of one sequence."""

    def __init__(
        self, cfg: DecoderConfig, weights: dict[str, torch.Tensor], experts: Experts = ()
    ) -> None:
        self.cfg = cfg
        self.weights = {name: weight.float() for name, weight in weights.items()}
        self.experts = experts
        self.keys: dict[int, torch.Tensor] = {}  # layer -> [positions, kv heads, head_dim]
        self.values: dict[int, torch.Tensor] = {}
        self.length = 0

    def norm(self, rows: torch.Tensor, name: str | None) -> torch.Tensor:
        if name is None:
            return rows
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.cfg.norm_eps)
        return self.weights[name] * (rows * scale)

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        frequencies, scaling = inv_freq(self.cfg.rope, self.length)
        angles = positions[:, None].float() * torch.from_numpy(frequencies)
        cos, sin = angles.cos()[:, None] * scaling, angles.sin()[:, None] * scaling
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def heads(self, rows: torch.Tensor, norm: str | None) -> torch.Tensor:
        if self.cfg.full_width_qk_norm:
            return self.norm(rows, norm).unflatten(-1, (-1, self.cfg.head_dim))
        return self.norm(rows.unflatten(-1, (-1, self.cfg.head_dim)), norm)

    def attend(self, group: GroupDescription, q, k, v, positions) -> torch.Tensor:  # type: ignore[no-untyped-def]
        cfg, layer = self.cfg, group.layer
        assert layer is not None
        q = self.rotate(self.heads(q, group.q_norm), positions)
        k = self.rotate(self.heads(k, group.k_norm), positions)
        v = v.unflatten(-1, (-1, cfg.head_dim))
        self.keys[layer] = torch.cat([self.keys[layer], k]) if layer in self.keys else k
        self.values[layer] = torch.cat([self.values[layer], v]) if layer in self.values else v
        repeats = cfg.num_heads // cfg.num_kv_heads
        keys = self.keys[layer].repeat_interleave(repeats, dim=1)
        values = self.values[layer].repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / cfg.head_dim**0.5
        distance = positions[:, None] - torch.arange(len(keys))[None]
        window = cfg.windows[layer] or self.length
        scores[:, (distance < 0) | (distance >= window)] = -torch.inf
        if group.sinks is not None:
            sinks = self.weights[group.sinks][:, None, None].expand(-1, len(q), 1)
            shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, values).flatten(1)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, experts), [rows, top_k] each, the likeliest expert first"""
        moe = self.cfg.moe
        assert moe is not None
        if moe.softmax_chosen:
            chosen, ids = logits.topk(moe.top_k, dim=-1)
            return chosen.softmax(-1), ids
        weights, ids = logits.softmax(-1).topk(moe.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True) if moe.norm_topk else weights, ids

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        moe = self.cfg.moe
        if moe is None or not moe.swiglu_limit:
            return torch.nn.functional.silu(gate) * up
        gate = gate.clamp(max=moe.swiglu_limit)
        up = up.clamp(-moe.swiglu_limit, moe.swiglu_limit)
        return (up + 1) * gate * torch.sigmoid(gate * moe.swiglu_alpha)

    def mix(
        self, group: GroupDescription, inputs: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        moe = self.cfg.moe
        assert moe is not None
        assert group.layer is not None
        layer = self.experts[moe.sparse_layers.index(group.layer)]
        weights, ids = self.choose(logits)
        mixed = torch.zeros_like(inputs)
        linear = torch.nn.functional.linear
        for row in range(len(inputs)):
            for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
                biases = [self.weights[name][expert] for name in group.expert_biases]
                gate_bias, up_bias, down_bias = biases or (None, None, None)
                gate, up, down = layer[expert]
                gated = self.activate(
                    linear(inputs[row], gate, gate_bias), linear(inputs[row], up, up_bias)
                )
                mixed[row] += weight * linear(gated, down, down_bias)
        return mixed

    def __call__(self, token_ids: list[int]) -> np.ndarray:
        positions = torch.arange(self.length, self.length + len(token_ids))
        self.length += len(token_ids)
        rows: torch.Tensor = torch.empty(0)
        outputs: list[torch.Tensor] = []
        before = rows  # of the router: it, the shared expert and the experts see the same input
        choosing: list[torch.Tensor] = []  # the router's logits, and those of the shared gate
        for group in describe_groups(self.cfg):
            if group.kind == "embed":
                matrix = group.parts[0].tensor if group.parts else "model.embed_tokens.weight"
                rows = self.weights[matrix][token_ids]
                continue
            if group.kind == "attn":
                outputs = [self.attend(group, *outputs, positions)]
                continue
            if group.kind == "router":
                before = rows
            if group.norm is None:
                inputs = outputs[0]
            else:
                is_beside = group.kind in ("router", "experts") or ".shared_" in group.name
                inputs = self.norm(before if is_beside else rows, group.norm)
            if group.kind == "experts":
                rows = rows + self.mix(group, inputs, choosing[0])
                continue
            results = [
                torch.nn.functional.linear(
                    inputs,
                    self.weights[part.tensor],
                    None if part.bias is None else self.weights[part.bias],
                )
                for part in group.parts
            ]
            if group.kind == "router":
                choosing = results
            elif group.name.endswith("shared_down"):
                rows = rows + torch.sigmoid(choosing[1]) * results[0]
            elif group.kind in ("o", "down"):
                rows = rows + results[0]
            elif group.kind == "gate_up":
                outputs = [torch.nn.functional.silu(results[0]) * results[1]]
            else:
                outputs = results
        return outputs[0].numpy()
