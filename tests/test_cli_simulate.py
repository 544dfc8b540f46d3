"""``tokenweave simulate``: its table, JSON and picture, its errors, and its speed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tokenweave.cli.main import main

BASE = ["simulate", "--model", "Llama-3.1-8B", "--gpu", "h100", "--tp", "4", "--requests", "100"]


def simulated(folder: Path, *arguments: str, trace: str = "sharegpt") -> dict:
    path = folder / "deep" / "result.json"
    assert main([*BASE, "--trace", trace, "--json", str(path), *arguments]) == 0
    return json.loads(path.read_text("utf-8"))


def test_json_has_what_is_documented(tmp_path: Path) -> None:
    result = simulated(
        tmp_path, "--rate", "4,40", "--replicas", "1,2", "--ttft-target", "100", "--transport", "multimem"
    )
    runs = result.pop("runs")
    assert {key: result[key] for key in ("trace", "requests", "arrivals", "model", "gpu", "tp", "transport")} == {
        "trace": "sharegpt", "requests": 100, "arrivals": "poisson", "model": "Llama-3.1-8B", "gpu": "h100", "tp": 4,
        "transport": "multimem",
    }  # fmt: skip
    assert (result["max_batch_tokens"], result["max_requests_running"]) == (2048, 256)
    assert result["kv_tokens"] > 1_500_000
    assert [(run["replicas"], run["rate"], run["mode"]) for run in runs] == [
        (replicas, rate, mode) for replicas in (1, 2) for rate in (4, 40) for mode in ("sequential", "auto")
    ]
    for run in runs:
        assert run["requests_per_s"] * run["seconds"] == pytest.approx(100)
        assert run["output_tokens_per_s"] * run["seconds"] == pytest.approx(result["output_tokens"])
        assert set(run["ttft_ms"]) == set(run["tpot_ms"]) == {"mean", "p50", "p90", "p99"}
        assert 0 <= run["within_targets"] <= 1
        assert 0 < run["busy"] < 1 + 1e-9
    for sequential, auto in zip(runs[::2], runs[1::2], strict=True):
        assert auto["ttft_ms"]["p50"] < sequential["ttft_ms"]["p50"]
        assert auto["tpot_ms"]["p50"] < sequential["tpot_ms"]["p50"]
        assert auto["within_targets"] >= sequential["within_targets"] - 0.03  # other steps: single requests may lose


def test_text_says_what_auto_gains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = simulated(tmp_path, "--modes", "sequential,auto,no_comm", "--burst", trace="arxiv_summarization")
    out = capsys.readouterr().out
    ratio = result["runs"][1]["requests_per_s"] / result["runs"][0]["requests_per_s"]
    assert ratio > 1.02
    assert f"auto against sequential: throughput x{ratio:.3f}; TTFT p50 -" in out
    assert "100 requests all at once" in out
    assert "cache of" in out
    assert "in time" not in out
    assert result["arrivals"] == "burst"
    assert result["runs"][0]["within_targets"] is None


def test_times_of_the_trace_are_used_unless_told_otherwise(tmp_path: Path) -> None:
    trace = tmp_path / "timed.csv"
    trace.write_text("arrived_at,prompt_tokens,output_tokens\n" + "".join(f"{10 * i},100,20\n" for i in range(10)))
    recorded = simulated(tmp_path, trace=str(trace))
    assert recorded["arrivals"] == "trace"
    assert recorded["runs"][0]["seconds"] == pytest.approx(10 * 99, abs=1)
    assert simulated(tmp_path, "--burst", trace=str(trace))["runs"][0]["seconds"] < 10
    random = simulated(tmp_path, "--rate", "30", trace=str(trace))
    assert random["arrivals"] == "poisson"
    assert random["runs"][0]["seconds"] == pytest.approx(100 / 30, rel=0.4)


def test_requests_that_do_not_fit_are_refused_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "long.csv"
    trace.write_text("prompt_tokens,output_tokens\n100,20\n140000,20\n100,5\n")
    assert main([*BASE, "--trace", str(trace)]) == 2
    assert "1 of 3 requests can never be served, the first of them request 1: 140000 prompt" in (
        err := capsys.readouterr().err
    )
    assert "the model's context has room for 131072" in err
    result = simulated(tmp_path, "--drop-unfit", "--requests", "2", trace=str(trace))
    assert "1 of 3 requests left out" in capsys.readouterr().out
    assert (result["requests"], result["prompt_tokens"], result["output_tokens"]) == (2, 200, 25)
    assert main([*BASE, "--trace", str(trace), "--drop-unfit", "--kv-tokens", "50"]) == 2
    assert "none of the trace's 3 requests fits" in capsys.readouterr().err


@pytest.mark.parametrize("extra", [["--burst"], ["--rate", "5,20"], ["--replicas", "1,2"]])
def test_pictures(tmp_path: Path, extra: list[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "deep" / "picture.svg"
    assert (
        main(
            [*BASE, "--trace", "sharegpt", "--requests", "50", "--max-batch-tokens", "256", "--plot", str(path), *extra]
        )
        == 0
    )
    assert path.read_text("utf-8").lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nope"], "no trace 'nope'"),
        (["--rate", "0"], "--rate '0'; expected positive numbers"),
        (["--rate", "4,x"], "--rate '4,x'"),
        (["--rate", "nan"], "--rate 'nan'"),
        (["--replicas", "0"], "--replicas '0'"),
        (["--modes", "auto,turbo"], "--modes 'turbo'; expected some of sequential, fused, woven, auto, no_comm"),
        (["--max-batch-tokens", "0"], "--max-batch-tokens 0"),
        (["--max-batch-tokens", "99999999"], "expected at most"),
        (["--max-requests-running", "-1"], "--max-requests-running -1"),
        (["--kv-tokens", "0"], "--kv-tokens 0"),
        (["--kv-tokens", "9", "--memory-gib", "80"], "give one of them"),
        (["--memory-gib", "1"], "leave no room for a cache"),
        (["--overhead-us", "-1"], "--overhead-us -1"),
        (["--requests", "0"], "0 requests"),
        (["--gpu", "h300"], "no GPU 'h300'"),
        (["--gpu", "cpu"], "memory of 'cpu' is not known; name a GPU (--gpu h100), its memory (--memory-gib) or"),
        (["--model", "nope"], "no model 'nope'"),
        (["--tp", "0"], "tensor parallel size 0"),
        (["--tp", "64"], "size 64 on h100; expected at most 8"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--trace", "sharegpt", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_fifty_thousand_requests_take_seconds(tmp_path: Path) -> None:
    """A million take less than a minute; a twentieth of them, with slack for a busy machine, not more than its share."""
    began = time.process_time()
    result = simulated(tmp_path, "--requests", "50000", "--rate", "50", "--replicas", "2", "--modes", "auto")
    assert time.process_time() - began < 15  # 3 s on an idle core, half of it the predictor's, which doesn't grow
    assert result["runs"][0]["steps"] > 100_000
