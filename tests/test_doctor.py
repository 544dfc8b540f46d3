"""``tokenweave doctor``: this machine as it is, and machines with GPUs as a faked torch and nvidia-smi tell of them."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tokenweave.cli.doctor import text
from tokenweave.cli.main import main
from tokenweave.collective import workspace
from tokenweave.doctor import machine
from tokenweave.models import attention_choice

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPHB\tNODE\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tNV4\tNODE\t0-31\t0\t\tN/A
GPU2\tPHB\tNV4\t X \tSYS\t0-31\t0\t\tN/A
NIC0\tNODE\tNODE\tSYS\t X

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def _choose(asked, device, world_size):
    return ("p2p", "the GPUs reach each other's memory") if world_size > 1 else ("torch", "p2p needs NVIDIA GPUs")


def _gpus(count: int, *, capability=(9, 0), multicast=True) -> tuple[machine.Gpu, ...]:
    return tuple(machine.Gpu(i, "NVIDIA H200", capability, 132, 143_771 << 20, multicast) for i in range(count))


@pytest.fixture
def two_h200(monkeypatch):
    """A torch that sees two H200 with NVLink, whatever this machine has."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=1 << 37)
    cuda = SimpleNamespace(
        device_count=lambda: 2,
        is_available=lambda: True,
        get_device_properties=lambda index: properties,
        can_device_access_peer=lambda a, b: True,
        nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
    )
    fake = SimpleNamespace(__version__="2.11.0+cu130", version=SimpleNamespace(cuda="13.0"), cuda=cuda)
    monkeypatch.setattr(machine, "_torch", lambda: (fake, ""))
    monkeypatch.setattr(machine, "_backends", lambda torch: ["gloo", "nccl 2.28.9"])
    monkeypatch.setattr(machine, "_multicast", lambda index: True)
    monkeypatch.setattr(machine, "nvidia_smi", lambda *args: TOPOLOGY if args[0] == "topo" else "580.159.04\n")
    monkeypatch.setattr(workspace, "choose_transport", _choose)
    for name in ("CUDA_VISIBLE_DEVICES", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)


def test_this_machine(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torch       {torch.__version__}" in out
    assert "gloo" in out
    assert "transport   torch" in out or torch.cuda.device_count() > 1


def test_an_attention_kernel_that_is_none_is_told_without_gpus_too(monkeypatch):
    monkeypatch.setenv("TOKENWEAVE_ATTENTION", "foo")
    attention = machine.examine().attention
    assert attention.value == "none"
    assert attention.why.startswith("TOKENWEAVE_ATTENTION='foo'; expected one of auto, ")


def test_json_has_the_same_facts(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"] == torch.__version__
    assert report["broken"] is False
    assert len(report["gpus"]) == torch.cuda.device_count()
    assert all(report["packages"].values())
    assert {"numpy", "gguf", "tokenizers"} <= report["packages"].keys()


def test_without_torch_it_says_so_and_how_to_get_it():
    code = "import sys; sys.modules['torch'] = None; from tokenweave.cli.main import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "PROBLEM: torch is not installed\n    pip install 'torch>=2.11'" in done.stdout
    assert "transport   none" in done.stdout
    assert "attention   none" in done.stdout
    assert done.stderr == ""


def test_a_damaged_torch_is_a_problem_and_no_crash(monkeypatch, capsys):
    def damaged(name):
        raise OSError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(machine.importlib, "import_module", damaged)
    report = machine.examine()
    assert report.broken
    assert "torch does not import: OSError: libtorch.so" in text(report)


def test_missing_packages_are_named_with_the_command_that_gets_them(monkeypatch):
    version = machine.version_of
    monkeypatch.setattr(machine, "version_of", lambda name: None if name in ("gguf", "tqdm") else version(name))
    report = machine.examine()
    assert report.broken
    assert "PROBLEM: missing: gguf, tqdm\n    pip install 'gguf>=0.10' 'tqdm>=4.64'" in text(report)


def test_sources_that_are_not_installed(monkeypatch):
    def missing(name):
        raise machine.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.importlib.metadata, "requires", missing)
    report = machine.examine()
    assert not report.broken
    assert "packages    unknown" in text(report)
    assert "hint: this package is imported from its sources" in text(report)


def test_two_gpus(two_h200):
    report = machine.examine()
    shown = text(report)
    assert "GPU 1       NVIDIA H200, sm_90, 132 SMs, 128 GiB" in shown
    assert "GPU 0-1     peer access, 18 NVLinks" in shown
    assert "driver      580.159.04" in shown
    assert report.multicast.value == "yes"
    assert report.transport.value == "p2p"
    assert not report.broken


@pytest.mark.parametrize(
    ("capability", "asked", "value", "why"),
    [
        ((9, 0), "", "fa3-fwd 0", "FlashAttention-3"),
        ((8, 0), "", "torch", "torch's FlashAttention-2; FlashAttention-3 is for compute capability 9.0"),
        ((9, 0), "torch", "torch", "torch's FlashAttention-2, because TOKENWEAVE_ATTENTION says so"),
        ((9, 0), "flash-attn-9", "none", "TOKENWEAVE_ATTENTION='flash-attn-9'; expected one of auto, "),
    ],
)
def test_the_attention_kernel_and_why(two_h200, monkeypatch, capability, asked, value, why):
    build = SimpleNamespace(name="fa3-fwd", label="fa3-fwd 0")
    monkeypatch.setattr(attention_choice, "FLASH3_BUILDS", (build,))
    monkeypatch.setattr(attention_choice, "load_flash3", lambda given: None)
    monkeypatch.setattr(attention_choice, "_load_flash2", lambda: None)
    monkeypatch.setenv("TOKENWEAVE_ATTENTION", asked)
    fake, _ = machine._torch()
    properties = fake.cuda.get_device_properties(0)
    properties.major, properties.minor = capability
    report = machine.examine()
    assert report.attention.value == value
    assert report.attention.why.startswith(why)
    assert f"attention   {value}: {why}" in text(report)


def test_gpu_packages_are_asked_for_only_where_there_are_gpus(two_h200, monkeypatch):
    version = machine.version_of
    monkeypatch.setattr(machine, "version_of", lambda name: None if "cuda" in name else version(name))
    report = machine.examine()
    (advice,) = report.advice
    assert report.transport == machine.Verdict("torch", "p2p needs cuda-core, cuda-bindings, nvidia-cuda-nvrtc")
    assert advice.remedy.startswith("pip install 'cuda-core>=")
    assert not report.broken


def test_gpus_that_cannot_reach_each_other(two_h200):
    fake, _ = machine._torch()
    fake.cuda.can_device_access_peer = lambda a, b: False
    report = machine.examine()
    assert report.transport == machine.Verdict("torch", "GPUs 0 and 1 cannot reach each other's memory")
    assert "GPU 0-1     no peer access" in text(report)


def test_a_cpu_build_of_torch_beside_a_driver_is_pointed_out(two_h200, monkeypatch):
    fake, _ = machine._torch()
    fake.cuda.device_count = lambda: 0
    fake.version.cuda = None
    assert "torch is a build without CUDA" in text(machine.examine())


@pytest.mark.parametrize(
    ("gpus", "environment", "value", "why"),
    [
        ((), {}, "no", "none here"),
        (_gpus(1), {}, "no", "1 here"),
        (_gpus(2, capability=(8, 0)), {}, "no", "sm_80"),
        (_gpus(2, multicast=False), {}, "no", "driver says"),
        (_gpus(2), {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, "no", "TORCH_SYMM_MEM_DISABLE_MULTICAST"),
        (_gpus(2), {"NCCL_NVLS_ENABLE": "0"}, "no", "NCCL_NVLS_ENABLE=0"),
        (_gpus(2, multicast=None), {}, "unknown", "cuda-bindings"),
        (_gpus(2), {"NCCL_NVLS_ENABLE": "1"}, "yes", "nothing switches it off"),
    ],
)
def test_multicast_or_not_and_why(gpus, environment, value, why):
    verdict = machine.judge_multicast(gpus, environment)
    assert verdict.value == value
    assert why in verdict.why


def test_topology_as_nvidia_smi_prints_it():
    links = machine.parse_topology(TOPOLOGY)
    assert links[0, 1] == links[1, 0] == 18
    assert links[1, 2] == 4
    assert links[0, 2] == 0
    assert (0, 0) not in links
    assert machine.parse_topology("") == {}


def test_the_cache_and_what_it_holds(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TOKENWEAVE_CACHE", str(tmp_path / "cache"))
    assert machine.judge_cache() == machine.Verdict(str(tmp_path / "cache"), "compiled kernels 0, tuned tables 0")
    (tmp_path / "cache" / "profiles").mkdir(parents=True)
    (tmp_path / "cache" / "profiles" / "a.json").touch()
    assert machine.judge_cache().why == "compiled kernels 0, tuned tables 1"
    assert main(["doctor"]) == 0
    assert f"cache       {tmp_path / 'cache'}: compiled kernels 0" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["file/cache", "x" * 300])
def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch, where):
    (tmp_path / "file").touch()
    monkeypatch.setattr("tokenweave.cache.os.environ", {"TOKENWEAVE_CACHE": f"{tmp_path}/{where}"})
    assert "it cannot be written, so that each process compiles" in machine.judge_cache().why
