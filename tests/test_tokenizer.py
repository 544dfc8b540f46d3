"""Tokenizers of GGUF files and of Hugging Face folders, and chat templates, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.errors import ModelError, RequestError
from tokenweave.models import Tokenizer, gguf_tokenizer, load_tokenizer
from tokenweave.models.gguf import GGUFFile

OTHER_DIGITS = "١٢٣ ½ ² Ⅷ 1st 2nd B2B"
TEXTS = [
    "Hello, world!",
    " leading and trailing ",
    "It's 2026-11-29, isn't it? Pi is 3.14159; call 0800 123 456.",
    "déjà vu, naïve, ﬁne; Ελληνικά, русский, 日本語のテキスト, العربية, हिन्दी",
    "emoji: 🙂👩‍👩‍👧‍👦🇪🇺 and e\u0301 combining",
    "def f(x):\n    return x**2  # square\n\n\nfor i in range(10):\n\tprint(f(i))\n",
    "a\r\nb\r\n\r\n  c\t\td",
    "x  y   z    ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_end|><|im_end|>x<repo_name>",
    "<|im_star|> <not_special> <|",
    OTHER_DIGITS,
    "\u00a0\u2003 \u200b\ufeff\x00\x7f",
    "don't DON'T we'll I'VE 'tis",
    "https://example.org/a_b?c=d&e=%20#f",
    "!!!???...---===",
    "",
    "\n",
    "supercalifragilisticexpialidocious " * 20,
]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="module")
def transformers_tokenizer(smollm2_gguf: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def published_smollm2(transformers_tokenizer: Any) -> tokenizers.Tokenizer:
    """transformers' tokenizer with the pre-tokenizer of SmolLM2's tokenizer.json.

    Reading the GGUF file, transformers does not know the pre-tokenizer ``smollm`` and leaves out that digits are split
    off first. That shows where two or more spaces precede a digit ("a  1" is ["a", "  ", "1"] as the model was trained)
    and in digits other than 0-9, whose merges would cross.
    """
    backend = tokenizers.Tokenizer.from_str(transformers_tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return backend


@pytest.mark.parametrize("text", [text for text in TEXTS if text != OTHER_DIGITS])
def test_smollm2_encodes_as_transformers(smollm2: Tokenizer, transformers_tokenizer: Any, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == transformers_tokenizer.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert smollm2.decode(ids) == transformers_tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@settings(deadline=None, max_examples=300)
@given(text=st.text(max_size=60) | st.text(alphabet="ab1 2\n\t'é<|_im_start|>", max_size=40))
def test_smollm2_encodes_any_text_as_published(
    smollm2: Tokenizer, published_smollm2: tokenizers.Tokenizer, text: str
) -> None:
    ids = published_smollm2.encode(text).ids
    assert smollm2.encode(text) == ids
    # Not ``text`` itself: the vocabulary lacks a few control characters.
    assert smollm2.decode(ids, skip_special_tokens=False) == published_smollm2.decode(ids, skip_special_tokens=False)


def test_digits_are_split_off_first(smollm2: Tokenizer) -> None:
    pieces = [smollm2.decode([token]) for token in smollm2.encode("a  12")]
    assert pieces == ["a", "  ", "1", "2"]


def test_smollm2_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.token_id("<|im_end|>") == 2
    assert smollm2.token_id("no such token") is None
    assert smollm2.vocab_size == 49152
    ids = smollm2.encode("a<|im_end|>b")
    assert 2 in ids
    assert smollm2.decode(ids) == "ab"
    assert smollm2.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_part_of_a_character_is_marked(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🙂")
    assert len(ids) > 1
    assert "\ufffd" in smollm2.decode(ids[:-1])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a  12 <b>&'\" é"}],
        [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "3\n\n"},
        ],
    ],
)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_as_transformers(
    smollm2: Tokenizer, transformers_tokenizer: Any, messages: list[dict[str, str]], prompt: bool
) -> None:
    expected = transformers_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert smollm2.apply_chat_template(messages, add_generation_prompt=prompt) == expected


# --- a small vocabulary of our own, as a folder and as GGUF files ---


def train(split: tokenizers.pre_tokenizers.PreTokenizer, ignore_merges: bool = False) -> tokenizers.Tokenizer:
    """A byte-level BPE on TEXTS with <s>, </s> and <think> (not special)."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = split
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return backend


def write_tokenizer_gguf(path: Path, backend: tokenizers.Tokenizer, pre: str, **more: Any) -> Path:
    """``backend``'s vocabulary and merges; ``more`` are entries below tokenizer.ggml."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    kinds = [{"<s>": 3, "</s>": 3, "<think>": 4}.get(token, 1) for token in tokens]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(more.pop("model", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in more.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_by(pattern: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    return tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# As in the tokenizer.json of Llama-3.1 and of Qwen2.5.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@pytest.mark.parametrize("text", [*TEXTS, "<think>so</think>", "</s>x<s>"])
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "default", "smollm"])
def test_pre_tokenizers(tmp_path_factory: pytest.TempPathFactory, pre: str, text: str) -> None:
    if pre not in _made:
        plain = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Digits(individual_digits=True), plain])
        split = {"llama-bpe": split_by(LLAMA3), "qwen2": split_by(QWEN2), "smollm": digits}.get(pre, plain)
        backend = train(split, ignore_merges=pre == "llama-bpe")
        if pre == "qwen2":
            backend.normalizer = tokenizers.normalizers.NFC()
        path = write_tokenizer_gguf(tmp_path_factory.mktemp(pre) / "t.gguf", backend, pre, add_bos_token=False)
        _made[pre] = backend, load_tokenizer(path)
    backend, tokenizer = _made[pre]
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == (backend.normalizer or _Same()).normalize_str(text)


class _Same:
    def normalize_str(self, text: str) -> str:
        return text


_made: dict[str, tuple[tokenizers.Tokenizer, Tokenizer]] = {}


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    return train(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.mark.parametrize(
    ("pre", "settings", "begins"),
    [
        ("gpt-2", {"add_bos_token": True}, True),
        ("gpt-2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ],
)
def test_bos(tmp_path: Path, backend: tokenizers.Tokenizer, pre: str, settings: dict[str, bool], begins: bool) -> None:
    tokenizer = load_tokenizer(write_tokenizer_gguf(tmp_path / "t.gguf", backend, pre, **settings))
    assert (tokenizer.encode("Hello")[0] == 0) == begins
    assert tokenizer.encode("Hello", add_special_tokens=False)[0] != 0
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"


def test_ends_of_text_and_of_turn(tmp_path: Path, backend: tokenizers.Tokenizer) -> None:
    tokenizer = load_tokenizer(
        write_tokenizer_gguf(tmp_path / "t.gguf", backend, "gpt-2", eot_token_id=5, eom_token_id=1)
    )
    assert tokenizer.eos_token_ids == (1, 5)


@pytest.mark.parametrize(("pre", "model"), [("tekken", "gpt2"), ("default", "llama")])
def test_other_kinds_need_a_tokenizer_json(tmp_path: Path, backend: tokenizers.Tokenizer, pre: str, model: str) -> None:
    path = write_tokenizer_gguf(tmp_path / "t.gguf", backend, pre, model=model)
    with pytest.raises(
        ModelError, match=rf"'{model}' with tokenizer\.ggml\.pre '{pre}'.*put the model's tokenizer\.json"
    ):
        load_tokenizer(path)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(path).encode(TEXTS[0]) == backend.encode(TEXTS[0]).ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is missing or damaged; expected a list of texts"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges is missing or damaged"),
        ({"tokenizer.ggml.token_type": 5}, "token_type is 5; expected a list"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000; the vocabulary has"),
        ({"tokenizer.ggml.bos_token_id": -1}, "bos_token_id is -1"),
        ({"tokenizer.ggml.bos_token_id": "<s>"}, "bos_token_id is '<s>'"),
    ],
)
def test_damaged_metadata(tmp_path: Path, backend: tokenizers.Tokenizer, change: dict[str, Any], message: str) -> None:
    file = GGUFFile(write_tokenizer_gguf(tmp_path / "m.gguf", backend, "qwen2"))
    file.metadata.update(change)
    with pytest.raises(ModelError, match=message):
        gguf_tokenizer.build(file)


def test_damaged_merges(tmp_path: Path, backend: tokenizers.Tokenizer) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_token_merges(["a c"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"t\.gguf: the tokenizer's merges do not fit its vocabulary"):
        load_tokenizer(tmp_path / "t.gguf")


@pytest.fixture
def folder(tmp_path: Path, backend: tokenizers.Tokenizer) -> Path:
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
                "eos_token": "</s>",
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'bad' %}"
                "{{ raise_exception('no ' + m.role) }}{% endif %}\n[{{ m.content }}]{{ m | tojson }}{% if loop.first %}"
                "{% continue %}{% endif %}.{% endfor %}{% if add_generation_prompt %}>{% endif %}",
            }
        )
    )
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_folder_as_transformers(folder: Path, text: str) -> None:
    tokenizer, reference = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode(text) == reference.encode(text)


def test_folder_chat_as_transformers(folder: Path) -> None:
    messages = [{"role": "user", "content": "<é> & 'x'"}, {"role": "assistant", "content": "2"}]
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert load_tokenizer(folder).apply_chat_template(messages) == expected
    assert expected.startswith("<s>")


def test_template_file_and_named_templates(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(folder).apply_chat_template([]) == "d"
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(folder).apply_chat_template([]) == "from the file"


def test_template_that_refuses(folder: Path) -> None:
    with pytest.raises(RequestError, match="chat template failed on these messages: no bad"):
        load_tokenizer(folder).apply_chat_template([{"role": "bad", "content": ""}])


@pytest.mark.parametrize(
    "template", ["{{ 1 + messages[0].content }}", "{{ 1 // 0 }}", "{{ messages[0].content ** 2 }}"]
)
def test_template_that_fails_in_its_own_way(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="the model's chat template failed on these messages"):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("value", [5, [5], ["default"], [{"name": "default"}]])
def test_damaged_template(folder: Path, value: Any) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": value}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template is .*; expected a text"):
        load_tokenizer(folder)


def test_damaged_template_file(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: cannot be read as UTF-8"):
        load_tokenizer(folder)


def test_special_tokens_without_a_text_are_left_out(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": {"a": 1}, "eos_token": None}))
    assert load_tokenizer(folder).encode("a")


def test_text_that_is_no_unicode(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"the text 'caf\\udce9' is not valid Unicode"):
        load_tokenizer(folder).encode("caf\udce9")


def test_templates_are_sandboxed(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match=r"unsafe|undefined"):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "x"}])


def test_no_template(tmp_path: Path, backend: tokenizers.Tokenizer) -> None:
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])


def test_folder_ends(folder: Path) -> None:
    assert load_tokenizer(folder).eos_token_ids == (1,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 1]}')
    assert load_tokenizer(folder).eos_token_ids == (4, 1)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").unlink()
    assert load_tokenizer(folder).eos_token_ids == (1,)


def test_folder_without_or_with_a_damaged_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json in this folder"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="no such model"):
        load_tokenizer(tmp_path / "nothing")
