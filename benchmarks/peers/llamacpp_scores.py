"""How likely llama.cpp finds the tokens of given windows, each read on its own from the beginning.

Reads {"text", "windows": [[id, ...], ...], "first"} from standard input; prints {"token_ids": the
text as llama.cpp's tokenizer has it, "scores": for each window the negative natural logarithms of
token first + 1 and those after it, "version"}.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from typing import Any

from llamacpp_greedy import tokenize
from llamacpp_run import configure


def scores_of(lib: Any, context: Any, size: int, window: list[int], first: int) -> list[float]:
    import numpy as np

    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    batch = lib.llama_batch_init(len(window), 0, 1)
    batch.n_tokens = len(window)
    for place, token in enumerate(window):
        batch.token[place], batch.pos[place] = token, place
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        batch.logits[place] = first <= place < len(window) - 1
    status = lib.llama_decode(context, batch)
    lib.llama_batch_free(batch)
    if status != 0:
        raise RuntimeError(f"llama_decode must return 0; got {status}")
    scores = []
    for place in range(first, len(window) - 1):
        row = lib.llama_get_logits_ith(context, place)
        logits = np.ctypeslib.as_array(row, shape=(size,)).astype(np.float64)
        largest = logits.max()
        whole = largest + np.log(np.exp(logits - largest).sum())
        scores.append(float(whole - logits[window[place + 1]]))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    asked = json.load(sys.stdin)
    import llama_cpp as lib

    @lib.llama_log_callback
    def quiet(level: int, text: bytes, _data: Any) -> None:
        pass

    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(given.model.encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"error: llama.cpp could not load {given.model}")
    length = max(len(window) for window in asked["windows"])
    params = lib.llama_context_default_params()
    configure(
        params,
        n_ctx=length,
        n_batch=length,
        n_ubatch=length,
        n_threads=given.threads,
        n_threads_batch=given.threads,
    )
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("error: llama.cpp could not make a context")
    vocab = lib.llama_model_get_vocab(model)
    size = lib.llama_vocab_n_tokens(vocab)
    scores = [scores_of(lib, context, size, window, asked["first"]) for window in asked["windows"]]
    token_ids = tokenize(lib, vocab, asked["text"])
    version = f"llama-cpp-python {lib.__version__}"
    print(json.dumps({"token_ids": token_ids, "scores": scores, "version": version}))


if __name__ == "__main__":
    main()
