"""Small models and a machine that exist nowhere: to plan over cards without any file."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import STAGE_NBYTES, Load, Model, Work
from shadowlane.planner.hybrid_layouts import Question

CARD = Card("card", 8e9, 1e9, 400e9, 40e12, 20e9, 20e9, launch_s=5e-6, crossing_s=20e-6)
MACHINE = Hardware("machine", (CARD,), 40e9, 1e12, 2e-6, 60e9, 64e9, 4e9, 5e9)
ROW_NBYTES = 10_000.0


def small_model(*loads: Load) -> Model:
    """In execution order."""
    return Model("model", loads, ROW_NBYTES, fixed_ram_nbytes=1e8, max_context=65536)


def dense(name: str, nbytes: float, layer: int = 0) -> Load:
    return Load(name, "gate_up", layer, nbytes, flops_per_row=4 * nbytes)


def uneven(seed: int, layers: int) -> Question:
    """A model of a few uneven layers on a machine of its own."""
    random = Random(seed)
    loads: list[Load] = []
    for layer in range(layers):
        scale = random.choice((1, 2))
        for kind, nbytes in (("qkv", 60e6), ("attn", 0.0), ("o", 40e6), ("gate_up", 200e6)):
            size = nbytes * scale
            kv = random.choice((2e4, 8e4)) if kind == "attn" else 0.0
            flops = 16384.0 if kind == "attn" else 4 * size
            loads.append(Load(f"{layer}.{kind}", kind, layer, size, flops, kv))  # type: ignore[arg-type]
    loads.append(Load("lm_head", "lm_head", None, 150e6, 600e6))
    link = random.choice((6e9, 12e9, 25e9))
    cpu = random.choice((20e9, 40e9, 60e9))
    whole = small_model(*loads)
    card = replace(
        CARD,
        vram_nbytes=1e9 + STAGE_NBYTES + whole.nbytes * random.uniform(0.1, 0.9),
        h2d_bytes_per_s=link,
        crossing_s=random.choice((5e-6, 20e-6, 200e-6)),
    )
    port = cpu * random.choice((1.1, 1.6))
    machine = replace(MACHINE, cards=(card,), cpu_bytes_per_s=cpu, dram_bytes_per_s=port)
    context = random.choice((128, 4096))
    return Question(whole, machine, Work(context=context, max_context=4096))
