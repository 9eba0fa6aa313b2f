"""Text to token ids and back, from what lies with the model; without importing transformers.

A directory brings a `tokenizer.json`, which the `tokenizers` package reads as it is. GGUF metadata
and older forms of tokenizer are converted into that form once and kept in a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from shadowlane.ops.chat_template import render_chat
from shadowlane.ops.decoder_config import read_token_ids
from shadowlane.ops.errors import ModelError
from shadowlane.ops.text_stream import TextStream

if TYPE_CHECKING:
    from shadowlane.ops.files import ModelFiles

__all__ = ["TextStream", "Tokenizer", "TokenizerSettings", "load_tokenizer", "read_eos_token_ids"]

SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
TOKENIZER_FILES = (
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
CACHE_VERSION = 1
NO_VOCABULARY = "no_vocab"  # what GGUF files of models without tokenizer say, or "none"
HUGGING_FACE_FIELD = "tokenizer.huggingface.json"  # a whole tokenizer.json inside a GGUF file


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What a tokenizer.json does not say."""

    special_tokens: dict[str, str]  # "bos_token" -> "<s>", the names chat templates use
    chat_template: str | None
    eos_token_ids: tuple[int, ...]  # any of them ends an answer
    # What `encode` puts around a text, besides what the tokenizer.json adds itself.
    ids_before: tuple[int, ...] = ()
    ids_after: tuple[int, ...] = ()


class Tokenizer:
    """A model's tokenizer. `load_tokenizer` makes it."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._settings = settings
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._byte_ids = self._find_byte_pieces()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._settings.eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        return self._settings.chat_template is not None

    @property
    def settings(self) -> TokenizerSettings:
        return self._settings

    def token_id(self, token: str) -> int | None:
        """The id of one whole token; None for what the vocabulary does not have."""
        return self._backend.token_to_id(token)

    def to_json(self) -> str:
        """The contents of a tokenizer.json; `settings` has the rest."""
        return self._backend.to_str()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special` adds what the model expects around it (BOS)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise ValueError(
                f"text must be valid Unicode; got {text[error.start]!r} at character {error.start}"
            ) from None
        ids = self._backend.encode(text, add_special_tokens=add_special).ids
        if not add_special:
            return ids
        return [*self._settings.ids_before, *ids, *self._settings.ids_after]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation, `[{"role": "user", "content": "..."}]`.

        `add_generation_prompt` ends it with the beginning of the assistant's answer. Raises
        ModelError if the model has no template, ValueError if the template refuses the messages.
        """
        if self._settings.chat_template is None:
            raise ModelError("chat needs a model with a chat_template; this one has none")
        text = render_chat(
            self._settings.chat_template,
            messages,
            self._settings.special_tokens,
            add_generation_prompt,
        )
        return self.encode(text, add_special=False)

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """Text of one sequence as its ids come, ended by any of the `stop` texts."""
        return TextStream(self, stop)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def is_byte_piece(self, token_id: int) -> bool:
        return token_id in self._byte_ids

    def _find_byte_pieces(self) -> frozenset[int]:
        """Ids of "<0x00>" to "<0xFF>", where the vocabulary falls back to bytes."""
        if not getattr(self._backend.model, "byte_fallback", False):
            return frozenset()
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(id_ for id_ in ids if id_ is not None)


def load_tokenizer(files: ModelFiles, cache_dir: Path) -> Tokenizer | None:
    """The tokenizer of a model, or None where it has none.

    Converted tokenizers are kept under `cache_dir` by the model's fingerprint; a cache that cannot
    be written costs the conversion again, no more. Raises ModelError for what cannot be read.
    """
    if files.kind == "gguf":
        metadata = files.gguf_metadata or {}
        is_there = HUGGING_FACE_FIELD in metadata
        if metadata.get("tokenizer.ggml.model") in (NO_VOCABULARY, "none") and not is_there:
            return None
        from shadowlane.ops.tokenizer_gguf import convert_gguf

        return _converted(cache_dir, files.fingerprint, lambda: convert_gguf(files))
    if (files.root / "tokenizer.json").exists():
        backend = _parse(_read_text(files.root / "tokenizer.json"), files.root / "tokenizer.json")
        return _with_directory_settings(backend, files)
    for name, convert in (
        ("tokenizer.model", _convert_sentencepiece),
        ("vocab.json", _convert_with_transformers),
    ):
        path = files.root / name
        if path.exists():
            return _converted(cache_dir, _directory_key(files), partial(convert, files, path))
    return None


def read_eos_token_ids(files: ModelFiles, eos_token: int | None = None) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's, else the config's, and the tokenizer's.

    Works without a tokenizer. Raises ModelError if a file says something else than ids.
    """
    config = files.config
    if files.kind == "safetensors":
        generation = _read_json(files.root / "generation_config.json")
        if generation.get("eos_token_id") is not None:
            config = generation
    ids = read_token_ids(config, "eos_token_id")
    return ids if eos_token is None or eos_token in ids else (*ids, eos_token)


def _with_directory_settings(
    backend: tokenizers.Tokenizer, files: ModelFiles, defaults: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Applies tokenizer_config.json and its companions, over `defaults`, to a backend."""
    config = dict(defaults or {}) | _read_json(files.root / "tokenizer_config.json")
    named = _read_json(files.root / "special_tokens_map.json") | config
    special_tokens = {}
    for name in SPECIAL_NAMES:
        token = named.get(f"{name}_token")
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str):
            special_tokens[f"{name}_token"] = content
    try:
        _add_missing_tokens(backend, config, special_tokens)
        chat_template = _read_chat_template(files.root, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        path = files.root / "tokenizer_config.json"
        raise ModelError(f"{path}: must be a tokenizer's configuration: {error!r}") from error
    eos_token = special_tokens.get("eos_token")
    eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
    settings = TokenizerSettings(
        special_tokens=special_tokens,
        chat_template=chat_template,
        eos_token_ids=read_eos_token_ids(files, eos_token_id),
        ids_before=_missing_bos(backend, config, special_tokens.get("bos_token")),
    )
    return Tokenizer(backend, settings)


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Tokens that only tokenizer_config.json knows as whole ones."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    for _, token in sorted((listed or {}).items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            options = {flag: token[flag] for flag in flags if flag in token}
            backend.add_tokens([tokenizers.AddedToken(token["content"], **options)])
            known.add(token["content"])
    for content in special_tokens.values():
        # One that the vocabulary does not have would get an id the model has no row for.
        if content not in known and backend.token_to_id(content) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True)])


def _missing_bos(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos_token: str | None
) -> tuple[int, ...]:
    """Some tokenizer.json leave it to the config to ask for the BOS token."""
    if config.get("add_bos_token") is not True or bos_token is None:
        return ()
    bos_token_id = backend.token_to_id(bos_token)
    is_added_anyway = bool(backend.encode("", add_special_tokens=True).ids)
    return () if bos_token_id is None or is_added_anyway else (bos_token_id,)


def _read_chat_template(root: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own wins over tokenizer_config.json; of several templates "default" counts."""
    path = root / "chat_template.jinja"
    if path.exists():
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, Sequence) and not isinstance(template, str):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{root}: chat_template must be a text; got {template!r:.60}")
    return template


def _convert_sentencepiece(files: ModelFiles, path: Path) -> Tokenizer:
    """A directory with nothing but a tokenizer.model, as Llama 2 was first published."""
    from shadowlane.ops.tokenizer_sentencepiece import build_sentencepiece, read_sentencepiece

    file = read_sentencepiece(path)
    try:
        backend = build_sentencepiece(file.vocabulary)
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"{path}: the tokenizer is inconsistent: {error}") from error
    tokens = file.vocabulary.tokens
    named = (("bos", file.bos_id), ("eos", file.eos_id), ("unk", file.vocabulary.unknown_id))
    defaults: dict[str, Any] = {f"{name}_token": tokens[i] for name, i in named if i is not None}
    # What sentencepiece tokenizers of these families do unless told otherwise.
    return _with_directory_settings(backend, files, defaults | {"add_bos_token": True})


def _convert_with_transformers(files: ModelFiles, path: Path) -> Tokenizer:
    """A vocab.json with its merges.txt, which only its class in transformers knows how to split."""
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(
            files.root, local_files_only=True, trust_remote_code=False
        )
        backend = tokenizers.Tokenizer.from_str(slow.backend_tokenizer.to_str())
    except Exception as error:  # whatever it meets in such files, the way out is the same
        raise ModelError(
            f"{path}: must be a tokenizer that transformers can convert, or have a "
            f"tokenizer.json beside it: {error!s:.200}"
        ) from error
    return _with_directory_settings(backend, files)


def _directory_key(files: ModelFiles) -> str:
    """Changes with any file that a converted tokenizer is made of."""
    digest = hashlib.sha256(files.fingerprint.encode())
    for name in TOKENIZER_FILES:
        path = files.root / name
        if path.exists():
            found = path.stat()
            digest.update(f"{name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _converted(cache_dir: Path, key: str, convert: Callable[[], Tokenizer]) -> Tokenizer:
    path = cache_dir / "tokenizers" / f"{key}-{CACHE_VERSION}-{tokenizers.__version__}.json"
    with contextlib.suppress(Exception):  # absent, cut off or of another make: made anew
        return _read_cache(path)
    tokenizer = convert()
    _write_cache(path, tokenizer)
    return tokenizer


def _read_cache(path: Path) -> Tokenizer:
    cached = json.loads(path.read_text(encoding="utf-8"))
    backend = tokenizers.Tokenizer.from_str(cached["tokenizer"])
    settings = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in cached["settings"].items()
    }
    return Tokenizer(backend, TokenizerSettings(**settings))


def _write_cache(path: Path, tokenizer: Tokenizer) -> None:
    contents = {"tokenizer": tokenizer._backend.to_str(), "settings": asdict(tokenizer._settings)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(contents, file)
            os.replace(temporary, path)  # readers see all of it or nothing
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        return  # a full or read-only cache; the tokenizer is there all the same


def _parse(text: str, path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"{path}: must be a tokenizer: {error!s:.200}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        contents = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelError(f"{path}: must be JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ModelError(f"{path}: must be a JSON object; got {type(contents).__name__}")
    return contents
