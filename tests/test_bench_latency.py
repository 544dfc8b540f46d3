"""``tokenweave bench latency`` without a GPU: what it runs, on two CPU ranks with a wall clock, and what it reports."""

import argparse
import contextlib
import dataclasses
import json
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tokenweave.bench.energy import Change
from tokenweave.bench.latency import bench, sequential
from tokenweave.bench.latency.bench import MODES, Config, LatencyBench
from tokenweave.bench.latency.finals import SINGLE
from tokenweave.bench.latency.measure import comparable, final_rows
from tokenweave.bench.latency.plots import plot_latency
from tokenweave.bench.latency.report import finish, plan_json, plan_of, text
from tokenweave.bench.steps import Variant
from tokenweave.bench.trace import record
from tokenweave.bench.trace.events import Span
from tokenweave.cli import bench_latency
from tokenweave.cli.arguments import command_line
from tokenweave.cli.main import main
from tokenweave.models.config import ModelConfig
from tokenweave.models.dummy import dummy_model
from tokenweave.planning import Mode, Plan, Planner
from tokenweave.planning.plan import Scheme, woven_plan

TINY = ModelConfig(
    family="llama", hidden=64, intermediate=96, layers=4, heads=8, kv_heads=4, head_dim=16, vocab=160, context=1024
)


class _Graph:
    def __init__(self, call):
        self.replay = call


class _Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


class _Stream:
    def wait_stream(self, other):
        pass


class _Free:
    """Of 16 MiB, 3 go with every capture."""

    def __init__(self):
        self.calls = 0

    def __call__(self, device):
        self.calls += 1
        return (13 if self.calls % 2 == 0 else 16) << 20, 16 << 20


class WallClock:
    stream = _Stream()

    def capture(self, call, calls):
        assert calls == 1
        return _Graph(call)

    def replay(self, graph, reset, replays=1):
        reset()
        began = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        return (time.perf_counter() - began) / replays * 1e6


class _Recorder(record.Recorder):
    """A collective is longer on the rank that comes first; compute is beside half of it."""

    def record(self, call, path, ahead=False):
        call()
        end = 10.0 + 5 * (1 - dist.get_rank())
        return [Span("gemm", 0.0, 10.0, 1), Span("twoshot_ring", 5.0, end, 2)]


class _Watch(contextlib.nullcontext):
    """Of 480 W, by a counter that changes every 100 ms; as often as it is told."""

    failure = None

    def __init__(self, changes):
        super().__init__()
        self.changes = [Change(3.0 + 0.1 * i, 1e6 + 48.0 * i) for i in range(changes)]


class FixedMonitor:
    """The first window at each size's first mode is too short for the counter."""

    def __init__(self):
        self.windows = []

    def energy(self):
        self.windows.append(7 if len(self.windows) in (0, 6) else 11)
        return _Watch(self.windows[-1])

    def limit_w(self):
        return 700.0

    def sample(self):
        pass

    def take(self):
        return {
            "sm_mhz": {"low": 1, "median": 1700, "high": 2},
            "power_w": {"low": 1, "median": 500, "high": 2},
            "celsius": None,
            "limits": {"power": 0.5},
        }


def _bench(path, sweep, sustain, tokens):
    """On each rank: the benchmark with the CUDA calls of its host side taken out."""
    replaced = {
        torch.cuda: {
            "synchronize": lambda device=None: None,
            "current_stream": _Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "Event": _Event,
            "mem_get_info": _Free(),
        },
        sequential: {"_symmetric_rows": lambda *args: None, "_fusion": lambda *args: None},
        record: {"Recorder": _Recorder},
    }
    with contextlib.ExitStack() as stack:
        for module, names in replaced.items():
            stack.enter_context(mock.patch.multiple(module, **names))
        return _measured(path, sweep, sustain, tokens)


def _measured(path, sweep, sustain, tokens):
    group, device = dist.group.WORLD, torch.device("cpu")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = dummy_model(TINY, rank=rank, world_size=world, group=group, dtype=torch.float32, layers=2)
    config = Config("tiny", tokens, MODES, layers=TINY.layers, sweep=sweep, sustain=sustain, json=path)
    lines = []
    measures = LatencyBench(
        config,
        model,
        lambda transport: Planner(model.config, "h200", world, "p2p", mode="auto"),
        group,
        device,
        WallClock(),
        FixedMonitor(),
        {
            "gpus": ["H200"],
            "nvlinks": [18],
            "multicast": {"value": "no"},
            "power_limit_w": 700.0,
            "torch": "2",
            "nccl": "2",
            "driver": "5",
        },
        lines.append,
    )
    return measures.run(), lines


@pytest.mark.parametrize(("sweep", "tokens"), [(False, (48, 130)), (True, (130,))], ids=["planned", "swept"])
def test_every_mode_is_measured_and_agrees_with_sequential(sweep, tokens, tmp_path):
    path = tmp_path / "out.json"
    (result, lines), (other, _) = run_ranks(2, _bench, path, sweep, 0.001, tokens)
    rows = result["rows"]
    both = {(row["tokens"], row["mode"]): (row, its) for row, its in zip(rows, other["rows"], strict=True)}
    assert json.loads(path.read_text())["rows"] == json.loads(json.dumps(rows))
    assert [(row["tokens"], row["mode"]) for row in rows] == [(t, m) for t in tokens for m in MODES]
    for row in rows:
        assert row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["ms_per_layer"] == row["ms"] / 2
        assert row["replays"] == 2, "two of four layers"
        assert row["host_ms"]["eager"] > 0
        assert row["host_ms_per_layer"]["eager"] == pytest.approx(row["host_ms"]["eager"] / result["config"]["layers"])
        assert row["power_w"] == 500
        assert row["graph"] == {"mib": 3, "capture_s": row["graph"]["capture_s"]}
        assert 0 <= row["graph"]["capture_s"] < 1
        energy = row["sustained"]["energy"]
        assert energy == {
            "watts": pytest.approx([480] * 2),
            "seconds": pytest.approx([1.0] * 2),
            "changes": 11,
            "refused": None,
        }
        times = [ranks_row["sustained"]["ms"] for ranks_row in both[row["tokens"], row["mode"]]]
        assert row["sustained"]["joules"] == pytest.approx(480 * sum(times) / 1e3)
        assert row["joules_per_token"] == row["sustained"]["joules"] / row["tokens"]
        assert row["profile"]["waiting_ms"] == pytest.approx([0.005, 0])
        assert row["profile"]["busy_ms"] == pytest.approx(0.015)
        assert row["profile"]["hidden_ms"] == pytest.approx(0.005)
        assert (row["shares"] is not None) == (row["mode"] == "sequential")
        if row["mode"] == "sequential":
            assert row["speedup"]["value"] == 1
            assert row["shares"]["communication"]["value"] < 1
            assert row["shares"]["rmsnorm"]["low"] <= row["shares"]["rmsnorm"]["high"]
        if row["mode"] == "no_comm":
            assert row["error"] is None
        else:
            assert row["error"] < 1e-4
    woven = [row for row in rows if row["mode"] == "woven"]
    assert all(0 < row["plan"]["split"] < row["tokens"] for row in woven)
    assert [row["ms"] for row in rows] == [row["ms"] for row in other["rows"]], "ranks report the slowest of them"
    _check_finalists(result)
    assert bool(result["sweep"]) == sweep
    assert result["wrong"] == []
    assert all(entry["tokens"] in tokens for entry in result["sweep"])
    assert len(result["table"]["rows"]) == len(tokens)
    assert all(len(line) == len(result["table"]["columns"]) for line in result["table"]["rows"])
    plot_latency(result, tmp_path / "out.svg")
    assert "no_comm / it" in (tmp_path / "out.svg").read_text() or (tmp_path / "out.svg").stat().st_size > 10000
    report = text(result)
    assert "of the sequential step: communication" in report
    assert "best single mode / auto" in report
    assert "graphs, memory and time of the capture on rank 0: sequential 3 MiB, 0.0 s, fused 3 MiB" in report
    for row in rows:
        del row["graph"]
    assert "graphs, memory" not in text(result), "results without it are read"
    assert "chosen in 10 paired rounds, shown by 20 others" in report
    assert "woven" in report
    assert "H200" in report
    assert "power" in report
    assert any("130 tokens" in line for line in lines)


def _check_finalists(result):
    """Every figure of a row is of the second pass."""
    config, times = result["config"], {}
    assert (config["rounds"], config["first_rounds"]) == (20, 10)
    for entry in result["finalists"]:
        times.setdefault((entry["tokens"], entry["mode"]), {})[entry["variant"]] = entry
    for row in result["rows"]:
        final = times[row["tokens"], row["mode"]][row["variant"]]
        assert all(row[name] == final[name] for name in ("ms", "ms_low", "ms_high"))
        if row["mode"] != "auto":
            assert row["best_single"] is None
            continue
        mode, ratio = row["best_single"]["mode"], row["best_single"]["ratio"]
        assert mode in SINGLE
        assert ratio["low"] <= ratio["value"] <= ratio["high"]
        if mode == "sequential":
            assert ratio == row["speedup"]
    assert {mode for _, mode in times} == {*MODES, "compute"}
    assert {entry["tokens"] for entry in result["sequential"]} == {row["tokens"] for row in result["rows"]}


def _bench_of_a_lucky_pass():
    """As if every variant had taken 1 us in the first pass."""
    turns = {"take_turns": lambda modes, rounds, seed: {name: [1.0] * rounds for name in modes}}
    with mock.patch.multiple(bench, **turns):
        return _bench(None, False, 0.0, (48,))


def test_what_was_fast_in_the_first_pass_is_not_reported_by_that_time():
    result, _ = run_ranks(2, _bench_of_a_lucky_pass)[0]
    assert [entry["ms"] for entry in result["sequential"]] == [1e-3]
    assert [row["mode"] for row in result["rows"]] == list(MODES)
    assert min(row["ms_low"] for row in result["rows"]) > 2e-2, "a step on a CPU takes longer by far"
    assert min(row["host_ms"]["graph"] for row in result["rows"]) > 2e-2


def test_a_result_without_some_modes_still_becomes_a_table():
    row = {
        "tokens": 64,
        "mode": "fused",
        "ms": 1.0,
        "sm_mhz": None,
        "power_w": None,
        "speedup": None,
        "variant": "planned",
        "no_comm_ratio": None,
        "sustained": None,
        "best_single": None,
    }
    result = {
        "rows": [row],
        "sequential": [],
        "config": {"ranks": 2, "model": "m", "layers": 1, "dtype": "bfloat16", "rounds": 20, "first_rounds": 10},
        "environment": {
            "gpus": [],
            "nvlinks": [],
            "multicast": {"value": "no"},
            "power_limit_w": None,
            "torch": "2",
            "nccl": None,
            "driver": None,
        },
    }
    finish(result)
    assert result["table"]["rows"] == [[64, 1.0, "-", "-"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "no model 'nowhere'"),
        (["--model", "Llama-3.1-8B", "--tp", "9"], "--tp 9"),
        (["--model", "Llama-3.1-8B", "--modes", "woven,odd"], "--modes 'odd'"),
        (["--model", "Llama-3.1-8B", "--baselines", "mpi"], "--baselines 'mpi'"),
        (["--model", "Llama-3.1-8B", "--tokens", "1,x"], "--tokens '1,x'"),
        (["--model", "Llama-3.1-8B", "--tokens", "200000"], "context is 131072"),
        (["--model", "Llama-3.1-8B", "--rounds", "3"], "at least 20"),
        (["--model", "Llama-3.1-8B", "--layers", "0"], "--layers 0"),
    ],
)
def test_arguments_that_cannot_be(arguments, message, capsys):
    assert main(["bench", "latency", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_ranks_get_the_same_command_line():
    parser = argparse.ArgumentParser()
    kinds = parser.add_subparsers(dest="bench")
    bench_latency.add_parser(kinds)
    given = [
        "latency",
        "--model",
        "Llama-3.1-8B",
        "--tp",
        "4",
        "--layers",
        "8",
        "--sweep",
        "--no-profile",
        "--baselines",
        "torch,nccl",
        "--json",
        "x.json",
        "--sustain",
        "0.5",
    ]
    args = parser.parse_args(given)
    assert parser.parse_args(command_line(("latency",), args, bench_latency.OPTIONS)) == args


def test_random_weights_agree_between_ranks_where_they_must():
    models = [dummy_model(TINY, rank=rank, world_size=2, layers=1) for rank in range(2)]
    a, b = (model.layers[0] for model in models)
    assert torch.equal(a.input_norm, b.input_norm)
    assert not torch.equal(a.attention.qkv, b.attention.qkv)
    assert a.attention.qkv.shape == b.attention.qkv.shape
    assert not torch.equal(models[0].embedding, models[1].embedding)
    assert abs(float(a.mlp.down.float().std()) - 0.02) < 0.002
    assert torch.equal(dummy_model(TINY, rank=1, world_size=2, layers=1).head, models[1].head)


def test_experts_can_be_alike():
    mixtral = dataclasses.replace(TINY, family="mixtral", experts=4, experts_per_token=2)
    different, alike = (dummy_model(mixtral, layers=1, alike_experts=alike).layers[0].mlp for alike in (False, True))
    for name in ("gate_up", "down"):
        experts = getattr(different, name)
        assert not torch.equal(experts[0], experts[1])
        assert all(torch.equal(getattr(alike, name)[0], expert) for expert in getattr(alike, name))
    assert not torch.equal(alike.router[0], alike.router[1])


def test_rows_are_compared_where_right_ones_are_near_each_other():
    mixtral = dataclasses.replace(TINY, family="mixtral", experts=4, experts_per_token=2)
    for config, alike, near in ((TINY, False, True), (mixtral, False, False), (mixtral, True, True)):
        assert comparable(dummy_model(config, layers=1, alike_experts=alike)) is near
    row = torch.ones(1, 8)
    walks = [("sequential", row), ("fused", row + 0.1), ("woven", -row), ("no_comm", -row)]
    variants = [Variant(mode, "planned", None, lambda row=row: row) for mode, row in walks]
    with mock.patch("torch.cuda.synchronize"):
        errors, wrong = final_rows(variants, near=True)
        assert list(wrong) == ["woven planned"]
        assert errors["fused planned"] == pytest.approx(0.1)
        assert final_rows(variants, near=False)[1] == {}
        assert final_rows([*variants, Variant("auto", "x", None, lambda: row * torch.nan)], near=False)[1] == {
            "auto x": "not finite"
        }


def test_plans_come_back_from_results():
    for scheme in (Scheme(), Scheme(8, 2, ("qkv", "attention"), late=True)):
        plan = woven_plan(640, scheme, 124)
        assert plan_of(json.loads(json.dumps(plan_json(plan)))) == plan
        assert plan.scheme == scheme
    assert plan_of(plan_json(Plan(Mode.FUSED, ctas=12))) == Plan(Mode.FUSED, ctas=12)
