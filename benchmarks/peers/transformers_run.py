"""transformers' `generate`, bfloat16 on the CPU: scaled-dot-product attention, all in RAM."""

from __future__ import annotations

import time

from report import arguments, prompt_ids, report


def main() -> None:
    given = arguments(
        __doc__,
        cache=lambda parser: parser.add_argument(
            "--cache", choices=["dynamic", "static"], default="dynamic"
        ),
        attention=lambda parser: parser.add_argument(
            "--attention", choices=["sdpa", "eager"], default="sdpa"
        ),
    )
    import torch
    import transformers
    from torch_generate import timed_generate

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(given.threads)
    began = time.monotonic()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        given.model, dtype=torch.bfloat16, attn_implementation=given.attention
    ).eval()
    load_s = time.monotonic() - began

    ids = prompt_ids(given.prompt_tokens, given.vocab)
    options: dict[str, object] = {}
    if given.cache == "static":
        # A static cache asks for compilation by default; that wants a compiler, and is not the
        # plain way in which the library is used on a CPU.
        options = {"cache_implementation": "static", "disable_compile": True}
    if given.warmup:
        timed_generate(
            model, prompt_ids(given.prompt_tokens, given.vocab, seed=1), given.warmup, **options
        )
    marks, tokens = timed_generate(model, ids, given.new_tokens, **options)
    report(
        "transformers",
        f"{transformers.__version__} (torch {torch.__version__})",
        {"dtype": "bfloat16", "threads": given.threads, "attention": given.attention,
         "cache": given.cache},
        marks,
        len(ids),
        load_s,
        tokens,
    )  # fmt: skip


if __name__ == "__main__":
    main()
