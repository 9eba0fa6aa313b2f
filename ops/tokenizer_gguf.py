"""Builds a tokenizer from GGUF metadata: byte-level BPE ("gpt2") or sentencepiece BPE ("llama").

GGUF names the way a text is split before merging (`tokenizer.ggml.pre`) and leaves it to the reader
to know what the name means. Here each name stands for what the model's own tokenizer.json does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from shadowlane.ops.errors import ModelError
from shadowlane.ops.tokenizer import (
    HUGGING_FACE_FIELD,
    Tokenizer,
    TokenizerSettings,
    read_eos_token_ids,
)
from shadowlane.ops.tokenizer_sentencepiece import (
    Sentencepiece,
    add_whole_tokens,
    build_sentencepiece,
)

if TYPE_CHECKING:
    from shadowlane.ops.files import ModelFiles

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = ("default", "gpt-2")
_DIGITS = ("smollm", "starcoder", "refact", "command-r")  # GPT-2's, each digit on its own before
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3")
_LLAMA3_PLAIN = ("smaug-bpe", "dbrx")  # split like Llama 3, but neither BOS nor whole-word lookup
_QWEN2 = ("qwen2", "deepseek-r1-qwen", "megrez")
_TEKKEN = ("tekken",)
_KNOWN_SPLITS = (*_GPT2, *_DIGITS, *_LLAMA3, *_LLAMA3_PLAIN, *_QWEN2, *_TEKKEN)


def convert_gguf(files: ModelFiles) -> Tokenizer:
    """The tokenizer a GGUF file describes. Raises ModelError for a kind we do not know."""
    contents = _field(files, HUGGING_FACE_FIELD, None)
    if isinstance(contents, str):
        return _carried(files, contents)
    tokens = _strings(files, "tokenizer.ggml.tokens")
    kind = _field(files, "tokenizer.ggml.model")
    split = _field(files, "tokenizer.ggml.pre", "default")
    types = _token_types(files, len(tokens))
    if kind == "gpt2":
        backend = _byte_level(files, tokens, split)
        add_whole_tokens(backend, tokens, types)
        adds_bos = split in (*_LLAMA3, *_TEKKEN)
    elif kind == "llama":
        backend = _sentencepiece(files, tokens, types)
        adds_bos = True
    else:
        raise ModelError(f"{files.root}: tokenizer.ggml.model must be gpt2 or llama; got {kind!r}")

    return Tokenizer(backend, _settings(files, tokens, adds_bos))


def _carried(files: ModelFiles, contents: str) -> Tokenizer:
    """A tokenizer.json as it is; it adds itself what belongs around a text."""
    try:
        backend = tokenizers.Tokenizer.from_str(contents)
    except Exception as error:  # the package raises plain Exception
        raise ModelError(
            f"{files.root}: {HUGGING_FACE_FIELD} must be a tokenizer: {error!s:.200}"
        ) from error
    tokens = [backend.id_to_token(id_) or "" for id_ in range(backend.get_vocab_size())]
    settings = _settings(files, tokens, adds_bos=False)
    if backend.encode("").ids:
        settings = replace(settings, ids_before=(), ids_after=())
    return Tokenizer(backend, settings)


def _settings(files: ModelFiles, tokens: list[str], adds_bos: bool) -> TokenizerSettings:
    named = {
        f"{name}_token": token
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token := _named_token(files, key, tokens)) is not None
    }
    bos = named.get("bos_token")
    eos = named.get("eos_token")
    is_bos_added = bool(_field(files, "tokenizer.ggml.add_bos_token", adds_bos))
    is_eos_added = bool(_field(files, "tokenizer.ggml.add_eos_token", False))
    template = _field(files, "tokenizer.chat_template", None)
    return TokenizerSettings(
        special_tokens={name: text for name, (text, _) in named.items()},
        chat_template=template if isinstance(template, str) else None,
        eos_token_ids=read_eos_token_ids(files),
        ids_before=(bos[1],) if is_bos_added and bos is not None else (),
        ids_after=(eos[1],) if is_eos_added and eos is not None else (),
    )


def _byte_level(files: ModelFiles, tokens: list[str], split: Any) -> tokenizers.Tokenizer:
    if split not in _KNOWN_SPLITS:
        raise ModelError(
            f"{files.root}: tokenizer.ggml.pre must be one of {', '.join(_KNOWN_SPLITS)}; "
            f"got {split!r}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(files, "tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ModelError(f"{files.root}: tokenizer.ggml.merges must be pairs; not all are")
    # Llama 3 and Tekken look a whole word up before they merge its pieces.
    backend = _bpe(files, tokens, merges, ignore_merges=split in (*_LLAMA3, *_TEKKEN))
    backend.decoder = decoders.ByteLevel()
    if split in _QWEN2:
        backend.normalizer = normalizers.NFC()
    if split in _GPT2:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return backend
    if split in _DIGITS:
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        is_split_again = True
    else:
        pattern = _QWEN2_SPLIT if split in _QWEN2 else _LLAMA3_SPLIT
        pattern = _TEKKEN_SPLIT if split in _TEKKEN else pattern
        first = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        is_split_again = False
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_split_again)]
    )
    return backend


def _sentencepiece(files: ModelFiles, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    scores = files.gguf_field("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(
            f"{files.root}: tokenizer.ggml.scores must be {len(tokens)} numbers; got {len(scores)}"
        )
    unknown = _named_token(files, "unknown", tokens)
    vocabulary = Sentencepiece(
        tokens=tokens,
        scores=scores,
        types=types,
        unknown_id=None if unknown is None else unknown[1],
        adds_space=bool(_field(files, "tokenizer.ggml.add_space_prefix", True)),
    )
    try:
        return build_sentencepiece(vocabulary)
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"{files.root}: the tokenizer is inconsistent: {error}") from error


def _bpe(
    files: ModelFiles, tokens: list[str], merges: list[Any], **options: Any
) -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"{files.root}: the tokenizer is inconsistent: {error}") from error


def _token_types(files: ModelFiles, count: int) -> list[int]:
    types = _field(files, "tokenizer.ggml.token_type", [1] * count)
    if len(types) != count:
        raise ModelError(
            f"{files.root}: tokenizer.ggml.token_type must be {count} numbers; got {len(types)}"
        )
    return types


def _named_token(files: ModelFiles, key: str, tokens: Sequence[str]) -> tuple[str, int] | None:
    token_id = _field(files, f"tokenizer.ggml.{key}_token_id", None)
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        return None  # 2^32 - 1 is how some writers say that there is none
    return tokens[token_id], token_id


def _strings(files: ModelFiles, key: str) -> list[str]:
    values = files.gguf_field(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ModelError(f"{files.root}: {key} must be texts; got {values!r:.60}")
    return values


_REQUIRED = object()


def _field(files: ModelFiles, key: str, default: Any = _REQUIRED) -> Any:
    is_there = files.gguf_metadata is not None and key in files.gguf_metadata
    return files.gguf_field(key) if is_there or default is _REQUIRED else default
