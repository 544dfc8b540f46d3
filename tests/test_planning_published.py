"""Predictions against published figures, and the commands that make them: 8 H100, multimem, run eagerly (benchmarks/published)."""

from __future__ import annotations

import csv
import dataclasses
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.cli.main import main
from tokenweave.errors import RequestError
from tokenweave.models import builtin_names, read_config
from tokenweave.planning import EAGER, GPUS, GRAPH, Mode, Planner, Predictor, comm, machine_of, predict_step
from tokenweave.planning.batch import rounded_up

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "benchmarks" / "published"
sys.path.insert(0, str(ROOT / "scripts"))

import planning_tables  # noqa: E402


def rows_of(name: str) -> list[dict[str, float]]:
    with (PUBLISHED / name).open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["predict", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_published_prefills_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """All 42 values of both tensor parallel sizes, with the same parameters and what the command assumes by default."""
    errors = []
    for tp in (4, 8):
        measured = [row for row in rows_of("llama-3.3-70b.csv") if row["tp"] == tp]
        tokens = ",".join(str(int(row["tokens"])) for row in measured)
        shown = predicted(
            capsys,
            *(
                "--model",
                "Llama-3.3-70B",
                "--gpu",
                "h100",
                "--tp",
                str(tp),
                "--tokens",
                tokens,
                "--transport",
                "multimem",
            ),
        )
        assert {key: shown[key] for key in ("model", "gpu", "tp", "transport")} == {
            "model": "Llama-3.3-70B",
            "gpu": "h100",
            "tp": tp,
            "transport": "multimem",
        }
        for ours, theirs in zip(shown["rows"], measured, strict=True):
            assert list(ours) == ["tokens", "sequential_ms", "fused_ms", "woven_ms", "no_comm_ms"]
            assert ours["tokens"] == theirs["tokens"]
            names = {"sequential_ms": "baseline_ms", "no_comm_ms": "no_comm_ms", "woven_ms": "tokenweave_ms"}
            errors += [abs(ours[mine] / theirs[yours] - 1) for mine, yours in names.items()]
    assert len(errors) == 42
    assert max(errors) < 0.08
    assert statistics.median(errors) < 0.02


def test_published_kernel_times_are_predicted() -> None:
    errors = [
        abs(float(comm.fused_us(row["tokens"], 8192, 8, GPUS["h100"], "multimem", int(key[5:]))) / us - 1)
        for row in rows_of("fused_kernel.csv")
        for key, us in row.items()
        if key.startswith("ctas_")
    ]
    assert len(errors) == 70
    assert max(errors) < 0.1
    assert statistics.median(errors) < 0.02


@pytest.mark.parametrize("name", [name for name in builtin_names() if name != "SmolLM2-135M"])  # too small to need GPUs
def test_other_models_follow_from_the_same_parameters(name: str) -> None:
    """Nothing is fitted per model: twice the layers take twice the time, and a bigger model takes about its FLOPs more."""
    config = read_config(name)
    machine = machine_of("h100", 4, "multimem", dataclasses.replace(EAGER, step_us=0.0, host_us=0.0))
    once, twice = (
        predict_step(dataclasses.replace(config, layers=n * config.layers), machine, [(8192, 0)]) for n in (1, 2)
    )
    assert twice.sequential_us == pytest.approx(2 * once.sequential_us, rel=0.05)
    assert once.no_comm_us < once.fused_us < 1.01 * once.sequential_us
    assert once.woven_us is not None
    assert once.woven_us < once.sequential_us


def test_eager_launches_are_no_shorter_than_the_host_needs() -> None:
    config = read_config("Llama-3.1-8B")
    slow = dataclasses.replace(EAGER, host_us=100.0)
    eager = predict_step(config, machine_of("h100", 4, "multimem", slow), [(16, 0)])
    graph = predict_step(config, machine_of("h100", 4, "multimem", GRAPH), [(16, 0)])
    launches = config.layers * (4 + 3 + 2 * 2)
    assert eager.sequential_us > slow.step_us + launches * slow.host_us > 5 * graph.sequential_us
    assert eager.mode is not Mode.WOVEN, "twice the launches"
    assert graph.sequential_us < 5000


steps = st.lists(st.tuples(st.integers(1, 600), st.integers(0, 4000)), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(steps, st.integers(0, 300), st.integers(0, 9000), st.randoms())
def test_steps_of_prompts_and_decodes_are_one_however_they_are_told(
    chunks: list[tuple[int, int]], decodes: int, context: int, shuffle
) -> None:
    predictor = predictor_of_8b()
    listed = [*chunks, *[(1, context)] * decodes]
    shuffle.shuffle(listed)
    whole = predictor.step(listed)
    assert whole.tokens == sum(rows for rows, _ in listed)
    assert predictor.step_of(tuple(chunks), decodes, rounded_up(context)).tokens == whole.tokens
    if all(rows > 1 for rows, _ in chunks):
        assert predictor.step_of(tuple(chunks), decodes, context) == whole
    assert whole.auto_us == whole.of(whole.mode) <= whole.sequential_us
    assert 0 < whole.no_comm_us < whole.sequential_us
    more = predictor.step([*listed, (5, 7)])
    assert more.sequential_us >= whole.sequential_us


_PREDICTORS: dict[str, Predictor] = {}


def predictor_of_8b() -> Predictor:
    return _PREDICTORS.setdefault("8B", Predictor(read_config("Llama-3.1-8B"), machine_of("h200", 4, "p2p")))


def test_steps_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    predictor = predictor_of_8b()
    for bad in (
        lambda: predictor.step([]),
        lambda: predictor.step_of(()),
        lambda: predictor.step_of((), -1),
        lambda: machine_of("h100", 0),
    ):
        with pytest.raises(RequestError):
            bad()
    with pytest.raises(ValueError, match="one row"):
        predictor.step([(1, 5)]).of(Mode.WOVEN)
    for arguments, message in [
        (["--tokens", "x"], "--tokens 'x'"),
        (["--tokens", "1000000000"], "expected at most 4194304"),
        (["--tokens", "5", "--transport", "p2q"], "unknown transport"),
    ]:
        assert main(["predict", "--model", "Llama-3.1-8B", "--gpu", "h100", "--tp", "4", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["predict", "--model", "Llama-3.1-8B", "--gpu", "h10", "--tokens", "5"]) == 2


def test_text_names_the_best_mode(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "Llama-3.1-8B", "--gpu", "h200", "--tp", "4", "--tokens", "1,4096", "--launch", "graph"]
    assert main(["predict", *arguments]) == 0
    out = capsys.readouterr().out
    assert "woven, 1." in out
    row = predicted(capsys, *arguments)["rows"][0]
    assert row["woven_ms"] is None
    assert row["sequential_ms"] > row["fused_ms"] > 0


def test_planner_and_predictor_agree() -> None:
    config, machine = read_config("Llama-3.3-70B"), machine_of("h100", 8, "multimem")
    planner = Planner(config, mode="auto", costs=machine)
    for tokens in (64, 900, 5000):
        explained, step = planner.explain(tokens), predict_step(config, machine, [(tokens, 0)])
        assert step.mode is explained.plan.mode
        assert step.auto_us / 1e3 == pytest.approx(explained.predicted_ms[str(step.mode)])
        assert np.isfinite(step.no_comm_us)


def test_the_documents_tables_are_what_the_code_predicts() -> None:
    document = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert planning_tables.filled(document) == document, "run `python scripts/planning_tables.py`"


def test_what_is_predicted_of_more_ranks_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/ranks.md: its tables, and one line of them from `tokenweave predict` itself."""
    document = planning_tables.RANKS.read_text(encoding="utf-8")
    again = planning_tables.filled(document, planning_tables.RANKS_SECTIONS)
    assert again == document, "run `python scripts/planning_tables.py`"
    arguments = ["--model", "Llama-3.1-8B", "--gpu", "h200", "--tp", "4", "--transport", "p2p", "--launch", "graph"]
    tokens = ",".join(map(str, planning_tables.MORE))
    rows = predicted(capsys, *arguments, "--tokens", tokens)["rows"]
    gains = [f"{row['sequential_ms'] / min(row['fused_ms'], row['woven_ms']):.2f}" for row in rows]
    assert f"| Llama-3.1-8B | 4 | sequential / auto | {' | '.join(gains)} |" in document
