"""The model that a subcommand's ``--model``, ``--layers``, ``--dummy``, ``--dtype`` and ``--seed`` name."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenweave.errors import RequestError

if TYPE_CHECKING:
    from tokenweave.bench.launch import Rank
    from tokenweave.models import Model
    from tokenweave.models.config import ModelConfig
    from tokenweave.planning import Planner


def model_of(args: argparse.Namespace, me: Rank) -> Model:
    """This rank's part."""
    import torch

    from tokenweave.models import load_model, read_config
    from tokenweave.models.dummy import dummy_model

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    where: dict[str, Any] = {"rank": me.rank, "world_size": me.ranks, "group": me.group}
    where |= {"dtype": dtype, "device": me.device}
    config = read_config(args.model)
    if args.dummy or not Path(args.model).exists():
        return dummy_model(config, layers=args.layers, seed=args.seed, alike_experts=True, **where)
    model = load_model(args.model, **where)
    if args.layers is None:
        return model
    config = dataclasses.replace(model.config, layers=args.layers)
    return dataclasses.replace(model, config=config, layers=model.layers[: args.layers])


def planner_of(config: ModelConfig, me: Rank, transport: str, table: Path | None = None) -> Planner:
    """What plans the model's steps: with the table that rank 0 finds, on every rank, or with none. All ranks call it.

    TOKENWEAVE_MODE does not count: these commands name the mode of each step.

    Args:
        table: that was asked for, and must do; None: the one that is found.
    """
    from tokenweave.planning import Planner
    from tokenweave.planning.machine import machine_of
    from tokenweave.tuning.find import agreed_profile

    machine = machine_of("cpu" if me.device.type == "cpu" else None, me.ranks, transport)
    return Planner(config, mode="auto", costs=agreed_profile(config, machine, me.group, table) or machine)


def check_model(args: argparse.Namespace) -> ModelConfig:
    """The numbers of the model; refuses one that :func:`model_of` could not make, before any rank starts and says so itself."""
    from tokenweave.models import read_config
    from tokenweave.models.attention_choice import asked_attention
    from tokenweave.models.hf_weights import HfWeights
    from tokenweave.models.sharding import shard_of

    asked_attention()
    config = read_config(args.model)
    shard_of(config, 0, args.tp)
    if args.layers is not None and not 1 <= args.layers <= config.layers:
        raise RequestError(f"--layers {args.layers}; expected at least 1, and the model has {config.layers}")
    if Path(args.model).is_dir() and not args.dummy:
        HfWeights(Path(args.model))
    return config
