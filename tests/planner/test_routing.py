"""Routing traces: files of both kinds, what is wrong with them, halves, and the synthetic skew."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowlane.planner.heat import Heat, heat_from_json, heat_of, merged
from shadowlane.planner.routing import NOBODY, SKEW, RoutedModel, Trace, synthesize
from shadowlane.planner.routing_files import TraceWriter, read_trace, write_trace

few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    top_k, tokens = draw(st.integers(1, experts)), draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    choices = np.full((tokens, layers, top_k), NOBODY, np.int16)
    for route in choices.reshape(-1, top_k):
        number = random.integers(0, top_k + 1)
        route[:number] = random.permutation(experts)[:number]
    steps = np.cumsum(random.random(tokens) < 0.6).astype(np.int32)
    steps -= steps[0]
    starts = sorted({0, *(int(each) for each in random.integers(0, tokens, 2))})
    starts = [each for each in starts if each == 0 or steps[each] != steps[each - 1]]
    model = RoutedModel("a model", experts, top_k, (10,) * layers, (3,) * layers, 7)
    return Trace(model, choices, steps, steps < 1, tuple(starts))


@few
@given(traces(), st.sampled_from(["t.jsonl", "t.jsonl.gz"]))
def test_what_is_written_is_read_again(tmp_path: Path, trace: Trace, name: str) -> None:
    write_trace(tmp_path / name, trace)
    again = read_trace(tmp_path / name)
    assert again.model == trace.model
    assert again.turn_starts == trace.turn_starts
    for field in ("choices", "steps", "is_prefill"):
        np.testing.assert_array_equal(getattr(again, field), getattr(trace, field))


@few
@given(traces())
def test_parts_and_passes_lose_nothing(trace: Trace) -> None:
    joined = np.concatenate([turn.choices for turn in trace.turns()])
    np.testing.assert_array_equal(joined, trace.choices)
    if trace.steps[-1] > 0:
        first, second = trace.halves()
        assert first.steps[-1] < second.steps[0]
        np.testing.assert_array_equal(
            np.concatenate([first.choices, second.choices]), trace.choices
        )
    passes = list(trace.passes())
    assert sum(each.num_rows for each in passes) == trace.num_tokens
    for number, step in zip(np.unique(trace.steps), passes, strict=True):
        for layer, ids in step.routes:
            chosen = trace.choices[trace.steps == number, layer]
            assert set(ids.tolist()) == set(chosen[chosen != NOBODY].tolist())
            assert len(set(ids.tolist())) == len(ids)


def test_a_plain_file_is_whole_after_every_step(tmp_path: Path) -> None:
    trace = synthesize(num_tokens=3, num_layers=2, num_experts=8, top_k=2)
    writer = TraceWriter(tmp_path / "t.jsonl", trace.model)
    writer.step(trace.choices[:2], turn=0, is_prefill=True)
    assert read_trace(tmp_path / "t.jsonl").num_tokens == 2
    writer.step(trace.choices[2:], turn=0, is_prefill=False)
    assert read_trace(tmp_path / "t.jsonl").is_prefill.tolist() == [True, True, False]
    writer.close()


def test_halves_are_cut_between_turns_if_that_comes_near() -> None:
    trace = synthesize(num_tokens=100, num_layers=1, num_experts=8, top_k=2)
    assert [half.num_tokens for half in trace.halves()] == [50, 50]
    turns = replace(trace, turn_starts=(0, 10, 40, 90))
    assert [half.num_tokens for half in turns.halves()] == [40, 60]
    assert turns.halves()[1].turn_starts == (0, 50)
    with pytest.raises(ValueError, match="at least two steps"):
        trace.part(0, 1).halves()


HEADER = {
    "format": "shadowlane-routes",
    "version": 1,
    "model": "m",
    "layers": 1,
    "experts": 4,
    "top_k": 2,
    "expert_nbytes": [10],
    "dense_nbytes": [3],
    "outside_nbytes": 0,
}
TOKEN = {"step": 0, "turn": 0, "phase": "decode", "experts": [[1, 2]]}


@pytest.mark.parametrize(
    ("header", "token", "says"),
    [
        ({"version": 2}, {}, "line 1 must be the header: must be shadowlane-routes version 1"),
        ({"layers": None}, {}, "line 1 must be the header: numbers must be whole; got None"),
        ({"layers": 2}, {}, "dense_nbytes must be 2 sizes"),
        ({"top_k": 5}, {}, "top_k must be between 1 and the 4 experts; got 5"),
        ({"expert_nbytes": [0]}, {}, "expert_nbytes must be positive"),
        ({"outside_nbytes": -1}, {}, "outside_nbytes must not be negative"),
        (
            {},
            {"experts": [[1, 4]]},
            "line 2 must be a token: ids of layer 0 must be below 4; got 4",
        ),
        ({}, {"experts": [[1, -1]]}, "ids of layer 0 must be below 4; got -1"),
        ({}, {"experts": [[1, 1]]}, "must have distinct ids"),
        ({}, {"experts": [[1, 2, 3]]}, "at most 2 ids; got 3"),
        ({}, {"experts": [[1], [2]]}, "must be 1 lists; got 2"),
        ({}, {"experts": [[1.5]]}, "numbers must be whole; got 1.5"),
        ({}, {"experts": 7}, "line 2 must be a token"),
        ({}, {"phase": "sleep"}, "phase must be prefill or decode; got 'sleep'"),
        ({}, {"step": "x"}, "numbers must be whole; got 'x'"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(
    tmp_path: Path, header: dict[str, object], token: dict[str, object], says: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(HEADER | header) + "\n" + json.dumps(TOKEN | token) + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl: line \d ") as error:
        read_trace(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1 must be the header of a routing trace"),
        ("hello\n", "line 1 must be the header of a routing trace"),
        ("{}\n", "line 1 must have 'format' in the header"),
        (json.dumps(HEADER) + "\n", "line 2 must be a token: a trace must not be empty"),
        (json.dumps(HEADER) + "\n{}\n", "line 2 must have 'experts'"),
        (json.dumps(HEADER) + '\n{"step": 0, "tu', "line 2 is cut off"),
        (json.dumps(HEADER) + "\n" + json.dumps(TOKEN), "line 2 is cut off"),
        (json.dumps(HEADER) + "\n" + '{"step":\n', "line 2 must be a token"),
    ],
)
def test_a_file_that_is_none_or_not_whole_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"t\.jsonl: line \d ") as error:
        read_trace(tmp_path / "t.jsonl")
    assert says in str(error.value)


def test_a_gzip_stream_that_is_cut_off_or_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    write_trace(path, synthesize(num_tokens=200, num_layers=2, num_experts=64, top_k=8))
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"line \d+ is cut off: the gzip stream must have an end"):
        read_trace(path)
    path.write_bytes(b"plain text\n")
    with pytest.raises(ValueError, match="line 1 must be readable as gzip"):
        read_trace(path)


def test_steps_must_not_fall(tmp_path: Path) -> None:
    lines = [HEADER, TOKEN | {"step": 3}, TOKEN]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(ValueError, match="line 3 must be a token: steps and turns must not fall"):
        read_trace(tmp_path / "t.jsonl")


RECORDED = """\
# route_trace v1
# model=/somewhere/m.gguf arch=x n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=10 dense_bytes=5
# layer=1 expert_bytes=12 dense_bytes=6
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.5,0,10
0,0,0,0,1,1,0.2,0,10
0,0,1,0,0,2,0.5,0,10
0,0,1,1,0,2,0.5,0,10
0,1,2,0,0,0,0.5,1,0
0,1,2,1,1,3,0.5,1,0
"""


def test_a_recorded_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "r.csv.gz").write_bytes(gzip.compress(RECORDED.encode()))
    trace = read_trace(tmp_path / "r.csv.gz")
    assert trace.model == RoutedModel("m.gguf", 4, 2, (10, 12), (5, 6))
    assert trace.choices.tolist() == [
        [[3, 1], [-1, -1]],
        [[2, -1], [2, -1]],
        [[0, -1], [-1, 3]],
    ]
    assert trace.is_prefill.tolist() == [True, True, False]
    assert trace.steps.tolist() == [0, 0, 1]  # prefill is one pass


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("0,1,2,0,0,0,0.5", "0,1,2,2,0,0,0.5", "line 10 must have a layer below 2; got 2"),
        ("0,1,2,0,0,0,0.5", "0,1,2,0,2,0,0.5", "line 10 must have a slot below 2; got 2"),
        ("0,1,2,0,0,0,0.5", "0,1,2,0,0,4,0.5", "line 10 must have a expert below 4; got 4"),
        ("0,1,2,0,0,0,0.5", "0,1,2,x,0,0,0.5", "line 10 must have the nine columns"),
        ("0,1,2,0,0,0,0.5,1,0", "0,1,2,0,0,0", "line 10 must have the nine columns"),
        ("# layer=1 expert_bytes=12 dense_bytes=6\n", "", "the sizes of 2 layers; got 1"),
        ("n_expert=4", "n_expert=many", "a whole n_expert; got 'many'"),
        ("turn,phase", "when,phase", "line 5 must name the columns"),
        ("dense_bytes=6", "", "a whole dense_bytes; got 'none'"),
        ("3,0.5,1,0\n", "3,0.5,1,0", "line 11 is cut off"),
    ],
)
def test_a_malformed_recorded_file_is_refused(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    assert old in RECORDED
    (tmp_path / "r.csv").write_text(RECORDED.replace(old, new))
    with pytest.raises(ValueError, match=r"r\.csv: line \d+ ") as error:
        read_trace(tmp_path / "r.csv")
    assert says in str(error.value)


def test_a_trace_of_another_model_is_refused() -> None:
    trace = synthesize(num_tokens=1, num_layers=2, num_experts=8, top_k=2)
    trace.check(trace.model.name, 2, 8, 2)
    with pytest.raises(ValueError, match=r"must be of other \(2 layers, 8 experts, top 2\)"):
        trace.check("other", 2, 8, 2)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (256, 4)])
@pytest.mark.parametrize("locality", [0.0, 0.5])
def test_synthetic_choices_have_the_stated_shares(
    num_experts: int, top_k: int, locality: float
) -> None:
    trace = synthesize(
        num_tokens=6000, num_layers=2, num_experts=num_experts, top_k=top_k, locality=locality
    )
    counts = -np.sort(-heat_of(trace).counts, axis=1)
    assert (counts.sum(1) == 6000 * top_k).all()
    for part, share in SKEW:
        hottest = counts[:, : round(part * num_experts)].sum() / counts.sum()
        assert hottest == pytest.approx(share, abs=0.03)


def test_locality_is_what_stays_from_token_to_token() -> None:
    def staying(locality: float) -> float:
        trace = synthesize(num_tokens=200, num_layers=4, locality=locality)
        same = trace.choices[1:, :, :, None] == trace.choices[:-1, :, None, :]
        return float(same.any(-1).mean())

    assert staying(0.0) < 0.15
    assert staying(0.45) == pytest.approx(0.3, abs=0.05)  # as recorded
    assert staying(0.9) > 0.6
    again = [synthesize(num_tokens=9, num_layers=2, seed=seed).choices for seed in (1, 1, 2)]
    assert (again[0] == again[1]).all()
    assert (again[0] != again[2]).any()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"locality": 1.0}, "locality must be from 0 to below 1; got 1.0"),
        ({"num_tokens": 0}, "num_tokens must be positive; got 0"),
        ({"skew": ((0.5, 0.2),)}, "skew must be rising shares that rise ever less"),
        ({"top_k": 200}, "top_k must be between 1 and the 128 experts; got 200"),
    ],
)
def test_what_cannot_be_synthesized_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        synthesize(**({"num_tokens": 2} | arguments))  # type: ignore[arg-type]


def test_heat_survives_its_text_and_fades_from_run_to_run() -> None:
    heat = heat_of(synthesize(num_tokens=50, num_layers=2, num_experts=8, top_k=2))
    again = heat_from_json(heat.to_json())
    assert (again.model, again.visits) == (heat.model, 50)
    np.testing.assert_array_equal(again.counts, heat.counts)
    both = merged(heat, again, decay=0.5)
    np.testing.assert_allclose(both.rates, heat.rates)
    assert both.visits == 75
    with pytest.raises(ValueError, match="heat must be of other"):
        merged(heat, replace(heat, model="other"))
    with pytest.raises(ValueError, match="decay must be between 0 and 1; got 2"):
        merged(heat, heat, decay=2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "shadowlane-heat", "version": 2, "model": "m", "visits": 1, "counts": [[1]]}',
        '{"format": "shadowlane-heat", "version": 1, "model": "m", "visits": 1, "counts": [[2]]}',
        '{"format": "shadowlane-heat", "version": 1, "model": "m", "visits": 1, "counts": [[-1]]}',
        '{"format": "shadowlane-heat", "version": 1, "model": "m", "visits": 1, "counts": [1]}',
        '{"format": "shadowlane-heat", "version": 1, "model": "m", "visits": 1, "counts": [[1],2]}',
        '{"format": "shadowlane-heat", "version": 1, "model": "m", "visits": NaN, "counts": [[1]]}',
    ],
)
def test_heat_that_was_not_saved_so_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="heat must be as it was saved") as error:
        heat_from_json(text)
    assert "\n" not in str(error.value)


def test_heat_knows_its_shape() -> None:
    with pytest.raises(ValueError, match=r"heat must be of m \(1 layers of 3 experts\)"):
        Heat("m", 1, np.ones((1, 2))).check("m", 1, 3)
