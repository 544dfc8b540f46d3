"""What the documents show is what the code says: the picture of the weave, the README's tables, links and commands."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenweave.bench.kernel.plots import FAMILIES, OURS
from tokenweave.cli.main import COMMANDS, _parser
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.planning import Mode
from tokenweave.planning.makespan import Part, makespan

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import docs_tables  # noqa: E402
import draw_kernel  # noqa: E402
import draw_weave  # noqa: E402
import readme_tables  # noqa: E402
import simulation_tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _batched(items: list, n: int) -> list[tuple]:
    return list(zip(*[iter(items)] * n, strict=True))


@pytest.mark.parametrize("mode", list(Mode), ids=str)
def test_the_pictures_walk_takes_as_long_as_the_planner_says(mode):
    """run_stages on a virtual clock, and the planner's closed form, are two independent accounts of the schedule."""
    boxes, end = draw_weave.timeline(mode)
    splits = 2 if mode is Mode.WOVEN else 1
    pairs = [
        Part(compute.end - compute.start, compute.end - compute.start, collective.end - collective.start)
        for compute, collective in _batched(boxes, 2)
    ]
    stages = [list(stage) for stage in _batched(pairs, splits)]
    assert len(stages) == 1 + 2 * draw_weave.LAYERS
    assert end == pytest.approx(float(makespan([(stages, 1)])))


def test_the_picture_shows_overlap_in_the_woven_mode_alone():
    def overlap(mode: Mode) -> float:
        boxes, _ = draw_weave.timeline(mode)
        by_stream = [[b for b in boxes if b.stream == stream] for stream in ("compute", "communication")]
        return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a, b in itertools.product(*by_stream))

    assert overlap(Mode.SEQUENTIAL) == overlap(Mode.FUSED) == 0
    assert overlap(Mode.WOVEN) > 0


def test_the_picture_is_the_one_that_the_code_draws():
    drawn, kept = (
        ElementTree.fromstring(text) for text in (draw_weave.draw(), (ROOT / "docs" / "weave.svg").read_text("utf-8"))
    )
    words = [[element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")] for svg in (drawn, kept)]
    assert words[0] == words[1], "run `make docs`"


def test_the_kernels_picture_is_drawn_from_its_result(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["draw_kernel.py", str(draw_kernel.RESULT), str(tmp_path / "kernel.svg")])
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_kernel.main()
    drawn = (tmp_path / "kernel.svg").read_text("utf-8")
    for words in (*FAMILIES, OURS, "2x NVIDIA H200", "hidden 4096"):
        assert words in drawn


def test_the_readmes_tables_are_the_measured_ones():
    for path, text in readme_tables.contents().items():
        assert path.read_text("utf-8") == text, "`make docs`"


def test_the_readmes_gains_are_of_the_later_run_and_say_what_ran_in_part(tmp_path):
    def result(date: str, layers: int, tokens: int, gain: float) -> dict[str, Any]:
        auto = {
            "mode": "auto",
            "plan": {"mode": "woven"},
            "speedup": {"value": gain},
            "no_comm_ratio": {"value": 0.987},
        }
        config = {"model": "Llama-3.1-8B", "layers": layers}
        other = {"mode": "fused", "tokens": tokens, "speedup": {"value": 9.0}}
        rows = [auto | {"tokens": tokens}, other]
        return {"environment": {"date": date}, "config": config, "readme": {}, "rows": rows}

    with pytest.raises(readme_tables.TableError, match="no h200x2-latency-"):
        readme_tables.gains(tmp_path)
    for name, each in {
        "a": result("2026-02-01", 32, 512, 1.234),
        "b": result("2026-01-01", 32, 512, 1.5),
        "c": result("2026-03-01", 8, 1024, 0.99),
    }.items():
        (tmp_path / f"h200x2-latency-{name}.json").write_text(json.dumps(each))
    lines = readme_tables.gains(tmp_path).splitlines()
    assert lines[:4] == [
        "| tokens | Llama-3.1-8B |",
        "| ---: | ---: |",
        "| 512 | woven 1.23, 0.99 |",
        "| 1024 | woven 0.99, 0.99† |",
    ]
    assert lines[-1] == "† Llama-3.1-8B with 8 of 32 layers."


def test_a_result_becomes_a_table_with_its_machine(tmp_path):
    table = {
        "title": "Prefill",
        "columns": ["tokens", "ms"],
        "rows": [[512, 1.25], [1024, 2.0]],
        "note": "Lower is better.",
    }
    (tmp_path / "a.json").write_text(json.dumps({"machine": "2 x NVIDIA H200, NVLink", "readme": table}))
    (tmp_path / "b.json").write_text(json.dumps({"rounds": []}))
    assert readme_tables.tables(tmp_path) == (
        "**Prefill** (2 x NVIDIA H200, NVLink)\n\n| tokens | ms |\n| --- | ---: |\n| 512 | 1.25 |\n| 1024 | 2 |\n\n"
        "Lower is better."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a.json is not JSON"),
        ('{"readme": {"title": "x", "columns": ["a"], "rows": [[1]]}}', "needs the machine"),
        ('{"machine": "m", "readme": {"title": "x", "columns": ["a"]}}', "has no 'rows'"),
        ('{"machine": "m", "readme": {"title": "x", "columns": ["a"], "rows": [[1, 2]]}}', "2 cells; there are 1"),
    ],
)
def test_a_result_that_cannot_be_shown_is_named(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(readme_tables.TableError, match=message):
        readme_tables.tables(tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_documents_tables_are_the_measured_ones(document):
    text = document.read_text("utf-8")
    assert text == docs_tables.filled(text, docs_tables.measured(ROOT / "benchmarks" / "results")), "`make docs`"


def test_a_table_goes_to_its_place_in_a_document(tmp_path):
    table = {"title": "T", "columns": ["a"], "rows": [[1]]}
    (tmp_path / "a.json").write_text(json.dumps({"machine": "m", "tables": {"one": table}}))
    (tmp_path / "b.json").write_text(json.dumps([1]))
    document = "x\n<!-- table: one -->\nold\n<!-- end of table -->\ny\n<!-- table: two -->\n<!-- end of table -->\n"
    assert docs_tables.filled(document, docs_tables.measured(tmp_path)) == (
        "x\n<!-- table: one -->\n**T** (m)\n\n| a |\n| --- |\n| 1 |\n<!-- end of table -->\ny\n"
        f"<!-- table: two -->\n{docs_tables.NOTHING}\n<!-- end of table -->\n"
    )
    (tmp_path / "a.json").write_text(json.dumps({"tables": {"one": table}}))
    with pytest.raises(readme_tables.TableError, match="needs the machine"):
        docs_tables.measured(tmp_path)


def test_the_simulations_table_is_what_its_commands_give():
    document = simulation_tables.DOCUMENT.read_text("utf-8")
    assert document == simulation_tables.filled(document), "run `make docs`"


@pytest.mark.parametrize(
    ("change", "message"),
    [((simulation_tables.END, ""), "needs a line"), (("--burst", "--rate 2"), "a command with --burst and one")],
)
def test_a_simulation_without_its_commands_or_markers_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        simulation_tables.filled(simulation_tables.DOCUMENT.read_text("utf-8").replace(*change))


def test_a_readme_without_markers_is_an_error():
    with pytest.raises(readme_tables.TableError, match="has no lines"):
        readme_tables.filled("# TokenWeave\n", "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text("utf-8")):
        if not target.startswith("https://"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document):
    for name in re.findall(r"`((?:src|tests|scripts|docs|benchmarks)/[\w./-]+)`", document.read_text("utf-8")):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


def test_every_result_is_in_the_index():
    """benchmarks/results/README.md: each file in one row, with what made it and the document that uses it."""
    text = (RESULTS / "README.md").read_text("utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| h200")
    ]
    listed = [name for row in rows for name in row[0].split(", ")]
    assert sorted(listed) == sorted(path.name for path in RESULTS.glob("*.json"))
    for names, _, made_by, shown in rows:
        for script in re.findall(r"`((?:benchmarks|tests|scripts)/[^` ]+)`", made_by):
            assert (ROOT / script).exists(), script
        for command in re.findall(r"`(tokenweave [^`]+)`", made_by):
            words = shlex.split(command.replace("--tp N", "--tp 2"))[1:]
            _parser(words).parse_args(words)
        for document in shown.split(", "):
            assert (ROOT / document).exists() or (ROOT / "docs" / document).exists(), f"{names}: {document}"


def test_results_without_a_machine_are_the_ones_that_are_said_to_be():
    text = (RESULTS / "README.md").read_text("utf-8")
    results = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    bare = {name for name, result in results.items() if "machine" not in result}
    tuned = {name for name in bare if results[name].get("format") == "tokenweave profile"}
    (said,) = re.findall(r'Without a `"machine"` line are (.*?),\nstudies', text, re.S)
    assert set(re.split(r", | and ", said)) == bare - tuned
    assert all(results[name]["environment"]["gpus"] for name in bare - tuned)
    assert all(results[name]["identity"]["gpu"] for name in tuned)


def test_every_module_of_the_vllm_plugin_has_its_line():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = text[text.index("Inside `integrations/vllm/`") : text.index("## Tests")]
    modules = (ROOT / "src" / "tokenweave" / "integrations" / "vllm").glob("*.py")
    assert set(re.findall(r"`(\w+\.py)`", rows)) == {path.name for path in modules}


@pytest.mark.parametrize("reason", list(Reason), ids=str)
def test_a_reason_that_is_counted_is_explained(reason):
    """Metrics and log name it; the document says what it means."""
    assert f"`{reason}`" in (ROOT / "docs" / "vllm.md").read_text("utf-8")


def _commands(document: Path) -> list[str]:
    """What a document shows of `tokenweave ...`, in blocks and in lines."""
    text = document.read_text("utf-8").replace("\\\n", " ")
    return re.findall(r"^(?: {4})?(tokenweave .*)$", text, re.M) + re.findall(r"`(tokenweave [^`]*)`", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_are_shown_exist(document):
    """With options: they are parsed as on the command line. Without: the text means the command as such."""
    for command in _commands(document):
        words = shlex.split(command, comments=True)[1:]
        if any(word.startswith("--") for word in words):
            _parser(words).parse_args(words)
        else:
            assert words[0].strip(":") in {*COMMANDS, "COMMAND", "..."}, f"{document.name} shows {command!r}"


def _python(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", document.read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize(
    "document", [ROOT / "docs" / "planning.md", ROOT / "docs" / "simulation.md"], ids=lambda p: p.name
)
def test_python_that_is_shown_runs(document):
    blocks = _python(document)
    assert blocks
    for block in blocks:
        exec(compile(block, document.name, "exec"), {})


COLLECTIVE = """
total = (x @ weight).float()
dist.all_reduce(total)
expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5)
torch.testing.assert_close(normed.float(), expected, rtol=0.05, atol=0.05)
"""
WOVEN = """
def normalised(rows):
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)


total = inputs.clone()
dist.all_reduce(total)
for stage in stages[1:]:
    partial = torch.empty_like(inputs)
    stage.compute(normalised(total), None, partial)
    dist.all_reduce(partial)
    total += partial
torch.testing.assert_close(torch.cat([prefix, suffix]), normalised(total), rtol=1e-3, atol=1e-3)
"""


ENDED = """
import weakref

ended = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert ended() is None, "a group that outlives its end may abort the program as it exits"
"""


@pytest.mark.parametrize(
    ("document", "check"), [("README.md", COLLECTIVE), ("docs/architecture.md", WOVEN)], ids=["collective", "weave"]
)
def test_a_program_that_is_shown_runs_under_torchrun(document, check, tmp_path):
    """As a reader would run it, with a check of its result added to the end."""
    (block,) = (block for block in _python(ROOT / document) if block.startswith("# torchrun"))
    shown, closing = block.split("dist.destroy_process_group()")
    (tmp_path / "example.py").write_text(shown + check + ENDED + closing)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "example.py"]
    environment = dict(os.environ)
    if torch.cuda.device_count() < 2:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as torchrun:
        try:
            _, errors = torchrun.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            torchrun.terminate()  # it ends its ranks, which a killed one would leave behind
            raise
    assert torchrun.returncode == 0, errors


def _against_the_best(file: str) -> dict[tuple[int, int], float]:
    """Of a kernel result's table: hidden, tokens -> ours over the best baseline."""
    table = json.loads((RESULTS / file).read_text("utf-8"))["readme"]
    return {(row[0], row[1]): float(row[-1].split()[0]) for row in table["rows"]}


def _speedups(file: str) -> dict[str, dict[int, float]]:
    """Mode -> tokens -> sequential / mode, rounded as a table shows it."""
    rows = json.loads((RESULTS / file).read_text("utf-8"))["rows"]
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(row["mode"], {})[row["tokens"]] = round(row["speedup"]["value"], 2)
    return found


def test_what_the_readme_says_of_its_tables_is_so():
    """Prose is typed by hand; the tables are not. Where new figures break this, README's Limits must say something else."""
    for hidden in (4096, 8192):
        two, four = (_against_the_best(f"h200x{ranks}-kernel-{hidden}.json") for ranks in (2, 4))
        assert max(two.values()) < 1
        assert [key for key, ratio in four.items() if ratio >= 1] == [(hidden, 1)]
    small, large, qwen = (
        _speedups(f"h200x2-latency-{name}.json") for name in ("llama-3.1-8b", "llama-3.3-70b", "qwen2.5-72b-16-layers")
    )
    large["auto"] |= _speedups("h200x2-latency-llama-3.3-70b-20-layers.json")["auto"]
    assert small["auto"] == {512: 1.03, 1024: 1.06, 2048: 1.18, 4096: 1.10, 8192: 1.11, 16384: 1.10}
    assert large["auto"] == {1024: 1.04, 2048: 1.05, 4096: 1.06}
    assert qwen["auto"] == {1024: 0.99, 2048: 1.08, 4096: 1.05, 8192: 1.05}
    assert qwen["fused"][1024] == 1.03
    between, again, mixtral = (
        _speedups(f"h200x2-latency-{name}.json")
        for name in ("llama-3.1-8b-around-1024", "qwen2.5-72b-16-layers-to-2048", "mixtral-8x7b-16-layers")
    )
    assert between["auto"] == {768: 1.06, 1024: 1.05, 1280: 1.11}
    assert between["fused"] == {768: 1.06, 1024: 1.05, 1280: 1.05}
    assert between["woven"] == {768: 1.07, 1024: 1.03, 1280: 1.09}
    assert between["no_comm"] == {768: 1.22, 1024: 1.20, 1280: 1.19}
    assert [small["no_comm"][512], small["no_comm"][1024], small["woven"][1024]] == [1.17, 1.20, 1.04]
    assert again["auto"] == {1024: 1.04, 2048: 1.07}
    assert mixtral["auto"] == {1024: 1.02, 2048: 1.04, 4096: 1.02, 8192: 1.02}
    assert mixtral["woven"] == {1024: 0.66, 2048: 0.86, 4096: 0.92, 8192: 0.96}
    gains = [float(gain) for gain in re.findall(r"\| \w+ ([\d.]+),", readme_tables.gains(RESULTS))]
    assert len(gains) == 19
    assert (min(gains), max(gains)) == (1.02, 1.18)
    in_vllm = json.loads((RESULTS / "h200x2-vllm-check-llama-3.1-8b.json").read_text("utf-8"))["latency"]
    auto = {int(tokens): round(modes["auto"]["speedup"], 2) for tokens, modes in in_vllm.items()}
    assert (min(auto.values()), auto[512]) == (0.98, 0.98)
    assert {gain for tokens, gain in auto.items() if tokens >= 2048} == {1.13, 1.14, 1.15}
    assert min(gain for tokens, gain in auto.items() if 512 < tokens < 2048) > 1.15


def _modes_chosen(file: str) -> dict[int, str]:
    rows = json.loads((RESULTS / file).read_text("utf-8"))["rows"]
    return {row["tokens"]: row["plan"]["mode"] for row in rows if row["mode"] == "auto"}


def test_which_steps_are_woven_is_what_the_readme_says():
    for name in ("llama-3.1-8b", "llama-3.1-8b-around-1024"):
        small = _modes_chosen(f"h200x2-latency-{name}.json")
        assert {tokens for tokens, mode in small.items() if mode == "woven"} == {n for n in small if n >= 1280}
    large = ("llama-3.3-70b", "llama-3.3-70b-20-layers", "qwen2.5-72b-16-layers", "qwen2.5-72b-16-layers-to-2048")
    for name in large:
        assert set(_modes_chosen(f"h200x2-latency-{name}.json").values()) == {"woven"}
    assert set(_modes_chosen("h200x2-latency-mixtral-8x7b-16-layers.json").values()) == {"fused"}


def test_the_tables_of_whole_steps_are_with_flash_attention_3():
    shown = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("h200x2-latency-*.json"))]
    shown = [result for result in shown if "readme" in result]
    assert shown
    for result in shown:
        assert result["environment"]["attention"]["value"].startswith("fa3-fwd ")


def _rows(file: str) -> dict[tuple[int, str], dict[str, Any]]:
    return {(row["tokens"], row["mode"]): row for row in json.loads((RESULTS / file).read_text("utf-8"))["rows"]}


def test_what_is_said_to_limit_steps_is_measured():
    """docs/gpu-execution.md, "What limits it", and README's Limits."""
    rows = _rows("h200x2-latency-llama-3.1-8b.json")
    sizes = list(dict.fromkeys(tokens for tokens, _ in rows))
    alone = {key: row["sustained"] for key, row in rows.items()}
    assert all(measured["limits"]["power"] == 1 for measured in alone.values())
    gains = [round(alone[n, "sequential"]["ms"] / alone[n, "auto"]["ms"], 2) for n in sizes]
    assert gains == [1.01, 1.03, 1.06, 1.07, 1.10, 1.09]
    for tokens in (8192, 16384):
        clocks = {mode: alone[tokens, mode]["sm_mhz"] for mode in ("sequential", "fused", "woven", "auto", "no_comm")}
        highest = max(clocks[mode]["high"] for mode in ("woven", "auto"))
        assert all(clocks[mode]["low"] >= highest for mode in ("sequential", "fused", "no_comm"))
        cycles = {mode: alone[tokens, mode]["ms"] * clocks[mode]["median"] for mode in ("woven", "no_comm")}
        assert cycles["woven"] / cycles["no_comm"] == pytest.approx(1, abs=0.02)
    assert alone[512, "fused"]["sm_mhz"]["median"] - alone[512, "auto"]["sm_mhz"]["median"] == 90
    ratios = [1 / rows[n, mode]["no_comm_ratio"]["value"] for n in sizes if n >= 2048 for mode in ("woven", "auto")]
    assert (round(min(ratios), 2), round(max(ratios), 2)) == (1.00, 1.04)


def test_what_larger_models_spend_on_communication_is_measured():
    def shares(*files: str) -> tuple[float, float]:
        rows = [row for file in files for (_, mode), row in _rows(file).items() if mode == "sequential"]
        values = [row["shares"]["communication"]["value"] for row in rows]
        return round(min(values), 2), round(max(values), 2)

    large = ("llama-3.3-70b", "llama-3.3-70b-20-layers", "qwen2.5-72b-16-layers", "qwen2.5-72b-16-layers-to-2048")
    assert shares(*(f"h200x2-latency-{name}.json" for name in large)) == (0.06, 0.09)
    small = ("llama-3.1-8b", "llama-3.1-8b-around-1024")
    assert shares(*(f"h200x2-latency-{name}.json" for name in small)) == (0.10, 0.18)


def test_what_is_said_of_a_mixture_of_experts_was_measured():
    """docs/gpu-execution.md, "Mixture of experts", and docs/planning.md, what the formulas leave out."""
    rows = _rows("h200x2-latency-mixtral-8x7b-16-layers.json")
    shares = {n: row["shares"] for (n, mode), row in rows.items() if mode == "sequential"}
    communication = {n: share["communication"]["value"] for n, share in shares.items()}
    assert (round(min(communication.values()), 2), round(max(communication.values()), 2)) == (0.04, 0.07)
    assert round(shares[1024]["rmsnorm"]["value"], 3) == -0.045
    apart = {round(row["no_comm_ratio"]["value"], 2) for (_, mode), row in rows.items() if mode == "auto"}
    assert (min(apart), max(apart)) == (0.96, 0.97)
    longer = {n: rows[n, "woven"]["ms"] / rows[n, "sequential"]["ms"] for n in shares}
    assert (round(longer[1024], 1), round(longer[8192], 2)) == (1.5, 1.04)
    times = json.loads((RESULTS / "h200x2-tune-mixtral-8x7b.json").read_text("utf-8"))["times"]
    mlp = {tokens: us / 1e3 for name, tokens, us in times["stage"] if name == "mlp"}
    gemms = {(name, each): us / 1e3 for name, each, us in times["gemm"]}  # by the rows of an expert, a quarter of all
    grouped = {n: sum(gemms[name, n // 4] for name in ("gate_up", "down")) for n in (64, 128, 256, 512, 1024)}
    for tokens, two_halves_more, share_ms in ((1024, 0.68, 0.05), (8192, 0.16, 0.38)):
        assert 2 * mlp[tokens // 2] - mlp[tokens] == pytest.approx(two_halves_more, abs=0.006)
        a_layer = rows[tokens, "sequential"]["ms_per_layer"] * communication[tokens]
        assert a_layer == pytest.approx(share_ms, abs=0.005)
    assert [round(mlp[n], 2) for n in (512, 1024)] == [0.85, 1.01]
    assert [round(grouped[n], 2) for n in (512, 1024)] == [0.41, 0.53]
    assert [round(mlp[n] - grouped[n], 2) for n in (512, 1024)] == [0.44, 0.48]
    assert all(round(mlp[n] - grouped[n], 1) == 0.1 for n in (64, 128, 256))


@pytest.mark.parametrize(("model", "percent", "lone"), [("llama-3.1-8b", 1.2, 3.3), ("llama-3.3-70b", 2.2, 1.3)])
def test_one_fixed_scheme_is_nearly_as_good_as_the_best(model, percent, lone):
    """docs/gpu-execution.md, "Schemes"."""
    result = json.loads((RESULTS / f"h200x2-verify-{model}.json").read_text("utf-8"))
    means = {row[0]: 100 * (float(row[1]) - 1) for row in result["tables"][f"schemes-{model}"]["rows"]}
    assert means["8 / 2, qkv+gate_up limited"] == pytest.approx(percent, abs=0.05)
    assert means["8 / 1, none limited"] == pytest.approx(lone, abs=0.05)
    both = means["8 / 2, qkv+o+gate_up+down limited"] - means["8 / 2, qkv+gate_up limited"]
    assert 2 <= both <= 3.15
    slow = [mean for name, mean in means.items() if name.split(" ")[0] in ("12", "16") or name.startswith("8 / 4")]
    assert 6 <= min(slow) <= max(slow) <= 7.5


def test_what_chains_beside_a_collective_were_worth_is_measured():
    """docs/tuning.md, "From parts to steps"."""
    models = json.loads((RESULTS / "h200x2-parts-or-steps.json").read_text("utf-8"))["models"]
    errors = {
        kind: [model["left_out_errors"][kind]["largest"] for model in models.values()] for kind in ("beside", "free")
    }
    assert (round(max(errors["beside"]), 2), round(max(errors["free"]), 2)) == (0.48, 0.10)
    of_steps = models["Llama-3.1-8B"]["ratios"]["free"].values()
    ratios = [ratio for scheme in of_steps for tokens, ratio in scheme.items() if int(tokens) >= 700]
    assert (round(min(ratios), 2), round(max(ratios), 2)) == (1.07, 1.30)
    by_parts = json.loads((RESULTS / "h200x2-verify-by-parts-llama-3.3-70b.json").read_text("utf-8"))["summary"][
        "choice"
    ]
    assert (round(by_parts["median"], 3), round(by_parts["largest"], 3)) == (0.035, 0.134)


def test_what_is_said_of_the_plugin_was_measured():
    """docs/vllm.md, "How"."""
    result = json.loads((RESULTS / "h200x2-vllm-check-llama-3.1-8b.json").read_text("utf-8"))
    document = (ROOT / "docs" / "vllm.md").read_text("utf-8")
    for tokens in ("512", "768", "1024", "1536", "2048", "4096", "8192"):
        modes = result["latency"][tokens]
        of_start = result["step_ms_at_start"].get(tokens)
        last = "" if of_start is None else ", ".join(f"{of_start[mode]:.2f}" for mode in ("stock", "fused", "woven"))
        gain = f"{modes['auto']['speedup']:.2f} ± {modes['auto']['interval']:.2f}"
        row = f"| {tokens} | {modes['stock']['ms']:.1f} | {gain} | {last} |"
        assert row.replace("|  |", "| |") in document
    compared = result["layouts"]
    shares = [round(100 * compared[mode]["equal_tokens"]) for mode in ("stock", "fused", "woven")]
    assert shares == [88, 89, 91]
    assert [round(compared[mode]["largest_logprob_difference"], 2) for mode in ("stock", "fused", "woven")] == [
        0.03,
        0.03,
        0.06,
    ]


def test_how_far_formulas_are_from_woven_steps_is_said():
    """docs/planning.md, below the tables: of the large models' steps, measured over predicted."""
    text = (ROOT / "docs" / "planning.md").read_text("utf-8")
    table = text[text.index("<!-- models: begin") : text.index("<!-- models: end")]
    lines = [line.split("|") for line in table.splitlines() if re.match(r"\| (Llama-3.3-70B|Qwen2.5-72B)", line)]
    assert len(lines) == 9

    def longer(column: int) -> tuple[float, float]:
        pairs = [[float(x) for x in line[column].split("(")[0].split("/")] for line in lines]
        ratios = [measured / predicted - 1 for measured, predicted in pairs]
        return min(ratios), max(ratios)

    assert 0.045 < longer(6)[0] <= longer(6)[1] < 0.105
    assert 0.025 < longer(5)[0] <= longer(5)[1] < 0.045


def test_what_is_said_of_four_ranks_was_measured():
    """docs/collective.md: when NCCL's two halves are the fastest baseline, and what the links carry."""
    fastest, gbs, alone = {}, {}, {}
    for hidden in (4096, 8192):
        rows = json.loads((RESULTS / f"h200x4-kernel-{hidden}.json").read_text("utf-8"))["rows"]
        for row in rows:
            if row["hidden"] != hidden:
                continue
            key = hidden, row["tokens"]
            if row["kind"] == "rival":
                fastest[key] = min(fastest.get(key, (row["us"], row["impl"])), (row["us"], row["impl"]))
            elif row["kind"] == "ours":
                gbs[key] = max(gbs.get(key, 0), row["gb_s"])
            elif row["impl"] == "nccl all-reduce alone":
                alone[key] = row["gb_s"]
    halves = {key for key, (_, name) in fastest.items() if name.startswith("nccl reduce-scatter")}
    assert halves == {(4096, 16384), (4096, 32768), (8192, 8192), (8192, 16384), (8192, 32768)}
    assert [round(gbs[4096, tokens]) for tokens in (16384, 32768)] == [320, 322]
    assert {key for key in alone if key[0] == 4096 and alone[key] > gbs[key]} == {(4096, 16384), (4096, 32768)}
    assert round(alone[4096, 32768]) == 339


def test_what_is_said_of_freeing_a_stage_was_measured():
    """docs/collective.md, "How it is tested": microseconds of 16,384 rows."""
    rows = json.loads((RESULTS / "h200x2-ring-freeing.json").read_text("utf-8"))["rows"]
    us = {row["ctas"]: row for row in rows if row["tokens"] == 16384}
    for way, figures in {
        "one_arrival_fenced": (1076, 545),  # as it is shipped
        "one_arrival": (1086, 550),
        "reader_arrivals": (1111, 562),
        "reader_arrivals_all_fence": (1121, 567),
    }.items():
        assert tuple(round(us[ctas][way]) for ctas in (4, 8)) == figures
    for ctas in (12, 16):
        times = [time for name, time in us[ctas].items() if name not in ("tokens", "hidden", "ctas")]
        assert len(times) == 6
        assert max(times) / min(times) < 1.0021
