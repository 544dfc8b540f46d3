"""The benchmark of the fused collective: every implementation checked against float64, then timed in paired rounds."""

from __future__ import annotations

import functools
import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tokenweave.bench.kernel import report
from tokenweave.bench.kernel.expected import Expected
from tokenweave.bench.kernel.implementations import Family, Fixture, Implementation, Prepared, Skipped
from tokenweave.bench.timing import median_estimate, paired_rounds, ratio_estimate, slowest_rank
from tokenweave.errors import CollectiveError
from tokenweave.files import write_result
from tokenweave.stages import Epilogue

MEASURED_LINK_GBS = {"h200": 390.0}
"""Per direction between two GPUs; what copy engines sustain both ways at once at 256 MiB (push 389 GB/s over 18 NVLinks,
measured 2026-11). Other GPUs: the data sheet's figure in :mod:`tokenweave.planning.hardware`."""

_GRAPH_US = 5000.0  # aim of a chain of calls; between 10 and 20 of them


class Clock(Protocol):
    """What :class:`tokenweave.bench.timing.GraphClock` offers."""

    def capture(self, call: Callable[[], object], calls: int) -> Any: ...

    def replay(self, graph: Any, reset: Callable[[], None]) -> float: ...


@dataclass(frozen=True)
class Config:
    """What is measured: every combination of hidden and tokens.

    Attributes:
        hidden, tokens: sizes. ctas: thread blocks of the two-shot kernels, beside the default.
        dtype: torch.bfloat16 or torch.float16.
        rounds: of paired samples, at least 20. seed: of inputs and order.
        link_gbs: per direction; "wire" time is the traffic over it.
        fp8: ours with fp8 results too.
        json: written after every size, so that what was measured survives a failure; None for nowhere.
    """

    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    ctas: tuple[int, ...]
    dtype: torch.dtype
    rounds: int
    link_gbs: float
    seed: int = 0
    fp8: bool = False
    json: Path | None = None


def link_gbs(device: str, arch: str, sms: int) -> float:
    """GB/s per direction of a GPU, as the driver names it (``"NVIDIA H200", "sm_90", 132``): measured, else its data
    sheet's."""
    for name in device.casefold().split():
        if name in MEASURED_LINK_GBS:
            return MEASURED_LINK_GBS[name]
    from tokenweave.planning.hardware import describe

    return describe(device, arch, sms).link_gbs


def wire_bytes(tokens: int, hidden: int, ranks: int, itemsize: int) -> float:
    """What a rank sends, and receives, in a reduce-scatter and an all-gather."""
    return tokens * hidden * itemsize * 2 * (ranks - 1) / ranks


class KernelBench:
    """One run on one rank; all ranks make the same calls.

    Args:
        config: what to measure. group: the ranks; device: this one's.
        families: of implementations. clock: times them. monitor: samples clocks and power (``sample``, ``take``), or None.
        environment: the machine, for the result.
        log: called with progress, on every rank.
    """

    def __init__(
        self,
        config: Config,
        group: dist.ProcessGroup,
        device: torch.device,
        families: Sequence[Family],
        clock: Clock,
        monitor: Any,
        environment: dict[str, Any],
        log: Callable[[str], None],
    ) -> None:
        self.config, self.group, self.device = config, group, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.families, self.clock, self.monitor, self.log = families, clock, monitor, log
        self.result: dict[str, Any] = {"environment": environment, "config": _plain(config), "rows": [], "skipped": []}

    def run(self) -> dict[str, Any]:
        """Measures everything; the result is complete on rank 0."""
        for hidden in self.config.hidden:
            fixture = self._fixture(hidden)
            prepared = [(family, self._prepare(family, fixture)) for family in self.families]
            for tokens in self.config.tokens:
                self._measure(fixture, [ready for _, ready in prepared if ready is not None], tokens)
                self._write()
            for _, ready in prepared:
                if ready is not None:
                    ready.release()
            del fixture, prepared
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return self.result

    def _fixture(self, hidden: int) -> Fixture:
        c, rows = self.config, max(self.config.tokens)

        def random(seed: int, *shape: int) -> torch.Tensor:
            generator = torch.Generator(self.device).manual_seed(seed)
            return torch.randn(*shape, generator=generator, device=self.device, dtype=torch.float32).to(c.dtype)

        return Fixture(
            group=self.group,
            rank=self.rank,
            ranks=self.ranks,
            device=self.device,
            dtype=c.dtype,
            hidden=hidden,
            max_tokens=rows,
            ctas=c.ctas,
            partials=random(c.seed + 1 + self.rank, rows, hidden),
            residuals=random(c.seed, rows, hidden),
            epilogue=Epilogue(1 + 0.1 * random(c.seed + 100, hidden), 1e-5),
            x=torch.zeros(rows + self.ranks, hidden, dtype=c.dtype, device=self.device),
            residual=torch.zeros(rows + self.ranks, hidden, dtype=c.dtype, device=self.device),
            fp8=c.fp8,
        )

    def _prepare(self, family: Family, fixture: Fixture) -> Prepared | None:
        where = {"hidden": fixture.hidden}
        _, error = _attempt(family.require)
        if self._refused(error, family.name, where):
            return None
        ready, error = _attempt(lambda: family.prepare(fixture))
        return None if self._refused(error, family.name, where) else ready

    def _measure(self, fixture: Fixture, prepared: list[Prepared], tokens: int) -> None:
        where = {"hidden": fixture.hidden, "tokens": tokens}
        expected = Expected(fixture, tokens)
        calls = chain(wire_bytes(tokens, fixture.hidden, self.ranks, fixture.dtype.itemsize))
        ready: dict[str, Implementation] = {}
        samples: dict[str, Callable[[], float]] = {}
        for choice in (choice for family in prepared for choice in family.choices(tokens)):
            if isinstance(choice, Skipped):
                self.result["skipped"].append({"impl": choice.name, **where, "error": choice.reason})
                continue
            sample = self._sampler(choice, fixture, tokens, expected, min(calls, choice.max_calls))
            if sample is not None:
                ready[choice.key], samples[choice.key] = choice, sample
        gc.disable()  # a collection in the middle of a sample is a pause on one rank
        try:
            after = self.monitor.sample if self.monitor is not None else lambda: None
            mine = paired_rounds(samples, self.config.rounds, self.config.seed, after)
            times = slowest_rank(mine, self.group, self.device)
        finally:
            gc.enable()
        samples.clear()  # drops the graphs
        for key, impl in list(ready.items()):
            _, error = _attempt(impl.after)
            if self._refused(error, impl.name, {**where, "ctas": impl.ctas}):
                del ready[key], times[key]
        self._add_rows(fixture, tokens, ready, times, calls)

    def _sampler(
        self, impl: Implementation, fixture: Fixture, tokens: int, expected: Expected, calls: int
    ) -> Callable[[], float] | None:
        """Checks and captures; a function that times one call of the chain, or None if a rank failed."""
        label = {"hidden": fixture.hidden, "tokens": tokens, "ctas": impl.ctas}
        reset = functools.partial(self._reset, impl, fixture, tokens)
        _, error = _attempt(lambda: self._check(impl, reset, fixture, expected))
        if self._refused(error, impl.name, label):
            return None
        graph, error = _attempt(lambda: self.clock.capture(impl.call, calls))
        if self._refused(error, impl.name, label):
            return None

        def sample() -> float:
            return self.clock.replay(graph, reset) / calls

        _, error = _attempt(lambda: self._warm(impl, sample))
        return None if self._refused(error, impl.name, label) else sample

    def _add_rows(
        self,
        fixture: Fixture,
        tokens: int,
        ready: dict[str, Implementation],
        times: dict[str, list[float]],
        calls: int,
    ) -> None:
        clocks = None if self.monitor is None else self.monitor.take()
        sent = wire_bytes(tokens, fixture.hidden, self.ranks, fixture.dtype.itemsize)
        medians = {key: median_estimate(samples) for key, samples in times.items()}
        rivals = [key for key in times if ready[key].kind == "rival"]
        best = min(rivals, key=lambda key: medians[key].value, default=None)
        for key, impl in ready.items():
            us = medians[key]
            whole = impl.kind in ("ours", "rival")
            ratio = ratio_estimate(times[key], times[best]) if whole and best is not None else None
            # The norm alone moves no data between GPUs: it reads and writes rows and residual in HBM.
            moved = 4 * tokens * fixture.hidden * fixture.dtype.itemsize if impl.result == "norm" else sent * impl.wire
            self.result["rows"].append(
                {
                    "tokens": tokens,
                    "hidden": fixture.hidden,
                    "ranks": self.ranks,
                    "dtype": str(fixture.dtype).removeprefix("torch."),
                    "impl": impl.name,
                    "kind": impl.kind,
                    "ctas": impl.ctas,
                    "rows_per_cta": impl.rows_per_cta,
                    "us": round(us.value, 3),
                    "us_low": round(us.low, 3),
                    "us_high": round(us.high, 3),
                    "best_rival": best if whole else None,
                    "ratio_to_best_rival": None if ratio is None else round(ratio.value, 4),
                    "ratio_low": None if ratio is None else round(ratio.low, 4),
                    "ratio_high": None if ratio is None else round(ratio.high, 4),
                    "gb_s": round(moved / us.value / 1e3, 2),
                    "percent_of_wire": None
                    if impl.result == "norm"
                    else round(100 * moved / self.config.link_gbs / 1e3 / us.value, 2),
                    "calls": min(calls, impl.max_calls),
                    "clocks": clocks,
                    "samples": [round(sample, 3) for sample in times[key]],
                    **_against_unquantised(impl, times),
                }
            )
        self.log(report.progress(self.result["rows"][-len(ready) :]) if ready else f"{tokens} tokens: nothing ran")

    def _reset(self, impl: Implementation, fixture: Fixture, tokens: int) -> None:
        impl.rows.copy_(fixture.partials[:tokens])
        fixture.residual[:tokens].copy_(fixture.residuals[:tokens])
        if impl.fp8 is not None:
            # NaN, which no earlier result hides; peers write only when this rank's kernel has begun.
            impl.fp8.rows.view(torch.uint8).fill_(0x7F)
            if impl.fp8.scales is not None:
                impl.fp8.scales.fill_(float("nan"))
        if impl.padding:
            fixture.x[tokens : tokens + impl.padding].zero_()
            fixture.residual[tokens : tokens + impl.padding].zero_()

    def _check(self, impl: Implementation, reset: Callable[[], None], fixture: Fixture, expected: Expected) -> None:
        """One eager call, which also sets up whatever it needs, compared with float64."""
        reset()
        impl.call()
        self._synchronize()
        impl.after()
        expected.compare(impl, fixture)

    def _warm(self, impl: Implementation, sample: Callable[[], float]) -> None:
        sample()
        impl.after()
        result = impl.rows if impl.fp8 is None else impl.fp8.rows.to(impl.rows.dtype)
        if not bool(torch.isfinite(result).all()):
            raise CollectiveError("a chain of calls on finite inputs gave values that are not finite")

    def _refused(self, error: str | None, name: str, where: dict[str, Any]) -> bool:
        """Whether any rank failed; recorded, so that all ranks skip the same implementations."""
        failed = torch.tensor([error is not None], dtype=torch.int32, device=self.device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.group)
        if not failed.item():
            return False
        errors: list[str | None] = [None] * self.ranks
        dist.all_gather_object(errors, error, group=self.group)
        text = next(f"rank {rank}: {one}" for rank, one in enumerate(errors) if one)
        self.result["skipped"].append({"impl": name, **where, "error": text})
        self.log(f"skipped {name} {where}: {text}")
        return True

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _write(self) -> None:
        path = self.config.json
        if self.rank or path is None:
            return
        report.finish(self.result)
        write_result(self.result, path)


def chain(sent: float) -> int:
    """Calls in a graph, from what all ranks know: 20 where they are short, 10 where they are long."""
    estimate_us = 8 + 3 * sent / 300e3  # microseconds, 300 GB/s
    return max(10, min(20, int(_GRAPH_US / estimate_us)))


def _against_unquantised(impl: Implementation, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """An fp8 row's own fields: the key of the kernel that it is compared with, and its time over that one's."""
    if impl.fp8 is None:
        return {}
    plain = impl.unquantised
    ratio = ratio_estimate(times[impl.key], times[plain]) if plain is not None and plain in times else None
    return {
        "unquantised": plain,
        "ratio_to_unquantised": None if ratio is None else round(ratio.value, 4),
        "ratio_to_unquantised_low": None if ratio is None else round(ratio.low, 4),
        "ratio_to_unquantised_high": None if ratio is None else round(ratio.high, 4),
    }


def _attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return function(), None
    except Exception as error:  # whatever a rival raises: it is recorded, and the others go on
        text = str(error).strip().splitlines()
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return None, f"{type(error).__name__}: {' '.join(text)[:400]} ({where})"


def _plain(config: Config) -> dict[str, Any]:
    return {
        "hidden": list(config.hidden),
        "tokens": list(config.tokens),
        "ctas": list(config.ctas),
        "dtype": str(config.dtype).removeprefix("torch."),
        "rounds": config.rounds,
        "seed": config.seed,
        "fp8": config.fp8,
        "link_gbs_per_direction": config.link_gbs,
    }
