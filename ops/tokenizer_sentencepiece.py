"""Sentencepiece BPE vocabularies, from a `tokenizer.model` or from GGUF, as a `tokenizers` object.

A `tokenizer.model` is one protobuf message. The few fields that matter are read here by hand, so no
sentencepiece or protobuf package is needed. Field numbers are those of `sentencepiece_model.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers
from tokenizers.models import BPE

from shadowlane.ops.errors import ModelError

# Types of a piece, the same numbers in GGUF's tokenizer.ggml.token_type.
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6

_BPE_MODEL = 2
_MAX_NBYTES = 64 << 20  # the largest vocabularies take a few MB


@dataclass(frozen=True, slots=True)
class Sentencepiece:
    tokens: list[str]
    scores: list[float]  # the higher, the earlier a token is merged
    types: list[int]
    unknown_id: int | None
    adds_space: bool  # a space before the first word, which decoding takes away again


def build_sentencepiece(vocabulary: Sentencepiece) -> tokenizers.Tokenizer:
    """The tokenizer, whole tokens added. Raises the package's Exception if it is inconsistent."""
    tokens, unknown = vocabulary.tokens, vocabulary.unknown_id
    backend = tokenizers.Tokenizer(
        BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges_from_scores(tokens, vocabulary.scores, vocabulary.types),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    text: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.adds_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        text.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(text)
    add_whole_tokens(backend, tokens, vocabulary.types)
    return backend


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges that the scores amount to: every way to make a token of two, best first."""
    ordinary = {
        token: score
        for token, score, type_ in zip(tokens, scores, types, strict=True)
        if type_ not in (UNKNOWN, CONTROL, BYTE)
    }
    merges = [
        (score, length, token)
        for token, score in ordinary.items()
        for length in range(1, len(token))
        if token[:length] in ordinary and token[length:] in ordinary
    ]
    merges.sort(key=lambda merge: (-merge[0], -merge[1]))
    return [(token[:length], token[length:]) for _, length, token in merges]


def add_whole_tokens(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]
) -> None:
    """Tokens that are found in a text as they stand and never cut: control and user-defined."""
    for token, type_ in zip(tokens, types, strict=True):
        if type_ in (CONTROL, UNKNOWN):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif type_ == USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])


@dataclass(frozen=True, slots=True)
class SentencepieceFile:
    vocabulary: Sentencepiece
    bos_id: int | None
    eos_id: int | None


def read_sentencepiece(path: Path) -> SentencepieceFile:
    """Reads a `tokenizer.model`. Raises ModelError if it is damaged or of another kind than BPE."""
    if path.stat().st_size > _MAX_NBYTES:
        raise ModelError(f"{path}: must be at most {_MAX_NBYTES} bytes; got {path.stat().st_size}")
    try:
        return _parse(path, path.read_bytes())
    except (IndexError, ValueError, TypeError, struct.error) as error:
        raise ModelError(f"{path}: must be a sentencepiece model; it is damaged") from error


def _parse(path: Path, contents: bytes) -> SentencepieceFile:
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(contents):
        if field == 1:
            piece = dict(_fields(value))
            tokens.append(piece[1].decode())
            scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
            types.append(piece.get(3, 1))
        elif field == 2:
            trainer = dict(_fields(value))
        elif field == 3:
            normalizer = dict(_fields(value))
    if not tokens:
        raise ValueError("no pieces")
    if trainer.get(3, 1) != _BPE_MODEL or normalizer.get(2):
        raise ModelError(
            f"{path}: must be a BPE model without a table of characters, or have a tokenizer.json "
            "beside it"
        )
    vocabulary = Sentencepiece(
        tokens=tokens,
        scores=scores,
        types=types,
        unknown_id=_id(trainer.get(40, 0), len(tokens)),
        adds_space=bool(normalizer.get(3, 1)),
    )
    bos_id, eos_id = (_id(trainer.get(field, default), len(tokens)) for field, default in _ENDS)
    return SentencepieceFile(vocabulary, bos_id, eos_id)


_ENDS = ((41, 1), (42, 2))  # trainer_spec's bos_id and eos_id, with the proto's defaults


def _id(value: int, count: int) -> int | None:
    """Negative ids, 64-bit numbers on the wire, say that there is no such token."""
    return value if value < count else None


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value): numbers as int, everything else as its bytes."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        match tag & 7:
            case 0:
                value, place = _varint(message, place)
                yield tag >> 3, value
                continue
            case 1:
                nbytes = 8
            case 2:
                nbytes, place = _varint(message, place)
            case 5:
                nbytes = 4
            case wire_type:
                raise ValueError(f"wire type {wire_type}")
        if place + nbytes > len(message):
            raise ValueError("cut off")
        yield tag >> 3, message[place : place + nbytes]
        place += nbytes


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """The number at `place`, least significant seven bits first, and the place behind it."""
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("number too long")
