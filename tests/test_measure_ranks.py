"""``scripts/measure_ranks.py``: the commands that it would run are ones that there are, and what it makes of a part's end."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import measure_ranks
import pytest
from measure_ranks import Part

from tokenweave.cli.main import _parser
from tokenweave.models import read_config

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "measure_ranks.py"


def dry_run(*more: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *more, "--dry-run"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("ranks", [4, 8])
def test_every_command_is_one_that_there_is(ranks, tmp_path):
    lines = dry_run(str(ranks), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    exported = [words[1] for words in lines if words[0] == "export"]
    assert exported == [f"{name}={value}" for name, value in measure_ranks.NO_MULTICAST.items()]
    seen, outputs = set(), []
    for words in lines[len(exported) :]:
        start = words.index(sys.executable)
        assert all(re.fullmatch(r"TOKENWEAVE_\w+=.+", word) for word in words[:start])
        module, *arguments = words[start + 2 :]
        assert words[start + 1] == "-m"
        if module == "pytest":
            assert f"TOKENWEAVE_TEST_RANKS={ranks}" in words[:start]
            _names_tests(arguments)
            outputs.append(arguments[arguments.index("--junitxml") + 1])
            continue
        assert module == "tokenweave"
        args = _parser(arguments).parse_args(arguments)
        assert args.tp == ranks
        outputs.append(str(args.out if args.command == "tune" else args.json))
        kind = args.command if args.command == "tune" else args.bench
        if kind == "kernel":
            seen |= {(kind, int(args.hidden), int(tokens)) for tokens in args.tokens.split(",")}
            assert args.ctas == "2,4,8,12,16,32"
            continue
        assert args.model in measure_ranks.MODELS
        if kind == "tune":
            seen.add((kind, args.model))
            continue
        assert args.layers is None or 4 <= args.layers < read_config(args.model).layers
        tokens = [args.trace] if kind == "vllm" and args.trace else args.tokens.split(",")
        seen |= {(kind, args.model, each) for each in tokens}
        if kind == "latency":
            assert args.modes == "sequential,fused,woven,auto,no_comm"
            assert max(map(int, tokens)) <= read_config(args.model).context
    assert len(set(outputs)) == len(outputs)
    assert all(Path(out).parent == tmp_path / "new" and f"x{ranks}-" in Path(out).name for out in outputs)
    for hidden in (4096, 8192):
        assert {("kernel", hidden, 2**n) for n in range(16)} <= seen
    for model in ("Llama-3.1-8B", "Llama-3.3-70B", "Qwen2.5-72B", "Mixtral-8x22B"):
        assert ("tune", model) in seen
        assert {("latency", model, str(512 << n)) for n in range(7)} <= seen
        assert {
            ("vllm", model, of) for of in ("1024", "2048", "4096", "8192", "sharegpt", "arxiv_summarization")
        } <= seen


def _names_tests(arguments: list[str]) -> None:
    files = [ROOT / word for word in arguments if word.startswith("tests/")]
    assert files
    text = "".join(file.read_text("utf-8") for file in files)
    if "-k" in arguments:
        assert f"def test_{arguments[arguments.index('-k') + 1].split()[-1]}(" in text


def test_every_file_of_tests_that_takes_the_number_of_ranks_is_in_a_part():
    named = " ".join(words for _, words, _ in measure_ranks.TESTS)
    for file in (ROOT / "tests").glob("test_gpu_*.py"):
        assert ("gpu(count=RANKS)" in file.read_text("utf-8")) <= (f"tests/{file.name}" in named), file.name


def test_parts_can_be_chosen_and_multicast_left_on(tmp_path):
    lines = dry_run("4", str(tmp_path), "--only", "kernel-4096,70b", "--multicast", "--gpu", "b200", "--limit", "900")
    limits = [words[words.index("--time-limit") + 1] for words in lines if "--time-limit" in words]
    assert set(limits) == {"860"}
    assert not [words for words in lines if words[0] == "export"]
    assert all("b200x4-kernel-4096" in " ".join(words) or "llama-3.3-70b" in " ".join(words) for words in lines)
    assert all("--multicast" in words for words in lines if "vllm" in words)


# ---- running parts


def _part(program: str, **more: object) -> Part:
    return Part("part", (sys.executable, "-c", program, "OUT"), **more)


WRITES = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{}')"


def test_a_part_that_ends_leaves_its_file(tmp_path):
    program = f"{WRITES}; import os; assert os.environ['A'] + os.environ['B'] == 'ab'"
    assert measure_ranks.run(_part(program, environment={"B": "b"}), tmp_path, {"A": "a"}) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.json", "part.log"]


@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        (f"{WRITES}; sys.exit(3)", "exit code 3"),
        (f"{WRITES}; import time; time.sleep(100)", "longer than 2 s"),
    ],
)
def test_a_part_that_fails_or_takes_too_long_is_kept_apart(tmp_path, monkeypatch, program, wrong):
    monkeypatch.setattr(measure_ranks, "PATIENCE", 1.0)  # tests may run where SIGINT is ignored
    assert wrong in measure_ranks.run(_part(program), tmp_path, {}, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.failed.json", "part.log"]
    assert measure_ranks.run(_part(WRITES), tmp_path, {}) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.json", "part.log"]


def test_a_part_without_a_result_or_without_what_it_needs_has_failed(tmp_path):
    assert "no result" in measure_ranks.run(_part("print('nothing')"), tmp_path, {})
    assert "table.json" in measure_ranks.run(_part(WRITES, needs=tmp_path / "table.json"), tmp_path, {})


def test_the_result_of_tests_is_what_passed_and_what_did_not(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='no such machine')\n"
        "def test_elsewhere(): pass\n"
    )
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--junitxml",
        "OUT",
        "-c",
        os.devnull,
        str(file),
    )
    assert "exit code 1" in measure_ranks.run(Part("all", command), tmp_path, dict(os.environ))
    found = json.loads((tmp_path / "all.failed.json").read_text())
    assert found["passed"] == 1
    assert list(found["failed"]) == ["test_some::test_wrong"]
    assert found["skipped"] == {"test_some::test_elsewhere": "no such machine"}
    assert measure_ranks.run(Part("right", (*command, "-k", "right")), tmp_path, dict(os.environ)) is None
    skipped = Part("skipped", (*command, "-k", "elsewhere"))
    assert "no test ran" in measure_ranks.run(skipped, tmp_path, dict(os.environ))


def test_a_script_that_is_told_to_stop_stops_its_part(tmp_path):
    program = (
        "import sys, measure_ranks as m; from pathlib import Path\n"
        "m.parts = lambda *_, **__: [m.Part('p', (sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(100)'))]\n"
        f"m.main(['4', {str(tmp_path)!r}])"
    )
    path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT / "src")])
    script = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path})
    log, deadline = tmp_path / "p.log", time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    script.terminate()
    assert script.wait(30) == 143
    assert "KeyboardInterrupt" in log.read_text()


def test_what_is_there_is_not_run_again(tmp_path, monkeypatch, capsys):
    listed = [Part("one", _part(WRITES).command), Part("two", _part("assert False").command)]
    monkeypatch.setattr(measure_ranks, "parts", lambda *_, **__: listed)
    monkeypatch.setattr(measure_ranks.signal, "signal", lambda *_: None)  # pytest keeps its own
    assert measure_ranks.main(["4", str(tmp_path)]) == 1
    assert measure_ranks.main(["4", str(tmp_path), "--only", "one"]) == 0
    said = capsys.readouterr().out
    assert "one: done" in said
    assert "two: exit code 1" in said
    assert "one: is there" in said
