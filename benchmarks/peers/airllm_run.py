"""AirLLM on the CPU: one layer in memory at a time, read from its own per-layer copy of the model.

The copy is made once, into `--split-folder` (as large as the model); making it is not timed. The
layer that comes next is read ahead by a thread, as is its default.
"""

from __future__ import annotations

import contextlib
import sys
import time
from importlib import metadata

from report import arguments, prompt_ids, report


def main() -> None:
    given = arguments(
        __doc__,
        split=lambda parser: parser.add_argument(
            "--split-folder", required=True, help="where its copy of the layers lies"
        ),
    )
    import torch
    import transformers

    # It prints progress to standard output, where the result has to stand alone.
    with contextlib.redirect_stdout(sys.stderr):
        from airllm import AutoModel
        from airllm.airllm_base import AirLLMBaseModel
        from torch_generate import timed_generate

        # Prompts are token ids, and synthetic models have no tokenizer to load.
        AirLLMBaseModel.get_tokenizer = lambda self, hf_token=None: None
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(given.threads)
        began = time.monotonic()
        model = AutoModel.from_pretrained(
            given.model,
            device="cpu",
            dtype=torch.bfloat16,
            layer_shards_saving_path=given.split_folder,
        )
        load_s = time.monotonic() - began
        ids = prompt_ids(given.prompt_tokens, given.vocab)
        if given.warmup:
            timed_generate(
                model, prompt_ids(given.prompt_tokens, given.vocab, seed=1), given.warmup
            )
        marks, tokens = timed_generate(model, ids, given.new_tokens)
    report(
        "airllm",
        f"{metadata.version('airllm')} (transformers {transformers.__version__})",
        {"dtype": "bfloat16", "threads": given.threads, "prefetching": True},
        marks,
        len(ids),
        load_s,
        tokens,
    )


if __name__ == "__main__":
    main()
