"""What the model tests run on every rank: one model's stages, walked without the engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tokenweave import Epilogue, Split, Workspace, allreduce_rmsnorm, fused_allreduce_rmsnorm, run_stages
from tokenweave.engine.kv_cache import KVCache
from tokenweave.models import Inputs, Model, SequenceRows, load_model
from tokenweave.overlap import CpuThread, Inline, Overlap


@dataclass(frozen=True)
class Piece:
    """Tokens ``start``..``stop`` of sequence number ``sequence``."""

    sequence: int
    start: int
    stop: int


class Runner:
    """A model on one rank with a cache of ``length`` rows for each of ``sequences``."""

    def __init__(self, model: Model, sequences: list[list[int]], length: int = 64) -> None:
        self.model, self.sequences, self.length = model, sequences, length
        rows = length * len(sequences)
        self.kv = KVCache(
            model.config.layers, rows, model.kv_heads_local, model.config.head_dim, model.dtype, model.device
        )
        self.forget()
        self.stages = model.stages(self.kv)
        self.workspace = Workspace(model.group, max_tokens=rows, hidden=model.config.hidden, dtype=model.dtype)

    def forget(self) -> None:
        """Reading a row of the cache before it is written shows."""
        for cache in (*self.kv.keys, *self.kv.values):
            cache.fill_(float("nan"))

    def step(self, pieces: list[Piece], mode: str, cut: int | None = None) -> torch.Tensor:
        """float32 logits of all rows of the pieces, [tokens, vocab]. ``cut``: rows in the prefix of a woven step."""
        tokens = sum(piece.stop - piece.start for piece in pieces)
        residual = torch.full((tokens, self.model.config.hidden), float("nan"), dtype=self.model.dtype)
        bounds = [0, tokens] if cut is None else [0, cut, tokens]
        splits = [
            Split(lo, hi - lo, self.inputs(pieces, lo, hi), residual[lo:hi]) for lo, hi in itertools.pairwise(bounds)
        ]
        overlap: Overlap = CpuThread() if mode == "woven" else Inline()

        def collective(
            partial: torch.Tensor, residual: torch.Tensor, epilogue: Epilogue, rows: torch.Tensor | None
        ) -> torch.Tensor:
            common = {"rows": rows, "has_residual": epilogue.has_residual, "bias": epilogue.bias}
            arguments = (partial, residual, epilogue.weight, epilogue.eps, self.workspace)
            if mode == "sequential":
                return allreduce_rmsnorm(*arguments, **common)
            return fused_allreduce_rmsnorm(*arguments, **common)[0]

        try:
            with torch.inference_mode():
                rows = torch.cat(run_stages(self.stages, splits, collective, self.workspace, overlap))
                return self.model.logits(rows)
        finally:
            overlap.close()

    def inputs(self, pieces: list[Piece], lo: int, hi: int) -> Inputs:
        """Rows lo..hi of the step."""
        ids: list[int] = []
        positions: list[int] = []
        cache_rows: list[int] = []
        runs: list[SequenceRows] = []
        row = 0
        for piece in pieces:
            start = piece.start + max(0, lo - row)
            stop = min(piece.stop, piece.start + hi - row)
            row += piece.stop - piece.start
            if start >= stop:
                continue
            base = piece.sequence * self.length
            runs.append(SequenceRows(len(ids), stop - start, base, start))
            ids += self.sequences[piece.sequence][start:stop]
            positions += range(start, stop)
            cache_rows += range(base + start, base + stop)
        return Inputs(torch.tensor(ids), torch.tensor(positions), torch.tensor(cache_rows), tuple(runs))


def load_on_rank(path: Path, dtype: torch.dtype = torch.float32) -> Model:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return load_model(path, rank=rank, world_size=world_size, group=None, dtype=dtype)


def all_logits(path: Path, sequences: list[list[int]]) -> dict[str, list[torch.Tensor]]:
    """Per way of running, per sequence, the logits of every position; on each rank."""
    model = load_on_rank(path)
    a, b = sequences
    whole = [[Piece(0, 0, len(a)), Piece(1, 0, len(b))]]
    # b's prompt beside a's decode steps, then a chunk of one row, a cut inside b, and both decode together.
    mixed = [
        [Piece(0, 0, 5)],
        [Piece(0, 5, 6), Piece(1, 0, 9)],
        [Piece(1, 9, 10)],
        [Piece(0, 6, 7), Piece(1, 10, len(b) - 1), Piece(0, 7, len(a) - 1)],
        [Piece(1, len(b) - 1, len(b)), Piece(0, len(a) - 1, len(a))],
    ]
    results = {}
    for name, steps, mode in (
        ("whole sequential", whole, "sequential"),
        ("whole fused", whole, "fused"),
        ("mixed sequential", mixed, "sequential"),
        ("mixed fused", mixed, "fused"),
        ("mixed woven", mixed, "woven"),
    ):
        runner = Runner(model, sequences)
        out = [torch.full((len(s), model.config.vocab), float("nan")) for s in sequences]
        for pieces in steps:
            tokens = sum(piece.stop - piece.start for piece in pieces)
            cut = tokens // 2 if mode == "woven" and tokens > 1 else None
            logits = runner.step(pieces, mode, cut)
            for piece, part in zip(pieces, logits.split([p.stop - p.start for p in pieces]), strict=True):
                out[piece.sequence][piece.start : piece.stop] = part
        results[name] = out
        runner.workspace.close()
    return results


def every_length(path: Path, ids: list[int], expected: torch.Tensor) -> tuple[list[tuple[int, int | None]], list[str]]:
    """Prompts of 1 to len(ids) tokens in one step, whole and cut in several places.

    A row's logits do not depend on what follows it, so ``expected``, those of all of ``ids``, judges every length.

    Returns:
        (the (length, cut) that were run, what is wrong), on each rank.
    """
    runner = Runner(load_on_rank(path), [ids], length=len(ids))
    done: list[tuple[int, int | None]] = []
    wrong = []
    for length in range(1, len(ids) + 1):
        # Slivers at either end and the middle; at lengths of more than a few tokens one of these or the whole, in turn.
        cuts = sorted({1, 2, 3, length // 2, length - 3, length - 2, length - 1} & set(range(1, length)))
        ways = [None, *cuts]
        for cut in ways if length < 8 else [ways[length % len(ways)]]:
            runner.forget()
            mode = "woven" if cut else ("fused", "sequential")[length // 8 % 2]
            logits = runner.step([Piece(0, 0, length)], mode, cut)
            error = ((logits - expected[:length]).norm() / expected[:length].norm()).item()
            done.append((length, cut))
            if not error < 1e-4:
                wrong.append(f"{length} tokens, {mode}, cut {cut}: off by {error:.1e}")
    runner.workspace.close()
    return done, wrong
