"""Single decisions of the search, one by one."""

from __future__ import annotations

import json
import pickle

import pytest

from shadowlane.planner.cost import CostModel
from shadowlane.planner.explain import plan_report
from shadowlane.planner.placement import InfeasiblePlan, LaneSpec, Request
from shadowlane.planner.program import Read, build_programs
from shadowlane.planner.search import place
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog

MIB = 1 << 20
COST = CostModel(None)
CATALOG = llama_catalog()
WEIGHTS = sum(block.held_nbytes for block in CATALOG.blocks)
LEAST_KV = -(-CATALOG.page_nbytes // 4096) * 4096
LEAST = 12288 + 102400 + LEAST_KV + 4 * CATALOG.slot_nbytes


def test_a_model_that_fits_reads_nothing() -> None:
    placement = place(CATALOG, Request(ram=WEIGHTS + 20 * MIB), COST)
    assert placement.strategy == "all resident"
    assert (placement.num_slots, placement.sweep, placement.read_nbytes_per_step) == (0, (), 0)
    assert all(placement.resident)
    assert placement.context_tokens == CATALOG.max_context


def test_the_smallest_budget_is_four_slots_kv_scratch_and_constants() -> None:
    placement = place(CATALOG, Request(ram=LEAST), COST)
    assert placement.total_nbytes == LEAST
    assert placement.num_slots == 4
    assert placement.context_tokens == CATALOG.page_tokens
    assert not any(placement.resident)
    with pytest.raises(InfeasiblePlan) as caught:
        place(CATALOG, Request(ram=LEAST - 1), COST)
    assert caught.value.deficit == 1
    assert set(caught.value.parts) == {"constants", "KV for 16 tokens", "scratch", "4 slots"}
    assert "short by 1 B" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_infeasible_plan_survives_pickling() -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        place(CATALOG, Request(ram=1000), COST)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, InfeasiblePlan)
    assert str(copy) == str(caught.value)
    assert copy.deficit == caught.value.deficit


@pytest.mark.parametrize(
    ("ram", "tokens", "why"),
    [
        pytest.param(WEIGHTS + 20 * MIB, 2048, "", id="all fits"),
        pytest.param(WEIGHTS + 2 * MIB, 960, "all weights stay", id="shrunk so that all fits"),
        pytest.param(8 * MIB, 1024, "leave RAM", id="a quarter for KV"),
        pytest.param(3 * MIB, 512, "leave RAM", id="not below 512"),
        pytest.param(LEAST + 3 * LEAST_KV, 64, "all that the RAM budget holds", id="whatever fits"),
    ],
)
def test_the_default_context_shrinks_and_says_so(ram: int, tokens: int, why: str) -> None:
    placement = place(CATALOG, Request(ram=ram), COST)
    assert placement.context_tokens == tokens
    notes = [note for note in placement.notes if note.startswith("context ")]
    assert bool(notes) == bool(why)
    if why:
        assert why in notes[0]
        assert f"{tokens} tokens instead of 2048" in notes[0] or f"only {tokens} of" in notes[0]


def test_a_context_that_was_asked_for_is_kept_or_refused() -> None:
    request = Request(ram=8 * MIB, context=2000)
    assert place(CATALOG, request, COST).context_tokens == 2000
    with pytest.raises(InfeasiblePlan, match="KV for 2000 tokens"):
        place(CATALOG, Request(ram=3 * MIB, context=2000), COST)
    with pytest.raises(ValueError, match="at most 2048 tokens"):
        place(CATALOG, Request(ram=8 * MIB, context=2049), COST)


def test_an_untied_embedding_gets_ram_last_and_never_streams() -> None:
    catalog = llama_catalog(tied=False)
    embed = set(catalog.groups[0].blocks)
    without = sum(b.held_nbytes for b in catalog.blocks if b.index not in embed)
    request = Request(ram=without + 12288 + 102400 + 16 * catalog.page_nbytes, context=256)
    placement = place(catalog, request, COST)
    assert placement.sweep == ()
    assert [i for i, kept in enumerate(placement.resident) if not kept] == sorted(embed)
    assert any("gathered" in note for note in placement.notes)


@pytest.mark.parametrize(
    ("pins", "streams", "stays"),
    [
        ({"lm_head": "cpu"}, "", "lm_head"),
        ({"down": "disk"}, "2.down", ""),
        ({"[02].gate_up": "disk", r"^1\.": "cpu"}, "0.gate_up", "1.gate_up"),
    ],
)
def test_pins_are_kept(pins: dict[str, str], streams: str, stays: str) -> None:
    placement = place(CATALOG, Request(ram=12 * MIB, pins=pins), COST)
    if stays:
        assert all(placement.resident[i] for i in CATALOG.group(stays).blocks)
    if streams:
        assert not any(placement.resident[i] for i in CATALOG.group(streams).blocks)


def test_a_pin_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'attn' must match a group with weights"):
        place(CATALOG, Request(ram=12 * MIB, pins={"attn": "cpu"}), COST)


@pytest.mark.parametrize("pattern", ["experts", "0.experts", "."])
@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_routed_experts_cannot_be_pinned(pattern: str, home: str) -> None:
    request = Request(ram=1 << 30, pins={pattern: home})
    with pytest.raises(ValueError, match=r"share RAM by use .* it matches 0\.experts$"):
        place(mixture_catalog(), request, COST)


def test_pins_that_do_not_fit_are_named() -> None:
    with pytest.raises(InfeasiblePlan, match="pinned weights"):
        place(CATALOG, Request(ram=4 * MIB, pins={".": "cpu"}), COST)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ram": 0}, "ram must be positive; got 0"),
        ({"lanes": ()}, "at least one compute lane"),
        ({"lanes": (LaneSpec("cpu:0", 1), LaneSpec("cpu:0", 2))}, "different names"),
        ({"num_slots": 3}, "at least 4; got 3"),
        ({"context": 0}, "context must be positive; got 0"),
        ({"max_batch": 0}, "max_batch must be at least 1; got 0"),
        ({"pins": {"x": "vram:0"}}, "must name gpu:<n>, cpu or disk; got 'vram:0'"),
    ],
)
def test_requests_that_make_no_sense(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**{"ram": MIB, **wrong})  # type: ignore[arg-type]


def test_a_compute_lane_has_a_name_of_its_kind() -> None:
    with pytest.raises(ValueError, match="cpu:<n> or gpu:<n>; got 'h2d:0'"):
        LaneSpec("h2d:0", 1)


def test_a_group_larger_than_the_ring_is_cut_into_several_instructions() -> None:
    placement = place(CATALOG, Request(ram=LEAST), COST)
    programs = build_programs(CATALOG, placement)
    of_head = [i for i in programs["cpu:0"].instructions if getattr(i, "group", "") == "lm_head"]
    assert len(CATALOG.group("lm_head").blocks) == 16
    assert len(of_head) == 8  # two blocks each: half the ring
    reads = [each for each in programs["disk:0"].instructions if isinstance(each, Read)]
    assert [read.block for read in reads] == list(placement.sweep)
    assert all(len(read.consumers) == 1 for read in reads)


def test_shares_follow_threads() -> None:
    lanes = (LaneSpec("cpu:0", 3), LaneSpec("cpu:1", 1))
    # Large enough for a split to be worth two barriers a group.
    catalog = llama_catalog(hidden=2048, inner=8192, layers=2, vocab=4096)
    placement = place(catalog, Request(ram=1 << 30, lanes=lanes), COST)
    assert placement.shares["0.down"] == (("cpu:0", 0, 96), ("cpu:1", 96, 128))
    assert placement.shares["embed"] == (("cpu:0", 0, 256),)


def test_a_large_model_is_planned() -> None:
    catalog = llama_catalog(
        layers=80, hidden=8192, inner=28672, heads_kv=8, vocab=128_000, tile_rows=512
    )
    assert len(catalog.blocks) > 10_000
    placement = place(catalog, Request(ram=40 << 30), COST)
    assert placement.sweep
    assert placement.total_nbytes <= 40 << 30


def test_the_report_is_plain_data_and_adds_up() -> None:
    placement = place(CATALOG, Request(ram=9 * MIB), COST)
    report = json.loads(json.dumps(plan_report(CATALOG, placement, COST)))
    assert report["bytes"]["total"] == placement.total_nbytes
    assert sum(row["disk_nbytes"] for row in report["groups"]) == report["tiers"]["disk"]
    assert sum(row["ram_nbytes"] for row in report["groups"]) == report["tiers"]["ram"]
    assert report["measured"] is False
    assert report["unmeasured"] == ["everything"]
    assert report["predicted"]["bottleneck"] == "disk:0"
    assert report["predicted"]["resource_bound_s"] <= report["predicted"]["decode_step_s"]
