"""Files of a model that are nowhere: shapes and layouts from a configuration alone.

They can be cut into groups and blocks and planned for like any others. Nothing can be read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shadowlane.ops.decoder import expected_tensors
from shadowlane.ops.decoder_config import read_config
from shadowlane.ops.errors import ModelError
from shadowlane.ops.files.base import ModelFiles, TensorSource, tensor_nbytes
from shadowlane.ops.layouts import LAYOUTS


def imagine_files(name: str, config: Mapping[str, Any], layouts: Mapping[str, str]) -> ModelFiles:
    """Every tensor that `config` asks for, in the layout of the first pattern that matches.

    layouts: pattern of tensor names -> layout, in the order in which they are tried. Vectors and
    routers are f32. Experts are stacked, as GGUF has them.

    Raises ModelError where nothing matches, a layout is unknown or its blocks do not fit a row.
    """
    decoder = read_config(config)
    shapes = dict(expected_tensors(decoder))
    moe = decoder.moe
    for layer in moe.sparse_layers if moe else ():
        prefix = f"model.layers.{layer}.mlp.experts"
        assert moe is not None
        for part in ("gate_proj", "up_proj"):
            shapes[f"{prefix}.{part}"] = (moe.num_experts, moe.inner, decoder.hidden_size)
        shapes[f"{prefix}.down_proj"] = (moe.num_experts, decoder.hidden_size, moe.inner)
    tensors, offset = {}, 0
    for tensor, shape in shapes.items():
        layout = _layout_of(tensor, shape, layouts)
        try:
            nbytes = tensor_nbytes(layout, shape)
        except ValueError as error:
            raise ModelError(f"{name}: {tensor}: {error}") from None
        tensors[tensor] = TensorSource(tensor, "", offset, nbytes, shape, layout)
        offset += nbytes
    digest = hashlib.sha256(json.dumps([config, dict(layouts)], sort_keys=True).encode())
    return ModelFiles(
        root=Path(name),
        kind="gguf",
        tensors=tensors,
        config=dict(config),
        rope_pairing="half",
        rope_factors=None,
        gguf_metadata=None,
        fingerprint=digest.hexdigest()[:32],
        stamps=(),
    )


def _layout_of(tensor: str, shape: tuple[int, ...], layouts: Mapping[str, str]) -> str:
    is_router = tensor.endswith((".mlp.gate.weight", ".mlp.router.weight"))
    if len(shape) == 1 or tensor.endswith(("_bias", ".shared_expert_gate.weight")) or is_router:
        return "f32"
    for pattern, layout in layouts.items():
        if fnmatchcase(tensor, pattern):
            if layout not in LAYOUTS:
                raise ModelError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
            return layout
    raise ModelError(f"layouts must have a pattern that matches {tensor}; none does")
