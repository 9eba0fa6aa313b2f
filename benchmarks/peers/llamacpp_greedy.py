"""llama.cpp's own answers, greedily, with its likeliest candidates at each step.

Reads texts from standard input, a JSON list; prints one JSON list of {prompt_ids, token_ids,
candidates: per step [[id, logit], ...], likeliest first}.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from typing import Any

from llamacpp_run import configure

NUM_CANDIDATES = 8


def tokenize(lib: Any, vocab: Any, text: str) -> list[int]:
    raw = text.encode()
    room = (ctypes.c_int32 * (len(raw) + 8))()
    count = lib.llama_tokenize(vocab, raw, len(raw), room, len(room), False, True)
    if count < 0:
        raise ValueError(
            f"a text of {len(raw)} bytes must fit {len(room)} tokens; it needs {-count}"
        )
    return list(room[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    import llama_cpp as lib
    import numpy as np

    @lib.llama_log_callback
    def quiet(level: int, text: bytes, _data: Any) -> None:
        pass

    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(given.model.encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"error: llama.cpp could not load {given.model}")
    params = lib.llama_context_default_params()
    configure(params, n_ctx=2048, n_threads=given.threads, n_threads_batch=given.threads)
    context = lib.llama_init_from_model(model, params)
    vocab = lib.llama_model_get_vocab(model)
    size = lib.llama_vocab_n_tokens(vocab)
    answers = []
    for text in json.load(sys.stdin):
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        prompt_ids = tokenize(lib, vocab, text)
        waiting, token_ids, candidates = list(prompt_ids), [], []
        while len(token_ids) < given.new_tokens:
            array = (ctypes.c_int32 * len(waiting))(*waiting)
            status = lib.llama_decode(context, lib.llama_batch_get_one(array, len(waiting)))
            if status != 0:
                raise RuntimeError(f"llama_decode must return 0; got {status}")
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(size,))
            best = np.argsort(-logits, kind="stable")[:NUM_CANDIDATES]
            candidates.append([[int(each), float(logits[each])] for each in best])
            token_ids.append(int(best[0]))
            waiting = [token_ids[-1]]
        answers.append({"prompt_ids": prompt_ids, "token_ids": token_ids, "candidates": candidates})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
