"""`shadowlane show`: what a model is made of, from its headers alone."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

from shadowlane.cli import options
from shadowlane.cli.stages import Stages
from shadowlane.models import DEFAULT_MODEL, resolve_model
from shadowlane.sizes import format_size

if TYPE_CHECKING:
    from shadowlane.ops.files import ModelFiles

EPILOG = options.epilog("shadowlane show smollm2", "shadowlane show ./llama-3b --json")

# What people ask about a decoder, by its name in config.json.
_CONFIG_KEYS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
)


def show(
    model: options.ModelArgument = DEFAULT_MODEL, json_output: options.JsonOutput = False
) -> None:
    """Show family, shapes, number formats and sizes of a model. Reads headers, no weights."""
    with Stages() as stages:
        path = resolve_model(model, stages)
        from shadowlane.ops.files import open_model

        facts = describe(open_model(path))
    if json_output:
        print(json.dumps(facts))
        return
    layouts = [f"{name} {format_size(nbytes)}" for name, nbytes in facts.pop("layouts").items()]
    facts["nbytes"] = format_size(facts["nbytes"])
    facts["layouts"] = ", ".join(layouts)
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {value if isinstance(value, str) else json.dumps(value)}")


def describe(files: ModelFiles) -> dict[str, Any]:
    """Facts by name; the configuration's keep the names they have in config.json."""
    from shadowlane.ops.files.base import RAW, tensor_nbytes

    layouts: Counter[str] = Counter()
    num_parameters = 0
    for tensor in files.tensors.values():
        if tensor.layout == RAW:  # MXFP4 in two tensors: blocks of two elements a byte, and scales
            layouts["mxfp4"] += tensor.nbytes
            num_parameters += 2 * tensor.nbytes * tensor.name.endswith("_blocks")
        else:
            layouts[tensor.layout] += tensor_nbytes(tensor.layout, tensor.shape)
            num_parameters += prod(tensor.shape)
    facts: dict[str, Any] = {
        "path": str(files.root),
        "kind": files.kind,
        "parameters": num_parameters,
        "nbytes": sum(layouts.values()),
        "tensors": len(files.tensors),
        "layouts": dict(layouts.most_common()),
        "fingerprint": files.fingerprint,
    }
    # Sub-configurations may hold anything; only what json can carry is shown.
    return facts | {key: files.config[key] for key in _CONFIG_KEYS if key in files.config}
