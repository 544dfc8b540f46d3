"""What ``tokenweave bench kernel`` measures: ours, its rivals, and parts of them, all in place on the same input.

A family sets up memory for one hidden size, then gives the implementations for a number of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from tokenweave.bench.flashinfer_fusion import FlashInferFusion
from tokenweave.bench.kernel.report import FP8, key_of
from tokenweave.collective import Workspace, fused_allreduce_rmsnorm
from tokenweave.collective import fp8 as quantisation
from tokenweave.collective.fp8 import Fp8
from tokenweave.collective.norm import add_rmsnorm
from tokenweave.collective.rows import owned_rows, rows_per_rank
from tokenweave.stages import Epilogue

Kind = Literal["ours", "rival", "part", "fp8"]
Result = Literal["fused", "sum", "norm"]
_STATIC_SCALE = 0.02  # of fp8 rows: up to 8.96, about what normalised rows of normal numbers reach
_ONESHOT_BYTES = 64 << 20  # of a batch: above it a one-shot, which sends it whole to every peer, is not competitive


@dataclass(frozen=True)
class Fixture:
    """One hidden size's input and scratch memory. Rows of ``x`` and ``residual`` past max_tokens are padding.

    Attributes:
        group, rank, ranks, device: of the tensor-parallel group.
        dtype, hidden, max_tokens: of the rows. ctas: block counts to try, beside the default.
        partials: [max_tokens, hidden], this rank's input. residuals: the same on all ranks. Neither is written.
        epilogue: weight and epsilon.
        x, residual: [max_tokens + ranks, hidden], ordinary memory that the implementations work on.
        fp8: try ours with fp8 results as well.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int
    device: torch.device
    dtype: torch.dtype
    hidden: int
    max_tokens: int
    ctas: tuple[int, ...]
    partials: torch.Tensor
    residuals: torch.Tensor
    epilogue: Epilogue
    x: torch.Tensor
    residual: torch.Tensor
    fp8: bool = False


@dataclass(frozen=True)
class Implementation:
    """One way to do the step, ready to run.

    Attributes:
        name: of the implementation, ctas: thread blocks, where they can be chosen.
        kind: "ours", "rival" (the same result by other means), "part" (of one of them; for orientation) or "fp8" (ours with
            fp8 results, which are no rival's).
        call: one step, in place on ``rows`` [tokens, hidden] and the fixture's residual, on the current stream.
        result: what the rows then hold: the norm of sum plus residual, the sum, or the norm of own rows plus residual.
        residual_rows: rows of the residual that are valid afterwards.
        padding: rows behind the batch that the call reads as well; they are zeroed with each reset.
        max_calls: longest chain whose values stay finite.
        after: raises if a call failed on the device; called once the device is idle.
        fp8: where ``call`` writes its result, if that is quantised; it then reads ``rows`` alone.
        unquantised: key of the same kernel, with as many blocks, whose result is not.
        wire: what it sends, over what a reduce-scatter and an all-gather of unquantised rows do.
    """

    name: str
    kind: Kind
    call: Callable[[], object]
    rows: torch.Tensor
    result: Result
    residual_rows: range
    ctas: int | None = None
    rows_per_cta: int | None = None
    padding: int = 0
    max_calls: int = 1000
    after: Callable[[], None] = lambda: None
    fp8: Fp8 | None = None
    unquantised: str | None = None
    wire: float = 1.0

    @property
    def key(self) -> str:
        """Unique within a number of tokens."""
        return key_of(self.name, self.ctas)


@dataclass(frozen=True)
class Skipped:
    """An implementation that is not run for a number of tokens, and why."""

    name: str
    reason: str


Choices = list[Implementation | Skipped]


@dataclass(frozen=True)
class Prepared:
    """A family's memory for one fixture. ``release`` frees it; no call may be in flight."""

    choices: Callable[[int], Choices]
    release: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class Family:
    """Implementations that share their set-up.

    Attributes:
        require: raises where this process lacks what the family needs; touches no other rank.
        prepare: collective; called only if ``require`` succeeded on all ranks.
    """

    name: str
    require: Callable[[], None]
    prepare: Callable[[Fixture], Prepared]


def _ours(fixture: Fixture) -> Prepared:
    from tokenweave.collective import cuda_backend

    f, e = fixture, fixture.epilogue
    workspace = Workspace(
        f.group,
        max_tokens=f.max_tokens,
        hidden=f.hidden,
        dtype=f.dtype,
        device=f.device,
        channels=1,
        regions=1,
        staging=False,
        fp8_regions=int(f.fp8),
        transport="p2p",
        time_limit=10.0,
    )
    scale = torch.full((1,), _STATIC_SCALE, device=f.device)

    def two_shot(tokens: int, ctas: int | None) -> Implementation:
        rows, residual = workspace.buffer(tokens), f.residual[:tokens]
        blocks = cuda_backend.default_ctas(tokens, workspace) if ctas is None else ctas
        return Implementation(
            "tokenweave two-shot" + (" default" if ctas is None else ""),
            "ours",
            lambda: fused_allreduce_rmsnorm(rows, residual, e.weight, e.eps, workspace, ctas=ctas),
            rows,
            "fused",
            owned_rows(tokens, f.rank, f.ranks),
            ctas=blocks,
            rows_per_cta=-(-rows_per_rank(tokens, f.ranks) // blocks),
            after=workspace.check,
        )

    def one_shot(tokens: int) -> Implementation:
        rows, residual = workspace.buffer(tokens), f.residual[:tokens]
        return Implementation(
            "tokenweave one-shot",
            "ours",
            lambda: fused_allreduce_rmsnorm(rows, residual, e.weight, e.eps, workspace, layout="replicated"),
            rows,
            "fused",
            range(tokens),
            rows_per_cta=1,
            after=workspace.check,
        )

    def quantised(plain: Implementation, wire: float, **launch: Any) -> list[Implementation]:
        """``plain`` with fp8 results: one static scale, and a scale a row."""
        tokens = plain.rows.shape[0]
        rows, residual, scales = workspace.fp8(tokens), f.residual[:tokens], workspace.scales(tokens)
        return [
            dataclasses.replace(
                plain,
                name=f"{plain.name} {ending}",
                kind="fp8",
                call=functools.partial(
                    fused_allreduce_rmsnorm,
                    *(plain.rows, residual, e.weight, e.eps, workspace),
                    out_dtype=quantisation.DTYPE,
                    out=output.rows,
                    scale=output.scale,
                    out_scales=output.scales,
                    **launch,
                ),
                fp8=output,
                unquantised=plain.key,
                wire=wire,
            )
            for ending, output in zip(FP8, (Fp8(rows, None, scale), Fp8(rows, scales, None)), strict=True)
        ]

    def choices(tokens: int) -> Choices:
        assert workspace.symmetric is not None
        most = 2 * workspace.symmetric.inbox_rows
        two_shots = {ctas: two_shot(tokens, ctas) for ctas in (None, *f.ctas)}
        found: Choices = [*two_shots.values()]
        if f.fp8:
            item = f.dtype.itemsize  # partial sums keep it, results are a byte
            found += [
                q for ctas, plain in two_shots.items() for q in quantised(plain, (item + 1) / (2 * item), ctas=ctas)
            ]
        if tokens <= most:
            plain = one_shot(tokens)
            found.append(plain)
            # Partial sums alone are sent.
            found += quantised(plain, 1.0, layout="replicated") if f.fp8 else []
        else:
            found.append(
                Skipped("tokenweave one-shot", f"its inboxes hold {most // 2} rows; two calls at most are tried")
            )
        return found

    return Prepared(choices, workspace.close)


def _nccl(fixture: Fixture) -> Prepared:
    f, e = fixture, fixture.epilogue

    def choices(tokens: int) -> Choices:
        rows, residual, every = f.x[:tokens], f.residual[:tokens], range(tokens)
        per_rank = rows_per_rank(tokens, f.ranks)
        padded = f.x[: per_rank * f.ranks]  # NCCL's reduce-scatter takes equal shards only
        own_residual = f.residual[f.rank * per_rank :][:per_rank]
        shard = torch.empty_like(own_residual)

        def all_reduce() -> None:
            dist.all_reduce(rows, group=f.group)

        def all_reduce_norm() -> None:
            dist.all_reduce(rows, group=f.group)
            add_rmsnorm(rows, residual, e)

        def scatter_norm_gather() -> None:
            dist.reduce_scatter_tensor(shard, padded, group=f.group)
            add_rmsnorm(shard, own_residual, e)
            dist.all_gather_into_tensor(padded, shard, group=f.group)

        # A chain of sums grows by the number of ranks each time; every other chain grows by a sum of norms.
        bits = 12 if f.dtype == torch.float16 else 100
        finite = max(1, int(bits / math.log2(f.ranks)))
        own = owned_rows(tokens, f.rank, f.ranks)
        return [
            Implementation("nccl all-reduce + add-rmsnorm", "rival", all_reduce_norm, rows, "fused", every),
            Implementation(
                "nccl reduce-scatter + add-rmsnorm + all-gather",
                "rival",
                scatter_norm_gather,
                rows,
                "fused",
                own,
                padding=padded.shape[0] - tokens,
            ),
            Implementation("nccl all-reduce alone", "part", all_reduce, rows, "sum", range(0), max_calls=finite),
            Implementation("add-rmsnorm alone", "part", lambda: add_rmsnorm(rows, residual, e), rows, "norm", every),
        ]

    return Prepared(choices)


def _torch_symmetric(fixture: Fixture) -> Prepared:
    import torch.distributed._symmetric_memory as symm

    f, e, ops = fixture, fixture.epilogue, torch.ops.symm_mem
    group_name = f.group.group_name
    memory: list[torch.Tensor] = [symm.empty(f.max_tokens, f.hidden, dtype=f.dtype, device=f.device)]
    symm.rendezvous(memory[0], f.group)

    def choices(tokens: int) -> Choices:
        rows, residual, every = memory[0][:tokens], f.residual[:tokens], range(tokens)

        def one_shot() -> None:
            add_rmsnorm(ops.one_shot_all_reduce(rows, "sum", group_name), residual, e, out=rows)

        def two_shot() -> None:
            ops.two_shot_all_reduce_(rows, "sum", group_name)
            add_rmsnorm(rows, residual, e)

        found: Choices = [
            Implementation("torch two-shot + add-rmsnorm", "rival", two_shot, rows, "fused", every),
        ]
        name = "torch one-shot + add-rmsnorm"
        if rows.nbytes <= _ONESHOT_BYTES:
            found.append(Implementation(name, "rival", one_shot, rows, "fused", every))
        else:
            found.append(Skipped(name, f"batch over {_ONESHOT_BYTES >> 20} MiB"))
        return found

    return Prepared(choices, memory.clear)


def _flashinfer(fixture: Fixture) -> Prepared:
    f, e = fixture, fixture.epilogue
    fusion = FlashInferFusion(f.group, f.max_tokens, f.hidden)

    def choices(tokens: int) -> Choices:
        rows, residual = f.x[:tokens], f.residual[:tokens]

        def fused(one_shot: bool) -> Callable[[], object]:
            return lambda: fusion.run(rows, residual, residual, e.weight, e.eps, one_shot)

        found: Choices = []
        for name, one_shot in (("flashinfer one-shot", True), ("flashinfer two-shot", False)):
            if one_shot and rows.nbytes > _ONESHOT_BYTES:
                found.append(Skipped(name, f"batch over {_ONESHOT_BYTES >> 20} MiB"))
            elif not fusion.takes(tokens, one_shot):
                found.append(Skipped(name, "it takes more tokens than there are ranks"))
            else:
                found.append(Implementation(name, "rival", fused(one_shot), rows, "fused", range(tokens)))
        return found

    return Prepared(choices, fusion.close)


def _require_flashinfer() -> None:
    importlib.import_module("flashinfer.comm")


FAMILIES = (
    Family("tokenweave", lambda: None, _ours),
    Family("nccl", lambda: None, _nccl),
    Family("torch symmetric memory", lambda: None, _torch_symmetric),
    Family("flashinfer", _require_flashinfer, _flashinfer),
)
