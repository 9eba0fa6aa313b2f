"""How models are cut: every row in one block, at heights that no plan and no option changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from filemaking import write_gguf
from inprocess import cut, small_blocks
from tiny import FAMILIES

from shadowlane.actors import blueprint as blueprints
from shadowlane.actors.blueprint import (
    BLOCK_NBYTES,
    PAGE,
    UNIT_ROWS,
    Blueprint,
    Options,
    block_rows,
)
from shadowlane.actors.scratch import gather_stride
from shadowlane.ops.files import open_model
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.table import MAX_BLOCK_ROWS
from shadowlane.shapes import shape_model
from shadowlane.what_if import load_model

SHAPES = [  # rows, row bytes: of smollm2, Llama 3.2 3B, Qwen 2.5 7B, in bfloat16 and packed
    (576, 576 * 2),
    (1536, 576 * 2),
    (49152, 576 // 32 * 20),
    (3072, 3072 * 2),
    (8192, 3072 * 2),
    (3072, 8192 * 2),
    (128256, 3072 * 2),
    (18944, 3584 // 256 * 144),
    (3584, 18944 // 256 * 210),
    (16, 64),
    (5, 64),
]


@pytest.mark.parametrize(("rows", "row_nbytes"), SHAPES)
def test_heights_are_whole_units_near_the_size_that_disks_like(rows: int, row_nbytes: int) -> None:
    height = block_rows(rows, row_nbytes)
    assert height % UNIT_ROWS == 0
    assert UNIT_ROWS <= height <= MAX_BLOCK_ROWS
    nbytes = min(height, rows) * row_nbytes
    assert nbytes <= BLOCK_NBYTES + UNIT_ROWS * row_nbytes
    if rows * row_nbytes > 4 * BLOCK_NBYTES and height < MAX_BLOCK_ROWS - UNIT_ROWS:
        assert nbytes > BLOCK_NBYTES // 2


def assert_sound(blueprint: Blueprint, tensors: dict) -> None:
    catalog = blueprint.catalog
    assert [block.index for block in catalog.blocks] == list(range(len(blueprint.sources)))
    assert [index for group in catalog.groups for index in group.blocks] == list(
        range(len(catalog.blocks))
    )
    for group, description in zip(catalog.groups, blueprint.groups, strict=True):
        assert group.name == description.name
        output_row = 0
        for number, part in enumerate(description.parts):
            tensor = tensors[part.tensor]
            mine = [
                blueprint.sources[index]
                for index in group.blocks
                if blueprint.sources[index].part == number
            ]
            row = 0
            row_nbytes = LAYOUTS[tensor.layout].row_nbytes(part.cols)
            for source in mine:  # each row once, in order, where the file has it
                assert source.first_row == row
                assert source.offset == tensor.offset + row * row_nbytes
                assert source.nbytes == source.num_rows * source.row_nbytes
                assert source.row_nbytes == row_nbytes
                assert source.output_row == output_row + row
                assert 0 <= source.skew < PAGE
                assert source.held_nbytes % PAGE == 0
                assert source.skew + source.nbytes <= source.held_nbytes
                assert source.held_nbytes < source.skew + source.nbytes + PAGE
                row += source.num_rows
            assert row == part.rows
            if description.kind != "gate_up":
                output_row += part.rows
        if description.kind == "gate_up":
            pairs = zip(group.blocks[::2], group.blocks[1::2], strict=True)
            for gate, up in pairs:
                one, other = blueprint.sources[gate], blueprint.sources[up]
                assert (one.part, other.part) == (0, 1)
                assert (one.first_row, one.num_rows) == (other.first_row, other.num_rows)
        blocks = [catalog.blocks[index] for index in group.blocks]
        firsts = [block.first_unit for block in blocks]
        assert firsts == sorted(firsts)
        if blocks:
            covered = {unit for b in blocks for unit in range(b.first_unit, b.last_unit)}
            assert covered == set(range(group.units))
        assert all(block.group == group.name for block in blocks)
    streamed = [block.held_nbytes for block in catalog.blocks if block.group != "embed"]
    assert catalog.slot_nbytes == max(streamed)
    for block, source in zip(catalog.blocks, blueprint.sources, strict=True):
        assert (block.nbytes, block.held_nbytes) == (source.nbytes, source.held_nbytes)


@pytest.mark.parametrize("family", [*FAMILIES])
@pytest.mark.parametrize("nbytes", [1024, 8192, 2 << 20])
def test_every_row_lies_in_one_block(
    tiny_model: Callable[..., Path], family: str, nbytes: int
) -> None:
    model = tiny_model(family)
    with small_blocks(nbytes):
        blueprint = cut(model, Options(), ((0,),))
    assert_sound(blueprint, open_model(model).tensors)


def test_options_and_threads_change_no_block(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("qwen3")
    with small_blocks(4096):
        first = cut(model, Options(), ((0,),))
        for options, cores in (
            (Options(context=32, max_batch=8), ((0, 1),)),
            (Options(dtype="bfloat16", prefill_chunk=7, logit_rows=100), ((0,), (1,))),
        ):
            other = cut(model, options, cores)
            assert other.sources == first.sources
            # only what a copy in the compute type would take depends on that type
            for ours, theirs in zip(other.catalog.blocks, first.catalog.blocks, strict=True):
                assert replace(ours, expanded_nbytes=theirs.expanded_nbytes) == theirs
            assert other.fingerprint == first.fingerprint


def test_a_tied_model_embeds_from_its_last_matrix(tiny_model: Callable[..., Path]) -> None:
    tied, untied = (cut(tiny_model(name), Options(), ((0,),)) for name in ("qwen2-tied", "qwen2"))
    assert tied.catalog.group("embed").blocks == ()
    assert tied.embedding_blocks == tied.catalog.group("lm_head").blocks
    assert untied.embedding_blocks == untied.catalog.group("embed").blocks
    for blueprint in (tied, untied):
        heights = [blueprint.sources[index].num_rows for index in blueprint.embedding_blocks]
        # a row's block is found by division
        assert set(heights[:-1]) <= {blueprint.embedding_block_rows}


def test_rows_of_the_gather_buffer_begin_on_cache_lines(tiny_model: Callable[..., Path]) -> None:
    blueprint = cut(tiny_model("llama2"), Options(), ((0,),))
    assert gather_stride(blueprint.embedding) % 64 == 0
    assert gather_stride(blueprint.embedding) >= 64 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(context=0), "ctx_size must be between 1 and the model's 512; got 0"),
        (Options(context=513), "ctx_size must be between 1 and the model's 512; got 513"),
        (Options(max_batch=0), "max_batch must be between 1 and 8; got 0"),
        (Options(max_batch=9), "max_batch must be between 1 and 8; got 9"),
        (Options(prefill_chunk=0), "prefill_chunk must be at least 1; got 0"),
        (Options(logit_rows=0), "logit_rows must be at least 1; got 0"),
        (Options(dtype="int8"), "dtype must be one of .*; got int8"),  # type: ignore[arg-type]
    ],
)
def test_options_out_of_range(
    tiny_model: Callable[..., Path], options: Options, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cut(tiny_model("llama2"), options, ((0,),))


@pytest.mark.parametrize(
    ("flags", "family", "asked", "chosen", "notice"),
    [
        (set(), "llama2", None, "float32", ""),
        (set(), "llama-bfloat16", None, "bfloat16", "bfloat16 prefill is slow"),
        ({"amx_bf16"}, "llama-bfloat16", None, "bfloat16", ""),
        ({"avx512_bf16"}, "llama-float16", None, "float16", "float16 is slow"),
        ({"avx512_fp16"}, "llama-float16", None, "float16", ""),
        (set(), "llama2", "float16", "float16", "float16 is slow"),
        (set(), "llama-float16", "float32", "float32", ""),
    ],
)
def test_types_and_what_is_said_about_them(
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    flags: set[str],
    family: str,
    asked: blueprints.DataType | None,
    chosen: str,
    notice: str,
) -> None:
    monkeypatch.setattr(blueprints, "processor_flags", lambda: flags)
    blueprint = cut(tiny_model(family), Options(dtype=asked), ((0,),))
    assert blueprint.dtype == chosen
    assert len(blueprint.notes) == bool(notice)
    assert all(notice in note for note in blueprint.notes)


def test_what_is_planned_for_another_machine_does_not_depend_on_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "model.gguf"
    write_gguf(packed)
    found = []
    for flags in (set[str](), {"avx512_bf16"}):
        monkeypatch.setattr(blueprints, "processor_flags", lambda flags=flags: flags)
        blueprint, _ = blueprints.read_blueprint(packed, Options(), 1, is_elsewhere=True)
        assert (blueprint.dtype, blueprint.notes) == ("bfloat16", ())
        found.append((load_model("it", packed, None), shape_model("llama-2-70b")))
    assert found[0] == found[1]
