"""From arguments to one rank's engine: device, dtype, weights, how many cache rows there are, the planner."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tokenweave.collective import Workspace
from tokenweave.engine.batch import Chunk, rows_of
from tokenweave.engine.buckets import fill_bucket
from tokenweave.engine.engine import Engine, Model
from tokenweave.engine.kv_cache import KVCache
from tokenweave.engine.scheduler import Scheduler
from tokenweave.engine.text import Decoder
from tokenweave.errors import RequestError
from tokenweave.models.attention_choice import asked_attention
from tokenweave.models.config import ModelConfig
from tokenweave.overlap import CpuThread, CudaStream
from tokenweave.peers import loading
from tokenweave.planning import Mode, Plan, Planner, asked_mode
from tokenweave.planning.machine import machine_of
from tokenweave.tuning import agreed_profile

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Of the memory that is free once the weights are loaded. The rest of a GPU is for activations and the logits; a CPU
# shares its memory with everything else, and its cache takes memory only as rows are first written.
_CACHE_SHARE = {"cuda": 0.8, "cpu": 0.25}


@dataclass(frozen=True)
class EngineArgs:
    """What every rank of an engine is given; checked when created.

    Attributes:
        model: Hugging Face folder or GGUF file.
        tensor_parallel_size: ranks.
        dtype: ``"auto"`` (cpu: float32, cuda: bfloat16), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: ``"auto"`` (cuda if there is a GPU per rank), ``"cpu"`` or ``"cuda"``.
        mode: ``"auto"`` (the planner chooses each step's), ``"sequential"``, ``"fused"`` or ``"woven"``. None, the
            default, becomes what the environment variable TOKENWEAVE_MODE says, or auto.
        max_batch_tokens: most rows of a step; longer prompts are computed in chunks.
        max_num_seqs: most requests that run at once.
        cache_tokens: token positions of the KV cache; None: by the free memory.
        max_context: longest sequence; None: the model's.
        graphs: run steps as CUDA graphs where that is possible.

    Raises:
        RequestError: a value out of its range, more ranks than GPUs, or TOKENWEAVE_ATTENTION names no kernel.
    """

    model: str
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    device: str = "auto"
    mode: str | None = None
    max_batch_tokens: int = 2048
    max_num_seqs: int = 256
    cache_tokens: int | None = None
    max_context: int | None = None
    graphs: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (("dtype", ("auto", *DTYPES)), ("device", ("auto", "cpu", "cuda"))):
            if getattr(self, name) not in allowed:
                raise RequestError(f"{name}={getattr(self, name)!r}; expected one of {', '.join(allowed)}")
        # Here, so that all ranks are given one and the same mode.
        object.__setattr__(self, "mode", str(asked_mode(self.mode) or "auto"))
        asked_attention()  # on CPUs it decides nothing, and a name that is none is told there too
        for name in ("tensor_parallel_size", "max_batch_tokens", "max_num_seqs", "cache_tokens", "max_context"):
            value = getattr(self, name)
            if value is None and name in ("cache_tokens", "max_context"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(f"{name}={value!r}; expected an integer >= 1")
        if not isinstance(self.graphs, bool):
            raise RequestError(f"graphs={self.graphs!r}; expected True or False")
        gpus = torch.cuda.device_count()
        if self.device == "cuda" and gpus < self.tensor_parallel_size:
            raise RequestError(
                f"device='cuda' with tensor_parallel_size={self.tensor_parallel_size}; this machine has {gpus} GPUs that "
                "torch can use: lower tensor_parallel_size, or take device='cpu'"
            )

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"``: what ``device`` comes to on this machine."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.device_count() >= self.tensor_parallel_size else "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        """What ``dtype`` comes to on this machine."""
        if self.dtype == "auto":
            return torch.float32 if self.device_type == "cpu" else torch.bfloat16
        return DTYPES[self.dtype]

    @property
    def backend(self) -> str:
        """Of torch.distributed."""
        return "cpu:gloo,cuda:nccl" if self.device_type == "cuda" else "gloo"


def build_engine(
    args: EngineArgs,
    *,
    rank: int,
    group: dist.ProcessGroup | None,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Loads this rank's part of the model and puts an engine around it. Every rank of ``group`` calls it.

    Args:
        args: the same on all ranks.
        rank: within ``group``; on CUDA also the GPU's number.
        group: the tensor-parallel group; None for a single rank.
        progress: called as the weights load, as :func:`tokenweave.models.load_model` does.

    Raises:
        ModelError: the model cannot be loaded, or not with so many ranks.
        RequestError: the context or the cache asked for cannot be had.
        CollectiveError: another rank could not load its part, or took too long.
    """
    from tokenweave.models import load_model, load_tokenizer

    device = torch.device(args.device_type, rank) if args.device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif args.device == "auto" and rank == 0 and (gpus := torch.cuda.device_count()):
        log.warning("%d ranks run on the CPU, because torch can use only %d GPUs here", args.tensor_parallel_size, gpus)
    with loading(group):
        model = load_model(
            args.model,
            rank=rank,
            world_size=args.tensor_parallel_size,
            group=group,
            dtype=args.torch_dtype,
            device=device,
            progress=progress,
        )
    return engine_around(model, args, group, device, functools.cache(lambda: load_tokenizer(args.model)))


def engine_around(
    model: Model,
    args: EngineArgs,
    group: dist.ProcessGroup | None,
    device: torch.device,
    tokenizer: Callable[[], Decoder],
) -> Engine:
    """The engine of a model that is loaded: its cache, workspace, scheduler and planner. Every rank calls it.

    Raises:
        RequestError: as :func:`build_engine`.
    """
    config, dtype = model.config, args.torch_dtype
    context = config.context if args.max_context is None else args.max_context
    if context > config.context:
        raise RequestError(f"max_context={context}; this model's context is {config.context} tokens")
    row_bytes = 2 * config.layers * model.kv_heads_local * config.head_dim * dtype.itemsize
    _check_memory(args, row_bytes, config.hidden * dtype.itemsize, device)
    workspace = Workspace(group, max_tokens=args.max_batch_tokens, hidden=config.hidden, dtype=dtype, device=device)
    cache_rows = args.cache_tokens
    if cache_rows is None:
        cache_rows = _agreed(min(args.max_num_seqs * context, _cache_bytes(device, args) // row_bytes), group, device)
    scheduler = Scheduler(
        cache_rows=cache_rows,
        context=context,
        max_batch_tokens=args.max_batch_tokens,
        max_num_seqs=args.max_num_seqs,
        vocab=config.vocab,
    )
    cache = KVCache(config.layers, cache_rows, model.kv_heads_local, config.head_dim, dtype, device)
    plan = plan_function(args, config, workspace.transport, group)
    overlap = CudaStream(device) if device.type == "cuda" else CpuThread()
    here = args.graphs and model.capturable
    everywhere = bool(_agreed(int(here), group, device))  # a graph's steps are padded, so that they send more rows
    if here and not everywhere:
        log.warning("steps run without CUDA graphs: another rank's cannot be captured, and its log says why")
    return Engine(model, cache, workspace, scheduler, plan, overlap, tokenizer, everywhere)


def plan_function(
    args: EngineArgs, config: ModelConfig, transport: str, group: dist.ProcessGroup | None = None
) -> Callable[[Sequence[Chunk]], Plan]:
    """What the engine asks before each step: the planner for this model, these ranks and this machine.

    Args:
        args: their ``mode`` is given to every step, except that a step of one row cannot be woven and runs fused.
        transport: of the workspace.
        group: of the ranks, all of which call it: they agree on what `tokenweave tune` has measured.
    """
    machine = machine_of("cpu" if args.device_type == "cpu" else None, args.tensor_parallel_size, transport)
    planner = Planner(config, mode=args.mode, costs=agreed_profile(config, machine, group) or machine)
    captured = args.graphs and args.device_type == "cuda"
    told = False

    def plan(chunks: Sequence[Chunk]) -> Plan:
        nonlocal told
        rows = rows_of(chunks)
        sequences = [(len(chunk.token_ids), chunk.first) for chunk in chunks]
        # A graph's steps share a plan, which is that of its fullest step.
        filled = fill_bucket(sequences, args.max_batch_tokens) if captured else sequences
        chosen = planner.plan(sum(tokens for tokens, _ in filled), sequences=filled)
        if chosen.split is not None and chosen.split >= rows:
            chosen = planner.plan(rows, sequences=sequences)
        if rows == 1 and args.mode == Mode.WOVEN and not told:
            log.info("mode=woven: steps of one row cannot be cut in two; they run fused and are counted as fused")
            told = True
        return chosen

    return plan


def _check_memory(args: EngineArgs, cache_row_bytes: int, row_bytes: int, device: torch.device) -> None:
    """Raises RequestError where what was asked for can't be allocated: the cache, and the workspace with the residual."""
    needed = 5 * args.max_batch_tokens * row_bytes + (args.cache_tokens or 0) * cache_row_bytes
    free = _free_bytes(device, args)
    if needed > free:
        raise RequestError(
            f"max_batch_tokens={args.max_batch_tokens}, cache_tokens={args.cache_tokens}: they need "
            f"{needed / 2**30:.1f} GiB on each rank, and {free / 2**30:.1f} GiB are free; lower them"
        )


def _cache_bytes(device: torch.device, args: EngineArgs) -> int:
    """What this rank's cache may take."""
    return int(_CACHE_SHARE[device.type] * _free_bytes(device, args))


def _free_bytes(device: torch.device, args: EngineArgs) -> int:
    """What this rank may still allocate: its GPU's free memory, or its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _available_memory() // args.tensor_parallel_size


def _available_memory() -> int:
    """Bytes that this machine can still give; where the kernel doesn't say, half of what it has."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _agreed(number: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """The least of all ranks' numbers, such as the rows that each has memory for: their steps must be the same."""
    if group is not None and dist.get_world_size(group) > 1:
        least = torch.tensor([number], device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        number = int(least.item())
    return number
