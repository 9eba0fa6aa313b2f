"""Compiles every Triton kernel for cards that need not be there; prints what each takes.

A program of its own, since kernels are either interpreted or compiled in one process:

    python tests/ops/card/compile_kernels.py 86
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from shadowlane.ops.card import attention_triton as attention
from shadowlane.ops.card import choices_triton as choices
from shadowlane.ops.card import kernels_triton as kernels
from shadowlane.ops.card.packed_torch import DIRECT
from shadowlane.ops.layouts import LAYOUTS

Case = tuple[str, Any, dict[str, str], dict[str, Any]]  # name, kernel, types, constants
BYTES, FLOATS, INTEGERS, NUMBER = "*u8", "*fp32", "*i64", "i32"


def multiply_cases() -> Iterator[Case]:
    types = {"weights": BYTES, "x": FLOATS, "y": FLOATS, "bias": FLOATS}
    names = ("num_rows", "row_nbytes", "num_blocks", "x_stride", "y_stride", "num_inputs")
    types |= dict.fromkeys(names, NUMBER)
    for layout in LAYOUTS:
        tile = kernels._tile(layout)
        for inputs in (1, 2, 4, 8):
            sizes = {"ROWS": kernels._rows_together(inputs), "M": inputs}
            sizes |= {"NUM": tile.num, "PLACES": tile.places}
            yield (
                f"multiply {layout} x {inputs}",
                kernels._multiply_kernel,
                types,
                {
                    "LAYOUT": layout,
                    **sizes,
                },
            )


def gate_up_cases() -> Iterator[Case]:
    types = {"gates": BYTES, "ups": BYTES, "limit": "fp32", "alpha": "fp32"}
    types |= dict.fromkeys(("x", "out", "gate_bias", "up_bias"), FLOATS)
    names = ("num_rows", "gate_nbytes", "gate_blocks", "up_nbytes", "up_blocks", "x_stride")
    types |= dict.fromkeys((*names, "out_stride", "num_inputs"), NUMBER)
    for layout in LAYOUTS.keys() - DIRECT.keys():
        tile = kernels._tile(layout)
        for inputs in (1, 8):
            sizes: dict[str, Any] = {"GATE_NUM": tile.num, "GATE_PLACES": tile.places}
            sizes |= {"UP_NUM": tile.num, "UP_PLACES": tile.places}
            sizes |= {"ROWS": kernels._rows_together(inputs), "M": inputs}
            flags = {"HAS_BIAS": inputs > 1, "IS_CLAMPED": inputs > 1, "GATE": layout, "UP": layout}
            name = f"gate_up {layout} x {inputs}"
            yield name, kernels._gate_up_kernel, types, sizes | flags


def expert_cases() -> Iterator[Case]:
    places = {"memory": BYTES, "places": INTEGERS, "ids": INTEGERS, "x": FLOATS, "out": FLOATS}
    for layout in LAYOUTS:
        tile = kernels._tile(layout)
        for has_more in (False, True):
            types = places | dict.fromkeys(("gate_biases", "up_biases"), FLOATS)
            names = ("gate_nbytes", "gate_blocks", "up_nbytes", "up_blocks", "x_stride", "num_rows")
            types |= dict.fromkeys(names, NUMBER) | {"limit": "fp32", "alpha": "fp32"}
            sizes: dict[str, Any] = {"GATE_NUM": tile.num, "GATE_PLACES": tile.places}
            sizes |= {"UP_NUM": tile.num, "UP_PLACES": tile.places, "TOP_K": 4, "ROWS": 4}
            flags = {"HAS_BIAS": has_more, "IS_CLAMPED": has_more}
            layouts = {"GATE": layout, "UP": layout}
            kernel = kernels._expert_gate_up_kernel
            yield f"expert gate_up {layout} {has_more}", kernel, types, layouts | sizes | flags
            types = places | {"biases": FLOATS}
            names = ("num_rows", "down_nbytes", "down_blocks", "x_stride")
            types |= dict.fromkeys(names, NUMBER)
            sizes = {"NUM": tile.num, "PLACES": tile.places, "ROWS": 4, "HAS_BIAS": has_more}
            kernel = kernels._expert_down_kernel
            yield f"expert down {layout} {has_more}", kernel, types, {"DOWN": layout, **sizes}
    types = {"places": INTEGERS, "ids": INTEGERS, "source": FLOATS, "target": FLOATS}
    more = {"width": NUMBER}
    yield "leave experts", kernels._leave_kernel, types | more, {"COLS": kernels.LEAVE_COLS}


def choice_cases() -> Iterator[Case]:
    types = {"logits": FLOATS, "ids": INTEGERS, "weights": FLOATS, "left_ids": "*i32"}
    types |= {"left_weights": FLOATS, "numbers": "*fp64"}
    types |= dict.fromkeys(("stride", "num_experts", "top_k"), NUMBER)
    exact = {"FLOOR": choices.FLOOR, "LEAST": choices.LEAST, "ONE": choices.ONE}
    exact |= {"HEAD": choices.HEAD, "TERMS": len(choices.POLYNOMIAL)}
    for experts, is_one in ((8, True), (64, False), (128, True)):
        flags = {"NORMALISES": is_one, "HAS_GATE": not is_one, "EXPERTS": experts}
        yield f"choose of {experts}", choices._choose_kernel, types, flags | exact


def attention_cases() -> Iterator[Case]:
    for kind, dtype in (
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ):
        for grouped, dim in ((1, 64), (8, 128), (7, 24)):
            sizes = {"GROUPED": grouped, "DIM": dim, "GROUPED_PAD": 16}
            sizes |= {"DIM_PAD": max(16, triton.next_power_of_2(dim)), "SPLITS": 8}
            parts = dict.fromkeys(("sums", "tops", "totals"), FLOATS)
            types = {"queries": FLOATS, "pages": f"*{kind}", **parts, "scale": "fp32"}
            types |= dict.fromkeys(("table", "sequences", "positions"), INTEGERS)
            names = ("window", "table_stride", "page_stride", "value_stride", "head_stride")
            types |= dict.fromkeys(names, NUMBER)
            more = {"PAGE_TOKENS": 32, "TOKENS": attention.tokens_together(dtype)}
            name = f"attend {kind} {grouped} x {dim}"
            yield name, attention._attend_kernel, types, sizes | more
            types = parts | {"sinks": FLOATS, "out": FLOATS}
            yield (
                f"join {grouped} x {dim}",
                attention._join_kernel,
                types,
                sizes | {"HAS_SINKS": kind == "fp32"},
            )


def compile_case(case: Case, capability: int) -> str:
    """The kernel for cards of this compute capability; what the assembler says of it."""
    name, kernel, types, constants = case
    signature = {each: types.get(each, "constexpr") for each in kernel.arg_names}
    places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    is_exact = kernel is choices._choose_kernel
    options = {"enable_fp_fusion": False, "num_warps": choices.WARPS} if is_exact else {}
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    assert compiled.asm["cubin"]
    assert not is_exact or "fma." not in compiled.asm["ptx"], "products and sums must round apart"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(compiled.asm["ptx"])
        assembler = get_ptxas(capability).path
        target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
        assert target is not None
        said = subprocess.run(
            [assembler, "-v", f"--gpu-name={target[1]}", "kernel.ptx", "-o", "kernel.cubin"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    spilled = re.search(r"(\d+) bytes spill stores", said)
    used = re.search(r"Used (\d+) registers", said)
    assert spilled is not None
    assert used is not None
    shared = compiled.metadata.shared
    return f"{name}: {used[1]} registers, {spilled[1]} bytes spilled, {shared} bytes shared"


if __name__ == "__main__":
    cases = (*multiply_cases(), *gate_up_cases(), *expert_cases(), *choice_cases())
    for each in (*cases, *attention_cases()):
        print(compile_case(each, int(sys.argv[1])), flush=True)
