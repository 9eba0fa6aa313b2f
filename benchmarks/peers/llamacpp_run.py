"""llama.cpp through its C interface: a bfloat16 GGUF, memory-mapped or read into RAM.

The low-level calls are used (decode, then the largest logit), as its own benchmark tool does: the
Python class around them would add copies of the logits to each token.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from report import Marks, arguments, prompt_ids, report


def configure(params: ctypes.Structure, **values: int) -> None:
    """Set fields of a C structure that exist.

    NOTE: ctypes takes any attribute without a word; a field that a newer version has renamed would
    leave its default in force, and the table would name a setting that was never made.
    """
    fields = {name for name, *_ in params._fields_}
    for name, value in values.items():
        if name not in fields:
            raise ValueError(f"{type(params).__name__} must have a field {name}; it has none")
        setattr(params, name, value)


def largest_logit(lib: Any, context: Any, vocab: int) -> int:
    import numpy as np

    logits = lib.llama_get_logits_ith(context, -1)
    return int(np.argmax(np.ctypeslib.as_array(logits, shape=(vocab,))))


def generate(lib: Any, context: Any, vocab: int, ids: list[int], num_new: int, num_batch: int):  # type: ignore[no-untyped-def]
    """Greedy tokens and their marks, from an empty cache."""
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    marks = Marks(began=time.monotonic())
    tokens: list[int] = []
    waiting = list(ids)
    while len(tokens) < num_new:
        now, waiting = waiting[:num_batch], waiting[num_batch:]
        array = (ctypes.c_int32 * len(now))(*now)
        status = lib.llama_decode(context, lib.llama_batch_get_one(array, len(now)))
        if status != 0:
            raise RuntimeError(f"llama_decode must return 0; got {status}")
        if not waiting:
            tokens.append(largest_logit(lib, context, vocab))
            marks.token()
            waiting = [tokens[-1]]
    return marks, tokens


def main() -> None:
    given = arguments(
        __doc__,
        mmap=lambda parser: parser.add_argument("--no-mmap", dest="mmap", action="store_false"),
        batch=lambda parser: parser.add_argument("--batch", type=int, default=512),
        gpu=lambda parser: parser.add_argument("--gpu-layers", type=int, default=0),
    )
    import llama_cpp as lib

    @lib.llama_log_callback
    def log(level: int, text: bytes, _data: Any) -> None:
        if level == 4:  # errors only
            print(text.decode(errors="replace"), end="")

    lib.llama_log_set(log, ctypes.c_void_p(0))
    lib.llama_backend_init()
    began = time.monotonic()
    model_params = lib.llama_model_default_params()
    load_modes = {True: lib.LLAMA_LOAD_MODE_MMAP, False: lib.LLAMA_LOAD_MODE_NONE}
    # Weights repacked for the processor are copies in memory of their own: fast, but not mapped.
    configure(
        model_params,
        load_mode=load_modes[given.mmap],
        n_gpu_layers=given.gpu_layers,
        use_extra_bufts=not given.mmap,
    )
    model = lib.llama_model_load_from_file(given.model.encode(), model_params)
    if not model:
        raise SystemExit(f"error: llama.cpp could not load {given.model}")
    context_params = lib.llama_context_default_params()
    configure(
        context_params,
        n_ctx=given.prompt_tokens + given.new_tokens,
        n_batch=given.batch,
        n_ubatch=given.batch,
        n_threads=given.threads,
        n_threads_batch=given.threads,
    )
    context = lib.llama_init_from_model(model, context_params)
    if not context:
        raise SystemExit("error: llama.cpp could not make a context")
    load_s = time.monotonic() - began

    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    ids = prompt_ids(given.prompt_tokens, given.vocab)
    if given.warmup:
        other = prompt_ids(given.prompt_tokens, given.vocab, seed=1)
        generate(lib, context, vocab, other, given.warmup, given.batch)
    marks, tokens = generate(lib, context, vocab, ids, given.new_tokens, given.batch)
    features = lib.llama_print_system_info().decode()
    report(
        "llama.cpp",
        f"llama-cpp-python {lib.__version__}",
        {
            "mmap": given.mmap,
            "gpu_layers": given.gpu_layers,
            "threads": given.threads,
            "batch": given.batch,
            "built": features,
        },
        marks,
        len(ids),
        load_s,
        tokens,
    )


if __name__ == "__main__":
    main()
