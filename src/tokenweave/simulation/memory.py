"""How many positions a replica's cache holds: what the weights and a step leave of each GPU's memory."""

from __future__ import annotations

from tokenweave.errors import RequestError
from tokenweave.models.config import ModelConfig
from tokenweave.models.sharding import ModelShard, shard_of
from tokenweave.planning.hardware import Gpu

MEMORY_GIB = {"h100": 80, "h200": 141, "h20": 96, "a100": 80, "b200": 180, "l40s": 48}
"""GPU -> its data sheet's figure (SXM or HGX parts; L40S: PCIe). They write GB: drivers report about 99 % of as many GiB."""

SHARE = 0.9  # of a GPU's memory that a server takes; the rest is the CUDA context's, NCCL's and what fragments
BYTES = 2  # bf16
MOST_GIB = 1e6  # no GPU comes near it; far more is a slip, and no number of tokens


def weight_bytes(config: ModelConfig, tp: int) -> int:
    """Bytes of one rank's weights in bf16."""
    return BYTES * _parameters(config, shard_of(config, 0, tp))


def _parameters(config: ModelConfig, shard: ModelShard) -> int:
    hidden = config.hidden
    attention = hidden * (2 * shard.query.size + 2 * shard.kv.size)  # q, k, v and the output projection
    mlp = 3 * hidden * shard.intermediate.size * max(1, config.experts) + hidden * config.experts
    tables = (1 if config.tied_embeddings else 2) * shard.vocab.size * hidden
    return config.layers * (attention + mlp + 2 * hidden) + tables + hidden


def position_bytes(config: ModelConfig, tp: int) -> int:
    """Bytes of K and V of one position on one rank, in bf16."""
    return 2 * BYTES * config.layers * shard_of(config, 0, tp).kv.size


def step_bytes(config: ModelConfig, tp: int, max_batch_tokens: int, max_requests_running: int) -> int:
    """Bytes that a step takes beside weights and cache: rows in five forms (as the engine's workspace), the MLP's inside,
    and float32 logits."""
    shard = shard_of(config, 0, tp)
    inside = 3 * shard.intermediate.size * max(1, config.experts_per_token)
    logits = 4 * max_requests_running * config.vocab
    return BYTES * max_batch_tokens * (5 * config.hidden + inside) + logits


def kv_tokens(
    config: ModelConfig,
    gpu: Gpu,
    tp: int,
    max_batch_tokens: int,
    max_requests_running: int,
    memory_gib: float | None = None,
) -> int:
    """Positions that the cache of one replica of ``tp`` GPUs holds.

    Args:
        memory_gib: of each GPU; None for :data:`MEMORY_GIB`'s.

    Raises:
        RequestError: the GPU's memory is not known; the weights and a step leave nothing.
        ModelError: more ranks than query heads.
    """
    if memory_gib is None and gpu.name not in MEMORY_GIB:
        raise RequestError(
            f"the memory of {gpu.name!r} is not known; name a GPU (--gpu h100), its memory (--memory-gib) or the cache's size "
            f"in tokens (--kv-tokens)"
        )
    memory = MEMORY_GIB[gpu.name] if memory_gib is None else memory_gib
    if not 0 < memory <= MOST_GIB:
        raise RequestError(f"a GPU memory of {memory:g} GiB; expected a positive number, at most {MOST_GIB:g}")
    weights = weight_bytes(config, tp)
    steps = step_bytes(config, tp, max_batch_tokens, min(max_requests_running, max_batch_tokens))
    tokens = int(SHARE * memory * 2**30 - weights - steps) // position_bytes(config, tp)
    if tokens < 1:
        raise RequestError(
            f"on each of {tp} GPUs the weights take {weights / 2**30:.1f} GiB and a step {steps / 2**30:.1f} GiB; "
            f"{SHARE:.0%} of {gpu.name}'s {memory:g} GiB leave no room for a cache: raise tp or lower the step's limits"
        )
    return tokens
