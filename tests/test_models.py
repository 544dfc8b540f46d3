"""Logits of every architecture against transformers, at several tensor-parallel sizes, however the rows are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoints import VARIANTS, make_checkpoint, reference_logits
from model_ranks import Piece, Runner, all_logits, every_length, load_on_rank
from ranks import run_ranks
from tokenweave.errors import ModelError
from tokenweave.models import load_model

A = [1, *torch.randint(3, 160, (16,), generator=torch.Generator().manual_seed(1)).tolist()]
B = [1, *torch.randint(3, 160, (22,), generator=torch.Generator().manual_seed(2)).tolist()]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[torch.Tensor]]]:
    """variant -> (folder, transformers' logits of A and of B); made once."""
    made: dict[str, tuple[Path, list[torch.Tensor]]] = {}

    def get(variant: str) -> tuple[Path, list[torch.Tensor]]:
        if variant not in made:
            folder = make_checkpoint(tmp_path_factory.mktemp(variant), variant)
            made[variant] = folder, [reference_logits(folder, ids) for ids in (A, B)]
        return made[variant]

    return get


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


# On 8 ranks: heads, MLP and vocabulary leave ranks with nothing but padding in the second.
@pytest.mark.parametrize(
    ("variant", "world_size"),
    [*[(variant, world_size) for variant in VARIANTS for world_size in (1, 2, 3, 4)], ("llama", 8), ("llama-odd", 8)],
)
def test_logits_equal_transformers(
    checkpoint: Callable[[str], tuple[Path, list[torch.Tensor]]], variant: str, world_size: int
) -> None:
    folder, expected = checkpoint(variant)
    ranks = run_ranks(world_size, all_logits, folder, [A, B])
    for name, logits in ranks[0].items():
        for mine, reference in zip(logits, expected, strict=True):
            assert mine.dtype == torch.float32
            assert relative(mine, reference) < 1e-4, name
        for other in ranks[1:]:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(logits, other[name], strict=True)), name


def in_one_of_two_groups(folder: Path, members: list[list[int]]) -> list[torch.Tensor]:
    """Each group of ranks runs a prompt of its own, in every mode; the logits on each rank."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    rank, world_size, ids = dist.get_rank(groups[mine]), len(members[mine]), (A, B)[mine]
    runner = Runner(load_model(folder, rank=rank, world_size=world_size, group=groups[mine]), [ids])
    ways = (("sequential", None), ("fused", None), ("woven", 5))
    logits = [runner.step([Piece(0, 0, len(ids))], mode, cut) for mode, cut in ways]
    runner.workspace.close()
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    return logits


@pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[3], [0, 1, 2]]], ids=str)
def test_two_groups_run_a_model_each(
    checkpoint: Callable[[str], tuple[Path, list[torch.Tensor]]], members: list[list[int]]
) -> None:
    folder, expected = checkpoint("llama-odd")
    for rank, logits in enumerate(run_ranks(4, in_one_of_two_groups, folder, members)):
        mine = next(i for i, ranks in enumerate(members) if rank in ranks)
        assert [relative(found, expected[mine]) < 1e-4 for found in logits] == [True] * 3


@pytest.mark.parametrize("variant", ["llama", "llama-odd", "qwen2", "qwen3", "mixtral"])
def test_every_length_of_a_prompt_wherever_it_is_cut(tmp_path: Path, variant: str) -> None:
    folder = make_checkpoint(tmp_path, variant)
    ids = [1, *torch.randint(3, 160, (69,), generator=torch.Generator().manual_seed(3)).tolist()]
    for done, wrong in run_ranks(2, every_length, folder, ids, reference_logits(folder, ids)):
        assert wrong == []
        assert {length for length, _ in done} == set(range(1, 71))
        assert {(2, 1), (3, 2), (7, 3), (7, 6)} <= set(done)
        assert {(8, None), (16, None), (69, 66)} <= set(done)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["llama-odd", "qwen3", "mixtral"])
def test_half_precision_is_near(
    checkpoint: Callable[[str], tuple[Path, list[torch.Tensor]]], variant: str, dtype: torch.dtype
) -> None:
    # Rounding to 8 (11) significand bits at some 20 places in a row: a few times 2^-8 (2^-11) of the norm. Mixtral may
    # choose another expert for a row where two are nearly equal.
    folder, expected = checkpoint(variant)
    [logits] = run_ranks(1, half_logits, folder, A, dtype)
    limit = {torch.bfloat16: 0.05, torch.float16: 0.006}[dtype] * (4 if variant == "mixtral" else 1)
    assert relative(logits, expected[0]) < limit


def half_logits(folder: Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    return Runner(load_on_rank(folder, dtype), [ids]).step([Piece(0, 0, len(ids))], "fused")


def test_more_ranks_than_query_heads(checkpoint: Callable[[str], tuple[Path, list[torch.Tensor]]]) -> None:
    folder, _ = checkpoint("llama")
    with pytest.raises(
        ModelError, match="tensor parallel size 9 is more than the model's 8 query heads; use 8 or less"
    ):
        load_model(folder, rank=0, world_size=9)


def test_unknown_dtype(checkpoint: Callable[[str], tuple[Path, list[torch.Tensor]]]) -> None:
    with pytest.raises(ModelError, match=r"dtype torch\.float64; supported are torch\.float32"):
        load_model(checkpoint("llama")[0], dtype=torch.float64)


def test_ranks_hold_their_share_alone(checkpoint: Callable[[str], tuple[Path, list[torch.Tensor]]]) -> None:
    folder, _ = checkpoint("llama")
    whole, half = load_model(folder), load_model(folder, rank=1, world_size=2)
    for name in ("qkv", "output"):
        assert getattr(half.layers[0].attention, name).numel() * 2 == getattr(whole.layers[0].attention, name).numel()
    assert half.embedding.numel() * 2 == whole.embedding.numel()
    assert half.head.numel() * 2 == whole.head.numel()
    assert half.kv_heads_local * 2 == whole.kv_heads_local


def test_tied_head_is_the_embedding(checkpoint: Callable[[str], tuple[Path, list[torch.Tensor]]]) -> None:
    model = load_model(checkpoint("llama-tied")[0])
    assert model.head is model.embedding


def test_progress_is_told(checkpoint: Callable[[str], tuple[Path, list[torch.Tensor]]]) -> None:
    seen: list[tuple[int, int]] = []
    load_model(checkpoint("llama")[0], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 5) for done in range(6)]


def test_no_rows_no_logits(checkpoint: Callable[[str], tuple[Path, list[torch.Tensor]]]) -> None:
    model = load_model(checkpoint("llama")[0])
    assert model.logits(torch.empty(0, 64)).shape == (0, 160)
