"""The latency of one prefill step: sequential, fused, woven, and the reference without communication, in one run.

A step is what the engine runs for one prompt: embedding, all layers, the final norm of the last row; not the vocabulary's
projection, which is the same in every mode. Every variant is captured as one CUDA graph and timed in paired rounds, the
slowest rank's time: first to choose a variant of each mode, then the chosen ones in fresh rounds, which are reported. A step
of fewer layers than the model has is replayed as often as makes up for them, so that power and clocks are those of the
model. ``no_comm`` removes the collectives and nothing else: 1.0 of it means that all communication is hidden.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.bench.environment import Monitor
from tokenweave.bench.latency.busy import profiled
from tokenweave.bench.latency.finals import SINGLE, Times, decided, finalists
from tokenweave.bench.latency.measure import comparable, final_rows, host_ms, sustained
from tokenweave.bench.latency.report import Measured, finalist_rows, finish, plan_json, rows_of
from tokenweave.bench.latency.sequential import BASELINES, SequentialSteps
from tokenweave.bench.latency.sweep import swept_fused, swept_woven
from tokenweave.bench.steps import PrefillSteps, Variant, norm_alone
from tokenweave.bench.timing import GraphClock, median_estimate, paired_rounds, slowest_rank, take_turns
from tokenweave.files import write_result
from tokenweave.models import Model
from tokenweave.planning import Mode, Planner

MODES = ("sequential", "fused", "woven", "auto", "no_comm")
_QUICK_REPLAYS = 5  # of a candidate of the sweep, or for the sequential step
_CONTENDER = 1.05  # a sequential step that takes longer by more is not the strongest, and is left out of the rounds
_SWEPT, _SWEPT_NEAR = 3, 1.02  # of a sweep's candidates go on to the rounds at most, and as near to the fastest
_FIRST_SEED = 1 << 32  # added for the first pass, whose order is not the second's
_LONG_MS = 20.0  # of a sample: no more replays are needed for the clocks of long steps


@dataclass(frozen=True)
class Config:
    """What is measured.

    Attributes:
        model: its name. tokens: of the prompts. modes: some of :data:`MODES`.
        layers: that the model has; 0: those that are measured.
        rounds: of paired samples that are reported, at least 20; the variants to choose from have half as many before.
        seed: of token ids and of the order of modes.
        sweep: try cuts, thread blocks, clusters and SM budgets for fused and woven, instead of the planner's alone.
        sustain: seconds of back-to-back replays a mode, for power and energy; more where a GPU's energy counter changes so
            seldom that they are too few; 0 for none.
        baselines: some of :data:`tokenweave.bench.latency.sequential.BASELINES`, for the sequential step.
        profile: run every mode once more under torch.profiler, when all times are taken.
        json: written after every size; None for nowhere.
    """

    model: str
    tokens: tuple[int, ...]
    modes: tuple[str, ...]
    layers: int = 0
    rounds: int = 20
    seed: int = 0
    sweep: bool = False
    sustain: float = 1.6
    profile: bool = True
    baselines: tuple[str, ...] = BASELINES
    json: Path | None = None


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
        self._steps = PrefillSteps(model, most, group, device, config.seed)
        self._workspace = self._steps.workspace
        self._planner = planner(self._workspace.transport)
        self._sequential = SequentialSteps(self._steps, model, most, group, device, config.baselines, say)
        self._comparable = comparable(model)
        self._replays = 1  # of a sample
        self._energy_refused = False  # once is enough to be told
        self._chosen: dict[int, dict[str, Variant]] = {}  # tokens -> mode -> its fastest variant
        self._result: dict[str, Any] = {
            "environment": environment,
            "config": {
                "model": config.model,
                "layers": shape.layers,
                "ranks": self._workspace.world_size,
                "dtype": str(model.dtype).removeprefix("torch."),
                "transport": self._workspace.transport,
                "rounds": config.rounds,
                "first_rounds": config.rounds // 2,
                "seed": config.seed,
                "sweep": config.sweep,
            },
            "rows": [],
            "sweep": [],
            "sequential": [],
            "finalists": [],
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
            if self._config.profile:
                with torch.inference_mode():
                    self._profile()
        finally:
            self._sequential.close()
            self._steps.close()
        finish(self._result)
        self._write()
        return self._result

    # ---- variants

    def _variants(self, tokens: int) -> Iterator[Variant]:
        """What is timed in paired rounds; with ``sweep``, the best candidates of fused and woven."""
        modes, steps, plan = self._config.modes, self._steps, self._planner.plan
        if "sequential" in modes:
            yield from self._contenders(list(self._sequential.variants(tokens)), tokens)
        if "fused" in modes:
            planned = steps.of_plan("fused", "planned", plan(tokens, mode=Mode.FUSED), tokens)
            yield from swept_fused(steps, planned, tokens, self._best) if self._config.sweep else (planned,)
        if "woven" in modes and tokens > 1:
            planned = steps.of_plan("woven", "planned", plan(tokens, mode=Mode.WOVEN), tokens)
            costs = self._planner.model.costs
            yield from swept_woven(steps, planned, tokens, costs, self._best) if self._config.sweep else (planned,)
        if "auto" in modes:
            yield steps.of_plan("auto", "planned", plan(tokens, mode="auto"), tokens)
        if "no_comm" in modes:
            yield steps.of_collective("no_comm", "norm", None, tokens, norm_alone)
        if {"sequential", "no_comm"} <= set(modes):
            yield steps.compute_alone(tokens)  # for the share of the norms

    def _contenders(self, candidates: Sequence[Variant], tokens: int) -> list[Variant]:
        """Those that may be the fastest; what a few replays of the others took is noted in the result."""
        if len(candidates) == 1:
            return list(candidates)
        medians = self._quick(candidates)
        most = _CONTENDER * min(medians.values())
        for variant in candidates:
            if (us := medians[variant.name]) > most:
                self._result["sequential"].append(
                    {"tokens": tokens, "variant": variant.name, "ms": us / 1e3, "quick": True}
                )
        return [variant for variant in candidates if medians[variant.name] <= most]

    def _best(self, candidates: Sequence[Variant]) -> list[Variant]:
        """The fastest by a few replays, on the slowest rank, and what is near it; the fastest first. All are noted in the
        result."""
        medians = self._quick(candidates)
        for variant in candidates:
            plan = None if variant.plan is None else plan_json(variant.plan)
            entry = {"mode": variant.mode, "variant": variant.name, "ms": medians[variant.name] / 1e3, "plan": plan}
            self._result["sweep"].append(entry)
        order = sorted(candidates, key=lambda variant: medians[variant.name])[:_SWEPT]
        best = [variant for variant in order if medians[variant.name] <= _SWEPT_NEAR * medians[order[0].name]]
        fastest = f"{best[0].name}, {medians[best[0].name] / 1e3:.3f} ms"
        self._say(f"  {best[0].mode}: best of {len(candidates)}: {fastest}; {len(best)} go on")
        return best

    def _quick(self, candidates: Sequence[Variant]) -> dict[str, float]:
        """us by name: medians of a few replays, on the slowest rank."""
        medians = {}
        for variant in candidates:
            graph = self._captured(variant)
            self._replay(graph)
            samples = {variant.name: [self._replay(graph) for _ in range(_QUICK_REPLAYS)]}
            (times,) = slowest_rank(samples, self._group, self._device).values()
            medians[variant.name] = sorted(times)[len(times) // 2]
            del graph
        torch.cuda.empty_cache()  # the graphs' pools
        return medians

    # ---- timing

    def _measure(self, tokens: int) -> None:
        began = time.monotonic()
        self._replays = self._replays_of(tokens)
        noted = len(self._result["sweep"])
        variants = list(self._variants(tokens))
        for entry in self._result["sweep"][noted:]:
            entry["tokens"] = tokens
        graphs, taken = {}, {}
        for variant in variants:
            graphs[variant.key], taken[variant.key] = self._measured_capture(variant)
        host = {variant.key: host_ms(variant, graphs[variant.key], self._group) for variant in variants}
        errors = self._errors(variants, tokens)
        for graph in graphs.values():
            self._replay(graph)
        first = self._choose(variants, graphs, tokens)
        among = finalists(variants, first)
        for key in graphs.keys() - {variant.key for variant in among}:
            del graphs[key]
        self._monitor.take()
        samples = paired_rounds(
            {key: functools.partial(self._replay, graph) for key, graph in graphs.items()},
            self._config.rounds,
            seed=self._config.seed + tokens,
            after_round=self._monitor.sample,
        )
        clocks = self._monitor.take()
        self._workspace.check()
        finals = decided(among, first, slowest_rank(samples, self._group, self._device))
        shown = {mode: variant for mode, variant in finals.chosen.items() if mode != "compute"}
        sustained = {mode: self._sustained(graphs[v.key], finals.times[v.key]) for mode, v in shown.items()}
        layers = self._model.config.layers
        measured = Measured(tokens, layers, self._replays, finals, host, errors, taken, clocks, sustained)
        self._result["rows"] += rows_of(measured)
        self._result["finalists"] += finalist_rows(tokens, among, finals.times)
        self._chosen[tokens] = shown
        graphs.clear()
        text = ", ".join(f"{row['mode']} {row['ms']:.3f}" for row in self._result["rows"][-len(shown) :])
        self._say(f"{tokens} tokens: {text} ms ({time.monotonic() - began:.1f} s)")

    def _choose(self, variants: Sequence[Variant], graphs: Mapping[str, torch.cuda.CUDAGraph], tokens: int) -> Times:
        """The first pass: of the modes that a variant is chosen of. The sequential ones' times are noted in the result."""
        single = {v.key: functools.partial(self._replay, graphs[v.key]) for v in variants if v.mode in SINGLE}
        turns = take_turns(single, self._config.rounds // 2, self._config.seed + tokens + _FIRST_SEED)
        times = slowest_rank(turns, self._group, self._device)
        self._result["sequential"] += [
            {"tokens": tokens, "variant": v.name, "ms": median_estimate(times[v.key]).value / 1e3}
            for v in variants
            if v.mode == "sequential"
        ]
        return times

    def _profile(self) -> None:
        """Adds to the rows what torch.profiler sees. Last of all: graphs run slower once it has been on."""
        began = time.monotonic()
        found = profiled(self._chosen, self._captured, self._group, self._device)
        for row in self._result["rows"]:
            row["profile"] = found[row["tokens"]][row["mode"]]
        self._say(f"profiled ({time.monotonic() - began:.1f} s)")

    def _captured(self, variant: Variant) -> torch.cuda.CUDAGraph:
        return self._measured_capture(variant)[0]

    def _measured_capture(self, variant: Variant) -> tuple[torch.cuda.CUDAGraph, dict[str, float]]:
        """The graph, and what it takes (:class:`Measured`). Before, the step runs once on the stream that captures: libraries set
        themselves up there, and kernels are compiled."""
        self._clock.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._clock.stream):
            variant.walk()
        torch.cuda.synchronize()
        self._workspace.check()
        free, began = torch.cuda.mem_get_info(self._device)[0], time.monotonic()
        graph = self._clock.capture(variant.walk, 1)
        seconds = time.monotonic() - began
        return graph, {"mib": (free - torch.cuda.mem_get_info(self._device)[0]) / 2**20, "capture_s": seconds}

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        return self._clock.replay(graph, lambda: None, self._replays)

    def _replays_of(self, tokens: int) -> int:
        """Of a sample: as many as make up for layers that are left out, as far as that takes to be long."""
        layers = self._model.config.layers
        ms = self._planner.explain(tokens, mode="auto").predicted_ms["no_comm"]  # the same on all ranks
        return max(1, min(-(-self._config.layers // layers), math.ceil(_LONG_MS / ms)))

    def _errors(self, variants: Sequence[Variant], tokens: int) -> dict[str, float | None]:
        """Of the final rows, by key; what is wrong is told, and goes into the result's ``"wrong"``."""
        errors, wrong = final_rows(variants, self._comparable)
        for key, what in wrong.items():
            self._result["wrong"].append(f"{tokens} tokens, {key}: the final row is {what}")
            self._say(f"WRONG: {self._result['wrong'][-1]}")
        return errors

    def _sustained(self, graph: torch.cuda.CUDAGraph, samples: Sequence[float]) -> dict[str, Any] | None:
        if self._config.sustain <= 0:
            return None
        us = sorted(samples)[len(samples) // 2]
        found = sustained(graph, us, self._config.sustain, self._group, self._monitor)
        why = found["energy"]["refused"]
        if why is not None and not self._energy_refused:
            self._energy_refused = True
            self._say(f"no energy a token, of this step and of others that are alike: {why}")
        return found

    def _write(self) -> None:
        if self._config.json is not None and self._workspace.rank == 0:
            write_result(self._result, self._config.json)
