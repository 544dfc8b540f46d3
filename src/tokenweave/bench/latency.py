"""The latency of one prefill step: sequential, fused, woven, and the bound without communication, in one run.

A step is what the engine runs for one prompt: embedding, all layers, the final norm of the last row; not the vocabulary's
projection, which is the same in every mode. Every variant is captured as one CUDA graph and timed in paired rounds, the
slowest rank's time. ``no_comm`` removes the collectives and nothing else: 1.0 of it means that all communication is hidden.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.bench.environment import Monitor, machine_line
from tokenweave.bench.timing import Estimate, GraphClock, median_estimate, paired_rounds, ratio_estimate, slowest_rank
from tokenweave.collective import Workspace
from tokenweave.collective.norm import add_rmsnorm
from tokenweave.engine.batch import Chunk, splits_of
from tokenweave.engine.collectives import check, collective_of
from tokenweave.engine.kv_cache import KVCache
from tokenweave.models import Model
from tokenweave.overlap import CudaStream, Inline
from tokenweave.planning import Mode, Plan, Planner
from tokenweave.stages import Epilogue
from tokenweave.weave import Collective, run_stages

MODES = ("sequential", "fused", "woven", "auto", "no_comm")
_QUICK_REPLAYS = 7  # of a candidate of the sweep
_HOST_SAMPLES = 5
_ONESHOT_TOKENS = 512
# Of final rows against sequential's, in the Euclidean norm: bf16 with sums in another order drifts by some percent over
# many layers of random weights; rows of a broken step are unrelated, 1 or more away.
_TOLERANCE = 0.25
_FIRST_GEMMS = ("qkv", "gate_up")  # of a stage: these start beside the other split's collective


@dataclass(frozen=True)
class Config:
    """What is measured.

    Attributes:
        model: its name. tokens: of the prompts. modes: some of :data:`MODES`.
        rounds: of paired samples, at least 20. seed: of token ids and of the order of modes.
        sweep: try cuts, thread blocks, clusters and SM budgets for fused and woven, instead of the planner's alone.
        sustain: seconds of back-to-back replays a mode, for its power; 0 for none.
        json: written after every size; None for nowhere.
    """

    model: str
    tokens: tuple[int, ...]
    modes: tuple[str, ...]
    rounds: int = 20
    seed: int = 0
    sweep: bool = False
    sustain: float = 0.0
    json: Path | None = None


@dataclass(frozen=True)
class Variant:
    """One way to run the step.

    Attributes:
        mode: of :data:`MODES`. name: within the mode.
        plan: None where the planner knows no such thing.
        walk: all of its launches; gives the final rows, [1, hidden].
    """

    mode: str
    name: str
    plan: Plan | None
    walk: Callable[[], torch.Tensor]

    @property
    def key(self) -> str:
        return f"{self.mode} {self.name}"


class LatencyBench:
    """Measures one model on one rank; all ranks of ``group`` do the same.

    Args:
        model: this rank's part. planner: for it.
        group, device: of the ranks.
        clock, monitor: as :mod:`tokenweave.bench.timing` and :mod:`tokenweave.bench.environment` have them.
        environment: goes into the result. say: is called with lines of progress.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        planner: Callable[[str], Planner],
        group: dist.ProcessGroup,
        device: torch.device,
        clock: GraphClock,
        monitor: Monitor,
        environment: dict[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._model, self._group, self._device = config, model, group, device
        self._clock, self._monitor, self._say = clock, monitor, say
        most, shape = max(config.tokens), model.config
        self._workspace = Workspace(group, max_tokens=most, hidden=shape.hidden, dtype=model.dtype, device=device)
        self._planner = planner(self._workspace.transport)
        cache = KVCache(shape.layers, most, model.kv_heads_local, shape.head_dim, model.dtype, device)
        self._stages = model.stages(cache)
        self._residual = torch.empty(most, shape.hidden, dtype=model.dtype, device=device)
        self._overlap, self._inline = CudaStream(device), Inline()
        self._symmetric = _symmetric_rows(model, most, group, device, say)
        self._result: dict[str, Any] = {
            "environment": environment,
            "config": {
                "model": config.model,
                "layers": shape.layers,
                "ranks": self._workspace.world_size,
                "dtype": str(model.dtype).removeprefix("torch."),
                "transport": self._workspace.transport,
                "rounds": config.rounds,
                "seed": config.seed,
                "sweep": config.sweep,
            },
            "rows": [],
            "sweep": [],
            "sequential": [],
            "wrong": [],
        }

    def run(self) -> dict[str, Any]:
        """Measures every number of tokens; returns the result."""
        try:
            for tokens in self._config.tokens:
                with torch.inference_mode():
                    self._measure(tokens)
                gc.collect()  # graphs
                self._write()
        finally:
            self._overlap.close()
            self._workspace.close()
            self._symmetric = None
        finish(self._result)
        self._write()
        return self._result

    # ---- variants

    def _variants(self, tokens: int) -> Iterator[Variant]:
        """What is timed in paired rounds; with ``sweep``, the best candidate of fused and woven."""
        modes = self._config.modes
        if "sequential" in modes:
            yield self._of_plan("sequential", "nccl", Plan(Mode.SEQUENTIAL), tokens)
            yield from self._symmetric_variants(tokens)
        if "fused" in modes:
            planned = self._of_plan("fused", "planned", self._planner.plan(tokens, mode=Mode.FUSED), tokens)
            yield self._best([planned, *self._fused_candidates(tokens)]) if self._config.sweep else planned
        if "woven" in modes and tokens > 1:
            planned = self._of_plan("woven", "planned", self._planner.plan(tokens, mode=Mode.WOVEN), tokens)
            yield self._swept(planned, tokens) if self._config.sweep else planned
        if "auto" in modes:
            yield self._of_plan("auto", "planned", self._planner.plan(tokens, mode="auto"), tokens)
        if "no_comm" in modes:
            yield self._of_collective("no_comm", "norm", None, tokens, _norm_alone)

    def _of_plan(self, mode: str, name: str, plan: Plan, tokens: int) -> Variant:
        return self._of_collective(mode, name, plan, tokens, collective_of(plan, tokens, self._workspace))

    def _of_collective(
        self, mode: str, name: str, plan: Plan | None, tokens: int, collective: Collective, workspace: Any = None
    ) -> Variant:
        """``workspace``: gives the partial sums' memory; default: ours."""
        ids = torch.randint(
            self._model.config.vocab, (tokens,), generator=torch.Generator().manual_seed(self._config.seed)
        )
        chunk = Chunk(0, 0, tuple(ids.tolist()), 0, True)
        splits = splits_of([chunk], plan or Plan(Mode.SEQUENTIAL), self._residual, self._model.packs)
        overlap = self._overlap if len(splits) > 1 else self._inline
        memory = self._workspace if workspace is None else workspace

        def walk() -> torch.Tensor:
            fresh = [dataclasses.replace(split) for split in splits]
            return run_stages(self._stages, fresh, collective, memory, overlap)[-1]

        return Variant(mode, name, plan, walk)

    def _symmetric_variants(self, tokens: int) -> Iterator[Variant]:
        if self._symmetric is None:
            return
        ops, name = torch.ops.symm_mem, self._group.group_name

        def two_shot(partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, rows: Any) -> torch.Tensor:
            ops.two_shot_all_reduce_(partial, "sum", name)
            return _norm_alone(partial, residual, epilogue, rows)

        def one_shot(partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, rows: Any) -> torch.Tensor:
            add_rmsnorm(ops.one_shot_all_reduce(partial, "sum", name), residual, epilogue, out=partial)
            return partial if rows is None else partial[rows]

        plan = Plan(Mode.SEQUENTIAL)
        yield self._of_collective("sequential", "torch two-shot", plan, tokens, two_shot, self._symmetric)
        if tokens <= _ONESHOT_TOKENS:
            yield self._of_collective("sequential", "torch one-shot", plan, tokens, one_shot, self._symmetric)

    def _fused_candidates(self, tokens: int) -> Iterator[Variant]:
        for ctas in (None, 8, 12, 16, 32):
            yield self._of_plan("fused", f"ctas {ctas or 'default'}", Plan(Mode.FUSED, ctas=ctas), tokens)

    def _swept(self, planned: Variant, tokens: int) -> Variant:
        """Blocks, clusters and SM budgets at an even cut, then cuts, then budgets at the best cut; one after the other."""
        sms = self._planner.model.gpu.sms
        even = _aligned(tokens // 2, tokens)

        def variant(cut: int, ctas: int, cluster: int | None, left: int | None, gemms: Sequence[str]) -> Variant:
            budget = {(gemm, split): left for gemm in gemms for split in ("prefix", "suffix") if left is not None}
            plan = Plan(Mode.WOVEN, split=cut, ctas=ctas, cluster=cluster, gemm_sms=budget)
            text = f"cut {cut} ctas {ctas} cluster {cluster or 1} sms {left or 'all'} of {'+'.join(gemms) or '-'}"
            return self._of_plan("woven", text, plan, tokens)

        shapes: list[Variant] = [planned]
        for ctas, cluster in ((4, 4), (8, None), (8, 2), (8, 4), (12, 4), (16, 4)):
            shapes.append(variant(even, ctas, cluster, None, ()))
            for gemms in (_FIRST_GEMMS, ("qkv", "o", "gate_up", "down")):
                shapes.append(variant(even, ctas, cluster, sms - ctas, gemms))
        best = self._best(shapes)
        plan = best.plan
        assert plan is not None
        assert plan.split is not None
        cuts = {_aligned(tokens * k // 16, tokens) for k in (5, 6, 7, 9, 10, 11)} - {plan.split, even}
        moved = [
            self._of_plan("woven", f"{best.name}, at {cut}", dataclasses.replace(plan, split=cut), tokens)
            for cut in sorted(cuts)
        ]
        return self._best([best, *moved])

    def _best(self, candidates: Sequence[Variant]) -> Variant:
        """The fastest by a few replays, on the slowest rank; all are noted in the result."""
        medians = {}
        for variant in candidates:
            graph = self._captured(variant)
            self._replay(graph)
            samples = {variant.name: [self._replay(graph) for _ in range(_QUICK_REPLAYS)]}
            (times,) = slowest_rank(samples, self._group, self._device).values()
            medians[variant.name] = sorted(times)[len(times) // 2]
            del graph
        for name, us in medians.items():
            self._result["sweep"].append({"mode": candidates[0].mode, "variant": name, "ms": us / 1e3})
        best = min(candidates, key=lambda variant: medians[variant.name])
        self._say(f"  {best.mode}: best of {len(candidates)}: {best.name}, {medians[best.name] / 1e3:.3f} ms")
        torch.cuda.empty_cache()  # the graphs' pools
        return best

    # ---- timing

    def _measure(self, tokens: int) -> None:
        began = time.monotonic()
        noted = len(self._result["sweep"])
        variants = list(self._variants(tokens))
        for entry in self._result["sweep"][noted:]:
            entry["tokens"] = tokens
        graphs = {variant.key: self._captured(variant) for variant in variants}
        host = {variant.key: self._host_ms(variant, graphs[variant.key]) for variant in variants}
        errors = self._errors(variants, tokens)
        for graph in graphs.values():
            self._replay(graph)
        self._monitor.take()
        samples = paired_rounds(
            {key: (lambda graph=graph: self._replay(graph)) for key, graph in graphs.items()},  # type: ignore[misc]
            self._config.rounds,
            seed=self._config.seed + tokens,
            after_round=self._monitor.sample,
        )
        clocks = self._monitor.take()
        check(self._workspace)
        times = slowest_rank(samples, self._group, self._device)
        chosen = _strongest(variants, times)
        power = {mode: self._sustained(graphs[chosen[mode].key], times[chosen[mode].key]) for mode in chosen}
        self._result["rows"] += [
            _row(tokens, variant, chosen, times, host, errors, clocks, power[mode], self._model.config.layers)
            for mode, variant in chosen.items()
        ]
        self._result["sequential"] += [
            {"tokens": tokens, "variant": v.name, "ms": median_estimate(times[v.key]).value / 1e3}
            for v in variants
            if v.mode == "sequential"
        ]
        graphs.clear()
        text = ", ".join(f"{mode} {median_estimate(times[v.key]).value / 1e3:.3f}" for mode, v in chosen.items())
        self._say(f"{tokens} tokens: {text} ms ({time.monotonic() - began:.1f} s)")

    def _captured(self, variant: Variant) -> torch.cuda.CUDAGraph:
        """Runs once on the stream that captures: libraries set themselves up there, and kernels are compiled."""
        self._clock.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._clock.stream):
            variant.walk()
        torch.cuda.synchronize()
        check(self._workspace)
        return self._clock.capture(variant.walk, 1)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        return self._clock.replay(graph, lambda: None)

    def _host_ms(self, variant: Variant, graph: torch.cuda.CUDAGraph) -> dict[str, float]:
        """Milliseconds that the host needs to issue the step, by launches and as a graph; the GPU idles before."""

        def median(call: Callable[[], object]) -> float:
            samples = []
            for _ in range(_HOST_SAMPLES):
                torch.cuda.synchronize()
                dist.barrier(self._group)
                torch.cuda.synchronize()
                began = time.perf_counter()
                call()
                samples.append((time.perf_counter() - began) * 1e3)
            torch.cuda.synchronize()
            return sorted(samples)[_HOST_SAMPLES // 2]

        return {"eager": median(variant.walk), "graph": median(graph.replay)}

    def _errors(self, variants: Sequence[Variant], tokens: int) -> dict[str, float | None]:
        """Relative difference of the final rows to those of the first sequential variant, on this rank.

        Rows that are not finite, or differ by more than rounding, are told and go into the result's ``"wrong"``.
        """
        rows = {variant.key: variant.walk().float() for variant in variants}
        torch.cuda.synchronize()
        reference = next((rows[v.key] for v in variants if v.mode == "sequential"), None)
        errors: dict[str, float | None] = {}
        for variant in variants:
            wrong = ""
            got = rows[variant.key]
            error = None
            if not bool(torch.isfinite(got).all()):
                wrong = "not finite"
            elif reference is not None and variant.mode != "no_comm":
                error = float((got - reference).norm() / reference.norm())
                if error > _TOLERANCE:
                    wrong = f"{error:.3f} away from sequential's"
            errors[variant.key] = error
            if wrong:
                self._result["wrong"].append(f"{tokens} tokens, {variant.key}: the final row is {wrong}")
                self._say(f"WRONG: {self._result['wrong'][-1]}")
        return errors

    def _sustained(self, graph: torch.cuda.CUDAGraph, samples: Sequence[float]) -> dict[str, Any] | None:
        """Power and clocks over the second half of back-to-back replays, and a replay's mean time."""
        if self._config.sustain <= 0:
            return None
        replays = max(8, math.ceil(self._config.sustain * 1e6 / sorted(samples)[len(samples) // 2]))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier(self._group)
        self._monitor.take()
        start.record()
        ends: list[torch.cuda.Event] = []
        for index in range(replays):
            graph.replay()
            if index % max(1, replays // 16) == 0:
                if len(ends) > 1:
                    ends[-2].synchronize()  # so that a sample is of what runs now
                ends.append(torch.cuda.Event())
                ends[-1].record()
                if index > replays // 2:
                    self._monitor.sample()
        end.record()
        torch.cuda.synchronize()
        return {"ms": start.elapsed_time(end) / replays, **self._monitor.take()}

    def _write(self) -> None:
        path = self._config.json
        if path is None or self._workspace.rank:
            return
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(self._result, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)


class _SymmetricRows:
    """Memory for torch's symmetric all-reduces, with a workspace's ``buffer``."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def buffer(self, tokens: int, *, start: int = 0, region: int = 0) -> torch.Tensor:
        return self._data[region, start : start + tokens]


def _symmetric_rows(
    model: Model, most: int, group: dist.ProcessGroup, device: torch.device, say: Callable[[str], None]
) -> _SymmetricRows | None:
    """None, with a word why, where the GPUs share no memory: the same on all of them."""
    import torch.distributed._symmetric_memory as symm

    try:
        data = symm.empty(2, most, model.config.hidden, dtype=model.dtype, device=device)
        symm.rendezvous(data, group)
        tried = data.fill_(1)[1, :8]
        torch.ops.symm_mem.two_shot_all_reduce_(tried, "sum", group.group_name)
        ones = torch.ops.symm_mem.one_shot_all_reduce(data[0, :8], "sum", group.group_name)
        sums = {float(value) for x in (tried, ones) for value in (x.min(), x.max())}
        if sums != {float(dist.get_world_size(group))}:
            raise RuntimeError(f"sums of ones are {sums}")
    except RuntimeError as error:
        say(f"torch's symmetric-memory all-reduce is not measured: {error}")
        return None
    return _SymmetricRows(data)


def _norm_alone(partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, rows: Any) -> torch.Tensor:
    """The epilogue with no collective before it."""
    add_rmsnorm(partial, residual, epilogue)
    return partial if rows is None else partial[rows]


def _aligned(cut: int, tokens: int) -> int:
    """The multiple of 128 (64 below 512 tokens) nearest to ``cut``, inside the step."""
    step = 128 if tokens >= 512 else 64
    return min(max(step, round(cut / step) * step), tokens - 1)


def _strongest(variants: Sequence[Variant], times: dict[str, list[float]]) -> dict[str, Variant]:
    """Mode -> its fastest variant, in the order of the variants."""
    chosen: dict[str, Variant] = {}
    for mode, same in itertools.groupby(variants, key=lambda variant: variant.mode):
        chosen[mode] = min(same, key=lambda variant: median_estimate(times[variant.key]).value)
    return chosen


def _row(
    tokens: int,
    variant: Variant,
    chosen: dict[str, Variant],
    times: dict[str, list[float]],
    host: dict[str, dict[str, float]],
    errors: dict[str, float | None],
    clocks: dict[str, Any],
    sustained: dict[str, Any] | None,
    layers: int,
) -> dict[str, Any]:
    mine = times[variant.key]
    step = median_estimate(mine)

    def against(mode: str) -> dict[str, float] | None:
        """How often this mode fits into ``mode``'s time, with its 95 % interval."""
        if mode not in chosen:
            return None
        return _plain(ratio_estimate(times[chosen[mode].key], mine))

    draw = (sustained or clocks)["power_w"]
    speed = (sustained or clocks)["sm_mhz"]
    return {
        "tokens": tokens,
        "mode": variant.mode,
        "variant": variant.name,
        "ms": step.value / 1e3,
        "ms_low": step.low / 1e3,
        "ms_high": step.high / 1e3,
        "ms_per_layer": step.value / 1e3 / layers,
        "speedup": against("sequential"),
        "no_comm_ratio": against("no_comm"),
        "plan": None if variant.plan is None else plan_json(variant.plan),
        "host_ms": host[variant.key],
        "error": errors[variant.key],
        "power_w": draw and draw["median"],
        "sm_mhz": speed and speed["median"],
        "sustained": sustained,
        "joules_per_token": draw["median"] * sustained["ms"] / 1e3 / tokens if sustained and draw else None,
    }


def _plain(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def plan_json(plan: Plan) -> dict[str, Any]:
    """Plain values; ``gemm_sms`` as "gate_up/prefix" -> SMs."""
    return {
        "mode": str(plan.mode),
        "split": plan.split,
        "ctas": plan.ctas,
        "cluster": plan.cluster,
        "gemm_sms": {f"{gemm}/{split}": sms for (gemm, split), sms in plan.gemm_sms.items()},
    }


def finish(result: dict[str, Any]) -> None:
    """Adds the machine as a line, and the README's table: the modes of every size beside each other."""
    rows = result["rows"]
    if not rows or not result["environment"]:
        return
    settings, environment = result["config"], result["environment"]
    speeds = [row["sm_mhz"] for row in rows if row["sm_mhz"]]
    draws = [row["power_w"] for row in rows if row["power_w"]]
    environment["while_measuring"] = {"sm_mhz": _span(speeds), "power_w": _span(draws)}
    result["machine"] = machine_line(environment, settings["ranks"])
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    ours = [mode for mode in modes if mode not in ("sequential", "no_comm")]
    cells = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        same = {row["mode"]: row for row in rows if row["tokens"] == tokens}
        line = [tokens, *(round(same[mode]["ms"], 3) if mode in same else "-" for mode in modes)]
        for mode in ours:
            ratios = (same.get(mode, {}).get(name) for name in ("speedup", "no_comm_ratio"))
            line += [
                "-" if ratio is None else f"{ratio['value']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
                for ratio in ratios
            ]
        cells.append(line)
    heads = [f"{mode}, ms" for mode in modes]
    heads += [head for mode in ours for head in (f"sequential / {mode}", f"no_comm / {mode}")]
    result["readme"] = {
        "title": f"Prefill step, {settings['model']}, {settings['layers']} layers, {settings['ranks']} GPUs, {settings['dtype']}",
        "columns": ["tokens", *heads],
        "rows": cells,
        "note": f"Medians of {settings['rounds']} paired rounds of CUDA-graph replays, the slowest rank's time, with 95 % "
        "intervals of the ratios. sequential is the fastest of NCCL and torch's symmetric-memory all-reduces, each with "
        "a fused add-RMSNorm; no_comm removes the collectives and nothing else.",
    }


def _span(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"low": min(values), "median": sorted(values)[len(values) // 2], "high": max(values)}


def text(result: dict[str, Any]) -> str:
    """A line a size and mode."""
    settings = result["config"]
    lines = [
        result.get("machine", ""),
        f"{settings['model']}, {settings['layers']} layers, {settings['ranks']} ranks, {settings['dtype']}, "
        f"transport {settings['transport']}",
        f"{'tokens':>6} {'mode':10} {'ms':>9} {'ms/layer':>9} {'vs sequential':>22} {'no_comm / it':>22} "
        f"{'host eager/graph':>17} {'W':>5} {'MHz':>5}  variant",
    ]
    for row in result["rows"]:
        ratios = [
            "-" if ratio is None else f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            for ratio in (row["speedup"], row["no_comm_ratio"])
        ]
        variant = row["variant"]
        if row["plan"] is not None and variant == "planned":
            plan = row["plan"]
            left = sorted(set(plan["gemm_sms"].values()))
            variant += f": {plan['mode']} cut {plan['split']} ctas {plan['ctas']} cluster {plan['cluster']} sms {left}"
        lines.append(
            f"{row['tokens']:>6} {row['mode']:10} {row['ms']:>9.3f} {row['ms_per_layer']:>9.4f} {ratios[0]:>22} "
            f"{ratios[1]:>22} {row['host_ms']['eager']:>9.2f}/{row['host_ms']['graph']:.3f} "
            f"{row['power_w'] or 0:>5.0f} {row['sm_mhz'] or 0:>5.0f}  {variant}"
        )
    lines += [f"WRONG: {wrong}" for wrong in result["wrong"]]
    return "\n".join(line for line in lines if line)
