"""vLLM's ranks on one GPU: what is asked of vLLM is there, whatever the machine; that it works is what the GPU tests show."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import one_gpu
import pytest

import shared_gpu

pytest.importorskip("vllm")


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, without MPS, whose ranks are to share it."""
    monkeypatch.setenv("TOKENWEAVE_TEST_SHARE_GPU", "1")
    monkeypatch.setattr(one_gpu.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(shared_gpu, "CONTROL", "no-such-program")


def test_nothing_is_shared_unless_asked_for_or_without_a_gpu(one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_gpu.torch.cuda, "device_count", lambda: 0)
    with one_gpu.sharing(2) as sharing:
        assert (not sharing, sharing.arguments, sharing.environment) == (True, [], {})
    monkeypatch.setattr(one_gpu.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("TOKENWEAVE_TEST_SHARE_GPU")
    with one_gpu.sharing(2) as sharing:
        assert not sharing


@pytest.mark.filterwarnings("ignore:ranks share the GPU by time slices")
def test_vllm_knows_the_arguments(one: None) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with one_gpu.sharing(2) as sharing:
        assert sharing
        given = EngineArgs(**sharing.engine)
        parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(sharing.arguments)
    for name, value in sharing.engine.items():
        assert getattr(given, name) == getattr(parsed, name) == value


@pytest.mark.filterwarnings("ignore:ranks share the GPU by time slices")
def test_its_processes_find_the_worker(one: None) -> None:
    import one_gpu_worker
    from vllm.v1.worker import gpu_worker

    with one_gpu.sharing(2) as sharing:
        folders = [Path(folder) for folder in sharing.environment["PYTHONPATH"].split(os.pathsep)]
        module, _, name = sharing.engine["worker_cls"].rpartition(".")
    for needed in (module, "shared_gpu"):
        assert any((folder / f"{needed}.py").exists() for folder in folders)
    assert module == one_gpu_worker.__name__
    assert issubclass(getattr(one_gpu_worker, name), gpu_worker.Worker)


def test_each_worker_is_on_the_first_gpu_and_seems_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import one_gpu_worker

    seen: list[Any] = []

    def init_device(worker: Any) -> None:
        seen.extend([worker.local_rank, os.environ["NCCL_HOSTID"], one_gpu_worker.custom_all_reduce._can_p2p(0, 2)])

    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"):
        monkeypatch.setenv(name, "")  # and as it was after the test
    monkeypatch.setattr(one_gpu_worker.gpu_worker.Worker, "init_device", init_device)
    monkeypatch.setattr(one_gpu_worker.custom_all_reduce, "_can_p2p", one_gpu_worker.custom_all_reduce._can_p2p)
    worker: Any = object.__new__(one_gpu_worker.Worker)
    worker.rank = worker.local_rank = 1
    worker.init_device()
    assert seen == [0, "rank 1", True]
