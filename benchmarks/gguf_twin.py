"""Write a bfloat16 GGUF with the same weights as a Hugging Face Llama directory, for llama.cpp.

    python benchmarks/gguf_twin.py /data/llama-3b-bf16 --out /data/llama-3b-bf16.gguf

The file carries no tokenizer (`tokenizer.ggml.model = none`): benchmarks hand token ids to every
engine. Tensors are copied one at a time, so memory stays at the size of the largest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from checkpoint import read_headers
from synthesize import Progress, check_room

_LAYER_NAMES = {
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
_OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    model, layers, layer, rest = name.split(".", 3)
    part, _, suffix = rest.rpartition(".")
    if (model, layers, suffix) != ("model", "layers", "weight") or part not in _LAYER_NAMES:
        raise ValueError(f"a Llama checkpoint has no tensor named so; got {name}")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def interleave_rotary(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of q or k for llama.cpp, which rotates neighbours, not halves.

    Hugging Face pairs row i of a head with row i + head_dim/2; llama.cpp's `llama` architecture
    pairs 2i with 2i + 1. matrix: [heads * head_dim, cols], same shape out.
    """
    rows, cols = matrix.shape
    halves = matrix.reshape(num_heads, 2, rows // num_heads // 2, cols)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, cols)


def open_writer(
    out: Path, title: str, config: dict, file_type: gguf.LlamaFileType
) -> gguf.GGUFWriter:
    """A new file with what a `config.json` of a Llama says; tensors are still to be named."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    out.unlink(missing_ok=True)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(title)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("none")
    return writer


def write_gguf(folder: Path, out: Path) -> None:
    """Write `out` from the weights in `folder`: matrices in bfloat16, norms in float32."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"model_type must be llama; got {config['model_type']}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = read_headers(folder)
    if config.get("tie_word_embeddings"):
        tensors = [tensor for tensor in tensors if tensor.name != "lm_head.weight"]
    total_nbytes = sum(tensor.nbytes for tensor in tensors)
    check_room(out.parent, total_nbytes)

    writer = open_writer(out, folder.name, config, gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in tensors:
        name, shape = gguf_name(tensor.name), tensor.shape
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 2 * tensor.nbytes)
        else:
            # Raw types are announced by their bytes: the last dimension is in bytes.
            writer.add_tensor_info(
                name,
                (*shape[:-1], 2 * shape[-1]),
                np.dtype(np.uint8),
                tensor.nbytes,
                raw_dtype=gguf.GGMLQuantizationType.BF16,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    progress = Progress(total_nbytes, out.name)
    for tensor in tensors:
        values = np.fromfile(
            tensor.path, dtype=np.uint16, count=tensor.nbytes // 2, offset=tensor.offset
        ).reshape(tensor.shape)
        if len(tensor.shape) == 1:
            writer.write_tensor_data((values.astype(np.uint32) << 16).view(np.float32))
        else:
            if ".q_proj." in tensor.name:
                values = interleave_rotary(values, heads)
            elif ".k_proj." in tensor.name:
                values = interleave_rotary(values, kv_heads)
            writer.write_tensor_data(values.view(np.uint8))
        progress.add(tensor.nbytes)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="Hugging Face directory, Llama, bfloat16")
    parser.add_argument("--out", type=Path, required=True, help="GGUF file to write")
    arguments = parser.parse_args()
    try:
        write_gguf(arguments.model, arguments.out)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
