"""Mixtures in a running engine: logits of transformers, and the same tokens for any residency."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from inprocess import (
    AMPLE,
    ONE_THREAD,
    TWO_LANES,
    TWO_THREADS,
    InProcess,
    by_one_thread,
    collect,
    cut,
    running,
)
from mixture_files import (
    model_of_family,
    round_experts,
    write_mixture_gguf,
    write_published_gpt_oss,
    write_stacked,
)
from tiny import MIXTURES, reference_logits, tiny_tokens
from typer.testing import CliRunner

from shadowlane.actors import arranged_experts
from shadowlane.actors.blueprint import Options, read_blueprint
from shadowlane.actors.disk_lane import EXPERT_NBYTES
from shadowlane.actors.expert_reader import EARLY_HITS, NUM_EXPERT_STATISTICS, ExpertStatistics
from shadowlane.actors.hosts import ThreadHost
from shadowlane.actors.measure import measure_groups
from shadowlane.actors.routing import routed_model
from shadowlane.actors.run_report import expert_use
from shadowlane.actors.service import Service
from shadowlane.cli import app
from shadowlane.ops.errors import ModelError
from shadowlane.planner.chooser import Chooser
from shadowlane.planner.cost import CostModel, Workload
from shadowlane.planner.hit_rate import with_measured
from shadowlane.planner.look_ahead import LookAhead, LookAheadSettings
from shadowlane.planner.placement import InfeasiblePlan
from shadowlane.planner.profile import Profile
from shadowlane.planner.routing import NOBODY, synthesize
from shadowlane.planner.routing_files import TraceWriter, read_trace, write_trace
from shadowlane.planner.search import SPARE_EXPERTS

TOLERANCE = 1e-4  # float32 against float32, largest difference of any logit
NUM_TOKENS = 75
OPTIONS = Options(context=128, prefill_chunk=64, dtype="float32")
GPT_OSS = ["gpt-oss", "gpt-oss-plain"]
MANY = "qwen3-moe-norm"  # a family with experts enough to keep few of them


def pieces(length: int, chunk: int) -> list[int]:
    return [min(chunk, length - first) for first in range(0, length, chunk)]


def assert_logits(model: Path, reference: Path, cores: Sequence[Sequence[int]]) -> None:
    """64 and 20 rows go through torch, 8 and 1 through the compiled kernels."""
    tokens = tiny_tokens(NUM_TOKENS)
    for chunk in (64, 20, 8, 1):
        options = replace(OPTIONS, logit_rows=chunk)
        with running(model, options=options, cores=cores) as engine:
            ours = engine.logits(tokens)
        theirs = reference_logits(reference, tokens, pieces(NUM_TOKENS, chunk), "float32")
        assert np.abs(ours - theirs).max() <= TOLERANCE


@pytest.mark.parametrize("family", MIXTURES)
def test_logits_equal_those_of_transformers(tiny_model: Callable[..., Path], family: str) -> None:
    model = tiny_model(family)
    assert_logits(model, model, TWO_THREADS)


@pytest.mark.parametrize("family", GPT_OSS)
def test_gpt_oss_from_gguf(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    """Sinks, biases of experts, a clamped activation; the limit is that of the architecture."""
    model = tiny_model(family, swiglu_limit=7.0)
    assert_logits(write_mixture_gguf(model, tmp_path / "model.gguf"), model, TWO_THREADS)


def test_a_limit_that_is_reached(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """With larger weights, so that the architecture's limit cuts something off."""
    model = tiny_model("gpt-oss", swiglu_limit=7.0, hidden_size=96)
    path = write_mixture_gguf(model, tmp_path / "model.gguf")
    assert_logits(path, model, ONE_THREAD)


@pytest.mark.parametrize("is_fused", [True, False])
def test_experts_in_one_tensor(
    tiny_model: Callable[..., Path], tmp_path: Path, is_fused: bool
) -> None:
    model = tiny_model(MANY)
    stacked = write_stacked(model, tmp_path / "stacked", is_fused=is_fused)
    assert_logits(stacked, model, ONE_THREAD)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4"])
def test_packed_experts(tiny_model: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """Against weights rounded the same way. An expert that many rows of a chunk chose is expanded;
    for few rows, and in decode, the inputs are rounded to bytes."""
    layout = gguf.GGMLQuantizationType[kind]
    model = tiny_model(MANY, hidden_size=128)
    path = write_mixture_gguf(model, tmp_path / "model.gguf", kind=layout)
    rounded = round_experts(model, tmp_path / "rounded", layout)
    tokens = tiny_tokens(400)
    options = replace(OPTIONS, context=400, prefill_chunk=400, logit_rows=400)
    with running(path, options=options) as engine:
        ours = engine.logits(tokens)
    theirs = reference_logits(rounded, tokens, None, "float32")
    assert np.median(np.abs(ours - theirs).max(axis=1)) <= TOLERANCE
    tokens = tokens[:NUM_TOKENS]
    with running(path, options=replace(OPTIONS, logit_rows=1)) as engine:
        ours = engine.logits(tokens)
    theirs = reference_logits(rounded, tokens, [1] * NUM_TOKENS, "float32")
    errors = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    # a route may turn to another expert where two are as good; most rows must not
    assert np.median(errors) < 0.02


def test_published_gpt_oss(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The bits of the same weights in GGUF; and, where its experts are expanded, the logits of
    transformers, which expands all of them."""
    # so many experts per token that every one gets enough rows of a chunk to be expanded
    model = tiny_model("gpt-oss", swiglu_limit=7.0, hidden_size=128, num_experts_per_tok=5)
    published = write_published_gpt_oss(model, tmp_path / "published")
    layout = gguf.GGMLQuantizationType.MXFP4
    path = write_mixture_gguf(model, tmp_path / "model.gguf", kind=layout)
    tokens = tiny_tokens(NUM_TOKENS)
    for chunk in (64, 20, 8, 1):
        options = replace(OPTIONS, logit_rows=chunk)
        with running(published, options=options) as engine:
            ours = engine.logits(tokens)
        with running(path, options=options) as engine:
            assert np.array_equal(engine.logits(tokens), ours)
    tokens = tiny_tokens(100)
    options = replace(OPTIONS, prefill_chunk=100, logit_rows=100)
    with running(published, options=options) as engine:
        ours = engine.logits(tokens)
    assert np.abs(ours - reference_logits(published, tokens, None, "float32")).max() <= TOLERANCE


# -- residency


def budget_for(model: Path, slots: int, cores: Sequence[Sequence[int]], options: Options) -> int:
    """RAM under which a plan has so many slots for experts, with embedding rows gathered."""
    blueprint = cut(model, options, cores)
    catalog = blueprint.catalog
    assert catalog.experts is not None
    with running(model, options=options, cores=cores) as engine:
        whole = engine.engine.placement
    gathered = sum(
        block.held_nbytes for block in catalog.blocks if catalog.group(block.group).kind == "embed"
    )
    missing = catalog.experts.total - slots
    return whole.total_nbytes - gathered - missing * catalog.experts.slot_nbytes


def read_nbytes(engine: InProcess) -> int:
    return int(engine.engine.gauges.disk_statistics()[EXPERT_NBYTES])


@pytest.mark.parametrize("cores", [ONE_THREAD, TWO_THREADS, TWO_LANES])
@pytest.mark.parametrize("family", ["mixtral", MANY, "qwen2-moe", "gpt-oss", "published"])
def test_tokens_do_not_depend_on_what_is_in_ram(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    cores: Sequence[Sequence[int]],
) -> None:
    model = model_of_family(tiny_model, tmp_path, family)
    monkeypatch.setattr(arranged_experts, "PIECE_NBYTES", 4000)  # a tensor is in many pieces
    experts = cut(model, OPTIONS, cores).catalog.experts
    assert experts is not None
    prompt = tiny_tokens(40)
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        expected = engine.generate(prompt, 20)
        logits = engine.logits(prompt)
    for slots in (experts.total, experts.total // 2, experts.top_k + SPARE_EXPERTS):
        ram = budget_for(model, slots, cores, OPTIONS)
        with running(model, options=OPTIONS, cores=cores, ram=ram) as engine:
            assert engine.engine.placement.expert_slots == slots
            assert engine.generate(prompt, 20) == expected
            assert np.array_equal(engine.logits(prompt), logits)
            assert bool(read_nbytes(engine)) == (slots < experts.total)


def test_requests_that_share_steps_choose_for_themselves(tiny_model: Callable[..., Path]) -> None:
    """Rows of one step go to different experts, some to the same, with few slots for all."""
    model = tiny_model(MANY)
    options = replace(OPTIONS, max_batch=4)
    experts = cut(model, options, TWO_THREADS).catalog.experts
    assert experts is not None
    prompts = [tiny_tokens(20 + 7 * number)[number:] for number in range(4)]
    ram = budget_for(model, experts.top_k + SPARE_EXPERTS, TWO_THREADS, options)
    with running(model, options=options, ram=ram) as engine:
        alone = [engine.generate(prompt, 12) for prompt in prompts]
        together = [engine.submit(prompt, 12) for prompt in prompts]
        assert [collect(sequence) for sequence in together] == alone


@pytest.mark.parametrize("cores", [TWO_THREADS, TWO_LANES])
def test_a_router_of_many_experts_is_not_divided(
    tiny_model: Callable[..., Path], cores: Sequence[Sequence[int]]
) -> None:
    """A choice is made once, whoever computes: 32 rows are two units, for two lanes to share."""
    model = tiny_model(MANY, num_experts=32, num_experts_per_tok=4)
    prompt = tiny_tokens(40)
    expected = by_one_thread(model, OPTIONS, prompt, 20)
    for ram in (1 << 28, budget_for(model, 40, cores, OPTIONS)):
        with running(model, options=OPTIONS, cores=cores, ram=ram) as engine:
            assert [engine.generate(prompt, 20) for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_a_prompt_that_comes_in_changes_no_other_answer(
    tiny_model: Callable[..., Path], tmp_path: Path, kind: str | None
) -> None:
    """Few rows of its chunk go to an expert that a decode row of the same step goes to as well."""
    model = tiny_model(MANY, hidden_size=128)
    if kind is not None:
        layout = gguf.GGMLQuantizationType[kind]
        model = write_mixture_gguf(model, tmp_path / "model.gguf", kind=layout)
    options = replace(OPTIONS, max_batch=2)
    with running(model, options=options, cores=ONE_THREAD) as engine:
        alone = engine.generate(tiny_tokens(20), 40)
        for length in (17, 24, 60):
            running_one = engine.submit(tiny_tokens(20), 40)
            while not running_one.outputs.qsize():
                pass
            other = engine.submit(tiny_tokens(length + 3)[3:], 4)
            assert collect(running_one) == alone
            collect(other)


def test_a_chunk_reads_each_expert_once(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(MANY)
    experts = cut(model, OPTIONS, TWO_THREADS).catalog.experts
    assert experts is not None
    ram = budget_for(model, experts.top_k + SPARE_EXPERTS, TWO_THREADS, OPTIONS)
    with running(model, options=OPTIONS, ram=ram) as engine:
        engine.generate(tiny_tokens(64), 1)
        most = experts.total * experts.nbytes
        assert 0 < read_nbytes(engine) <= most


def test_experts_of_a_layer_are_of_the_same_types(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model(MANY), tmp_path / "mixed"))
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)
    safetensors.torch.save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layer 1: .*down of expert 0 is f32, of expert 3 bf16"):
        read_blueprint(model, OPTIONS, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 1, 1], "layer 1 must have distinct ids"),
        ([0, 1, NOBODY], "3 different experts in each layer; token 2 in layer 1"),
    ],
)
def test_a_trace_that_does_not_choose_whole_rows_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, row: list[int], message: str
) -> None:
    model = tiny_model(MANY, num_experts_per_tok=3)
    blueprint = cut(model, OPTIONS, ONE_THREAD)
    shape = routed_model(blueprint)
    choices = np.tile(np.array([0, 1, 2], np.int16), (4, shape.num_layers, 1))
    choices[2, 1] = row
    with TraceWriter(tmp_path / "trace.jsonl", shape) as writer:
        writer.step(choices, turn=0, is_prefill=False)
    with (
        pytest.raises(ValueError, match=message),
        running(model, options=OPTIONS, replay_routing=tmp_path / "trace.jsonl"),
    ):
        pass


def test_a_trace_of_another_shape_is_refused_and_told_what_this_model_is(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    other = cut(tiny_model(MANY, num_experts=32), OPTIONS, ONE_THREAD)
    shape = routed_model(other)
    with TraceWriter(tmp_path / "trace.jsonl", shape) as writer:
        choices = np.tile(np.arange(shape.top_k, dtype=np.int16), (4, shape.num_layers, 1))
        writer.step(choices, turn=0, is_prefill=False)
    model = tiny_model(MANY)
    mine = routed_model(cut(model, OPTIONS, ONE_THREAD))
    with (
        pytest.raises(ValueError, match=f"must be of {mine.name} .* it is of {shape.name} "),
        running(model, options=OPTIONS, replay_routing=tmp_path / "trace.jsonl"),
    ):
        pass


def test_a_run_is_recorded_and_can_be_replayed(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model(MANY)
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl.gz"]
    with running(model, options=OPTIONS, trace_routing=files[0]) as engine:
        engine.generate(tiny_tokens(20), 10)
    with running(model, options=OPTIONS, trace_routing=files[1], replay_routing=files[0]) as engine:
        engine.generate(tiny_tokens(20), 10)
    first, second = (read_trace(path) for path in files)
    assert first.num_tokens == 20 + 9
    assert int(first.is_prefill.sum()) == 20
    assert np.array_equal(first.choices, second.choices)
    assert len({tuple(row) for row in first.choices[:, 0].tolist()}) > 1


def test_what_a_run_tells_of_its_experts(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(MANY)
    experts = cut(model, OPTIONS, TWO_THREADS).catalog.experts
    assert experts is not None
    slots = experts.total // 2
    with running(model, options=OPTIONS, ram=budget_for(model, slots, TWO_THREADS, OPTIONS)) as run:
        sequence = run.submit(tiny_tokens(30), 16)
        collect(sequence)
        told = expert_use(run.engine, sequence)
        assert told is not None
        resident, early, chosen, read, _ = sequence.use_after.experts
        # the last token is given without a step of its own
        assert chosen == 15 * experts.num_layers * experts.top_k
        assert 0 < resident < chosen
        assert told["hit_rate"] == resident / chosen
        assert told["early_hit_rate"] == early / chosen
        assert 0 <= early <= told["look_ahead"]["early_reads"]
        assert 0 < read <= read_nbytes(run)
        assert (told["slots"], told["of"]) == (slots, experts.total)
    with running(tiny_model("llama2")) as run:
        sequence = run.submit(tiny_tokens(30), 4)
        collect(sequence)
        assert expert_use(run.engine, sequence) is None


def test_experts_of_prompts_are_counted_as_moved(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model(MANY)
    routing = tmp_path / "routes.jsonl"
    with running(model, options=OPTIONS, trace_routing=routing) as run:
        sequence = run.submit(tiny_tokens(90), 3)  # chunks of 64 and 26 rows, then two of one
        collect(sequence)
        experts = run.engine.blueprint.catalog.experts
        assert experts is not None
        dense = sum(run.engine.multiplied.in_a_step(run.engine.placement))
        moved = sequence.lane_use["cpu:0"][1]
    chosen = [len(ids) for step in read_trace(routing).passes() for _, ids in step.routes]
    assert len(chosen) == 4 * experts.num_layers
    assert moved == 4 * dense + sum(chosen) * experts.nbytes


def test_a_summary_names_ram_disk_and_reads_truly(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(MANY)
    experts = cut(model, OPTIONS, TWO_THREADS).catalog.experts
    assert experts is not None
    slots = experts.total // 2
    with running(model, options=OPTIONS, ram=budget_for(model, slots, TWO_THREADS, OPTIONS)) as run:
        service = Service(ThreadHost())
        service._engine = run.engine
        for length in (1, 9):
            sequence = service._last = run.submit(tiny_tokens(30), length)
            collect(sequence)
            plan = service.stats()["plan"]
            placement = run.engine.placement
            blocks = run.engine.blueprint.catalog.blocks
            gathered = sum(b.held_nbytes for b in blocks if not placement.resident[b.index])
            assert plan["tiers"] == {
                "ram": placement.weights_nbytes + slots * experts.slot_nbytes,
                "disk": gathered + (experts.total - slots) * experts.held_nbytes,
            }
            assert (plan["read_nbytes_per_token"] is None) == (length == 1)
        used = sequence.use_after.experts.read_nbytes - sequence.use_before.experts.read_nbytes
        assert plan["read_nbytes_per_token"] == used // 8
        service._engine = None


def test_what_a_missing_expert_costs_is_measured(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(MANY)
    experts = cut(model, OPTIONS, ONE_THREAD).catalog.experts
    assert experts is not None
    found = measure_groups((0,), model, OPTIONS, AMPLE)
    figure = found["experts"]
    assert (figure.nbytes, figure.contended_bytes_per_s) == (
        experts.held_nbytes,
        figure.bytes_per_s,
    )
    assert figure.bytes_per_s > 0
    assert found["miss_s"] >= 0
    assert found["chunk_miss_s"] >= experts.held_nbytes / figure.bytes_per_s
    cost = CostModel(Profile("h", "m", disk=(figure,), miss_s=2.0, chunk_miss_s=3.0))
    catalog = with_measured(cut(model, OPTIONS, ONE_THREAD).catalog, 1, 0.25, 99)
    assert cost.missing_s(catalog, 1, Workload("decode", 1)) == pytest.approx(
        2.0 * 0.75 * experts.top_k
    )
    chunk = cost.missing_s(catalog, 1, Workload("prefill", 10_000))
    assert chunk == pytest.approx(3.0 * experts.per_layer * (1 - 1 / experts.total))
    assert cost.missing_s(catalog, experts.total, Workload("prefill", 64)) == 0
    assert "miss_s" not in measure_groups((0,), tiny_model("llama2"), OPTIONS, AMPLE)


def test_a_simulation_holds_what_a_run_holds(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model(MANY)
    routing = tmp_path / "routes.jsonl"
    options = Options(dtype="float32")
    slots = cut(model, OPTIONS, TWO_THREADS).catalog.experts.total // 2
    # a longer context takes more scratch too
    for context, more, asked in ((128, 0, ("--ctx-size", "128")), (None, 900_000, ())):
        options = replace(options, context=context)
        ram = budget_for(model, slots, TWO_THREADS, replace(options, context=128)) + more
        with running(model, options=options, ram=ram, trace_routing=routing) as engine:
            engine.generate(tiny_tokens(20), 10)
            placement = engine.engine.placement
        result = CliRunner().invoke(
            app,
            ["simulate", str(model), "--routing", str(routing), "--ram", f"{ram}B", "--json",
             "--cpu-threads", "2", "--dtype", "float32", *asked],
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        said = json.loads(result.stdout)
        assert said["slots"] == placement.expert_slots
        assert said["title"] == model.name
        assert said["run"] == {
            "ram": placement.ram,
            "dense_nbytes": placement.weights_nbytes,
            "experts_nbytes": placement.experts_nbytes,
            "kv_nbytes": placement.kv_nbytes,
            "context_tokens": placement.context_tokens,
            "scratch_nbytes": placement.scratch_nbytes + placement.constants_nbytes,
        }


def test_routing_of_another_shape_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    routing = tmp_path / "routes.jsonl"
    write_trace(routing, synthesize(num_tokens=8, num_layers=2, num_experts=4, top_k=1))
    arguments = ["simulate", str(tiny_model(MANY)), "--routing", str(routing), "--ram", "1"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: the routing trace must be of " in result.stderr


def test_a_budget_below_what_every_token_needs_names_the_sum(
    tiny_model: Callable[..., Path],
) -> None:
    model = tiny_model(MANY)
    experts = cut(model, OPTIONS, TWO_THREADS).catalog.experts
    assert experts is not None
    least = budget_for(model, experts.top_k + SPARE_EXPERTS, TWO_THREADS, OPTIONS)
    with running(model, options=OPTIONS, ram=least):
        pass
    with (
        pytest.raises(InfeasiblePlan, match=r"weights of every token .* experts .* short by"),
        running(model, options=OPTIONS, ram=least - 4096),
    ):
        pass


def test_early_hits_outlive_the_lane_that_counted_them() -> None:
    fields = np.zeros(NUM_EXPERT_STATISTICS, np.int64)
    chooser = Chooser(2, 8, 2, 6)
    for early_hits, total in ((5, 5), (0, 5), (2, 7)):
        statistics = ExpertStatistics(fields)  # of a lane that has been started again
        statistics.tell(LookAhead(LookAheadSettings(), early_hits=early_hits), chooser)
        statistics.tell(LookAhead(LookAheadSettings(), early_hits=early_hits), chooser)
        assert fields[EARLY_HITS] == total
