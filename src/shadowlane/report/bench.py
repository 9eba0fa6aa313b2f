"""Repeated measurements, as a Markdown table and as an object."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shadowlane.report.figures import Json, size


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Repetitions of one measurement: "pp512" is prefill of 512 tokens, "tg128" decode of 128."""

    test: str
    tok_per_s: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.tok_per_s)

    @property
    def deviation(self) -> float:
        """Sample standard deviation; 0 for a single repetition."""
        return statistics.stdev(self.tok_per_s) if len(self.tok_per_s) > 1 else 0.0


def bench_object(model: str, rows: Sequence[BenchRow], stats: Json) -> dict[str, Any]:
    """What `bench --output json` prints: each repetition, mean, deviation, and the plan it ran."""
    return {
        "model": model,
        "tests": [
            {
                "test": row.test,
                "tok_per_s": list(row.tok_per_s),
                "mean_tok_per_s": row.mean,
                "deviation_tok_per_s": row.deviation,
            }
            for row in rows
        ],
        "plan": stats["plan"],
        "bottleneck": stats["bottleneck"],
        "emulated": stats["emulated"],
    }


def _vram(tiers: Json) -> list[tuple[str, int]]:
    return [(name, nbytes) for name, nbytes in tiers.items() if name.startswith("vram:")]


def bench_markdown(model: str, rows: Sequence[BenchRow], stats: Json) -> str:
    """The same as a Markdown table, to be pasted beside other engines' tables."""
    plan: Json = stats["plan"]
    emulated = " (emulated)" if stats["emulated"] else ""
    places = {
        **{f"on {name.replace('vram', 'gpu')}": nbytes for name, nbytes in _vram(plan["tiers"])},
        "in RAM": plan["tiers"]["ram"],
        "only on disk": plan["tiers"]["disk"],
        "read per token": plan["read_nbytes_per_token"],
    }
    head = ("model", *places, "bottleneck", "test", "tok/s" + emulated)
    lines = [head, ("---",) * (len(head) - 1) + ("---:",)]
    for row in rows:
        speed = f"{row.mean:.2f} ± {row.deviation:.2f}"
        sizes = [size(nbytes) for nbytes in places.values()]
        lines.append((model, *sizes, stats["bottleneck"], row.test, speed))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
