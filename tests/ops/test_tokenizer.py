"""Tokenizers against transformers: directories, GGUF metadata, chat templates, streaming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shadowlane.models import KNOWN
from shadowlane.ops.chat_template import render_chat
from shadowlane.ops.errors import ModelError
from shadowlane.ops.files import ModelFiles, open_model
from shadowlane.ops.tokenizer import Tokenizer, load_tokenizer, read_eos_token_ids

TEXTS = [
    "",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog. It's we'll I'd THEY'RE",
    "Ünïcödé, ﬁne ligature, e\u0301 combining, \u200bzero width, \u00a0no-break",
    "😀😃 👩‍👩‍👧‍👦 🇩🇪 ❤️",
    "你好，世界。日本語のテキスト 한국어 العربية हिन्दी",
    "def f(x):\n    return x ** 2  # comment\n\n\tif x:\n\t\tpass\n",
    "  leading, trailing   and \t tabs \n\n\n newlines \r\n carriage  ",
    "x = {'key': [1.5, -2e10]}; print(f\"{x!r}\")",
    "phone+49/30-1234567 3.14159 1,000,000 ²³ ½ ٣",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "\x00\x01 control \x7f \ufffd \ufeff",
    "a" * 300,
]
CHAT = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4 😀"},
    {"role": "user", "content": "  And\n3+3? "},
]
CHATML = (
    "{{ bos_token }}{%- for message in messages %}\n"
    "  {%- if loop.index0 > 50 %}{% break %}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{{ {'é': '<b>'} | tojson }}\n"
    "{% if add_generation_prompt %}{% generation %}<|im_start|>assistant\n{% endgeneration %}"
    "{% endif %}"
)


def train(pre_tokenizer, byte_level: bool = True, normalizer=None) -> tokenizers.Tokenizer:
    """A small BPE tokenizer of the kind, trained on the texts above."""
    backend = tokenizers.Tokenizer(BPE(byte_fallback=not byte_level, unk_token=None))
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if byte_level else [],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def gpt2_backend() -> tokenizers.Tokenizer:
    return train(pre_tokenizers.ByteLevel(add_prefix_space=False))


def directory_files(directory: Path, **config) -> ModelFiles:
    return ModelFiles(
        root=directory,
        kind="safetensors",
        tensors={},
        config={"eos_token_id": 0, **config},
        rope_pairing="half",
        rope_factors=None,
        gguf_metadata=None,
        fingerprint="d" * 32,
        stamps=(),
    )


def gguf_files(metadata: dict, fingerprint: str = "f" * 32) -> ModelFiles:
    return ModelFiles(
        root=Path("model.gguf"),
        kind="gguf",
        tensors={},
        config={"eos_token_id": metadata.get("tokenizer.ggml.eos_token_id")},
        rope_pairing="half",
        rope_factors=None,
        gguf_metadata=metadata,
        fingerprint=fingerprint,
        stamps=(),
    )


def gguf_metadata(backend: tokenizers.Tokenizer, split: str | None, **fields) -> dict:
    """What a converter to GGUF writes for a byte-level tokenizer."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }
    return metadata if split is None else metadata | {"tokenizer.ggml.pre": split}


def assert_same(ours: Tokenizer, reference, texts=TEXTS) -> None:
    for text in texts:
        ids = reference.encode(text)
        ids = getattr(ids, "ids", ids)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True), text
        assert ours.decode(ids, False) == reference.decode(ids, skip_special_tokens=False), text


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A tokenizer with a BOS token, a chat template of its own file and two ids that end."""
    directory = tmp_path_factory.mktemp("tokenizer")
    backend = gpt2_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
    )
    fast.save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return directory


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Tokenizer:
    path = KNOWN["smollm2"].path
    if not path.exists():
        pytest.skip("needs the default model: shadowlane fetch smollm2")
    return load_tokenizer(open_model(path), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def smollm2_reference(smollm2):
    path = KNOWN["smollm2"].path
    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def test_directory_equals_transformers(directory, tmp_path):
    ours = load_tokenizer(directory_files(directory), tmp_path)
    reference = AutoTokenizer.from_pretrained(directory)
    assert_same(ours, reference)
    assert ours.encode("hi", add_special=False) == reference.encode("hi", add_special_tokens=False)
    assert ours.eos_token_ids == (2, 0)
    assert ours.has_chat_template
    for prompt in (True, False):
        expected = reference.apply_chat_template(
            CHAT, add_generation_prompt=prompt, return_dict=False
        )
        assert ours.apply_chat_template(CHAT, add_generation_prompt=prompt) == expected
    assert list(tmp_path.iterdir()) == []  # nothing to convert, nothing cached


@pytest.mark.parametrize("form", ["string", "list", "none"])
def test_chat_template_of_the_config(directory, tmp_path, form):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    config["chat_template"] = {"string": CHATML, "list": named, "none": None}[form]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(directory_files(tmp_path), tmp_path)
    assert ours.has_chat_template == (form != "none")
    if form == "none":
        with pytest.raises(ModelError, match="chat_template"):
            ours.apply_chat_template(CHAT)
        return
    reference = AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(CHAT) == expected


def test_add_bos_token_where_the_tokenizer_leaves_it_to_the_config(tmp_path):
    gpt2_backend().save(str(tmp_path / "tokenizer.json"))
    config = {"add_bos_token": True, "bos_token": {"content": "<|im_start|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(directory_files(tmp_path), tmp_path)
    assert ours.encode("hi") == [1, *ours.encode("hi", add_special=False)]
    config["add_bos_token"] = False
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(directory_files(tmp_path), tmp_path)
    assert ours.encode("hi") == ours.encode("hi", add_special=False)


def test_whole_tokens_that_only_the_config_knows(tmp_path):
    gpt2_backend().save(str(tmp_path / "tokenizer.json"))
    token = {"content": "<|tool|>", "special": True, "normalized": False}
    config = {"added_tokens_decoder": {"700": token}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(directory_files(tmp_path), tmp_path)
    ids = ours.encode("a<|tool|>b")
    assert len(ids) == 3
    assert ours.is_special(ids[1])
    assert ours.decode(ids) == "ab"


def test_ids_that_end_an_answer(tmp_path):
    assert read_eos_token_ids(directory_files(tmp_path, eos_token_id=[7, 9])) == (7, 9)
    assert read_eos_token_ids(directory_files(tmp_path), eos_token=4) == (0, 4)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert read_eos_token_ids(directory_files(tmp_path)) == (5,)
    (tmp_path / "generation_config.json").write_text('{"temperature": 1}')
    assert read_eos_token_ids(directory_files(tmp_path)) == (0,)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json: must be JSON"):
        read_eos_token_ids(directory_files(tmp_path))


def test_no_tokenizer_and_broken_ones(tmp_path):
    assert load_tokenizer(directory_files(tmp_path), tmp_path) is None
    gpt2_backend().save(str(tmp_path / "tokenizer.json"))
    for config in ('{"added_tokens_decoder": {"x": 1}}', '{"chat_template": [1]}'):
        (tmp_path / "tokenizer_config.json").write_text(config)
        with pytest.raises(ModelError, match=r"tokenizer_config.json: must be a tokenizer's"):
            load_tokenizer(directory_files(tmp_path), tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelError, match=r"tokenizer.json: must be a tokenizer"):
        load_tokenizer(directory_files(tmp_path), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(ModelError, match=r"vocab.json: must be a tokenizer that transformers can"):
        load_tokenizer(directory_files(tmp_path), tmp_path)


LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str):
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), last])


def split_digits():
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


@pytest.mark.parametrize(
    ("split", "pre_tokenizer", "normalizer", "adds_bos"),
    [
        (None, pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
        ("smollm", split_digits(), None, False),
        ("llama-bpe", split_by(LLAMA3_SPLIT), None, True),
        ("smaug-bpe", split_by(LLAMA3_SPLIT), None, False),
        ("qwen2", split_by(QWEN2_SPLIT), normalizers.NFC(), False),
    ],
)
def test_gguf_byte_level_equals_the_original(tmp_path, split, pre_tokenizer, normalizer, adds_bos):
    original = train(pre_tokenizer, normalizer=normalizer)
    ours = load_tokenizer(gguf_files(gguf_metadata(original, split)), tmp_path)
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text, add_special=False) == ids
        assert ours.encode(text) == [1] * adds_bos + ids
        assert ours.decode(ids) == original.decode(ids)
    assert ours.eos_token_ids == (2,)
    says = gguf_files(gguf_metadata(original, split, add_bos_token=not adds_bos), "e" * 32)
    assert load_tokenizer(says, tmp_path).encode("") == [1] * (not adds_bos)


def test_gguf_user_defined_tokens_stay_whole(tmp_path):
    metadata = gguf_metadata(gpt2_backend(), "gpt-2")
    for token in ("<think>", "<｜会話｜>"):
        metadata["tokenizer.ggml.tokens"].append(token)
        metadata["tokenizer.ggml.token_type"].append(4)
    ours = load_tokenizer(gguf_files(metadata), tmp_path)
    count = len(metadata["tokenizer.ggml.tokens"])
    assert ours.encode("<think><｜会話｜>") == [count - 2, count - 1]
    assert ours.decode([count - 2, count - 1]) == "<think><｜会話｜>"


def sentencepiece_pair() -> tuple[tokenizers.Tokenizer, dict]:
    """A tokenizer as Llama 2's tokenizer.json has it, and its GGUF metadata: scores, no merges."""
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    trained = train(None, byte_level=False, normalizer=normalizers.Sequence(spaces))
    model = json.loads(trained.to_str())["model"]
    learned = sorted(
        (token for token in model["vocab"] if "<|" not in token), key=model["vocab"].get
    )
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    # A character that few texts hold goes through bytes.
    learned = [token for token in learned if not set(token) & set("😀😃世ﬁ")]
    merges = [merge for merge in model["merges"] if "".join(merge) in learned]
    tokens = [*special, *bytes_, *learned]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=[tuple(merge) for merge in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    for token in special:
        backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True)])
    # The earlier a merge was learned the higher its score; single characters come last.
    order = {"".join(merge): place for place, merge in reversed(list(enumerate(merges)))}
    scores = [-float(order.get(token, len(tokens))) for token in tokens]
    return backend, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(learned),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]",
    }


def test_gguf_sentencepiece_equals_the_original(tmp_path):
    original, metadata = sentencepiece_pair()
    ours = load_tokenizer(gguf_files(metadata), tmp_path)
    for text in [*TEXTS, "a</s> b<s>c", "  two", "😀世 and more 😀"]:
        ids = original.encode(text).ids
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == original.decode(ids)
    rendered = "<s>[INST] hi [/INST]"
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == (
        original.encode(rendered).ids
    )


def sentencepiece_model(metadata: dict, kind: int = 2):
    """The same vocabulary as a sentencepiece file, written with the published message format."""
    from transformers.utils.sentencepiece_model_pb2_new import ModelProto

    model = ModelProto()
    for token, score, type_ in zip(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.scores"],
        metadata["tokenizer.ggml.token_type"],
        strict=True,
    ):
        piece = model.pieces.add()
        piece.piece, piece.score, piece.type = token, score, type_
    model.trainer_spec.model_type = kind
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.pad_id = -1
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = True
    return model


def test_sentencepiece_file_equals_the_original(tmp_path):
    original, metadata = sentencepiece_pair()
    model = sentencepiece_model(metadata)
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    ours = load_tokenizer(directory_files(tmp_path, eos_token_id=None), tmp_path / "cache")
    for text in [*TEXTS, "a</s> b<s>c", "  two"]:
        ids = original.encode(text).ids
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == original.decode(ids)
    assert ours.eos_token_ids == (2,)
    config = '{"add_bos_token": false, "chat_template": "{{ bos_token }}{{ eos_token }}"}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    ours = load_tokenizer(directory_files(tmp_path), tmp_path / "cache")
    assert ours.encode("") == []
    assert ours.apply_chat_template(CHAT) == [1, 2]


def test_sentencepiece_refuses_by_name(tmp_path):
    _, metadata = sentencepiece_pair()
    path = tmp_path / "tokenizer.model"
    unigram = sentencepiece_model(metadata, kind=1).SerializeToString()
    path.write_bytes(unigram)
    with pytest.raises(ModelError, match=r"tokenizer.model: must be a BPE model"):
        load_tokenizer(directory_files(tmp_path), tmp_path)
    good = sentencepiece_model(metadata).SerializeToString()
    for damaged in (b"", b"not a model", good[:-7], good[:1000], b"\x0a" + b"\xff" * 20):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"tokenizer.model: must be a (sentence|BPE)"):
            load_tokenizer(directory_files(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model must be gpt2 or llama; got 't5'"),
        ({"tokenizer.ggml.pre": "chameleon"}, "tokenizer.ggml.pre must be one of .*'chameleon'"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges must be pairs"),
        ({"tokenizer.ggml.merges": ["zzz qqq"]}, "the tokenizer is inconsistent"),
        ({"tokenizer.ggml.tokens": 5}, "tokenizer.ggml.tokens must be texts"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type must be"),
    ],
)
def test_gguf_refuses_by_name(tmp_path, changes, message):
    files = gguf_files(gguf_metadata(gpt2_backend(), "gpt-2") | changes)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(files, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_converted_tokenizer_is_cached_and_a_broken_cache_is_made_anew(tmp_path):
    _, metadata = sentencepiece_pair()
    first = load_tokenizer(gguf_files(metadata), tmp_path)
    (cached,) = (tmp_path / "tokenizers").iterdir()
    # Served from the cache: the metadata is not looked at.
    again = load_tokenizer(gguf_files({}), tmp_path)
    for text in TEXTS:
        assert again.encode(text) == first.encode(text)
        assert again.decode(again.encode(text)) == first.decode(first.encode(text))
    chat = [{"role": "user", "content": "hi"}]
    assert again.apply_chat_template(chat) == first.apply_chat_template(chat)
    assert again.eos_token_ids == first.eos_token_ids == (2,)
    good = cached.read_bytes()
    cached.write_bytes(good[: len(good) // 2])
    assert load_tokenizer(gguf_files(metadata), tmp_path).encode("hi") == first.encode("hi")
    assert cached.read_bytes() == good
    other = load_tokenizer(gguf_files(gguf_metadata(gpt2_backend(), "gpt-2"), "0" * 32), tmp_path)
    assert other.encode("hi") != first.encode("hi")


def test_a_cache_that_cannot_be_written_is_no_matter(tmp_path):
    (tmp_path / "tokenizers").write_text("a file where a folder should be")
    ours = load_tokenizer(gguf_files(gguf_metadata(gpt2_backend(), "gpt-2")), tmp_path)
    assert ours.decode(ours.encode("hi")) == "hi"


def test_the_reason_of_a_template_is_one_line():
    template = "{{ raise_exception('no role\\n  of that name') }}"
    with pytest.raises(ValueError, match=r"chat template: no role of that name$"):
        render_chat(template, [{"role": "x", "content": ""}], {}, add_generation_prompt=True)


def test_messages_a_template_refuses(directory, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    ours = load_tokenizer(directory_files(tmp_path), tmp_path)
    with pytest.raises(ValueError, match="chat template: roles must alternate"):
        ours.apply_chat_template(CHAT)
    with pytest.raises(ValueError, match="messages must not be empty"):
        ours.apply_chat_template([])
    with pytest.raises(ValueError, match="messages must be objects with a role"):
        ours.apply_chat_template([{"content": "hi"}])
    template.write_text("{% if %}")
    ours = load_tokenizer(directory_files(tmp_path), tmp_path)
    with pytest.raises(ModelError, match="chat_template must be a valid Jinja template"):
        ours.apply_chat_template(CHAT)
    template.write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    ours = load_tokenizer(directory_files(tmp_path), tmp_path)
    with pytest.raises(ValueError, match=r"do not fit the model's chat template: .*unsafe"):
        ours.apply_chat_template(CHAT)


def test_text_that_is_no_unicode_is_refused(directory, tmp_path):
    ours = load_tokenizer(directory_files(directory), tmp_path)
    with pytest.raises(ValueError, match="text must be valid Unicode"):
        ours.encode("a\ud800b")


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join([stream.push(token_id) for token_id in ids]) + stream.finish()


def test_streams_add_up(tmp_path):
    _, metadata = sentencepiece_pair()
    count = len(metadata["tokenizer.ggml.tokens"])
    ours = load_tokenizer(gguf_files(metadata), tmp_path)
    # Bytes of an emoji, special tokens and single spaces often, as they are what goes wrong.
    difficult = [*ours.encode("😀 世"), *range(3), metadata["tokenizer.ggml.tokens"].index("▁")]
    ids = st.one_of(st.sampled_from(difficult), st.integers(0, count - 1))

    @settings(deadline=None)
    @given(st.lists(ids, max_size=30))
    def check(token_ids: list[int]) -> None:
        assert streamed(ours, token_ids) == ours.decode(token_ids)

    check()


def test_smollm2_equals_transformers(smollm2, smollm2_reference):
    # transformers does not know the file's "smollm" and splits as GPT-2 does, which differs where
    # several spaces come before a digit; the model's own tokenizer sets each digit apart first.
    assert_same(smollm2, smollm2_reference, [text for text in TEXTS if "3.14159" not in text])
    assert_same(smollm2, smollm2_reference, ["1,000,000 3.14159 a1b2c3 12:30", "x=10\ny=-2e10"])
    spaces, *digits = smollm2.encode("  12")
    assert smollm2.decode([spaces]) == "  "
    assert [smollm2.decode([digit]) for digit in digits] == ["1", "2"]
    for prompt in (True, False):
        expected = smollm2_reference.apply_chat_template(
            CHAT, add_generation_prompt=prompt, return_dict=False
        )
        assert smollm2.apply_chat_template(CHAT, add_generation_prompt=prompt) == expected
    assert smollm2.eos_token_ids == (2,)


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Nd", "Nl", "No"])))
def test_smollm2_encodes_any_text_as_transformers_does(smollm2, smollm2_reference, text):
    ids = smollm2.encode(text)
    assert ids == smollm2_reference.encode(text)
    assert streamed(smollm2, ids) == smollm2.decode(ids)


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 400) | st.integers(0, 49151), max_size=30))
def test_smollm2_streams_add_up(smollm2, ids):
    assert streamed(smollm2, ids) == smollm2.decode(ids)
