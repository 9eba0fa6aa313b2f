"""Figures of a profile, and what is made of them."""

from __future__ import annotations

import json

import pytest

from shadowlane.planner.cost import ASSUMED_DISK_BYTES_PER_S, CostModel, Workload
from shadowlane.planner.placement import DISK_LANE, LaneSpec
from shadowlane.planner.profile import DiskFigure, GroupFigure, Profile
from shadowlane.planner.synthetic import llama_catalog

CATALOG = llama_catalog()
DOWN = next(i for i, group in enumerate(CATALOG.groups) if group.kind == "down")
ATTN = next(i for i, group in enumerate(CATALOG.groups) if group.kind == "attn")
ONE = LaneSpec("cpu:0", 1)


def down(rows: int, seconds: float, units: int = 32) -> GroupFigure:
    return GroupFigure("cpu", 1, "down", "bf16", units, 1024, "decode", rows, 0, seconds)


def attention(context: int, seconds: float) -> GroupFigure:
    return GroupFigure("cpu", 1, "attn", "", 2, 0, "decode", 1, context, seconds)


PROFILE = Profile(
    "machine",
    "model",
    groups=(down(1, 0.010), down(4, 0.016), attention(100, 0.001), attention(1100, 0.002)),
    disk=(DiskFigure(1 << 20, 4, 2e9, 1.5e9), DiskFigure(1 << 16, 4, 0.5e9)),
    dram_bytes_per_s=20e9,
    instruction_s=1e-6,
)


def seconds(workload: Workload, group: int, profile: Profile = PROFILE) -> float:
    table = CostModel(profile).table(CATALOG, [ONE], workload, streaming=False)
    return table.full_s["cpu:0"][group]


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 0.010), (2, 0.012), (4, 0.016), (6, 0.020), (8, 0.024)]
)
def test_rows_between_and_beyond_those_measured(rows: int, expected: float) -> None:
    assert seconds(Workload("decode", rows, 1), DOWN) == pytest.approx(expected)


@pytest.mark.parametrize(("context", "expected"), [(100, 0.001), (600, 0.0015), (2100, 0.003)])
def test_attention_grows_with_context(context: int, expected: float) -> None:
    assert seconds(Workload("decode", 1, context), ATTN) == pytest.approx(expected)


def test_a_part_of_a_group_was_measured() -> None:
    profile = Profile("machine", "model", groups=(down(1, 0.005, units=16),))
    assert seconds(Workload("decode", 1, 1), DOWN, profile) == pytest.approx(0.010)


def test_the_nearest_block_size_counts_and_contention_where_it_was_measured() -> None:
    cost = CostModel(PROFILE)
    assert cost.disk_bytes_per_s(2 << 20, contended=False) == 2e9
    assert cost.disk_bytes_per_s(2 << 20, contended=True) == 1.5e9
    assert cost.disk_bytes_per_s(40_000, contended=True) == 0.5e9
    assert CostModel(None).disk_bytes_per_s(1, contended=True) == ASSUMED_DISK_BYTES_PER_S


def test_what_was_not_measured_is_named() -> None:
    assert CostModel(None).unmeasured(CATALOG, [ONE]) == ("everything",)
    missing = CostModel(PROFILE).unmeasured(CATALOG, [ONE])
    assert "step_s" in missing
    assert "gate_up bf16 512 on 1 threads" in missing
    assert not any(name.startswith(("down", "attn", "instruction_s")) for name in missing)
    assert not CostModel(None).measured
    assert CostModel(PROFILE).measured


def test_lanes_that_work_together_share_the_memory_port() -> None:
    fast = Profile("machine", "model", groups=(down(1, 1e-6),), dram_bytes_per_s=1e9)
    two = [ONE, LaneSpec("cpu:1", 1)]
    alone = CostModel(fast).table(CATALOG, [ONE], streaming=False).full_s["cpu:0"][DOWN]
    both = CostModel(fast).table(CATALOG, two, streaming=False).full_s["cpu:0"][DOWN]
    assert both == pytest.approx(2 * alone)


def test_drift_of_the_disk_scales_reads() -> None:
    plain = CostModel(PROFILE).table(CATALOG, [ONE], streaming=True)
    slow = CostModel(PROFILE, {DISK_LANE: 3.0}).table(CATALOG, [ONE], streaming=True)
    assert slow.read_s_per_byte == pytest.approx(3 * plain.read_s_per_byte)


def test_reads_are_slow_only_while_lanes_compute() -> None:
    table = CostModel(PROFILE).table(CATALOG, [ONE], streaming=True, block_nbytes=2 << 20)
    assert (table.read_s_per_byte, table.idle_read_s_per_byte) == (1 / 1.5e9, 1 / 2e9)
    assert table.mean_read_s_per_byte(6e9, 0.0) == pytest.approx(1 / 2e9)
    assert table.mean_read_s_per_byte(6e9, 100.0) == pytest.approx(1 / 1.5e9)
    # two seconds beside computing bring 3 GB, the other 3 GB come in one and a half
    assert table.mean_read_s_per_byte(6e9, 2.0) == pytest.approx(3.5 / 6e9)


def test_a_profile_survives_json() -> None:
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
    assert Profile.from_json(Profile("h", "m").to_json()).unmeasured == (
        "groups",
        "disk",
        "dram_bytes_per_s",
        "dram_contended_bytes_per_s",
        "instruction_s",
        "step_s",
        "gather_s",
        "copies_save_s_per_byte",
        "miss_s",
        "chunk_miss_s",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version must be 1; got 99"),
        ({"frequency": 3}, "Profile does not fit: .*frequency"),
        ({"disk": [{"nbytes": 1, "speed": 2}]}, "DiskFigure does not fit: .*speed"),
    ],
)
def test_a_profile_of_another_kind_is_refused(change: dict[str, object], message: str) -> None:
    data = {**json.loads(PROFILE.to_json()), **change}
    with pytest.raises(ValueError, match=message):
        Profile.from_json(json.dumps(data))
