"""Which transport a workspace takes, what switches multicast off, and the self-test that a GPU transport must pass."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tokenweave.collective import Workspace, cuda_backend, selftest, torch_backend, workspace
from tokenweave.collective.symmetric import Symmetric
from tokenweave.collective.workspace import choose_transport
from tokenweave.errors import CollectiveError, CudaError
from tokenweave.switches import multicast_switched_off

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for name in ("TOKENWEAVE_DISABLE_MULTICAST", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)


def test_choice(hopper):
    assert choose_transport("auto", CPU, 2)[0] == "torch"
    assert choose_transport("auto", CUDA, 1)[0] == "torch"
    assert choose_transport("auto", CUDA, 9)[0] == "torch"
    assert choose_transport("auto", CUDA, 4)[0] == "p2p"  # until the memory turns out to have a multicast address
    for asked in ("torch", "p2p", "multimem", "multimem-emulated"):
        assert choose_transport(asked, CUDA, 4) == (asked, "it was asked for")


@pytest.mark.parametrize("asked", ["p2p", "multimem", "multimem-emulated"])
def test_what_was_asked_for_is_never_replaced(hopper, asked):
    with pytest.raises(CollectiveError, match=f"transport='{asked}': {asked} needs NVIDIA GPUs, and the device is cpu"):
        choose_transport(asked, CPU, 2)
    with pytest.raises(CollectiveError, match=f"{asked} takes 2 to 8 ranks, and the group has 9"):
        choose_transport(asked, CUDA, 9)
    with pytest.raises(CollectiveError, match="transport='multicast'; expected one of 'auto', 'torch', 'p2p'"):
        choose_transport("multicast", CUDA, 2)


def test_older_gpus(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_transport("auto", CUDA, 2)[0] == "p2p"
    with pytest.raises(CollectiveError, match=r"multimem needs compute capability 9\.0, and NVIDIA H200 has less"):
        choose_transport("multimem", CUDA, 2)


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("TOKENWEAVE_DISABLE_MULTICAST", "1", True),
        ("TOKENWEAVE_DISABLE_MULTICAST", "0", False),
        ("TOKENWEAVE_DISABLE_MULTICAST", "true", True),
        ("TOKENWEAVE_DISABLE_MULTICAST", "False", False),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "false", False),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", True),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "", False),
        ("NCCL_NVLS_ENABLE", "0", True),
        ("NCCL_NVLS_ENABLE", "1", False),
        ("NCCL_NVLS_ENABLE", "2", False),
    ],
)
def test_switches_of_multicast(hopper, monkeypatch, name, value, off):
    monkeypatch.setenv(name, value)
    assert multicast_switched_off({name: value}) == (f"{name}={value}" if off else None)
    assert choose_transport("multimem-emulated", CUDA, 2)[0] == "multimem-emulated"
    assert choose_transport("auto", CUDA, 2)[0] == "p2p"
    if off:
        with pytest.raises(CollectiveError, match=f"transport='multimem': {name}={value} in the environment"):
            choose_transport("multimem", CUDA, 2)
    else:
        assert choose_transport("multimem", CUDA, 2)[0] == "multimem"


# ---- the self-test, on CPUs: a stand-in for the GPU transport, which is right, wrong, or fails


FAILURES = {"fails": CollectiveError("a peer did not come"), "does not launch": CudaError("too many blocks")}


def _stand_in(kind: str, monkeypatch: pytest.MonkeyPatch, *, multicast: int = 0) -> list[str]:
    """Symmetric memory and kernels as they would be, of CPU memory; returns the transports that were launched."""
    launched: list[str] = []

    def allocate(group, *, max_tokens, hidden, dtype, device, channels, regions, fp8_regions):
        data = torch.zeros(regions, max_tokens, hidden, dtype=dtype)
        fp8 = torch.zeros(fp8_regions, max_tokens, hidden).to(torch.float8_e4m3fn)
        words = torch.zeros(channels, 8, dtype=torch.int32)
        return Symmetric(
            data, fp8, torch.zeros(fp8_regions, max_tokens), [0], multicast, 0, 0, 0, 0, words, words, None
        )

    def launch(call):
        of, partial = call.workspace, call.partial
        launched.append(of.transport)
        bad = (kind == of.transport or kind in ("wrong", "NaN", *FAILURES)) and of.rank == of.world_size - 1
        torch_backend.fused(call)
        if kind in FAILURES and bad:
            raise FAILURES[kind]
        if bad:
            partial[-1, 3] = float("nan") if kind == "NaN" else partial[-1, 3] + 0.5

    def prepare(of, *case):
        if kind == "does not compile" and of.rank == 0:
            raise CudaError("no compiler")

    monkeypatch.setattr(workspace, "allocate", allocate)
    monkeypatch.setattr(workspace, "choose_transport", lambda asked, *_: ("p2p" if asked == "auto" else asked, "why"))
    monkeypatch.setattr(selftest, "_launch", launch)
    monkeypatch.setattr(cuda_backend, "prepare", prepare)
    monkeypatch.setattr(selftest, "_passed", type(selftest._passed)())
    return launched


def _open(transport: str, tokens: int = 200, hidden: int = 72) -> Workspace:
    return Workspace(dist.group.WORLD, max_tokens=tokens, hidden=hidden, dtype=torch.bfloat16, transport=transport)


def _verdict(kind: str, asked: str, multicast: int = 0) -> tuple[str, str, int, list[str], list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("tokenweave.collective.workspace")
    log.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            launched = _stand_in(kind, monkeypatch, multicast=multicast)
            try:
                with _open(asked) as made:
                    counters = made.collectives + made.bytes_sent + made.copies
                    return made.transport, made.reason, counters, launched, messages
            except CollectiveError as error:
                return "refused", str(error), 0, launched, messages
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_transport_that_is_right_is_used(world_size):
    for transport, _, counters, launched, messages in run_ranks(world_size, _verdict, "right", "auto"):
        assert transport == "p2p"
        assert counters == 0
        assert len(launched) == 5
        assert not messages


@pytest.mark.parametrize("kind", ["wrong", "NaN", "does not compile", *FAILURES])
def test_a_transport_that_is_wrong_on_one_rank_is_refused_on_all(kind):
    for rank, (transport, reason, _, _, messages) in enumerate(run_ranks(3, _verdict, kind, "auto")):
        assert transport == "torch"
        assert "the p2p transport is refused" in reason
        assert len(messages) == (rank == 0), "one line, of one rank"
    for transport, reason, *_ in run_ranks(3, _verdict, kind, "p2p"):
        assert transport == "refused"
        assert "the p2p transport is refused" in reason
    reasons = [reason for _, reason, *_ in run_ranks(3, _verdict, kind, "auto")]
    told = {**{kind: str(error) for kind, error in FAILURES.items()}, "does not compile": "no compiler"}
    what = told.get(kind, "on rank 2 is not what")
    failed = 0 if kind == "does not compile" else 2
    assert all(f"rank {failed}: " in reason and what in reason for reason in reasons), "all know why"


def test_multicast_is_for_more_than_two_ranks():
    assert [found[0] for found in run_ranks(2, _verdict, "right", "auto", 1)] == ["p2p"] * 2
    for transport, reason, _, launched, _ in run_ranks(3, _verdict, "right", "auto", 1):
        assert transport == "multimem"
        assert "multicast" in reason
        assert set(launched) == {"multimem"}
    for transport, _, _, launched, _ in run_ranks(3, _verdict, "multimem", "auto", 1):
        assert transport == "p2p"
        assert launched == ["multimem"] * 5 + ["p2p"] * 5
    assert [found[0] for found in run_ranks(2, _verdict, "right", "multimem", 1)] == ["multimem"] * 2
    for transport, reason, *_ in run_ranks(2, _verdict, "right", "multimem"):
        assert transport == "refused"
        assert "no multicast address on every rank" in reason


def _twice() -> list[int]:
    counts = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        launched = _stand_in("right", monkeypatch)
        for tokens, hidden in ((50, 72), (9, 72), (200, 72), (300, 72), (200, 80), (1, 88)):
            with _open("auto", tokens, hidden):
                counts.append(len(launched))
    return counts


def test_a_group_asks_once_for_each_kind_of_workspace_and_again_for_more_rows():
    """With few rows no block works on row after row. 81 are as many as it tries."""
    assert run_ranks(2, _twice) == [[5, 5, 10, 10, 15, 20]] * 2
