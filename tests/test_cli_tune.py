"""``tokenweave tune``: arguments, the summary, and the comparison of predicted with measured steps."""

import json
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tokenweave.bench.latency.report import plan_json
from tokenweave.bench.launch import Rank
from tokenweave.cli import tune as cli
from tokenweave.cli.arguments import command_line
from tokenweave.cli.main import main
from tokenweave.cli.model import planner_of
from tokenweave.planning import Planner, machine
from tokenweave.planning.plan import Mode, Plan, Scheme, woven_plan
from tokenweave.planning.profile import Profile
from tokenweave.planning.profile_table import write_table
from tokenweave.tuning import find
from tokenweave.tuning.verify import MODES, TOKENS, checks, summary, tables, text
from tuning_cases import LLAMA, FakePieces, h200, setting_of, table_of

MACHINE = h200()
TABLE = table_of(
    FakePieces(MACHINE, noise=0.02),
    setting_of(MACHINE, blocks=((4, 4), (8, 4))),
    date="2026-11-29",
    model="Llama-3.1-8B",
    seconds=61.2,
    while_measuring={"sm_mhz": {"low": 1, "median": 1710, "high": 2}, "celsius": None, "limits": {"power": 0.4}},
    left_out=["finer steps"],
    uncovered=3,
)


def _args(*words):
    import argparse

    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    return parser.parse_args(["tune", "--model", "Llama-3.1-8B", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tp", "1"), "--tp 1; expected 2 to 8"),
        (("--tp", "64"), "--tp 64; expected 2 to 8"),
        (("--max-tokens", "100"), "--max-tokens 100; expected at least 512"),
        (("--seconds", "0"), "--seconds 0; expected a positive number"),
        (("--verify", "--layers", "0"), "--layers 0; expected at least 1"),
        (("--verify", "--tokens", "1,x"), "--tokens '1,x'; expected positive whole numbers"),
        (("--verify", "--tokens", "200000"), "--tokens 200000; the model's context is 131072"),
        (("--model", "Llama-9"), "no model 'Llama-9'"),
        ((), "--tp 2 needs as many GPUs; torch sees 0"),
    ],
)
def test_what_cannot_be_measured_is_told_before_any_rank_starts(words, message, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["tune", "--model", "Llama-3.1-8B", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_rank_gets_the_same_arguments():
    words = ("--tp=4", "--out=x/t.json", "--max-tokens=4096", "--seconds=9.5", "--verify", "--sweep", "--tokens=64,100")
    args = _args(*words, "--layers=2", "--json=out.json", "--time-limit=10")
    command = command_line(("tune",), args, cli.OPTIONS)
    assert command[0] == "tune"
    again = _args(*command[1:])
    assert vars(again) == vars(args)


def test_the_summary_names_what_was_measured_on_what(tmp_path):
    shown = cli.summary(TABLE, tmp_path / "table.json")
    assert f"Llama-3.1-8B on 2 x NVIDIA H200, p2p: {len(TABLE.times)} points" in shown
    assert "in 61.2 s" in shown
    assert "sm_mhz 1710" in shown
    assert "left out for lack of time: finer steps" in shown
    assert "3 samples ran longer than the work beside them" in shown
    assert shown.endswith(f"written to {tmp_path / 'table.json'}")


@pytest.mark.parametrize("final", [True, False], ids=["in both passes", "in the first"])
def test_nccls_step_counts_as_in_the_rounds_of_the_others(final):
    planner = Planner(LLAMA, costs=Profile(TABLE, LLAMA, MACHINE), mode="auto")
    result = _result(planner, (3500,), 1.25)
    (row,) = (row for row in result["rows"] if row["mode"] == "sequential")
    (nccl,) = result["sequential"]
    right = nccl["ms"]
    nccl["ms"] = right * 1.1  # the first pass ran at lower clocks
    result["sequential"].append({"tokens": 3500, "variant": row["variant"], "ms": row["ms"] * 1.1})
    if final:
        result["finalists"] = [{"tokens": 3500, "mode": "sequential", "variant": "nccl", "ms": right}]
    (check,) = checks(result, planner)
    assert check.measured["sequential"] == pytest.approx(right)


def _result(planner, tokens, wrong_by, swept=False):
    """What the latency benchmark would find if steps took ``wrong_by`` times what is predicted."""
    result = {"rows": [], "sequential": [], "sweep": []}
    for n in tokens:
        explanation = planner.explain(n)
        head = planner.model.head_us(1) / 1e3
        predicted = {mode: ms - head for mode, ms in explanation.predicted_ms.items()}
        predicted["auto"] = predicted[str(explanation.plan.mode)]
        for mode in MODES:
            if mode == "no_comm":
                plan = None
            elif mode == "auto":
                plan = plan_json(explanation.plan)
            else:
                plan = plan_json(explanation.woven if mode == "woven" else Plan(Mode(mode)))
            row = {"tokens": n, "mode": mode, "variant": "planned", "ms": predicted[mode] * wrong_by, "plan": plan}
            if mode == "sequential":
                result["sequential"].append({"tokens": n, "variant": "nccl", "ms": row["ms"]})
                row |= {"variant": "torch two-shot", "ms": row["ms"] * 0.9}
            if mode == "woven" and swept:
                quick = row["ms"] * 0.9  # at the clocks of a few replays
                swept_to = {"variant": "cut 64", "plan": plan_json(woven_plan(64, Scheme(8, 2), None))}
                result["sweep"].append({"tokens": n, "mode": "woven", "variant": "planned", "ms": quick, "plan": plan})
                result["sweep"].append({"tokens": n, "mode": "woven", "ms": quick * 0.8, **swept_to})
                row |= {"ms": row["ms"] * 0.8, **swept_to}
            result["rows"].append(row)
    return result


@pytest.mark.parametrize("swept", [False, True])
def test_predictions_are_compared_with_the_steps_that_they_are_of(swept):
    planner = Planner(LLAMA, costs=Profile(TABLE, LLAMA, MACHINE), mode="auto")
    found = checks(_result(planner, (160, 3500), 1.25, swept), planner)
    assert [check.tokens for check in found] == [160, 3500]
    for check in found:
        for mode in ("sequential", "fused", "woven", "no_comm"):
            assert check.error(mode) == pytest.approx(0.8 - 1), "of NCCL's sequential step and of the planned woven one"
    sizes = summary(found)
    assert sizes["woven"] == {"median": pytest.approx(0.2), "largest": pytest.approx(0.2)}
    woven = found[1]
    assert woven.chosen == "woven"
    assert woven.loss == pytest.approx(0.25 if swept else 0.0)
    assert woven.winner == ("woven cut 64" if swept else "woven planned")
    shown = text(found)
    assert "-20.0%" in shown
    result = _result(planner, (160, 3500), 1.25, swept) | {"config": {"model": "Llama-9", "layers": 4, "ranks": 2}}
    if swept:
        result["sweep"].clear()
        for ctas, ms in ((8, 2.0), (4, 3.0)):
            plan = plan_json(woven_plan(1792, Scheme(ctas, 2, ("qkv", "gate_up"), late=ctas == 4), 132 - ctas))
            entry = {"tokens": 3500, "mode": "woven", "variant": f"cut 1792 ctas {ctas}", "ms": ms, "plan": plan}
            result["sweep"].append(entry)
    made = tables(found, result)
    assert [row[0] for row in made["verify-llama-9"]["rows"]] == [160, 3500]
    assert "(-20.0%)" in made["verify-llama-9"]["rows"][1][2]
    if swept:
        assert made["schemes-llama-9"]["columns"][2:] == ["3500"]
        assert made["schemes-llama-9"]["rows"] == [
            ["8 / 2, qkv+gate_up limited", "1.000", "1.00"],
            ["4 / 2, qkv+gate_up limited, late", "1.500", "1.50"],
        ]
    else:
        assert len(made) == 1
    assert f"choice: median {sizes['choice']['median']:.1%}, largest {sizes['choice']['largest']:.1%}" in shown
    json.dumps([check.as_json() for check in found], allow_nan=False)


def test_verified_tokens_are_no_powers_of_two():
    assert len(TOKENS) == 12
    assert min(TOKENS) >= 64
    assert max(TOKENS) <= 16384
    assert not any(n & (n - 1) == 0 for n in TOKENS)


def _planned(folder):
    """On each rank: what plans its steps, where the ranks' environments name different tables."""
    rank, group = dist.get_rank(), dist.group.WORLD
    table = {"TOKENWEAVE_PROFILE": ["off", f"{folder}/table.json"][rank]}
    me = Rank(rank, rank, 2, torch.device("cuda", rank), group)
    with (
        mock.patch.dict(os.environ, table),
        mock.patch.object(find, "identity_here", return_value=TABLE.identity),
        mock.patch.object(machine, "machine_of", return_value=MACHINE),
    ):
        return planner_of(LLAMA, me, "p2p").model.costs.signature


def test_all_ranks_of_a_bench_plan_with_the_same_table(tmp_path):
    """Different tables are different cuts: collectives of different rows, which wait for each other for ever."""
    write_table(TABLE, tmp_path / "table.json")
    assert run_ranks(2, _planned, str(tmp_path)) == [MACHINE.signature] * 2
