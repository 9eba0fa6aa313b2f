"""A mixture of experts out of a dense model: each MLP cut into a shared and some routed experts.

    .venv/bin/python examples/split_mixture.py --out mixture
    shadowlane run ./mixture -p "The capital of France is"

No training: it takes a minute or three, and the result predicts text worse than the model it was
made of, the more so the fewer experts a token goes through. docs/mixtures.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from split_parts.dense import DenseModel

    from shadowlane.ops.tokenizer import Tokenizer

# Logits of the router scatter by this much: small enough that its softmax gives each expert the
# weight 1 / experts within a rounding of bfloat16, large enough to rank them safely in float32.
ROUTER_SPREAD = 2.0**-8


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Make a mixture of experts (Qwen2-MoE, safetensors) out of a dense model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory to write, new or empty")
    add("--model", default="smollm2", help="a dense Llama: smollm2, a directory or a .gguf file")
    add("--experts", type=int, default=16, help="routed experts per layer")
    add("--shared", type=float, default=1 / 3, help="share of the neurons every token goes through")
    add("--top-k", type=int, default=12, help="routed experts that a token goes through")
    add("--no-refit", action="store_true", help="leave the shared experts' weights as they were")
    add("--text", type=Path, action="append", default=[], help="calibrate on this file; repeatable")
    add("--tokens", type=int, default=16384, help="length of the calibration text")
    add("--window", type=int, default=512, help="tokens that are read together")
    add("--seed", type=int, default=0, help="of the clusters' first centres")
    return parser


def check(args: argparse.Namespace, inner: int) -> int:
    """The width of an expert. Raises ValueError for what cannot be."""
    if args.experts < 1:
        raise ValueError(f"--experts must be positive; got {args.experts}")
    if not 1 <= args.top_k <= args.experts:
        raise ValueError(f"--top-k must be from 1 to --experts ({args.experts}); got {args.top_k}")
    if not 0 < args.shared < 1:
        raise ValueError(f"--shared must be between 0 and 1; got {args.shared}")
    if args.window < 2:
        raise ValueError(f"--window must be at least 2; got {args.window}")
    if args.tokens < args.window:
        raise ValueError(f"--tokens must be at least one window ({args.window}); got {args.tokens}")
    # What does not divide by the number of experts goes to the shared one.
    width = int(inner * (1 - args.shared) + 1e-6) // args.experts
    if width < 1:
        raise ValueError(f"--experts must leave each a neuron of {inner}; got {args.experts}")
    return width


def split_model(
    model: DenseModel, windows: torch.Tensor, width: int, args: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """The mixture's tensors, bfloat16.

    Layers are split from the first to the last, and each sees what the layers before it, split
    already, make of the calibration text: so a refit also answers to what was lost before.
    """
    from split_parts.dense import Attention

    attention = Attention(model, windows.shape[1])
    rows = model.weights["model.embed_tokens.weight"][windows]
    tensors = {name: tensor for name, tensor in model.weights.items() if ".mlp." not in name}
    start = time.monotonic()
    for layer in range(model.cfg.num_layers):
        rows = attention(layer, rows)
        update, found, kept = split_layer(model, layer, rows, width, args)
        rows = rows + update
        tensors |= found
        tell(
            f"layer {layer + 1} of {model.cfg.num_layers}: the chosen {args.top_k} of "
            f"{args.experts} experts carry {kept:.0%}, {time.monotonic() - start:.0f} s"
        )
    return {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}


def split_layer(
    model: DenseModel, layer: int, rows: torch.Tensor, width: int, args: argparse.Namespace
) -> tuple[torch.Tensor, dict[str, torch.Tensor], float]:
    """What the split MLP adds to `rows` [windows, tokens, hidden], its tensors, and the share of
    the experts' squared output that the chosen ones carry."""
    import torch
    from split_parts import splitting
    from torch.nn import functional

    gate, up, down = model.mlp(layer)
    inputs = model.mlp_input(layer, rows).flatten(0, 1)  # [tokens, hidden]
    activations = functional.silu(inputs @ gate.T) * (inputs @ up.T)  # [tokens, inner]
    parts = splitting.partition(activations[::4], down, args.experts, width, args.seed)
    norms = splitting.output_norms(activations, down, parts.experts)
    router = splitting.fit_router(inputs, norms, ROUTER_SPREAD).bfloat16()
    logits = inputs @ router.float().T
    mask = splitting.chosen_neurons(logits, parts, args.top_k)
    down = down.clone()
    if not args.no_refit and args.top_k < args.experts:
        # The shared neurons are there for every token: they can make up for what is left out, as
        # far as it follows from what they compute.
        left_out = (activations * (1 - mask)) @ down.T
        shared = activations[:, parts.shared]
        down[:, parts.shared] += splitting.ridge(shared, left_out, splitting.REFIT_RIDGE).T
    chosen = torch.zeros_like(norms).scatter(1, logits.topk(args.top_k, dim=1).indices, 1.0)
    kept = ((norms * chosen).square().sum() / norms.square().sum()).item()
    update = (activations * mask) @ down.T

    prefix = f"model.layers.{layer}.mlp"
    # The sigmoid of a gate of zeros is one half, the softmax of equal logits 1 / experts: down
    # matrices are scaled by the inverse, so that every neuron counts as it did, whatever the
    # number of chosen experts. Powers of two cost nothing in bfloat16.
    tensors = {
        f"{prefix}.gate.weight": router,
        f"{prefix}.shared_expert_gate.weight": torch.zeros(1, inputs.shape[1]),
    }
    modules = {"shared_expert": (parts.shared, 2)} | {
        f"experts.{number}": (neurons, args.experts) for number, neurons in enumerate(parts.experts)
    }
    for module, (neurons, scale) in modules.items():
        tensors[f"{prefix}.{module}.gate_proj.weight"] = gate[neurons]
        tensors[f"{prefix}.{module}.up_proj.weight"] = up[neurons]
        tensors[f"{prefix}.{module}.down_proj.weight"] = down[:, neurons] * scale
    return update.view_as(rows), tensors, kept


def mixture_config(dense: dict[str, Any], width: int, args: argparse.Namespace) -> dict[str, Any]:
    """config.json: the dense model's, with experts."""
    return dense | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": args.experts,
        "num_experts_per_tok": args.top_k,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": dense["intermediate_size"] - args.experts * width,
        "norm_topk_prob": False,  # weights are 1 / experts, however many are chosen
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": False,
        "use_sliding_window": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def write_model(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """The directory, config.json last: without it nobody takes the directory for a model."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    settings = tokenizer.settings
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings.special_tokens, indent=2))
    if settings.chat_template is not None:
        (folder / "chat_template.jinja").write_text(settings.chat_template)
    ends = {"eos_token_id": list(settings.eos_token_ids)}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2))
    # sorted by name, an expert's three matrices lie side by side: one read brings it
    save_file(dict(sorted(tensors.items())), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> None:
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ValueError(f"--out must be a new or empty directory; {args.out} is not")
    import torch
    from split_parts.dense import read_dense
    from split_parts.texts import calibration_texts, cut_windows

    from shadowlane.models import resolve_model
    from shadowlane.ops.errors import ModelError
    from shadowlane.ops.tokenizer import load_tokenizer
    from shadowlane.paths import cache_dir

    path = resolve_model(args.model)
    model = read_dense(path, tell)
    width = check(args, model.cfg.intermediate_size)
    tokenizer = load_tokenizer(model.files, cache_dir())
    if tokenizer is None:
        raise ModelError(f"{path} must have a tokenizer; it has none")
    texts = calibration_texts(args.text)
    windows = cut_windows(texts, tokenizer, args.tokens // args.window, args.window)
    tell(f"calibrating on {windows.numel()} tokens of {len(texts)} texts")
    with torch.inference_mode():
        tensors = split_model(model, windows, width, args)
    write_model(args.out, tensors, mixture_config(model.files.config, width, args), tokenizer)
    shared = model.cfg.intermediate_size - args.experts * width
    read = (shared + args.top_k * width) / model.cfg.intermediate_size
    print(
        f"{args.out}: {model.cfg.num_layers} layers of {args.experts} experts of {width} neurons "
        f"beside {shared} shared ones; a token goes through {args.top_k} experts, "
        f"{read:.0%} of the MLPs"
    )


def main() -> int:
    parser = arguments()
    if len(sys.argv) < 2:
        parser.print_help()
        return 0
    args = parser.parse_args()
    from shadowlane.ops.errors import ModelError

    try:
        run(args)
    except (ModelError, ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if code := main():
        sys.exit(code)
