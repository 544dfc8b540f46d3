"""A model's numbers, independent of the file they came from."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tokenweave.errors import ModelError

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral")

# What damaged files claim is refused before anything of that size is made.
_LARGEST, _MOST_HEADS = 2**31 - 1, 2**16


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3.x rotary scaling. Frequencies whose wavelength exceeds ``original_context / low_freq_factor`` are divided
    by ``factor``; those under ``original_context / high_freq_factor`` are kept; between, the two are blended.

    Raises:
        ModelError: numbers that scale nothing: they would give NaN.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        numbers = (self.factor, self.low_freq_factor, self.high_freq_factor, self.original_context)
        if not all(0 < n < math.inf for n in numbers) or self.low_freq_factor >= self.high_freq_factor:
            raise ModelError(
                f"rotary scaling with factor {self.factor}, low_freq_factor {self.low_freq_factor}, high_freq_factor "
                f"{self.high_freq_factor}, original context {self.original_context}; expected positive numbers, "
                f"low_freq_factor below high_freq_factor"
            )


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer.

    Attributes:
        family: ``"llama"`` (Mistral too), ``"qwen2"``, ``"qwen3"`` or ``"mixtral"``.
        hidden, intermediate, layers, vocab: sizes; ``intermediate`` is one expert's for mixture-of-experts.
        heads, kv_heads, head_dim: attention.
        context: longest sequence, tokens.
        norm_eps: of every RMSNorm.
        rope_theta, rope_scaling: rotary embedding.
        rope_divisors: [head_dim / 2] numbers that the rotary frequencies are divided by (linear scaling; GGUF files
            store Llama-3.x scaling so), or empty.
        qkv_bias: Qwen2. qk_norm: Qwen3 (RMSNorm over head_dim of q and k, before the rotary embedding).
        output_bias, mlp_bias: of the attention's output projection and of the MLP's three (some Llama-like models).
        tied_embeddings: the head reuses the embedding's weight.
        experts, experts_per_token: mixture-of-experts, 0 for dense.
        eos_token_ids: any of these ends a request.
        bos_token_id: None where the tokenizer adds none.

    Raises:
        ModelError: numbers that no model of these families can have.
    """

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_divisors: tuple[float, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    experts: int = 0
    experts_per_token: int = 0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        def expect(ok: bool, what: str) -> None:
            if not ok:
                raise ModelError(f"model config: {what}")

        expect(self.family in FAMILIES, f"family {self.family!r}; expected one of {', '.join(FAMILIES)}")
        for name in ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab", "context"):
            value = getattr(self, name)
            expect(type(value) is int and value > 0, f"{name} is {value!r}; expected a positive integer")
            expect(value <= _LARGEST, f"{name} is {value}; no model has more than {_LARGEST}")
        expect(self.heads <= _MOST_HEADS, f"{self.heads} query heads; no model has more than {_MOST_HEADS}")
        expect(
            self.heads % self.kv_heads == 0,
            f"{self.heads} query heads over {self.kv_heads} key/value heads; expected a multiple",
        )
        expect(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}; the rotary embedding needs an even number")
        expect(
            len(self.rope_divisors) in (0, self.head_dim // 2),
            f"{len(self.rope_divisors)} rotary divisors; expected head_dim / 2 = {self.head_dim // 2}",
        )
        bad = [number for number in self.rope_divisors if not 0 < number < math.inf]
        expect(not bad, f"rotary frequencies are divided by {bad[:3]}; expected positive numbers")
        expect(
            0 < self.norm_eps < math.inf and 0 < self.rope_theta < math.inf,
            f"norm_eps {self.norm_eps}, rope_theta {self.rope_theta}; expected positive numbers",
        )
        tokens = [*self.eos_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])]
        expect(all(type(t) is int for t in tokens), f"token ids {tokens} that begin or end a text; expected integers")
        expect(
            0 <= self.experts_per_token <= self.experts and (self.experts > 0) == (self.experts_per_token > 0),
            f"{self.experts_per_token} experts per token of {self.experts}",
        )
        expect(
            (self.family == "mixtral") == (self.experts > 0),
            f"family {self.family!r} with {self.experts} experts; mixture-of-experts is supported as mixtral only",
        )


def builtin_names() -> list[str]:
    """Names that :func:`read_config` knows without a file."""
    folder = resources.files("tokenweave.models") / "configs"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def _names() -> str:
    return ", ".join(builtin_names())


def read_config(path_or_name: str | Path) -> ModelConfig:
    """The numbers of a model.

    Args:
        path_or_name: a Hugging Face folder with config.json, a .gguf file, or one of :func:`builtin_names` in any case.

    Raises:
        ModelError: there is nothing of that name, the file is damaged, or the model needs something that is not
            supported (a sliding window, logit soft-caps, other rotary scalings, ...).
    """
    if path_or_name == "":  # as a path it would be the current folder
        raise ModelError(f"no model is named: '' was given; expected a folder, a .gguf file or one of {_names()}")
    if _exists(path := Path(path_or_name)):
        return read_model_config(path)
    if (name := _builtin(path)) is not None:
        return _read_builtin(name)
    raise ModelError(
        f"no model {str(path_or_name)!r}: there is no such file or folder, and it is none of the built-in "
        f"configurations: {_names()}{_of_the_hub(path, 'config.json ')}"
    )


def read_model_config(path: Path) -> ModelConfig:
    """As :func:`read_config`, of an existing model's folder or file: a built-in name has no weights."""
    # Imported here: both readers build a ModelConfig, so they import this module.
    from tokenweave.models.gguf_config import read_gguf_config
    from tokenweave.models.hf_config import read_hf_config

    if _exists(path) and path.is_dir():
        return read_hf_config(path)
    if path.is_file():
        return read_gguf_config(path)
    expected = "expected a Hugging Face folder with config.json and *.safetensors, or a .gguf file"
    if path.exists():
        raise ModelError(f"{str(path)!r} is neither a folder nor a regular file; {expected}")
    if (name := _builtin(path)) is not None:
        raise ModelError(
            f"no model {str(path)!r}: there is no such file or folder. {name} is built in as numbers to plan with, without "
            f"weights; {expected}"
        )
    raise ModelError(f"no model {str(path)!r}: there is no such file or folder; {expected}{_of_the_hub(path)}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a name too long, a folder that must not be read
        raise ModelError(f"{str(path)[:200]!r}: cannot be looked up: {error.strerror}") from None


def _of_the_hub(path: Path, files: str = "") -> str:
    """What to do with a name such as Hugging Face's hub has them, ``organisation/model``; "" for any other.

    Args:
        files: that are enough, with a space behind; "": all of the model's.
    """
    if path.is_absolute() or len(path.parts) != 2 or path.parts[0] in (".", "..", "~") or path.suffix == ".gguf":
        return ""
    return f". Nothing is fetched from Hugging Face's hub: `hf download {path} {files}--local-dir DIR`, then name DIR"


def _builtin(path: Path) -> str | None:
    """The built-in name that this is, in any case."""
    return next((name for name in builtin_names() if name.casefold() == str(path).casefold()), None)


def _read_builtin(name: str) -> ModelConfig:
    text = (resources.files("tokenweave.models") / "configs" / f"{name}.json").read_text(encoding="utf-8")
    numbers: dict[str, Any] = json.loads(text)
    if numbers.get("rope_scaling") is not None:
        numbers["rope_scaling"] = RopeScaling(**numbers["rope_scaling"])
    numbers["eos_token_ids"] = tuple(numbers.get("eos_token_ids", ()))
    return ModelConfig(**numbers)
