"""The pure parts of the benchmarks: shapes, synthetic files, statistics, budgets, settling."""

from __future__ import annotations

import argparse
import json
import os
import select
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts import one another as siblings, as they do when they are run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))


@pytest.fixture
def tiny_directory(tmp_path: Path) -> Path:
    from shapes import SHAPES
    from synthesize import write_model

    write_model(SHAPES["tiny"], tmp_path / "tiny", seed=3, shard_nbytes=500_000)
    return tmp_path / "tiny"


def test_named_shapes_have_the_sizes_they_are_named_after() -> None:
    from shapes import SHAPES

    assert SHAPES["135m"].num_parameters == 134_515_008  # SmolLM2-135M
    assert SHAPES["7b"].num_parameters == 6_738_415_616  # Llama 2 7B
    assert SHAPES["3b"].nbytes == pytest.approx(5.4e9, rel=0.01)


def test_shape_that_no_decoder_can_have_is_refused() -> None:
    from dataclasses import replace

    from shapes import SHAPES

    with pytest.raises(ValueError, match="num_attention_heads must be a multiple"):
        replace(SHAPES["tiny"], num_key_value_heads=3)
    with pytest.raises(ValueError, match="vocab_size must be positive"):
        replace(SHAPES["tiny"], vocab_size=0)


def test_bfloat16_rounds_to_nearest_even() -> None:
    import torch
    from synthesize import to_bfloat16

    values = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(to_bfloat16(values), wanted)


def test_synthetic_directory_is_a_model_with_finite_logits(tiny_directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert len(list(tiny_directory.glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = model(torch.tensor([[3, 4, 5]])).logits.float()
    assert torch.isfinite(logits).all()
    assert 0.1 < logits.std().item() < 10


def test_synthetic_rows_differ_and_a_seed_repeats(tiny_directory: Path, tmp_path: Path) -> None:
    from checkpoint import read_headers
    from shapes import SHAPES
    from synthesize import write_model

    tensor = next(
        t for t in read_headers(tiny_directory) if t.name.endswith("0.mlp.up_proj.weight")
    )
    rows = np.fromfile(tensor.path, np.uint16, tensor.nbytes // 2, offset=tensor.offset)
    rows = rows.reshape(tensor.shape)
    assert len(np.unique(rows, axis=0)) == len(rows)

    write_model(SHAPES["tiny"], tmp_path / "again", seed=3, shard_nbytes=500_000)
    for path in tiny_directory.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_writing_over_other_files_or_without_room_is_refused(tmp_path: Path) -> None:
    from shapes import SHAPES
    from synthesize import check_room, write_model

    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="must be empty or an earlier model"):
        write_model(SHAPES["tiny"], tmp_path)
    with pytest.raises(ValueError, match="are free"):
        check_room(tmp_path, 1 << 60)


def test_gguf_twin_has_the_same_weights(tiny_directory: Path, tmp_path: Path) -> None:
    import gguf
    from checkpoint import read_headers
    from gguf_twin import gguf_name, write_gguf

    write_gguf(tiny_directory, tmp_path / "tiny.gguf")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    originals = read_headers(tiny_directory)
    assert len(stored) == len(originals)
    for tensor in originals:
        copy = stored[gguf_name(tensor.name)]
        assert tuple(reversed(copy.shape.tolist())) == tensor.shape
        if "q_proj" in tensor.name or "k_proj" in tensor.name or len(tensor.shape) == 1:
            continue  # reordered, or in float32
        values = np.fromfile(tensor.path, np.uint16, tensor.nbytes // 2, offset=tensor.offset)
        np.testing.assert_array_equal(copy.data.view(np.uint16).ravel(), values)


def test_rotary_pairs_become_neighbours() -> None:
    from gguf_twin import interleave_rotary

    rows = np.arange(8)[:, None] * np.ones((1, 2), int)  # two heads of four rows
    assert interleave_rotary(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_decode_reads_all_weights_but_an_untied_table_of_embeddings(
    tiny_directory: Path, tmp_path: Path
) -> None:
    from dataclasses import replace

    from checkpoint import decode_nbytes
    from shapes import SHAPES
    from synthesize import write_model

    tied, untied = SHAPES["tiny"], replace(SHAPES["tiny"], tie_word_embeddings=False)
    write_model(untied, tmp_path / "untied")
    assert decode_nbytes(tiny_directory) == tied.nbytes
    assert decode_nbytes(tmp_path / "untied") == tied.nbytes  # embed left out, lm_head counted


def test_spread_and_ratios_leave_out_what_failed() -> None:
    from measure import Spread, ratio_per_round, spread

    assert spread([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread([None]) is None
    assert ratio_per_round([4.0, None, 9.0], [2.0, 5.0, 0.0]) == [2.0, None, None]


def test_percentile_is_a_value_that_was_measured() -> None:
    from measure import percentile

    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 50) == 50.0
    assert percentile(values, 99) == 99.0
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)


def test_smallest_budget_for_a_share() -> None:
    from measure import find_budget

    def resident_share(budget: int) -> float | None:
        return None if budget < 100 else min((budget - 100) / 1000, 1.0)

    assert find_budget(resident_share, 0.0, 0, 5000, 1) == 100
    assert find_budget(resident_share, 0.5, 0, 5000, 1) == 600
    with pytest.raises(ValueError, match="must hold 100%"):
        find_budget(resident_share, 1.0, 0, 900, 1)


def test_table_is_markdown() -> None:
    from measure import markdown_table

    assert markdown_table(("a", "bb"), [(1, "x")]).splitlines() == [
        "| a | bb |",
        "|---|----|",
        "| 1 | x  |",
    ]


def _outcome(engine: str, rate: float | None, tokens: list[int]) -> object:
    from compare import Outcome

    if rate is None:
        return Outcome(engine, None, "memory limit", None)
    result = {
        "version": "1",
        "prefill_tok_per_s": 10 * rate,
        "decode_tok_per_s": rate,
        "load_s": 1.0,
        "peak_rss_bytes": 1e9,
        "token_ids": tokens,
    }
    return Outcome(engine, result, None, None)


def test_comparison_takes_ratios_within_rounds() -> None:
    from compare import as_markdown, summarise

    rounds = [
        [_outcome("ours", 8.0, [1, 2, 3]), _outcome("slow", 2.0, [1, 2, 4])],
        [_outcome("ours", 2.0, [1, 2, 3]), _outcome("slow", 1.0, [1, 2, 4])],
        [_outcome("ours", 6.0, [1, 2, 3]), _outcome("slow", None, [])],
    ]
    ours, slow = summarise(["ours", "slow"], rounds)
    assert ours.decode_ratio is not None
    assert ours.decode_ratio.median == 1.0
    assert slow.decode_ratio is not None
    assert (slow.decode_ratio.low, slow.decode_ratio.high) == (2.0, 4.0)
    assert slow.same_tokens == "2/3"
    assert slow.failures == ("memory limit",)
    assert "slow (failed: memory limit)" in as_markdown([ours, slow])


def test_last_json_line_is_found_behind_chatter() -> None:
    from compare import last_json_line

    assert last_json_line('loading\n{"engine": "x"}\nbye') == {"engine": "x"}
    assert last_json_line("Traceback\n{broken") is None
    assert last_json_line("") is None


def test_engine_without_its_options_is_refused() -> None:
    import compare

    given = compare.parse(["--model", "m", "--engines", "llamacpp-mmap"])
    with pytest.raises(ValueError, match="llamacpp-mmap needs"):
        compare.command_of("llamacpp-mmap", given, 512)
    assert not given.cold
    assert compare.parse(["--model", "m", "--memory-limit", "2GiB"]).cold


def test_marks_divide_prefill_and_decode() -> None:
    from report import Marks

    rates = Marks(began=10.0, tokens=[12.0, 12.5, 13.0]).rates(num_prompt=8)
    assert rates == {"prefill_tok_per_s": 4.0, "decode_tok_per_s": 2.0, "wall_s": 3.0}
    assert Marks(began=0.0, tokens=[1.0]).rates(4)["decode_tok_per_s"] is None


def test_prompts_are_the_same_for_all_and_warm_ups_differ() -> None:
    from report import prompt_ids

    assert prompt_ids(50, 512) == prompt_ids(50, 512)
    assert prompt_ids(50, 512) != prompt_ids(50, 512, seed=1)
    assert all(3 <= token < 512 for token in prompt_ids(200, 512))


def test_disturbed_phases_and_settling() -> None:
    from disturbed import phases, time_to_settle

    quiet = [0.1 * step for step in range(1, 11)]  # 10 tok/s
    slow = [1.0 + 0.5 * step for step in range(1, 5)]  # 2 tok/s while it settles
    settled = [3.0 + 0.2 * step for step in range(1, 21)]  # 5 tok/s
    times = [*quiet, *slow, *settled]
    result = phases(times, disturbed_at=1.05, settle_s=2.0, settle_steps=4)
    assert result.quiet_tok_per_s == pytest.approx(10)
    assert result.disturbed_tok_per_s == pytest.approx(5)

    steps, seconds = time_to_settle(times, 1.05, wanted_tok_per_s=4.9)
    assert steps == 3
    assert seconds == pytest.approx(3.0 - 1.05)
    assert time_to_settle(times, 1.05, wanted_tok_per_s=50) is None
    with pytest.raises(ValueError, match="both phases"):
        phases(quiet, disturbed_at=1.05, settle_s=0, settle_steps=0)


def test_fio_reads_directly_and_never_writes(tmp_path: Path) -> None:
    from bandwidth import fio_command

    files = [tmp_path / "a", tmp_path / "b"]
    deep = fio_command(files, 2 << 20, 4, "libaio", 5)
    threads = fio_command(files, 2 << 20, 4, "psync", 5)
    for command in (deep, threads):
        assert {"--readonly", "--direct=1", f"--bs={2 << 20}"} <= set(command)
        assert f"--filename={files[0]}:{files[1]}" in command
    assert {"--iodepth=4", "--numjobs=1"} <= set(deep)
    assert {"--iodepth=1", "--numjobs=4"} <= set(threads)
    with pytest.raises(ValueError, match="engine must be"):
        fio_command(files, 4096, 1, "mmap", 1)


def test_benchmark_environment_leaves_out_what_would_skew(monkeypatch: pytest.MonkeyPatch) -> None:
    from machine import benchmark_environment

    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    environment = benchmark_environment()
    assert "OPENBLAS_CORETYPE" not in environment
    assert "OMP_NUM_THREADS" not in environment


def test_share_of_dram_is_per_round() -> None:
    from in_ram import share_of_dram

    assert share_of_dram([5.0, None], [20e9, 10e9], 2_000_000_000) == [0.5, None]


def test_disk_and_memory_of_this_machine_are_named(tmp_path: Path) -> None:
    from machine import hardware_line, versions

    assert "GiB RAM" in hardware_line(tmp_path)
    assert versions("numpy", "no-such-package").count(",") == 1


def test_dimensions_override_a_named_shape() -> None:
    from synthesize import shape_from

    given = dict.fromkeys(
        ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "rope_theta"), None
    )
    options = argparse.Namespace(shape="1b", layers=2, tied=False, context=512, **given)
    shape = shape_from(options)
    assert (shape.num_hidden_layers, shape.hidden_size) == (2, 2048)
    assert shape.config()["tie_word_embeddings"] is False
    assert json.loads(json.dumps(shape.config()))["max_position_embeddings"] == 512


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    from machine import run_limited

    # The grandchild holds a pipe open for writing; its end hangs the pipe up.
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        script = f"(exec 3>{pipe}; sleep 600) & wait"
        done, peak, was_killed = run_limited(["/bin/sh", "-c", script], None, timeout_s=1)
        assert (done.returncode, peak, was_killed) == (124, None, False)
        hung_up = select.poll()
        hung_up.register(reader, select.POLLHUP)
        assert hung_up.poll(10_000) == [(reader, select.POLLHUP)]
    finally:
        os.close(reader)


def test_a_commands_outcome_is_kept() -> None:
    from machine import run_limited

    done, _, _ = run_limited(["/bin/sh", "-c", "echo fine; exit 3"], None, timeout_s=60)
    assert (done.returncode, done.stdout) == (3, "fine\n")


def test_a_difference_in_perplexity_is_known_better_than_the_perplexities() -> None:
    from perplexity import difference

    theirs = np.random.default_rng(0).exponential(3.0, 1000)
    ours = theirs + np.tile([0.01, 0.03], 500)
    relative, error = difference(ours.tolist(), theirs.tolist())
    assert relative == pytest.approx(np.exp(0.02) - 1)
    assert error == pytest.approx(np.exp(0.02) * 0.01 / np.sqrt(999))
    assert difference(theirs.tolist(), theirs.tolist()) == (0.0, 0.0)
