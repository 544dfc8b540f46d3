"""Text <-> token ids, and chats -> text, of a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenweave.errors import ModelError, RequestError
from tokenweave.models import gguf_tokenizer
from tokenweave.models.gguf import GGUFFile
from tokenweave.models.hf_config import end_tokens, read_json


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: of the ``tokenizers`` library.
        special_tokens: ``bos_token``, ``eos_token``, ... -> text; chat templates refer to them.
        eos_token_ids: any of these ends a text.
        chat_template: Jinja source, or None.

    Attributes:
        vocab_size: ids run from 0 to this, exclusive.
        eos_token_ids, chat_template: as given.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        chat_template: str | None,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens in ``text``, such as ``<|im_end|>``, become their ids.

        Args:
            add_special_tokens: begin with BOS where the model wants it; False for the text of a chat template, which
                has it already.

        Raises:
            RequestError: surrogates in the text, which the command line gives for bytes that are not UTF-8.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise RequestError(f"the text {text[:80]!r} is not valid Unicode; expected UTF-8") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text; bytes that are not (yet) whole characters become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of one token's text, special ones included; None if there is none."""
        return self._backend.token_to_id(token)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a chat, to be encoded with ``add_special_tokens=False``.

        Args:
            messages: ``{"role": "user", "content": "..."}`` and the like, in order.
            add_generation_prompt: end with the beginning of the assistant's turn.

        Raises:
            RequestError: the model has no chat template, or the template refuses these messages.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template; give it plain text prompts")
        try:
            return _environment.from_string(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program of the model's: it may fail in any way
            raise RequestError(f"the model's chat template failed on these messages: {error}") from error


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        path: a folder with tokenizer.json, or a .gguf file. A GGUF file whose kind of tokenizer is not supported takes
            the tokenizer.json beside it.

    Raises:
        ModelError: there is none, it is damaged, or of a kind that is not supported.
    """
    path = Path(path)
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_gguf(GGUFFile(path))
    raise ModelError(f"{path}: no such model; expected a folder with tokenizer.json or a .gguf file")


def _from_folder(folder: Path) -> Tokenizer:
    backend = _read_backend(folder / "tokenizer.json")
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    special = {
        name: text
        for name, value in settings.items()
        if name.endswith("_token")
        and isinstance(text := value.get("content") if isinstance(value, dict) else value, str)
    }
    ids = end_tokens(folder)
    if "eos_token" in special and not ids:
        named = backend.token_to_id(special["eos_token"])
        ids = () if named is None else (named,)
    template = folder / "chat_template.jinja"
    if template.is_file():
        try:
            return Tokenizer(backend, special, ids, template.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{template}: cannot be read as UTF-8 text: {error}; download it again") from error
    return Tokenizer(backend, special, ids, _default_template(settings.get("chat_template"), folder))


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(
            f"{path.parent}: no tokenizer.json in this folder; get it from where the model came from, or make it with "
            f"transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{path}: cannot be read as a tokenizer: {error}; download it again") from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def _default_template(value: Any, folder: Path) -> str | None:
    """tokenizer_config.json holds one template, or a list of named ones."""
    try:
        template = {e["name"]: e["template"] for e in value}.get("default") if isinstance(value, list) else value
    except (KeyError, TypeError):
        template = value
    if template is not None and not isinstance(template, str):
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {template!r:.80}; expected a text, or a list of "
            f'{{"name": ..., "template": ...}}'
        )
    return template


def _from_gguf(file: GGUFFile) -> Tokenizer:
    data = file.metadata
    beside = file.path.parent / "tokenizer.json"
    if gguf_tokenizer.is_supported(file):
        backend = gguf_tokenizer.build(file)
    elif beside.is_file():
        backend = _read_backend(beside)
    else:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model is {data.get('tokenizer.ggml.model')!r} with tokenizer.ggml.pre "
            f"{data.get('tokenizer.ggml.pre')!r}, which is not supported; put the model's tokenizer.json beside the file"
        )
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = data.get(f"tokenizer.ggml.{key}_token_id")
        token = backend.id_to_token(index) if type(index) is int and 0 <= index < 2**32 else None
        if token is not None:
            special[f"{name}_token"] = token
    return Tokenizer(backend, special, gguf_tokenizer.end_tokens(data), data.get("tokenizer.chat_template"))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own filter escapes for HTML


def _chat_environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for. Sandboxed: a template comes with a model, from anywhere."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


_environment = _chat_environment()
