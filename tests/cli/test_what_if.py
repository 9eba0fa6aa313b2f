"""`shadowlane plan --hardware`: tables, an object, flags for llama.cpp, errors of one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from filemaking import write_gguf
from typer.testing import Result

from shadowlane.llama_cpp import llama_cpp_flags, number_pattern
from shadowlane.planner.hybrid import Load, Model, Plan, Site, Work
from shadowlane.what_if import OURS, what_if
from shadowlane.what_if_report import _sizes

EXAMPLES = Path(__file__).parents[2] / "examples" / "hardware"
LAPTOP, ONE_CARD, TWO_CARDS = (
    EXAMPLES / f"{name}.yaml" for name in ("rtx-3060-laptop-6gb", "rtx-4090-24gb", "two-rtx-3090")
)
KEYS = {
    "model",
    "hardware",
    "strategy",
    "phase",
    "context",
    "tok_per_s",
    "predicted_tok_per_s",
    "resource_bound",
    "path_bound",
    "emulated",
}

Command = Callable[..., Result]


@pytest.fixture
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search without most of its small changes: nearly as good, and much sooner."""
    monkeypatch.setattr("shadowlane.planner.hybrid_search.MOST_TRIES", 50)


# -- what is printed


@pytest.mark.usefixtures("few_tries")
@pytest.mark.parametrize(
    ("model", "hardware", "layouts"),
    [
        ("llama-2-13b", LAPTOP, ("cpu", "layer-split", "layer-stream")),
        ("gpt-oss-120b", TWO_CARDS, ("cpu", "layer-split", "cpu-moe")),
    ],
)
def test_each_layout_is_one_row_of_eighty_columns(
    shadowlane_command: Command,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    hardware: Path,
    layouts: Sequence[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = shadowlane_command("plan", model, "--hardware", hardware)
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    text = " ".join(result.stdout.split())
    assert "Emulated: predicted from a hardware file, nothing was run." in text
    assert "2048 tokens of prompt, then 128 of answer, emulated" in lines
    for phase in ("Decode, one sequence, 512 of 4096 tokens", "Prompt, 2048 tokens at once"):
        heading = lines.index(f"{phase}, emulated")
        rows = lines[heading + 3 : lines.index("", heading)]
        rows = [row for row in rows if re.search(r"(cpu|gpu|h2d|disk):\d \d+%$", row)]
        for layout in (*layouts, OURS):
            assert [row for row in rows if row.startswith(layout)], (layout, rows)
        assert rows[-1].startswith(OURS)
        assert re.search(r" 1\.00 ", rows[-1])


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    """A mixture that does not fit two cards, as JSON has it."""
    from shadowlane.shapes import load_hardware, shape_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shadowlane.planner.hybrid_search.MOST_TRIES", 50)
        machine = load_hardware(TWO_CARDS)
        return what_if(shape_model("gpt-oss-120b"), machine)


def test_rows_have_the_keys_that_comparisons_have(planned: dict[str, Any]) -> None:
    assert planned["planning_s"] > 0
    for row in planned["rows"]:
        assert set(row) >= KEYS
        assert row["emulated"] is True
        assert row["tok_per_s"] is None  # nothing was run
        assert row["predicted_tok_per_s"] <= row["path_bound"] * 1.0001
        assert row["path_bound"] <= row["resource_bound"] * 1.0001
    assert {row["phase"] for row in planned["rows"]} == {"decode", "prefill"}


def test_ours_is_last_and_no_layout_by_hand_serves_a_request_sooner(
    planned: dict[str, Any],
) -> None:
    asked = planned["request"]
    took: dict[str, float] = {}
    for phase, tokens in (("decode", "answer_tokens"), ("prefill", "prompt_tokens")):
        rows = [row for row in planned["rows"] if row["phase"] == phase]
        assert rows[-1]["strategy"] == OURS
        for row in rows:
            seconds = asked[tokens] / row["predicted_tok_per_s"]
            took[row["strategy"]] = took.get(row["strategy"], 0.0) + seconds
    assert list(took.values()) == sorted(took.values(), reverse=True)
    for row in planned["rows"]:
        assert row["request_over_ours"] == pytest.approx(took[row["strategy"]] / took[OURS])


def test_a_layout_is_the_same_in_both_phases(planned: dict[str, Any]) -> None:
    """One placement; what is brought to cards may differ."""
    layouts: dict[str, set[str]] = {}
    for row in planned["rows"]:
        layouts.setdefault(row["strategy"], set()).add(row["layout"])
    assert all(len(names) == 1 for names in layouts.values())
    experts = planned["plan"]["kinds"]["experts"]
    assert experts["vram"] + experts["ram"] + experts["disk"] == pytest.approx(1.0)
    assert experts["brought"] < experts["brought_prefill"] == pytest.approx(1.0 - experts["vram"])


def test_where_things_live_adds_up(planned: dict[str, Any]) -> None:
    plan = planned["plan"]
    for parts in plan["kinds"].values():
        assert parts["vram"] + parts["ram"] + parts["disk"] == pytest.approx(1)
    held = sum(plan["vram_nbytes"]) + plan["ram_nbytes"] + plan["disk_nbytes"]
    assert held >= planned["weights_nbytes"]
    assert max(plan["vram_nbytes"]) <= 24 * 2**30


@pytest.mark.usefixtures("few_tries")
def test_room_for_what_is_brought_is_part_of_the_budget_and_named() -> None:
    from shadowlane.shapes import load_hardware, shape_model

    model, machine = shape_model("llama-2-13b"), load_hardware(LAPTOP)
    plan = what_if(model, machine, gpu_memory=2 << 30, ram=16 << 30)["plan"]
    ((card,), (stage,)) = plan["vram_nbytes"], plan["stage_nbytes"]
    brought = sum(kind["brought"] + kind["brought_prefill"] for kind in plan["kinds"].values())
    assert brought > 0
    assert 0 < stage < card <= (2 << 30) * (1 + 1e-9)
    assert plan["disk_nbytes"] > 0
    assert 0 < plan["ring_nbytes"] < plan["ram_nbytes"] <= (16 << 30) * (1 + 1e-9)
    sizes = _sizes(plan)
    assert sizes.startswith("card 0 2.00 GiB (244.1 MiB of it for what is brought), RAM 16.0 GiB (")
    assert " of it to read ahead), only on disk" in sizes


@pytest.mark.usefixtures("few_tries")
def test_what_small_matrices_lose_on_our_lanes_is_told_where_it_counts(
    shadowlane_command: Command, tmp_path: Path
) -> None:
    """A plan of the same model by `--groups` has them, as `run` has."""
    path = tmp_path / "model.gguf"
    write_gguf(path)
    small = shadowlane_command("plan", path, "--hardware", LAPTOP)
    said = " ".join(small.stdout.split())
    assert "one of 1.5 MB reaches half of a rate" in said
    told = re.search(r"half of a rate: ([\d.e+]+) tok/s with this plan", said)
    assert told is not None
    row = re.search(rf"{OURS} +([\d.e+]+) ", small.stdout)
    assert row is not None
    assert float(told[1]) < 0.95 * float(row[1])
    large = shadowlane_command("plan", "llama-2-13b", "--hardware", LAPTOP)
    assert "half of a rate" not in large.stdout


@pytest.mark.usefixtures("few_tries")
def test_json_is_one_object_and_budgets_count(shadowlane_command: Command) -> None:
    def plan(*arguments: object) -> dict[str, Any]:
        asked = ("plan", "llama-2-7b", "--hardware", ONE_CARD, "--json", *arguments)
        found: dict[str, Any] = json.loads(shadowlane_command(*asked).stdout)
        return found

    whole, half = plan(), plan("--gpu-memory", "2GiB", "--ctx-size", 1024)
    assert (whole["context"], half["context"]) == (4096, 1024)
    assert max(half["plan"]["vram_nbytes"]) <= (2 << 30) + 1 < max(whole["plan"]["vram_nbytes"])
    none = plan("--gpu-memory", "0", "--ram", "3GiB", "--ctx-size", 512)
    assert none["plan"]["vram_nbytes"] == []
    assert none["plan"]["ram_nbytes"] <= (3 << 30) + 1
    assert none["plan"]["disk_nbytes"] > 0  # 3.8 GiB of weights
    assert [row["strategy"] for row in none["rows"]] == ["cpu", OURS] * 2


@pytest.mark.usefixtures("few_tries")
def test_a_model_that_is_here_is_planned_by_its_headers(
    shadowlane_command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    result = shadowlane_command("plan", path, "--hardware", ONE_CARD, "--json")
    assert result.exit_code == 0, result.output
    planned = json.loads(result.stdout)
    assert (planned["model"], planned["context"]) == (str(path), 128)
    assert set(planned["plan"]["kinds"]) == {"qkv", "attn", "o", "gate_up", "down", "lm_head"}


# -- what is wrong


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--groups",), "MODEL must be one that is here with --groups or a layout by hand"),
        (("--gpu-layers", "3"), "llama-2-7b is known by its shape alone"),
        (("--export", "llama.cpp", "--groups"), "--export needs to be without --groups"),
        (("--pin", "down"), "--pin must be REGEX=HOME, such as experts=cpu; got 'down'"),
        (("--pin", "[=cpu"), "--pin must be regular expressions; got '['"),
        (("--pin", "down=vram"), "--pin must name gpu:0, gpu:1, ..., cpu or disk; got 'vram'"),
        (("--pin", "x=cpu", "--pin", "x=disk"), "--pin must agree: 'x' is on cpu and on disk"),
        (("--pin", "nowhere=cpu"), "pin 'nowhere' must match a group"),
        (("--pin", "down=gpu:1"), "pin 'down' must name a card in use (gpu:0); got gpu:1"),
        (("--gpu-memory", "512MiB", "--pin", "down=gpu:0"), "budget is 512.0 MiB, short by"),
        (("--cpu-threads", "2"), "--cpu-threads must be left out"),
        (("--cpu-workers", "1"), "--cpu-workers must be left out"),
        (("--dtype", "float16"), "--dtype must be left out"),
        (("--kv", "q8_0"), "--kv must be left out"),
        (("--no-expand",), "--expand must be left out"),
        (("--weights", "q8_0"), "--weights must be left out"),
        (("--json", "--export", "llama.cpp"), "--export needs to be without --json"),
        (("--export", "vllm"), "--export must be llama.cpp; got 'vllm'"),
        (("--ram", "lots"), "--ram must be a size"),
        (("--ram", "65GiB"), "--ram must be at most the 64.0 GiB of RTX 4090"),
        (("--gpu-memory", "25"), "--gpu-memory must be at most the 24.0 GiB of RTX 4090; got 25.0"),
        (("--ctx-size", "4097"), "--ctx-size must be between 1 and the model's 4096; got 4097"),
        (
            ("--ram", "64MiB", "--gpu-memory", "0"),
            "nothing does: keys and values take 2.00 GiB, embedding and scratch",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(
    fails: Callable[..., str], arguments: tuple[str, ...], says: str
) -> None:
    assert says in fails("plan", "llama-2-7b", "--hardware", ONE_CARD, *arguments)


@pytest.mark.usefixtures("few_tries")
def test_options_of_this_machine_may_stand_in_the_environment(
    shadowlane_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHADOWLANE_CPU_THREADS", "2")
    result = shadowlane_command(
        "plan", "llama-2-7b", "--hardware", ONE_CARD, "--export", "llama.cpp"
    )
    assert result.exit_code == 0, result.output


def test_export_needs_a_machine(fails: Callable[..., str]) -> None:
    assert "--export needs --hardware, the machine to plan for" in fails(
        "plan", "llama-2-7b", "--export", "llama.cpp"
    )


def test_names_that_would_do_are_told(fails: Callable[..., str]) -> None:
    said = fails("plan", "llama-9", "--hardware", ONE_CARD)
    assert "unknown model 'llama-9'" in said
    assert "with --hardware also: llama-2-7b, " in said


def test_a_card_that_is_not_there_has_no_memory(fails: Callable[..., str], tmp_path: Path) -> None:
    lines = LAPTOP.read_text().splitlines(keepends=True)
    start, end = lines.index("cards:\n"), lines.index("cpu_bytes_per_s:\n")
    path = tmp_path / "bare.yaml"
    path.write_text("".join([*lines[:start], "cards: []\n", *lines[end:]]))
    said = fails("plan", "llama-2-7b", "--hardware", path, "--gpu-memory", "4")
    assert "--gpu-memory must be 0: RTX 3060 6 GB laptop, 32 GB DDR4 has no card" in said


def test_hardware_files_that_are_none(fails: Callable[..., str], tmp_path: Path) -> None:
    def said(path: Path) -> str:
        return fails("plan", "llama-2-7b", "--hardware", path)

    path = tmp_path / "machine.yaml"
    assert f"no such hardware file: {path}" in said(path)
    assert f"a hardware file must be a file; {tmp_path} is a folder" in said(tmp_path)
    for text, rule in (
        ("", "a hardware file must hold keys and values; it is empty"),
        ("cards: [", "while parsing"),
        ("cards: []\nname: bare\ncolour: red", "the file must have only"),
        ("cards: []\nname: bare", "cpu_bytes_per_s, cpu_flops"),
        (
            LAPTOP.read_text().replace("value: 20.0e-6", "value: fast"),
            "crossing_s of cards[0] must",
        ),
    ):
        path.write_text(text)
        assert f"{path}: " in said(path)
        assert rule in said(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert f"{path}: " in said(path)


# -- flags of llama.cpp


LAYERS = 12
GB = 1e9


def dense_model() -> Model:
    loads = []
    for layer in range(LAYERS):
        loads += [
            Load(f"{layer}.qkv", "qkv", layer, 0.2 * GB, 1.0),
            Load(f"{layer}.attn", "attn", layer, 0.0, 1.0, kv_nbytes_per_token=10_000.0),
            Load(f"{layer}.o", "o", layer, 0.1 * GB, 1.0),
            Load(f"{layer}.gate_up", "gate_up", layer, 0.6 * GB, 1.0),
            Load(f"{layer}.down", "down", layer, 0.3 * GB, 1.0),
        ]
    loads.append(Load("lm_head", "lm_head", None, 0.4 * GB, 1.0))
    return Model("dense", tuple(loads), 8192.0, 1e8, 8192)


def mixture() -> Model:
    loads = []
    for layer in range(LAYERS):
        loads += [
            Load(f"{layer}.qkv", "qkv", layer, 0.2 * GB, 1.0),
            Load(f"{layer}.attn", "attn", layer, 0.0, 1.0, kv_nbytes_per_token=10_000.0),
            Load(f"{layer}.o", "o", layer, 0.1 * GB, 1.0),
            Load(f"{layer}.router", "router", layer, 1e5, 1.0),
            Load(f"{layer}.experts", "experts", layer, 0.1 * GB, 1.0, experts=10, top_k=2),
        ]
    loads.append(Load("lm_head", "lm_head", None, 0.4 * GB, 1.0))
    return Model("mixture", tuple(loads), 8192.0, 1e8, 8192)


def flags(
    model: Model,
    vram: Callable[[Load], float],
    over: Callable[[Load], tuple[float, ...]] = lambda load: (1.0,),
) -> str:
    sites = tuple(Site(vram(load), 1 - vram(load), 0.0, over(load)) for load in model.loads)
    return " ".join(llama_cpp_flags(model, Plan("", sites), Work()))


def test_all_and_nothing() -> None:
    for model in (dense_model(), mixture()):
        assert flags(model, lambda load: 1.0) == "-ngl 13 -c 4096"
        assert flags(model, lambda load: 0.0) == "-ngl 0 -c 4096"


def test_whole_layers() -> None:
    """Which of them does not matter; llama.cpp puts the last ones on the card."""

    def first_five(load: Load) -> float:
        return float(load.layer is not None and load.layer < 5)

    def last_five(load: Load) -> float:
        return float(load.layer is None or load.layer >= 7)

    model = dense_model()
    assert flags(model, last_five) == "-ngl 6 -c 4096"
    assert flags(model, first_five) == r"-ngl 6 -c 4096 -ot ^(output|token_embd)\.=CPU"
    assert flags(model, lambda load: float(load.layer is None)) == "-ngl 1 -c 4096"


def test_kinds_of_groups() -> None:
    model = dense_model()
    mlp = ("gate_up", "down")
    assert flags(model, lambda load: float(load.kind not in mlp)) == (
        r"-ngl 13 -c 4096 -ot ffn_(gate|up|down)\.=CPU"
    )
    assert flags(model, lambda load: float(load.kind in mlp)) == (
        r"-ngl 13 -c 4096 --no-kv-offload -ot attn_(q|k|v|output)\.=CPU "
        r"-ot ^(output|token_embd)\.=CPU"
    )
    assert flags(model, lambda load: float(load.kind != "attn")) == (
        "-ngl 13 -c 4096 --no-kv-offload"
    )


def test_parts_become_as_many_whole_groups_as_fit() -> None:
    """Half of twelve, and of the twelfth layers that are divided, what room is left for."""

    def half_down(load: Load) -> float:
        return 0.54 if load.kind == "down" else 1.0

    # 6.48 groups are on the card: six, for a seventh there is no room
    assert flags(dense_model(), half_down) == r"-ngl 13 -c 4096 -ot blk\.[0-5]\.ffn_down\.=CPU"

    def nearly(load: Load) -> float:
        return 0.999 if load.name == "3.qkv" else 1.0

    assert flags(dense_model(), nearly) == "-ngl 13 -c 4096"


def test_experts() -> None:
    model = mixture()
    assert flags(model, lambda load: 0.0 if load.experts else 1.0) == "-ngl 13 -c 4096 --cpu-moe"
    assert flags(model, lambda load: 0.4 if load.experts else 1.0) == (
        "-ngl 13 -c 4096 --n-cpu-moe 8"  # 4.8 layers of experts are on the card
    )

    def some_layers(load: Load) -> float:
        return float(load.layer is None or load.layer >= (9 if load.experts else 4))

    assert flags(model, some_layers) == "-ngl 9 -c 4096 --n-cpu-moe 9"
    assert flags(model, lambda load: float(load.layer is None or load.layer >= 4)) == (
        "-ngl 9 -c 4096"  # experts go with their layers
    )


def test_two_cards() -> None:
    model = dense_model()

    def in_order(load: Load) -> tuple[float, ...]:
        return (1.0, 0.0) if load.layer is not None and load.layer < 8 else (0.0, 1.0)

    assert flags(model, lambda load: 1.0, in_order) == "-ngl 13 -c 4096 -ts 8,5"
    assert flags(model, lambda load: 1.0, lambda load: (1.0, 0.0)) == "-ngl 13 -c 4096 -ts 13,0"
    assert flags(model, lambda load: 1.0, lambda load: (0.75, 0.25)) == (
        "-ngl 13 -c 4096 -sm row -ts 75,25"
    )
    # Experts are counted over both cards, which divides no matrix: layers are shared by bytes. The
    # first six have no experts on cards and are light.
    light = flags(
        mixture(),
        lambda load: 0.5 if load.experts else 1.0,
        lambda load: (0.5, 0.5) if load.experts else (1.0, 0.0),
    )
    first, second = map(int, light.rsplit(" ", 1)[1].split(","))
    assert light.startswith("-ngl 13 -c 4096 --n-cpu-moe 6 -ts ")
    assert first + second == 13
    assert first > second


@pytest.mark.parametrize(
    ("numbers", "pattern"),
    [
        (range(80), r"[1-7]?\d"),
        (range(10), r"\d"),
        (range(31, 80), r"3[1-9]|[4-7]\d"),
        ([79], "79"),
        ([1, 2], "[12]"),
        (range(0, 16, 2), "[02468]|1[024]"),
        (range(100, 120), r"1[01]\d"),
    ],
)
def test_patterns_are_short(numbers: Sequence[int], pattern: str) -> None:
    assert number_pattern(numbers) == pattern


def test_patterns_match_these_numbers_and_no_others() -> None:
    random = Random(1)
    for _ in range(200):
        wanted = set(random.sample(range(200), random.randrange(1, 60)))
        first = random.randrange(150)
        for numbers in (wanted, set(range(first, first + random.randrange(1, 50)))):
            pattern = re.compile(number_pattern(numbers))
            assert {number for number in range(2000) if pattern.fullmatch(str(number))} == numbers


@pytest.mark.usefixtures("few_tries")
def test_export_prints_flags_alone(shadowlane_command: Command) -> None:
    result = shadowlane_command(
        "plan", "mixtral-8x7b", "--hardware", LAPTOP, "--export", "llama.cpp"
    )
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"-ngl 33 -c 4096 --n-cpu-moe \d+( -ot '\S+')*\n", result.stdout)
