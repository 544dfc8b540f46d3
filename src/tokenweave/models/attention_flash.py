"""The FlashAttention kernels over the cache: torch's own FlashAttention-2, and FlashAttention-3 of whoever installed it.

All take the same arguments and read every length and start from device memory, so that a captured graph sees their
new values. A sequence's keys start at ``cache_starts[i]`` and there are ``lengths[i]`` of them: both libraries take a
length from ``seqused_k`` where that is given, and from the cumulated lengths nothing but where the keys start
(``SeqlenInfoQKNewK`` in hopper/seqlen.h of Dao-AILab/flash-attention), so that the starts of the runs may stand there.
Causal means that the last query of a sequence sees its last position.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenweave.models.inputs import PackedSequences

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedSequences, int], torch.Tensor]

# Blocks that may share a decoded row's keys, and rows of partial results that they may write per head (4 bytes an element).
_MOST_SPLITS, _MOST_PARTIAL_ROWS = 32, 2048

# What a build's operator may ask for besides, and what leaves it out.
_NEUTRAL: dict[str, Any] = {
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


def flash2(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequences: PackedSequences, held: int
) -> torch.Tensor:
    """torch's FlashAttention-2, as :func:`tokenweave.models.attention_cuda.attend_packed`."""
    return torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        values,
        sequences.query_starts,
        sequences.cache_starts,
        sequences.max_queries,
        sequences.max_length,
        0.0,  # dropout
        True,  # causal
        False,  # no debug mask
        seqused_k=sequences.lengths,
    )[0]


@dataclass(frozen=True)
class Flash3Build:
    """An installed package that may hold FlashAttention-3.

    Attributes:
        name: of its distribution.
        package: that is imported by users. library: the extension's path within it, a glob pattern.
        operators: the namespace of torch.ops that the extension registers ``fwd`` in.
    """

    name: str
    package: str
    library: str
    operators: str

    @property
    def label(self) -> str:
        """The name, with the version that is installed."""
        try:
            return f"{self.name} {importlib.metadata.version(self.name)}"
        except importlib.metadata.PackageNotFoundError:
            return self.name


# The project's own first; fa3-fwd is its inference half as a wheel; vLLM brings a fork of it along.
FLASH3_BUILDS = (
    Flash3Build("flash-attn-3", "flash_attn_3", "_C*.so", "flash_attn_3"),
    Flash3Build("fa3-fwd", "fa3_fwd", "_C*.so", "fa3_fwd"),
    Flash3Build("vllm", "vllm", "vllm_flash_attn/_vllm_fa3_C*.so", "_vllm_fa3_C"),
)


def load_flash3(build: Flash3Build) -> Kernel:
    """Loads the extension alone, without importing its package: vLLM's changes settings of the whole process.

    Its operator is called, not the Python function around it: vLLM's refuses starts together with lengths, and the
    others' register autograd formulas that inference has no use for.

    Returns:
        The kernel, as :func:`tokenweave.models.attention_cuda.attend_packed`. It allocates and clears the counters of
        its tile scheduler in each call, on the caller's stream. The cache must hold finite numbers everywhere: rows past
        a sequence's end are multiplied by weights of zero.

    Raises:
        ImportError: it isn't installed, doesn't load, or its operator takes what is not known here.
    """
    library = _library(build)
    try:
        torch.ops.load_library(library)
        forward = getattr(torch.ops, build.operators).fwd.default
    except (OSError, RuntimeError, AttributeError) as error:  # built for another torch or CUDA
        raise ImportError(f"{build.name} does not load: {error.__cause__ or error}") from error
    given = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k"}
    given |= {"softmax_scale", "is_causal", "num_splits"}
    arguments = forward._schema.arguments
    if absent := given - {argument.name for argument in arguments}:
        raise ImportError(f"{build.name} takes no {', '.join(sorted(absent))}")
    rest: dict[str, Any] = {}
    for argument in arguments:
        if argument.name in _NEUTRAL:
            rest[argument.name] = _NEUTRAL[argument.name]
        elif argument.name not in given and not argument.has_default_value():
            if not isinstance(argument.type, torch.OptionalType):
                raise ImportError(f"{build.name} wants {argument.name}, which is not known here")
            rest[argument.name] = None

    margin = "sm_margin" in rest

    def flash3(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequences: PackedSequences, held: int
    ) -> torch.Tensor:
        # Of decodes the number of SMs decides in how many parts sums are made: always all of them.
        fewer = {"sm_margin": held} if margin and sequences.max_queries > 1 else {}
        return forward(
            q=queries,
            k=keys,
            v=values,
            cu_seqlens_q=sequences.query_starts,
            cu_seqlens_k=sequences.cache_starts,
            seqused_k=sequences.lengths,
            max_seqlen_q=sequences.max_queries,
            max_seqlen_k=sequences.max_length,
            softmax_scale=queries.shape[-1] ** -0.5,
            is_causal=True,
            num_splits=_splits(sequences),
            **{**rest, **fewer},
        )[0]

    return flash3


def _splits(sequences: PackedSequences) -> int:
    """The most blocks that may share a row's keys.

    Decodes are few rows, and one block for each and each key/value head would leave most SMs idle. The kernel takes the
    number as an upper bound and decides on the device, from the lengths, so it need not follow those; it adds the partial
    results in a fixed order. The bound follows the number of sequences in powers of two: no bucket of graphs passes one,
    so a row's bits are the same in a graph and outside of it. Prompts make blocks enough and are not split, so that a
    row's bits depend on its own sequence alone.
    """
    if sequences.max_queries > 1:
        return 1
    return max(1, min(_MOST_SPLITS, _MOST_PARTIAL_ROWS >> (sequences.lengths.shape[0] - 1).bit_length()))


def _library(build: Flash3Build) -> Path:
    try:
        spec = importlib.util.find_spec(build.package)
    except (ImportError, ValueError):  # half removed, or replaced by something without a spec
        spec = None
    if spec is None:
        raise ImportError(f"{build.name} is not installed")
    for folder in spec.submodule_search_locations or ():
        if found := sorted(Path(folder).glob(build.library)):
            return found[0]
    raise ImportError(f"{build.name} is installed without {build.library}")
