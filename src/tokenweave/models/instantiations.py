"""The models' own kernels for every built-in configuration, so that all of them can be compiled where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenweave.models.config import builtin_names, read_config
from tokenweave.models.kernels import RowKernel, embed_kernel, rope_kernel, silu_kernel
from tokenweave.models.sharding import shard_of


def model_kernels(ranks: Iterable[int], hidden: Iterable[int] | None, dtypes: Iterable[str]) -> list[RowKernel]:
    """Each kernel once; those of any rank, whose sizes are the same on all.

    Args:
        ranks: sizes of the group; those that a model has too few query heads for are left out.
        hidden: of the configurations; None for all. dtypes: ``"bfloat16"``, ``"float16"``, ``"float32"``.
    """
    wanted = None if hidden is None else set(hidden)
    return list(dict.fromkeys(_kernels(tuple(ranks), wanted, tuple(dtypes))))


def _kernels(ranks: tuple[int, ...], hidden: set[int] | None, dtypes: tuple[str, ...]) -> Iterator[RowKernel]:
    for config in map(read_config, builtin_names()):
        if hidden is not None and config.hidden not in hidden:
            continue
        for dtype in dtypes:
            for n in ranks:
                if n <= config.heads:
                    heads = shard_of(config, 0, n).heads
                    yield rope_kernel(dtype, len(heads.queries), len(heads.kv), config.head_dim, config.qk_norm)
            yield silu_kernel(dtype)
            yield embed_kernel(dtype)


def sizes_text(kernel: RowKernel) -> str:
    """``"16+4 heads of 128"``, with ``", normed"`` where queries and keys are; ``"-"`` for a kernel of any size."""
    sizes = dict(kernel.constants)
    if not sizes:
        return "-"
    heads = f"{sizes['QUERY_SLOTS']}+{sizes['KV_SLOTS']} heads of {sizes['HEAD_DIM']}"
    return heads + (", normed" if sizes["QK_NORM"] else "")
