"""Energy a replay on a real GPU, by its counter: the same load gives the same figure, near what the power's samples say.

PYTHONPATH=src python3 -m pytest -s -m gpu tests/test_gpu_energy.py
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shared_gpu import shares_gpu
from tokenweave.bench import environment
from tokenweave.bench.latency.measure import sustained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shares_gpu(), reason="others' work on the GPU is in its energy"),
]


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_same_load_takes_the_same_energy(alone):
    pytest.importorskip("pynvml")
    rows = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(rows)
    graph = torch.cuda.CUDAGraph()
    torch.mm(rows, rows, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(4):
            torch.mm(rows, rows, out=out)
    monitor = environment.Monitor(torch.cuda.current_device())
    if monitor.energy() is None:
        pytest.skip("this GPU has no energy counter that can be read")
    sustained(graph, 8000.0, 3.0, alone, monitor)  # to the temperature of the load
    watts = []
    for seconds in (0.3, 1.6, 1.6, 3.0):
        found = sustained(graph, 8000.0, seconds, alone, monitor)
        energy = found["energy"]
        assert energy["refused"] is None
        assert energy["changes"] >= 10
        watts.append(1e3 * found["joules"] / found["ms"])
        sampled = found["power_w"]["median"]
        apart = energy["seconds"][0] / (energy["changes"] - 1)
        print(
            f"\n{seconds} s asked for: {found['joules']:.2f} J a replay of {found['ms']:.2f} ms: {watts[-1]:.0f} W over "
            f"{energy['seconds'][0]:.2f} s, {energy['changes']} changes, {1e3 * apart:.1f} ms apart; samples {sampled:.0f} W"
        )
        assert watts[-1] == pytest.approx(sampled, rel=0.1)
    assert max(watts) < 1.04 * min(watts)
