"""Files that are nowhere, against files that are: published sizes, and tiny models' catalogs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from mixture_files import write_mixture_gguf

from shadowlane.actors.blueprint import cut_model
from shadowlane.actors.spec import Options
from shadowlane.ops.errors import ModelError
from shadowlane.ops.files import open_model
from shadowlane.ops.files.base import ModelFiles
from shadowlane.ops.files.imagined import imagine_files
from shadowlane.shapes import known_shapes, shape_catalog, shape_files

GIB = 1 << 30

# Of files that people publish: the last three as llama-bench prints them.
PUBLISHED = {
    "llama-2-70b": 41.42e9,  # llama-2-70b.Q4_K_M.gguf
    "llama-3.1-70b": 39.59 * GIB,  # Q4_K_M
    "qwen3-30b-a3b": 17.28 * GIB,  # Q4_K_M
    "gpt-oss-120b": 59.02 * GIB,  # MXFP4, the rest Q8_0
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_published_files(name: str) -> None:
    nbytes = sum(tensor.nbytes for tensor in shape_files(name).tensors.values())
    assert nbytes == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", known_shapes())
def test_each_shape_that_is_shipped_can_be_cut(name: str) -> None:
    catalog = shape_catalog(name, 512)
    kinds = [group.kind for group in catalog.groups]
    assert (kinds[0], kinds[-1]) == ("embed", "lm_head")
    assert kinds.count("attn") == kinds.count("qkv") == kinds.count("o")
    assert (catalog.experts is not None) == ("experts" in kinds) == ("down" not in kinds)
    assert shape_catalog(name, 512) == catalog


def cut(files: ModelFiles) -> tuple[Any, ...]:
    """What a plan is made of, without where in a file it stands."""
    catalog = cut_model(files, Options(context=64, dtype="float32"), 1).catalog
    blocks = [(block.group, block.nbytes, block.first_unit) for block in catalog.blocks]
    experts = catalog.experts
    routed = experts and (experts.total, experts.top_k, experts.nbytes)
    rest = (catalog.page_nbytes, catalog.max_context, catalog.constants_nbytes)
    return catalog.groups, blocks, routed, rest, catalog.scratch_nbytes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen2-tied"])
def test_a_dense_model_is_cut_like_its_real_files(
    tiny_model: Callable[..., Path], family: str
) -> None:
    real = open_model(tiny_model(family))
    assert cut(imagine_files("tiny", real.config, {"*": "f32"})) == cut(real)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "qwen2-moe", "gpt-oss"])
def test_a_mixture_is_cut_like_its_real_file(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    folder = tiny_model(family)
    kind = gguf.GGMLQuantizationType.Q8_0
    real = open_model(write_mixture_gguf(folder, tmp_path / "model.gguf", kind=kind))
    layouts = {"*.experts.*": "q8_0", "*": "f32"}
    assert cut(imagine_files("tiny", open_model(folder).config, layouts)) == cut(real)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 50,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "layouts", "says"),
    [
        (LLAMA, {"*": "q3_K"}, "layout must be one of .*; got 'q3_K'"),
        (LLAMA, {"lm_head*": "f16"}, "layouts must have a pattern that matches model.embed_tokens"),
        (LLAMA, {"*": "q4_K"}, "tiny: .*weight: .*256"),
        ({**LLAMA, "model_type": "mamba"}, {"*": "f16"}, "mamba"),
    ],
)
def test_what_cannot_be_imagined_is_refused(
    config: dict[str, Any], layouts: dict[str, str], says: str
) -> None:
    with pytest.raises(ModelError, match=says) as raised:
        imagine_files("tiny", config, layouts)
    assert "\n" not in str(raised.value)


def test_the_first_pattern_that_matches_counts() -> None:
    layouts = {"*.v_proj*": "f32", "*proj*": "q8_0", "*": "f16"}
    files = imagine_files("tiny", LLAMA, layouts)
    of = {name.split(".")[-2]: source.layout for name, source in files.tensors.items()}
    assert (of["v_proj"], of["q_proj"], of["lm_head"]) == ("f32", "q8_0", "f16")
    assert of["input_layernorm"] == "f32"  # a vector, whatever the patterns say


def test_a_shape_that_is_not_known_is_named() -> None:
    with pytest.raises(ModelError, match=r"model must be one of llama-2-7b, .*; got 'llama-9'"):
        shape_catalog("llama-9")
