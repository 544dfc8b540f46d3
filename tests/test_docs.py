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

import pytest
import torch

from tokenweave.cli.main import COMMANDS, _parser
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.planning import Mode
from tokenweave.planning.makespan import Part, makespan

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import docs_tables  # noqa: E402
import draw_weave  # noqa: E402
import readme_tables  # noqa: E402

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


def test_the_readmes_tables_are_the_measured_ones():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert readme == readme_tables.filled(readme, readme_tables.tables(ROOT / "benchmarks" / "results")), "`make docs`"


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


def test_a_readme_without_markers_is_an_error():
    with pytest.raises(readme_tables.TableError, match="has no lines"):
        readme_tables.filled("# TokenWeave\n", "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text("utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document):
    for name in re.findall(r"`((?:src|tests|scripts|docs|benchmarks)/[\w./-]+)`", document.read_text("utf-8")):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


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


@pytest.mark.parametrize(
    ("document", "check"), [("README.md", COLLECTIVE), ("docs/architecture.md", WOVEN)], ids=["collective", "weave"]
)
def test_a_program_that_is_shown_runs_under_torchrun(document, check, tmp_path):
    """As a reader would run it, with a check of its result added to the end."""
    (block,) = (block for block in _python(ROOT / document) if block.startswith("# torchrun"))
    shown, closing = block.split("dist.destroy_process_group()")
    (tmp_path / "example.py").write_text(shown + check + "dist.destroy_process_group()" + closing)
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


def _ratios(file: str, column: str) -> dict[tuple[object, ...], float]:
    """Of a published table: the row's first cells -> the ratio, without its interval."""
    table = json.loads((RESULTS / file).read_text("utf-8"))["readme"]
    at = table["columns"].index(column)
    first = 2 if table["columns"][0] == "hidden" else 1
    return {tuple(row[:first]): float(row[at].split()[0]) for row in table["rows"]}


def test_what_the_readme_says_of_its_tables_is_so():
    """Prose is typed by hand; the tables are not. Where new figures break this, README's Limits must say something else."""
    for hidden in (4096, 8192):
        two = _ratios(f"h200x2-kernel-{hidden}.json", "ours / rival (95 %)")
        four = _ratios(f"h200x4-kernel-{hidden}.json", "ours / rival (95 %)")
        assert max(two.values()) < 1
        assert [key for key, ratio in four.items() if ratio >= 1] == [(hidden, 1)]
    woven = _ratios("h200x2-latency-llama-3.1-8b.json", "sequential / woven")
    fused = _ratios("h200x2-latency-llama-3.1-8b.json", "sequential / fused")
    assert {tokens for tokens in woven if woven[tokens] > fused[tokens]} == {(n,) for (n,) in woven if n >= 2048}
    woven = _ratios("h200x2-latency-llama-3.3-70b.json", "sequential / woven")
    fused = _ratios("h200x2-latency-llama-3.3-70b.json", "sequential / fused")
    assert {tokens for tokens in woven if woven[tokens] > fused[tokens]} == {(1024,)}
    assert {tokens for tokens in woven if woven[tokens] < 1} == {(2048,)}
    assert set(woven) == {(1024,), (2048,), (4096,)}
    for model in ("3.1-8b", "3.3-70b"):
        result = json.loads((RESULTS / f"h200x2-latency-llama-{model}.json").read_text("utf-8"))
        assert result["environment"]["attention"]["value"].startswith("fa3-fwd ")
