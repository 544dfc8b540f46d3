"""The plugin under vLLM's Ray executor, on CPUs: Ray's workers get its variables, and their counters reach the driver.

vLLM's CPU build refuses Ray, since its platform names no resource for a worker. A platform plugin names one: that of GPUs,
of which the cluster is told to have two. vLLM's executor, its actors and what they hand over are as they are.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import pytest
import saved_models
from server import shared_memory

PROMPTS = [list(range(3, 60)), [5, 6, 7]]
TOKENS = 8


def which_platform() -> str:
    """The entry point of the platform plugin."""
    return "test_ray.RayOnCpu"


def __getattr__(name: str) -> Any:
    if name != "RayOnCpu":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform

    return type(name, (CpuPlatform,), {"ray_device_key": "GPU"})


def main(model: str, answer: Path, temporary: str) -> None:
    """The driver: variables that are set after its cluster was started are not inherited by the workers."""
    import prometheus_client
    import ray

    ray.init(
        num_gpus=2, num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=f"{temporary}/ray"
    )
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # the engine's core joins it
    os.environ |= {"TOKENWEAVE": "force", "TOKENWEAVE_MODE": "woven"}
    from vllm import LLM

    llm = LLM(
        **{**harness.ENGINE, "model": model, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
    )
    tokens = harness.generate(llm, PROMPTS, TOKENS)
    counters = prometheus_client.generate_latest().decode()
    left = [str(file) for file in shared_memory(_workers())]  # Ray ends its actors without a word
    answer.write_text(json.dumps({"tokens": tokens, "counters": counters, "left": left}))
    llm.llm_engine.engine_core.shutdown()
    ray.shutdown()


def _workers() -> list[int]:
    titles = {int(file.parent.name): file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")}
    return [pid for pid, title in titles.items() if title.startswith(b"ray::RayWorker")]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install ray")
@pytest.mark.parametrize("newer", ["1", "0"])
def test_under_vllms_ray_executor(tmp_path: Path, newer: str) -> None:
    model = saved_models.tiny_model(tmp_path / "model")
    info = tmp_path / "plugin" / "ray_on_cpu-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-on-cpu\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nray_on_cpu = test_ray:which_platform\n")
    here = Path(__file__).parent
    paths = [str(info.parent), str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **harness.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": newer}
    del environment["TOKENWEAVE"]
    with tempfile.TemporaryDirectory(prefix="tw", dir="/tmp") as temporary:  # a short path: there are sockets in it
        command = [sys.executable, __file__, str(model), str(tmp_path / "answer.json"), temporary]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-6000:]
    answer = json.loads((tmp_path / "answer.json").read_text())
    for file in answer["left"]:
        Path(file).unlink(missing_ok=True)
    assert answer["tokens"] == saved_models.transformers_tokens(model, PROMPTS, TOKENS)
    assert ("RayWorkerProc" if newer == "1" else "RayWorkerWrapper") in output
    (steps,) = [
        line
        for line in answer["counters"].splitlines()
        if line.startswith('tokenweave:steps_total{engine="0",mode="woven"')
    ]
    assert float(steps.split()[-1]) > 0


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
