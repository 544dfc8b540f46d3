"""What the tests of the engine on GPUs share: a rank's engine, whether ranks hold the same bits, how near rows are."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from gpu_cases import gathered
from shared_gpu import shares_gpu
from tokenweave.engine.build import EngineArgs, build_engine, engine_around
from tokenweave.engine.engine import Engine
from tokenweave.models import load_model, load_tokenizer


def built(args: EngineArgs) -> Engine:
    """This rank's engine, where ranks share a GPU on that one; :func:`build_engine` gives each its own."""
    rank, group = dist.get_rank(), dist.group.WORLD
    if args.device_type == "cpu" or not shares_gpu():
        return build_engine(args, rank=rank, group=group)
    device = torch.device("cuda", torch.cuda.current_device())
    model = load_model(
        args.model, rank=rank, world_size=dist.get_world_size(), group=group, dtype=args.torch_dtype, device=device
    )
    return engine_around(model, args, group, device, functools.cache(lambda: load_tokenizer(args.model)))


def same_bits(x: torch.Tensor, what: str) -> None:
    """On all ranks, each of which calls this."""
    if not x.numel():
        return
    words = [part.view(torch.uint8) for part in gathered(x.contiguous())]
    assert all(torch.equal(word, words[0]) for word in words), f"{what}: ranks hold different bits"


def errors_of(got: torch.Tensor, expected: torch.Tensor, what: str) -> torch.Tensor:
    """Of each row, relative to the expected one in the Euclidean norm."""
    assert got.shape == expected.shape, what
    assert torch.isfinite(got).all(), f"{what}: not finite"
    return (got - expected).norm(dim=1) / expected.norm(dim=1)
