"""The tokenizer that a GGUF file holds: a byte-level BPE rebuilt from its metadata."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenweave.errors import ModelError
from tokenweave.models.gguf import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# How the vocabularies' makers cut text before merging, by tokenizer.ggml.pre.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _WORDS.format(digits="{1,3}"),
    "llama3": _WORDS.format(digits="{1,3}"),
    "qwen2": _WORDS.format(digits=""),
}
_GPT2 = ("gpt-2", "default")
_SINGLE_DIGITS = ("smollm",)
_LLAMA3 = ("llama-bpe", "llama3")


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether text starts with the BOS token; where the file does not say, as llama.cpp decides."""
    default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def end_tokens(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end a text: of the text, of a turn, of a message that calls a tool."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def is_supported(file: GGUFFile) -> bool:
    """Whether :func:`build` knows this kind of tokenizer."""
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    return file.metadata.get("tokenizer.ggml.model") == "gpt2" and pre in (*_SPLITS, *_GPT2, *_SINGLE_DIGITS)


def build(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a file for which :func:`is_supported` holds. Raises ModelError for damaged metadata."""
    data = file.metadata
    tokens, merges = _texts(file, "tokens"), _texts(file, "merges")
    kinds = data.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list):
        raise ModelError(f"{file.path}: tokenizer.ggml.token_type is {kinds!r}; expected a list of numbers")
    bos = data.get("tokenizer.ggml.bos_token_id")
    if bos is not None and not (type(bos) is int and 0 <= bos < len(tokens)):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.bos_token_id is {bos!r}; the vocabulary has {len(tokens)} tokens"
        )
    pre = data.get("tokenizer.ggml.pre", "default")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _LLAMA3)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{file.path}: the tokenizer's merges do not fit its vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    typed = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in typed if kind == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == _USER_DEFINED])
    if adds_bos(data) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _texts(file: GGUFFile, name: str) -> list[str]:
    texts = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ModelError(f"{file.path}: tokenizer.ggml.{name} is missing or damaged; expected a list of texts")
    return texts


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
