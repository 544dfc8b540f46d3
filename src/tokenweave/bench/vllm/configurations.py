"""What vLLM engines are compared: the same model and engine arguments in stock configurations and with TokenWeave."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenweave.errors import RequestError
from tokenweave.files import write_whole
from tokenweave.models.config import ModelConfig, builtin_names, read_config
from tokenweave.models.hf_config import ARCHITECTURES, read_json
from tokenweave.switches import NO_MULTICAST

CONFIGURATIONS = {
    "default": "stock vLLM as it starts by itself",
    "best": "stock vLLM with CUDA graphs of whole steps up to max_num_batched_tokens, and few enough requests a step for "
    "FlashAttention-3's prefill kernel",
    "tokenweave": "vLLM's defaults with the TokenWeave plugin on",
}

_STOCK_GRAPHS = 512  # tokens: vLLM's own limit for graphs
_DECODE_TILE = 64  # rows of queries x heads up to which FlashAttention-3 takes its tile for decoding
_MOST_REQUESTS = 1024  # vLLM's default on large GPUs

# Without kernels that FlashInfer would build for minutes at the first use.
_EVERYWHERE = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_COLOR": "0",
}


def environment_of(name: str, base: Mapping[str, str], multicast: bool) -> dict[str, str]:
    """Variables of a configuration's processes: ``base`` with what all share, and TokenWeave's switch.

    Args:
        name: of :data:`CONFIGURATIONS`.
        base: what the caller has set wins, but for the switch (where ``force`` stays what it is) and ``multicast``.
        multicast: whether NCCL, torch and vLLM may make multicast objects.
    """
    switch = ("force" if base.get("TOKENWEAVE", "").casefold() == "force" else "1") if name == "tokenweave" else "0"
    return {**_EVERYWHERE, **base, **({} if multicast else NO_MULTICAST), "TOKENWEAVE": switch}


def named_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that decides how vLLM communicates and which kernels it takes."""
    starts = ("VLLM_", "NCCL_", "NVSHMEM_", "TORCH_SYMM_MEM", "TOKENWEAVE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    return {key: value for key, value in sorted(environment.items()) if key.startswith(starts)}


def graph_sizes(tokens: Sequence[int], most: int, least_prefill: int) -> list[int]:
    """Tokens of the steps that the ``best`` configuration has graphs for, ascending.

    Up to 512 those that vLLM would choose; above, from ``least_prefill`` on, four to each doubling, the measured ones and
    ``most``.
    """
    small = [1, 2, 4, *range(8, 256, 8), *range(256, _STOCK_GRAPHS + 1, 16)]
    large = [base * step // 4 for base in (512 << i for i in range(12)) for step in (5, 6, 7, 8)]
    wanted = {*small, *(size for size in (*large, *tokens) if size >= least_prefill), most}
    return sorted(size for size in wanted if size <= most)


def arguments_of(
    name: str, shared: Mapping[str, Any], tokens: Sequence[int], heads: int, kv_heads: int
) -> dict[str, Any]:
    """Engine arguments of a configuration.

    ``best``: vLLM 0.26 to 0.30 fix a full graph's longest query at ceil(tokens / max_num_seqs) when they capture it. If
    that times the query heads per key/value head is 64 or less, FlashAttention-3 takes its tile for decoding for every
    prefill, so max_num_seqs is lowered until the smallest prefill's graph is past it.

    Args:
        shared: of all configurations, with ``max_num_batched_tokens``.
        tokens: of the prefills that are measured.
        heads, kv_heads: of the model.
    """
    if name != "best":
        return dict(shared)
    most = shared["max_num_batched_tokens"]
    prefills = [size for size in tokens if _STOCK_GRAPHS < size <= most]
    least = min([*prefills, most, 2 * _STOCK_GRAPHS])
    requests = max(1, (least * (heads // kv_heads) - 1) // _DECODE_TILE)
    compilation = {
        **shared.get("compilation_config", {}),
        "cudagraph_mode": "FULL",
        "cudagraph_capture_sizes": graph_sizes(tokens, most, least),
    }
    asked = shared.get("max_num_seqs", _MOST_REQUESTS)
    return {**shared, "compilation_config": compilation, "max_num_seqs": min(asked, requests)}


def model_folder(model: str, where: Path) -> tuple[Path, bool]:
    """(a Hugging Face folder that vLLM reads, whether it was made for a built-in name and has no weights).

    Args:
        model: a folder with config.json, or one of ``builtin_names()``.
        where: for the folder with a config.json that is made. It stays: vLLM's cache of compiled graphs goes by its path.

    Raises:
        RequestError: it is neither; GGUF files among them. Or nothing can be written to ``where``.
        ModelError: there is no built-in name like it.
    """
    path = Path(model)
    # Unlike Path's, os.path's raise no error for names that are too long or that must not be looked up, and find nothing at "".
    if os.path.isdir(model):
        read_json(path / "config.json")
        return path.resolve(), False
    if os.path.exists(model):
        raise RequestError(
            f"--model {model}: vLLM is started with a Hugging Face folder, or with one of {', '.join(builtin_names())}"
        )
    text = json.dumps(config_json(read_config(model)), indent=2)
    made = where / model.casefold() / "config.json"
    try:
        if not made.exists() or made.read_text() != text:
            write_whole(made, text)
    except OSError as error:
        raise RequestError(f"{made} cannot be written ({error}); set TOKENWEAVE_CACHE to a folder that can") from error
    return made.parent, True


def config_json(config: ModelConfig) -> dict[str, Any]:
    """A Hugging Face config.json of these numbers, as checkpoints of transformers 4 have it (5 reads it too)."""
    architectures = {family: name for name, family in reversed(ARCHITECTURES.items())}
    found: dict[str, Any] = {
        "architectures": [architectures[config.family]],
        "model_type": config.family,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": config.output_bias or (config.qkv_bias and config.family != "qwen2"),
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if config.rope_scaling is not None:
        found["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_context,
        }
    if config.experts:
        found |= {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
        found["sliding_window"] = None
    return found


def attention_heads(folder: Path) -> tuple[int, int]:
    """(query heads, key/value heads) of the model in a Hugging Face folder; RequestError where it doesn't say."""
    raw = read_json(folder / "config.json")
    heads = raw.get("num_attention_heads")
    kv_heads = raw.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or not 0 < kv_heads <= heads:
        raise RequestError(f"{folder / 'config.json'}: num_attention_heads is {heads!r}; expected a positive number")
    return heads, kv_heads


def model_context(folder: Path) -> int:
    """Tokens of the longest sequence of the model in a Hugging Face folder; RequestError where it doesn't say."""
    context = read_json(folder / "config.json").get("max_position_embeddings")
    if not isinstance(context, int) or context < 1:
        raise RequestError(f"{folder / 'config.json'}: max_position_embeddings is {context!r}; expected a number")
    return context


def python_path() -> str:
    """PYTHONPATH for a child that has to import this package as this process does."""
    here = str(Path(__file__).parents[3])
    return os.pathsep.join(dict.fromkeys([here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
