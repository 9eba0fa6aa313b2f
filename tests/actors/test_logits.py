"""Logits against transformers, for every family and option: prefill, decode, and both in chunks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from inprocess import ONE_THREAD, TWO_THREADS, InProcess, collect, running, small_blocks
from tiny import FAMILIES, reference_logits, tiny_tokens

from shadowlane.actors.blueprint import Options, read_blueprint
from shadowlane.ops.table import QUERY_ROWS

TOLERANCE = 1e-4  # float32 against float32, largest difference of any logit
# Activations stay float32 here, so rounding comes from weights, which are the same, and from what
# prefill products and the KV cache round to. Logits of the tiny models are about 4 at most.
TOLERANCE_OF = {"bfloat16": 0.12, "float16": 0.015}
FLOAT32 = [name for name, options in FAMILIES.items() if "dtype" not in options]
SHORT = [name for name, options in FAMILIES.items() if "dtype" in options]
NUM_TOKENS = 75  # three KV pages; beyond every window, and beyond the length of dynamic rope


def cut_evenly(length: int, chunk: int) -> list[int]:
    return [min(chunk, length - first) for first in range(0, length, chunk)]


def assert_close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape
    worst = np.abs(ours - theirs).max(axis=1)
    assert worst.max() <= tolerance, f"row {worst.argmax()} is off by {worst.max()}"


def assert_greedy(
    model: Path, prompt: list[int], ids: list[int], chunk: int, tolerance: float = TOLERANCE
) -> None:
    """Each id is transformers' likeliest, given those before it; or as good as that."""
    chunks = [*cut_evenly(len(prompt), chunk), *([1] * (len(ids) - 1))]
    theirs = reference_logits(model, [*prompt, *ids[:-1]], chunks)[len(prompt) - 1 :]
    short_by = theirs.max(axis=1) - theirs[np.arange(len(ids)), ids]
    assert short_by.max() <= 2 * tolerance, f"token {short_by.argmax()} is not the likeliest"


@pytest.mark.parametrize("family", FLOAT32)
def test_prefill_and_decode_equal_those_of_transformers(
    tiny_model: Callable[..., Path], family: str
) -> None:
    """64 and 20 rows go through torch, 8 and 1 through the compiled kernels."""
    model = tiny_model(family)
    tokens = tiny_tokens(NUM_TOKENS)
    for chunk in (64, 20, 8, 1):
        with running(model, options=Options(logit_rows=chunk, prefill_chunk=64)) as engine:
            ours = engine.logits(tokens)
        assert_close(ours, reference_logits(model, tokens, cut_evenly(NUM_TOKENS, chunk)))


@pytest.mark.parametrize("family", ["llama2", "mistral-window", "qwen3-window"])
def test_a_long_chunk_is_attended_in_parts(tiny_model: Callable[..., Path], family: str) -> None:
    """With few heads per worker each part is an item; the bits are the same."""
    model = tiny_model(family)
    tokens = tiny_tokens(500)
    chunk = QUERY_ROWS + 50
    theirs = reference_logits(model, tokens, cut_evenly(len(tokens), chunk))
    found = []
    for cores in (ONE_THREAD, TWO_THREADS):
        options = Options(logit_rows=chunk, prefill_chunk=chunk)
        with running(model, options=options, cores=cores) as engine:
            found.append(engine.logits(tokens))
    assert_close(found[0], theirs)
    assert np.array_equal(*found)


@pytest.mark.parametrize("family", ["llama-head-dim", "qwen3", "llama-bfloat16-heads"])
def test_keys_and_values_in_8_bits(tiny_model: Callable[..., Path], family: str) -> None:
    """Within what 8 bits allow, in prefill and in decode; and really in 8 bits."""
    if family == "llama-bfloat16-heads":
        model = tiny_model("llama-bfloat16", head_dim=32)
    else:
        model = tiny_model(family)
    tokens = tiny_tokens(NUM_TOKENS)
    exact = reference_logits(model, tokens, dtype="float32")
    for rows in (64, 8, 1):
        plain, packed = (Options(kv=kv, logit_rows=rows, prefill_chunk=64) for kv in (None, "q8_0"))
        errors, page_nbytes = [], []
        for options in (plain, packed):
            with running(model, options=options) as engine:
                blueprint = engine.engine.blueprint
                page_nbytes.append(blueprint.catalog.page_nbytes)
                errors.append(np.abs(engine.logits(tokens) - exact).mean())
        element = 4 if blueprint.dtype == "float32" else 2
        assert page_nbytes[1] * 32 * element == page_nbytes[0] * 34
        assert errors[0] < errors[1] < 0.04  # logits are about 0.8 on average


def test_keys_in_8_bits_need_heads_of_whole_blocks(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"kv q8_0 needs heads of a multiple of 32; .* have 24"):
        read_blueprint(tiny_model("qwen3-tied"), Options(kv="q8_0"), 1)


@pytest.mark.parametrize("family", FLOAT32)
def test_decode_after_prefill_follows_transformers(
    tiny_model: Callable[..., Path], family: str
) -> None:
    model = tiny_model(family)
    prompt = tiny_tokens(37)
    with running(model, options=Options(prefill_chunk=16)) as engine:
        ids = engine.generate(prompt, max_tokens=30)
    assert_greedy(model, prompt, ids, chunk=16)


@pytest.mark.parametrize("family", SHORT)
def test_half_precision_stays_near_both_references(
    tiny_model: Callable[..., Path], family: str
) -> None:
    model = tiny_model(family)
    dtype = FAMILIES[family]["dtype"]
    tokens = tiny_tokens(NUM_TOKENS)
    exact = reference_logits(model, tokens, dtype="float32")
    with running(model, options=Options(logit_rows=64, prefill_chunk=64)) as engine:
        assert engine.engine.blueprint.dtype == dtype
        prefilled = engine.logits(tokens)
    with running(model, options=Options(logit_rows=8)) as engine:
        decoded = engine.logits(tokens)
    assert_close(prefilled, exact, TOLERANCE_OF[dtype])
    assert_close(decoded, exact, TOLERANCE_OF[dtype])
    theirs = reference_logits(model, tokens)
    # nearer to the exact result than transformers, which rounds after every operator
    assert np.abs(prefilled - exact).mean() < np.abs(theirs - exact).mean()
    assert np.abs(decoded - exact).mean() < np.abs(theirs - exact).mean()
    assert_close(prefilled, theirs, 3 * TOLERANCE_OF[dtype])


def test_a_type_may_be_chosen_for_a_model_of_another(tiny_model: Callable[..., Path]) -> None:
    """Weights of another type than the products are expanded tile by tile."""
    tokens = tiny_tokens(40)
    for family, dtype, tolerance in (
        ("llama-bfloat16", "float32", TOLERANCE),
        ("llama-float16", "float32", TOLERANCE),
        ("llama2", "bfloat16", TOLERANCE_OF["bfloat16"]),
        ("llama-bfloat16", "float16", TOLERANCE_OF["float16"]),
    ):
        model = tiny_model(family)
        exact = reference_logits(model, tokens, dtype="float32")
        with running(
            model, options=Options(dtype=dtype, logit_rows=40, prefill_chunk=64)
        ) as engine:
            assert_close(engine.logits(tokens), exact, tolerance)


def test_prompt_rows_and_decode_rows_share_a_step(tiny_model: Callable[..., Path]) -> None:
    """Two sequences decode while the prompts of others go through in chunks beside them."""
    model = tiny_model("qwen3-window")
    prompts = [tiny_tokens(60)[first:] for first in (0, 7, 20, 31)]
    with running(model, options=Options(prefill_chunk=12, max_batch=3)) as engine:
        requests = [engine.submit(prompt, max_tokens=20) for prompt in prompts]
        answers = [collect(request) for request in requests]
    for prompt, ids in zip(prompts, answers, strict=True):
        assert_greedy(model, prompt, ids, chunk=12)


def test_split_between_lanes_and_streamed(tiny_model: Callable[..., Path]) -> None:
    """Many small blocks from disk, rows between two lanes: the same logits."""
    model = tiny_model("llama-biases")
    tokens = tiny_tokens(50)
    with (
        small_blocks(4096),
        running(
            model,
            cores=((0,), (1,)),
            options=Options(context=96, logit_rows=32, prefill_chunk=32),
            ram=1_300_000,
        ) as engine,
    ):
        assert engine.engine.placement.sweep
        ours = engine.logits(tokens)
    assert_close(ours, reference_logits(model, tokens, cut_evenly(50, 32)))


# -- GGUF: rows of q and k are permuted there, and rotary pairs are neighbours

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        number, rest = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def write_twins(model: Path, root: Path, kind: gguf.GGMLQuantizationType) -> tuple[Path, Path]:
    """A tiny llama as GGUF with matrices of `kind`, and a directory of what those round to."""
    import safetensors.numpy

    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(root / "twin.gguf", "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_token_list([str(index) for index in range(config["vocab_size"])])
    rounded = {}
    for name, values in safetensors.numpy.load_file(model / "model.safetensors").items():
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            rounded[name] = values
            continue
        for module, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if module in name:
                values = permute(values, count)
        packed = gguf.quantize(values, kind)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
        values = gguf.dequantize(packed, kind)
        for module, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if module in name:
                values = permute(values, count, back=True)
        rounded[name] = np.ascontiguousarray(values, np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    twin = root / "rounded"
    twin.mkdir()
    (twin / "config.json").write_text((model / "config.json").read_text())
    safetensors.numpy.save_file(rounded, twin / "model.safetensors", {"format": "pt"})
    return root / "twin.gguf", twin


def permute(values: np.ndarray, heads: int, *, back: bool = False) -> np.ndarray:
    """Rows of each head: halves interleaved, as GGUF has them; or `back`."""
    rows, cols = values.shape
    half = rows // heads // 2
    shape = (heads, half, 2, cols) if back else (heads, 2, half, cols)
    return np.ascontiguousarray(values.reshape(shape).swapaxes(1, 2).reshape(rows, cols))


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_gguf_equals_transformers_with_the_same_weights(
    tiny_model: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    path, twin = write_twins(tiny_model("llama2"), tmp_path, gguf.GGMLQuantizationType[kind])
    tokens = tiny_tokens(NUM_TOKENS)
    for chunk in (64, 8):
        options = Options(dtype="float32", logit_rows=chunk, prefill_chunk=64)
        with running(path, options=options) as engine:
            ours = engine.logits(tokens)
        theirs = reference_logits(twin, tokens, cut_evenly(NUM_TOKENS, chunk))
        if kind in ("F32", "BF16"):
            assert_close(ours, theirs)
        else:
            # Decode rows, and rows whose logits are wanted, meet packed weights as signed bytes:
            # each input loses up to 1/254 of the largest of 32. That is noise, not a shift.
            error = ours - theirs
            assert np.sqrt((error**2).mean()) <= 0.05 * theirs.std()
            assert abs(error.mean()) <= 0.002 * theirs.std()


# -- limits


def test_a_context_may_be_filled_to_the_last_token(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama2")
    prompt = tiny_tokens(60)
    with running(model, options=Options(context=64)) as engine:
        ids = engine.generate(prompt, max_tokens=50)
        assert len(prompt) + len(ids) == 64
        assert_greedy(model, prompt, ids, chunk=60)
        assert_rejected(engine, tiny_tokens(64), "64 tokens")
        assert_rejected(engine, [], "at least one token")
        assert_rejected(engine, [1, 320], "between 0 and 319")


def assert_rejected(engine: InProcess, prompt: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        engine.submit(prompt)
