"""What the documents show is what the code says: the picture of the weave, the measured tables, links and commands."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import docs_tables
import draw_kernel
import draw_weave
import measured_tables
import planning_tables
import pytest
import simulation_tables
import torch

from tokenweave.bench.kernel.plots import FAMILIES, OURS
from tokenweave.cli.main import COMMANDS, _parser
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.planning import Mode
from tokenweave.planning.makespan import Part, makespan

ROOT = Path(__file__).parent.parent
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


def test_the_measured_tables_are_those_of_the_files():
    for path, text in measured_tables.contents().items():
        assert path.read_text("utf-8") == text, "`make docs`"


def test_the_readmes_gains_are_of_more_layers_and_the_later_run_and_say_what_ran_in_part(tmp_path):
    def result(date: str, layers: int, tokens: int, gain: float) -> dict[str, Any]:
        auto = {
            "mode": "auto",
            "plan": {"mode": "woven"},
            "speedup": {"value": gain},
            "no_comm_ratio": {"value": 0.987},
        }
        config = {"model": "Llama-3.1-8B", "layers": layers, "ranks": 2}
        other = {"mode": "fused", "tokens": tokens, "speedup": {"value": 9.0}}
        rows = [auto | {"tokens": tokens}, other]
        return {"environment": {"date": date}, "config": config, "table": {}, "rows": rows}

    with pytest.raises(measured_tables.TableError, match=r"no h200x\*-latency-.* has a table"):
        measured_tables.gains(tmp_path)
    for name, each in {
        "a": result("2026-02-01", 32, 512, 1.234),
        "b": result("2026-01-01", 32, 512, 1.5),
        "c": result("2026-03-01", 8, 1024, 0.99),
        "e": result("2026-03-01", 8, 1056, 1.1),
        "d": result("2026-03-01", 8, 512, 1.7),
    }.items():
        (tmp_path / f"h200x2-latency-{name}.json").write_text(json.dumps(each))
    lines = measured_tables.gains(tmp_path).splitlines()
    assert lines[:4] == [
        "| tokens | Llama-3.1-8B |",
        "| ---: | ---: |",
        "| 512 | 1.23 woven |",
        "| 1024 | 0.99 woven† |",
    ]
    assert len(lines) == 7, "sizes between powers of two are left out"
    assert lines[-1] == "† Llama-3.1-8B with 8 of 32 layers."


def test_steps_of_more_ranks_get_their_columns(tmp_path, monkeypatch):
    """In README's gains, measured.md and planning.md; with today's files alone nothing says how many ranks, which is two."""
    for path in RESULTS.glob("h200x2-latency-*.json"):
        shutil.copy(path, tmp_path)
    result = json.loads((RESULTS / "h200x2-latency-llama-3.1-8b.json").read_text("utf-8"))
    result["config"]["ranks"] = 4
    result["table"]["title"] = result["table"]["title"].replace("2 GPUs", "4 GPUs")
    rows = [row | {"speedup": {**row["speedup"], "value": 1.36}} for row in result["rows"]]
    (tmp_path / "h200x4-latency-llama-3.1-8b.json").write_text(json.dumps(result | {"rows": rows}))
    head, _, *lines = measured_tables.gains(tmp_path).splitlines()
    names = ["Llama-3.1-8B", "Llama-3.3-70B", "Mixtral-8x7B", "Qwen2.5-72B"]
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        "tokens",
        *[f"2 GPUs, {name}" for name in names],
        "4 GPUs, Llama-3.1-8B",
    ]
    steps = dict(line.strip("| ").replace(" ", "").split("|", 1) for line in lines if line.startswith("|"))
    assert steps["2048"].startswith("1.17woven|")
    assert steps["2048"].endswith("|1.36woven")
    assert any(line.startswith("† 2 GPUs, Llama-3.3-70B with 20 of 80 layers") for line in lines)
    assert "32 layers, 4 GPUs, bfloat16" in measured_tables.tables(tmp_path)
    monkeypatch.setattr(planning_tables, "RESULTS", tmp_path)
    predicted = planning_tables.SECTIONS["models"]()
    assert "| Llama-3.1-8B, 32 layers, 2 ranks | fa3-fwd 0.0.3 | 2048 |" in predicted
    assert "| Llama-3.1-8B, 32 layers, 4 ranks | fa3-fwd 0.0.3 | 2048 |" in predicted
    assert "Dense models, 4 ranks: 24 values" in predicted


def test_vllm_of_more_ranks_gets_its_columns(tmp_path):
    for ranks, model in ((2, "A"), (4, "A"), (8, "B")):
        rows = [
            [f"prefill of {512 * ranks} tokens", "1 ms", "", "1 ms", f"1.{ranks} (1.0-2.0)", ""],
            ["trace", "1.1", "1.2"],
        ]
        result = {"config": {"ranks": ranks, "model": model}, "table": {"rows": rows}}
        (tmp_path / f"h200x{ranks}-vllm-{model}.json").write_text(json.dumps(result))
    (tmp_path / "h200x2-vllm-check-a.json").write_text("{}")
    names = [
        f"{of}: over its {what}" for of in ("2 GPUs, A", "4 GPUs, A", "8 GPUs, B") for what in ("best", "defaults")
    ]
    assert measured_tables.inside_vllm(tmp_path).splitlines()[:6] == [
        f"|  | {' | '.join(names)} |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| prefill of 1024 tokens |  | 1.2 |  |  |  |  |",
        "| trace | 1.2 | 1.1 | 1.2 | 1.1 | 1.2 | 1.1 |",
        "| prefill of 2048 tokens |  |  |  | 1.4 |  |  |",
        "| prefill of 4096 tokens |  |  |  |  |  | 1.8 |",
    ]


def test_the_readmes_collectives_are_by_gpus_and_hidden_size(tmp_path):
    for name, ranks, cells in (
        ("h200x2-kernel-a", 2, [[4096, 1, 5.0, "1.02 (1.00-1.04)"], [4096, 2, 5.0, "0.5 (0.4-0.6)"]]),
        ("h200x4-kernel-a", 4, [[8192, 64, 5.0, "0.90 (0.90-0.90)"]]),
    ):
        result = {"rows": [{"ranks": ranks}], "table": {"rows": cells}}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert measured_tables.collectives(tmp_path).splitlines()[:4] == [
        "| tokens | 2 GPUs, hidden 4096 | 4 GPUs, hidden 8192 |",
        "| ---: | ---: | ---: |",
        "| 1 | 1.02 |  |",
        "| 64 |  | 0.90 |",
    ]


def test_a_result_becomes_a_table_with_its_machine(tmp_path):
    table = {
        "title": "Prefill",
        "columns": ["tokens", "ms"],
        "rows": [[512, 1.25], [1024, 2.0]],
        "note": "Lower is better.",
    }
    (tmp_path / "a.json").write_text(json.dumps({"machine": "2 x NVIDIA H200, NVLink", "table": table}))
    (tmp_path / "b.json").write_text(json.dumps({"rounds": []}))
    assert measured_tables.tables(tmp_path) == (
        "**Prefill** (2 x NVIDIA H200, NVLink)\n\n| tokens | ms |\n| --- | ---: |\n| 512 | 1.25 |\n| 1024 | 2 |\n\n"
        "Lower is better.\n\n[a.json](../benchmarks/results/a.json)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a.json is not JSON"),
        ('{"table": {"title": "x", "columns": ["a"], "rows": [[1]]}}', "needs the machine"),
        ('{"machine": "m", "table": {"title": "x", "columns": ["a"]}}', "has no 'rows'"),
        ('{"machine": "m", "table": {"title": "x", "columns": ["a"], "rows": [[1, 2]]}}', "2 cells; there are 1"),
    ],
)
def test_a_result_that_cannot_be_shown_is_named(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(measured_tables.TableError, match=message):
        measured_tables.tables(tmp_path)


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
    with pytest.raises(measured_tables.TableError, match="needs the machine"):
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


def test_a_document_without_markers_is_an_error():
    with pytest.raises(measured_tables.TableError, match="there are no lines"):
        measured_tables.filled("# TokenWeave\n", "gains", "")


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
