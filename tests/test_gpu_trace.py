"""``tokenweave trace`` and ``tokenweave bench latency`` on real GPUs, small: what they say of a woven step adds up.

    PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_trace.py

Two ranks by default; TOKENWEAVE_TEST_RANKS=4 runs the same on four.
"""

import gzip
import json

import pytest

from gpu_cases import RANKS
from shared_gpu import shares_gpu
from tokenweave.bench.trace.events import gpu_spans, tagged
from tokenweave.cli.main import main

pytestmark = [
    pytest.mark.gpu(count=RANKS),
    pytest.mark.timeout(180),
    pytest.mark.skipif(shares_gpu(), reason="the commands' ranks have a GPU each"),
]
SMALL = ["--model", "Llama-3.1-8B", "--layers", "3", "--tp", str(RANKS)]


def test_every_kernel_of_a_graph_finds_its_stage(tmp_path, capfd):
    assert main(["trace", *SMALL, "--tokens", "2048", "--mode", "woven", "--out", str(tmp_path)]) == 0
    said = capfd.readouterr()
    assert "not assigned" not in said.err
    assert "no picture" not in said.err
    assert {path.name for path in tmp_path.glob("layer-*.svg")} == {"layer-eager.svg", "layer-graph.svg"}
    eager, graph = (
        gpu_spans(json.loads(gzip.decompress((tmp_path / f"rank1-{name}.json.gz").read_bytes())))
        for name in ("eager", "graph")
    )
    spans = tagged(graph, eager)
    assert all(span.stage is not None for span in spans)
    comm = [span for span in spans if span.lane == "communication"]
    # Both splits of the embedding and of every half of a layer; but no row of the prefix is sampled after the last.
    assert len(comm) == 2 * (1 + 2 * 3) - 1
    found = json.loads((tmp_path / "summary.json").read_text())["steps"]["graph"]
    assert found["busy_ms"] > 0.9 * found["span_ms"], "a replayed graph has no gaps to speak of"
    kinds = found["by_kind_ms"]
    others = sum(kinds.values()) - kinds["collective"]  # on many ranks they take less time than the collectives
    assert found["hidden_ms"] > 0.5 * min(kinds["collective"], others)
    assert min(found["waiting_ms"]) < 0.2 * found["span_ms"]


def test_the_figures_of_the_latency_benchmark_add_up(tmp_path):
    path = tmp_path / "out.json"
    options = [
        "--tokens",
        "1024",
        "--baselines",
        "nccl,torch",
        "--json",
        str(path),
        "--plot",
        str(tmp_path / "out.svg"),
    ]
    assert main(["bench", "latency", *SMALL, *options]) == 0
    result = json.loads(path.read_text())
    rows = {row["mode"]: row for row in result["rows"]}
    assert rows["auto"]["best_single"]["ratio"]["value"] > 0.9
    shares = rows["sequential"]["shares"]
    assert 0.02 < shares["communication"]["value"] < (0.6 if RANKS == 2 else 0.8)
    assert 0 < shares["rmsnorm"]["value"] < 0.3
    for mode, row in rows.items():
        profile = row["profile"]
        assert 0.5 * row["ms"] < profile["span_ms"] < 2 * row["ms"], mode
        assert profile["busy_ms"] <= profile["span_ms"]
        assert bool(profile["by_kind_ms"].get("collective")) == (mode != "no_comm")
        assert profile["hidden_ms"] < 0.05 * profile["span_ms"] or mode in ("woven", "auto")
        energy = row["sustained"]["energy"]
        assert (row["joules_per_token"] is None) == (energy["refused"] is not None), energy
        if row["joules_per_token"] is not None:
            watts = row["joules_per_token"] * 1024 / (row["sustained"]["ms"] / 1e3)
            assert RANKS * 60 < watts < RANKS * 1.06 * result["environment"]["power_limit_w"], (
                "of all GPUs, over the replays"
            )
            assert energy["changes"] >= 10
            assert min(energy["seconds"]) > 0.1
    assert (tmp_path / "out.svg").exists()
