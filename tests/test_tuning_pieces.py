"""The measuring code without a GPU: every point of the schedule on two CPU ranks, with the GPU's kernels and clocks taken out.

What runs is what a GPU would be given: the same calls with the same shapes, on tensors that are really there.
"""

import contextlib
import itertools
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import silu

from ranks import run_ranks
from tokenweave.bench import timing
from tokenweave.collective import torch_backend
from tokenweave.models import model as model_module
from tokenweave.models.config import ModelConfig
from tokenweave.planning.machine import machine_of
from tokenweave.planning.profile_points import OverheadPoint, StepPoint
from tokenweave.tuning import chains, gpu, rig
from tokenweave.tuning.schedule import PHASES, Setting
from tokenweave.tuning.tuner import Tuner

DENSE = ModelConfig(
    family="llama", hidden=64, intermediate=96, layers=4, heads=8, kv_heads=4, head_dim=16, vocab=160, context=1024
)
MIXTURE = ModelConfig(
    family="mixtral",
    hidden=64,
    intermediate=32,
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=16,
    vocab=160,
    context=1024,
    experts=4,
    experts_per_token=2,
)


class _Stream:
    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other):
        pass


class _Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self, stream=None):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


class _Graph:
    """Replays the calls that ran between begin and end: the walk is run again."""

    open = None

    def capture_begin(self, pool=None, capture_error_mode=None):
        assert _Graph.open is None
        _Graph.open = self

    def capture_end(self):
        _Graph.open = None


def _capture(self, call, calls, pool=None):
    graph = _Graph()
    graph.capture_begin(pool)
    for _ in range(calls):
        call()
    graph.capture_end()
    graph.replay = call
    return graph


class _Properties:
    L2_cache_size = 1 << 16
    multi_processor_count = 132


ASKED = []


def _attend(queries, keys, values, packed, held=0):
    """Checks what FlashAttention would be told; the result's shape is all that matters here."""
    starts, caches, lengths = packed.query_starts.tolist(), packed.cache_starts.tolist(), packed.lengths.tolist()
    assert starts[0] == 0
    assert starts[-1] == queries.shape[0]
    each = [b - a for a, b in itertools.pairwise(starts)]
    assert max(each) == packed.max_queries
    assert max(lengths) == packed.max_length
    assert all(rows <= length for rows, length in zip(each, lengths, strict=True))
    ends = [start + length for start, length in zip(caches, lengths, strict=False)]
    assert max(ends) <= keys.shape[0]
    assert all(end <= start for end, start in zip(ends, caches[1:-1], strict=False)), "sequences share no cache rows"
    return queries.clone()


def _rope(qkv, keys, values, query_slots, tables, qk_norm, eps, positions, cache_rows):
    assert qkv.shape[0] == positions.numel() == cache_rows.numel()
    assert int(positions.max()) < tables[0].shape[0]
    assert int(cache_rows.max()) < keys.shape[0]
    assert keys.shape[1] * 2 + query_slots == qkv.shape[1]


def _grouped(rows, weights, offs):
    assert int(offs[-1]) == rows.shape[0]
    return rows.new_zeros(rows.shape[0], weights.shape[2])


def _fused(rows, residual, weight, eps, workspace, *, bias=None, layout="sharded", ctas=None, cluster=None):
    assert rows.shape == residual.shape
    assert not cluster or ctas % cluster == 0
    ASKED.append((rows.shape[0], layout, ctas, cluster))
    dist.all_reduce(torch.zeros(1), group=workspace.group)  # the ranks must call alike


@contextlib.contextmanager
def _no_gpu():
    def gated(x):
        gate, up = x.chunk(2, -1)
        return silu(gate) * up

    budgets = []

    @contextlib.contextmanager
    def budget(sms):
        budgets.append(sms)
        yield

    replaced = {
        torch.cuda: {
            "synchronize": lambda device=None: None,
            "current_stream": _Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "Stream": _Stream,
            "Event": _Event,
            "CUDAGraph": _Graph,
            "graph_pool_handle": lambda: (0, 1),
            "_sleep": lambda cycles: None,
            "mem_get_info": lambda device: (1 << 36, 1 << 37),
            "get_device_properties": lambda device: _Properties,
        },
        timing.GraphClock: {"capture": _capture},
        chains: {
            "CHAIN_US": 1.0,
            "SAMPLES": 2,
            "MIN_CALLS": 2,
            "WARM_SECONDS": 1e-9,
            "SAMPLE_SECONDS": 1e-9,
            "_cover_us": lambda us: us,
        },
        gpu: {
            "attend_packed": _attend,
            "add_rmsnorm": lambda x, residual, epilogue: x,
            "gated": gated,
            "sm_budget": budget,
            "fused_allreduce_rmsnorm": _fused,
            "MAX_POSITIONS": 1 << 12,
        },
        rig: {"MAX_POSITIONS": 1 << 12},
        gpu.kernels: {"rope_cache": _rope, "available": lambda x: False},
        torch_backend: {"available": lambda device: False},
        torch: {"_grouped_mm": _grouped},
        model_module.Model: {"capturable": True},
    }
    with contextlib.ExitStack() as stack:
        for module, names in replaced.items():
            stack.enter_context(mock.patch.multiple(module, **names))
        yield budgets


def _measure_all(config):
    """On each rank: the whole schedule, over steps of up to 512 rows."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    with _no_gpu() as budgets:
        pieces = gpu.GpuPieces(
            config, 512, group, torch.device("cpu"), lambda transport: machine_of("h200", ranks, "p2p")
        )
        assert pieces.setting.blocks[0] == (2, 2)
        few = Setting(**{**vars(pieces.setting), "blocks": ((4, 4), (8, 1)), "oneshot_rows": 64})

        def slowest(samples):
            return timing.slowest_rank({"": samples}, group, torch.device("cpu"))[""]

        pieces.warm_up(0.0)
        tuner = Tuner(few, pieces, slowest, time.monotonic, 1e9, lambda *_: None, PHASES[:-1])
        times = tuner.run()
        pieces.close()
    return list(times.items()), budgets, ASKED


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_every_point_of_the_schedule_is_measured_alike_on_all_ranks(config):
    (times, budgets, asked), (other, _, other_asked) = run_ranks(2, _measure_all, config, timeout=120)
    assert times == other, "ranks keep the slowest rank's times"
    assert all(us > 0 for _, us in times)
    points = [point for point, _ in times]
    assert {point.name for point in points if isinstance(point, OverheadPoint)} == {
        "kernel",
        "fork",
        "replay_host",
        "layer_host",
        "woven_layer_host",
    }
    schemes = {point.scheme for point in points if isinstance(point, StepPoint) and point.split}
    assert len(schemes) == 4
    assert {scheme.ctas for scheme in schemes} == {4, 8}
    assert {None, 128, 124} == set(budgets), "the library is told of what schemes leave"
    assert asked == other_asked
    assert (64, "replicated", None, None) in asked
    assert {(512, "sharded", 4, 4), (512, "sharded", 8, None)} <= set(asked)
