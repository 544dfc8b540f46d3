"""A measurer without GPUs, for tests of the tuner: times of an analytical machine, distorted, on a clock that they move."""

import dataclasses
import functools
import math
import random

import numpy as np

from tokenweave.models.config import ModelConfig
from tokenweave.planning.batch import Batch, runs_of
from tokenweave.planning.cost import CostModel
from tokenweave.planning.machine import machine_of
from tokenweave.planning.profile_points import (
    AllReducePoint,
    AttentionPoint,
    CollectivePoint,
    GemmPoint,
    StagePoint,
    StepPoint,
    StreamPoint,
)
from tokenweave.planning.profile_table import Identity, Table, shape_of
from tokenweave.planning.waves import attention_gemms, mlp_gemms
from tokenweave.tuning.schedule import Setting

LLAMA = ModelConfig(
    family="llama",
    hidden=4096,
    intermediate=14336,
    layers=4,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    context=131072,
)


def setting_of(machine, max_tokens=16384, **changes):
    given = {
        "max_tokens": max_tokens,
        "experts": 1,
        "experts_per_token": 1,
        "blocks": tuple((ctas, machine.cluster(ctas) or 1) for ctas in machine.ctas if ctas),
        "oneshot_rows": 512,
        "max_positions": 1 << 19,
        "layers": 4,
    }
    return Setting(**{**given, **changes})


def identity_of(config=LLAMA, **changes):
    given = {
        "gpu": "NVIDIA H200",
        "sms": 132,
        "driver": "580.65.06",
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "cublas": "13.1.0",
        "nccl": "2.28.9",
        "attention": "torch",
        "tp": 2,
        "transport": "p2p",
        "shape": shape_of(config),
    }
    return Identity(**{**given, **changes})


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


_cost_model = functools.lru_cache(maxsize=16)(CostModel)


class FakePieces:
    """Each sample is the machine's time, times ``factor``, with up to ``noise`` of it on top; ranks are unlike."""

    def __init__(
        self, machine, config=LLAMA, clock=None, rank=0, factor=1.0, noise=0.0, cost=0.005, fail_at=None, pace=1.0
    ):
        self.machine, self.config, self.clock = machine, config, clock
        self.factor, self.noise, self.cost, self.fail_at = factor, noise, cost, fail_at
        self.pace = pace
        self.random = random.Random(rank)
        self.asked = []
        self.gemms = {g.name: g for g in (*attention_gemms(config, machine.tp), *mlp_gemms(config, machine.tp))}

    def measure(self, point):
        self.asked.append(point)
        if self.fail_at is not None and len(self.asked) > self.fail_at:
            raise KeyboardInterrupt
        if self.clock is not None:
            self.clock.now += self.cost
        us = self.true_us(point) * self.factor
        return [us * (1 + self.noise * self.random.random()) for _ in range(5)]

    def true_us(self, point):
        machine, config = self.machine, self.config
        if isinstance(point, GemmPoint):
            gemm = self.gemms[point.name]
            us = machine.gemm_us(point.rows, gemm.n, gemm.k, experts=gemm.experts)
        elif isinstance(point, CollectivePoint):
            ctas = point.ctas or 16
            us = machine.collective_us(point.tokens, config.hidden, ctas)
            us *= {"oneshot": 0.7, "beside": 1.1}.get(point.kind, 1.0)
        elif isinstance(point, AllReducePoint):
            us = machine.all_reduce_us(point.tokens, config.hidden) + machine.norm_us(point.tokens, config.hidden)
        elif isinstance(point, AttentionPoint):
            each = point.rows // point.sequences
            pairs = point.sequences * (each * point.context + each * (each + 1) / 2)
            columns = config.heads * config.head_dim // machine.tp, config.kv_heads * config.head_dim // machine.tp
            us = machine.attention_us(pairs, point.sequences * (point.context + each), *columns)
        elif isinstance(point, StreamPoint):
            us = machine.norm_us(point.rows, config.hidden) if point.name == "norm" else self._stream(point)
        elif isinstance(point, StagePoint):
            embedding = point.name == "embedding"
            us = machine.embed_us(point.rows, config.hidden) if embedding else 10.0 + point.rows / 10
        elif isinstance(point, StepPoint):
            us = self.pace * self._step_us(point)
        else:
            us = 2.0
        assert math.isfinite(us)
        return float(us)

    def _step_us(self, point):
        model = _cost_model(dataclasses.replace(self.config, layers=point.layers), self.machine)
        batch = Batch(runs_of([(point.tokens, 0)]))
        if point.split is None:
            us = model.unsplit_us(batch, point.mode)
        else:
            scheme = point.scheme
            alike = [s for s in model.schemes if s.late == scheme.late]
            which = model.schemes.index(min(alike, key=lambda s: abs((s.ctas or 0) - (scheme.ctas or 0))))
            us = float(model.woven_us(batch, np.array([point.split]), np.array([which]))[0])
            us *= 1.0 if scheme.told else 1.3
        return us - model.head_us(batch.sampled)

    def _stream(self, point):
        config, tp = self.config, self.machine.tp
        qkv = (config.heads + 2 * config.kv_heads) * config.head_dim // tp
        columns = 2 * qkv if point.name == "rope" else 3 * config.intermediate // tp
        return self.machine.stream_us(2 * columns * point.rows)


def table_of(pieces, setting, identity=None, **info):
    """What a tuner that measured all of it would leave."""
    from tokenweave.tuning.tuner import Tuner

    tuner = Tuner(setting, pieces, list, lambda: 0.0, 1e9, lambda *_: None)
    return Table(identity or identity_of(pieces.config), tuner.run(), info)


def h200(tp=2):
    return machine_of("h200", tp, "p2p")
