"""A tokenizer as GGUF metadata, for our own reader and for llama.cpp.

GGUF names the way in which a text is split and leaves out much of what a tokenizer.json says. So
each form it may have is tried, read back as a reader would, and taken if it gives the same ids for
a text that tells the known ways apart. Where none does, the whole tokenizer.json goes into the
field that GGUF has for it, which our reader knows and llama.cpp does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shadowlane.ops.files.base import ModelFiles
from shadowlane.ops.tokenizer import HUGGING_FACE_FIELD, NO_VOCABULARY, Tokenizer
from shadowlane.ops.tokenizer_gguf import convert_gguf
from shadowlane.ops.tokenizer_sentencepiece import CONTROL, USER_DEFINED

_NORMAL, _UNUSED, _BYTE = 1, 5, 6
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPLITS = ("llama-bpe", "tekken", "smollm", "qwen2", "smaug-bpe", "gpt-2")  # one of each kind

# Contractions in both cases, numbers of many digits, runs of spaces and lines, marks, slashes at
# the ends of lines, scripts with and without cases, what is no letter at all.
PROBE = (
    "It's what WE'LL do: they'd say IT'S 7, 1234567 or 3.14159 times.\n\n  Two  spaces,\ttabs \n"
    "\n   def f(x_1, *args):\n        return {'a/': x**2}  # don't!!!\r\n/usr/bin/\nCamelCase "
    "HTTPServer na\u00efve cafe\u0301 \u00fcber \u0416\u0443\u043a \u65e5\u672c\u8a9e "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0661\u0662\u0663 \U0001f600\u200d\U0001f680 "
    "\u2019quoted\u2019... --- <|x|> </s> end   "
)


def tokenizer_fields(
    tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[dict[str, Any], list[str]]:
    """(metadata, notes). Without a tokenizer, the metadata says that there is none.

    vocab_size: rows of the embedding; rows that no token has get a name as unused ones.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": NO_VOCABULARY}, [
            "the model has no tokenizer, so the file has none: it continues token ids, no texts"
        ]
    contents = json.loads(tokenizer.to_json())
    common = _common(tokenizer)
    for form in _forms(tokenizer, contents, vocab_size):
        fields = form | common
        if _reads_the_same(fields, tokenizer):
            return fields, []
    fields = {"tokenizer.ggml.model": NO_VOCABULARY, HUGGING_FACE_FIELD: tokenizer.to_json()}
    return fields | common, [
        "GGUF has no name for the way in which this tokenizer splits a text: the file carries its "
        "tokenizer.json, which llama.cpp does not read"
    ]


def _common(tokenizer: Tokenizer) -> dict[str, Any]:
    """Special tokens and chat template."""
    fields: dict[str, Any] = {}
    settings = tokenizer.settings
    for name, theirs in _NAMES.items():
        text = settings.special_tokens.get(f"{name}_token")
        token_id = None if text is None else tokenizer.token_id(text)
        if token_id is not None:
            fields[f"tokenizer.ggml.{theirs}_token_id"] = token_id
    around = tokenizer.encode("")
    bos, eos = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    fields["tokenizer.ggml.add_bos_token"] = bool(around) and around[0] == bos
    fields["tokenizer.ggml.add_eos_token"] = len(around) > 1 and around[-1] == eos
    if settings.chat_template is not None:
        fields["tokenizer.chat_template"] = settings.chat_template
    return fields


def _forms(
    tokenizer: Tokenizer, contents: dict[str, Any], vocab_size: int
) -> Iterator[dict[str, Any]]:
    model = contents["model"]
    if model.get("type") != "BPE":
        return
    tokens, types = _vocabulary(contents, vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    listed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if model.get("byte_fallback"):
        # A sentencepiece vocabulary: what is merged first has the highest score.
        scores = dict.fromkeys(tokens, -float(len(merges)))
        for rank, merge in reversed(list(enumerate(merges))):
            scores[merge.replace(" ", "", 1)] = -float(rank)
        first = tokenizer.encode("a", add_special=False)
        yield {
            "tokenizer.ggml.model": "llama",
            **listed,
            "tokenizer.ggml.scores": [scores[token] for token in tokens],
            "tokenizer.ggml.add_space_prefix": tokens[first[0]].startswith("\u2581"),
        }
        return
    for split in _SPLITS:
        if (split in ("llama-bpe", "tekken")) == bool(model.get("ignore_merges")):
            yield {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": split,
                **listed,
                "tokenizer.ggml.merges": merges,
            }


def _vocabulary(contents: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types by id, of every row of the embedding."""
    texts = {token_id: text for text, token_id in contents["model"]["vocab"].items()}
    types = dict.fromkeys(texts, _NORMAL)
    if contents["model"].get("byte_fallback"):
        for token_id, text in texts.items():
            if len(text) == 6 and text.startswith("<0x"):
                types[token_id] = _BYTE
    for token in contents["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    count = max(vocab_size, max(texts, default=-1) + 1)
    return (
        [texts.get(token_id, f"[PAD{token_id}]") for token_id in range(count)],
        [types.get(token_id, _UNUSED) for token_id in range(count)],
    )


def _reads_the_same(fields: dict[str, Any], tokenizer: Tokenizer) -> bool:
    files = ModelFiles(
        root=Path("packed.gguf"),
        kind="gguf",
        tensors={},
        config={},
        rope_pairing="half",
        rope_factors=None,
        gguf_metadata=fields,
        fingerprint="",
        stamps=(),
    )
    try:
        again = convert_gguf(files)
    except Exception:  # an inconsistent form, found by the package that would read it
        return False
    specials = "".join(tokenizer.settings.special_tokens.values())
    return all(again.encode(text) == tokenizer.encode(text) for text in ("", PROBE, specials))
