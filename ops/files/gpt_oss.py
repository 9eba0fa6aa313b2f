"""GPT-OSS in safetensors: its experts' tensors in words of our own.

transformers has the experts of a layer in `gate_up_proj` and `down_proj`, like others, but
transposed and with gate and up in turn; the same names elsewhere mean rows in one piece. So here
they get names that say so, and the biases of gate and up become two sources.
"""

from __future__ import annotations

import re
from dataclasses import replace

from shadowlane.ops.errors import ModelError
from shadowlane.ops.files.base import TensorSource, tensor_nbytes

TRANSPOSED = "_transposed"
# uint8 tensors that belong together: [experts, rows, groups, 16] and [experts, rows, groups]
PACKED_PART = re.compile(r".+\.mlp\.experts\.(gate_up|down)_proj_(blocks|scales)")

_STACK = re.compile(r".+\.mlp\.experts\.(gate_up|down)_proj")
_MIXED_BIAS = re.compile(r"(.+\.mlp\.experts)\.gate_up_proj_bias")


def with_own_names(tensors: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors of a GPT-OSS directory, renamed as above. Raises ModelError for an odd bias."""
    renamed: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        if _STACK.fullmatch(name):
            renamed[name + TRANSPOSED] = replace(source, name=name + TRANSPOSED)
        elif match := _MIXED_BIAS.fullmatch(name):
            for place, matrix in enumerate(("gate", "up")):
                own = f"{match[1]}.{matrix}_proj_bias"
                renamed[own] = _every_other(source, own, place)
        else:
            renamed[name] = source
    return renamed


def _every_other(source: TensorSource, name: str, place: int) -> TensorSource:
    """The elements 0, 2, ... (`place` 0) or 1, 3, ... (`place` 1)."""
    *outer, width = source.shape or (1,)
    if width % 2:
        raise ModelError(
            f"{source.name}: must hold gate and up in turn, an even number of values; got {width}"
        )
    element = tensor_nbytes(source.layout, (1,))
    return replace(
        source,
        name=name,
        offset=source.offset + place * element,
        nbytes=max(0, source.nbytes - element),
        shape=(*outer, width // 2),
        step=2,
    )
