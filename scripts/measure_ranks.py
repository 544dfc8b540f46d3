"""Tests and measures on so many GPUs of one host, in parts of at most ten minutes (--limit), each of which leaves a JSON file in a folder.

    python scripts/measure_ranks.py 4 FOLDER                  # everything
    python scripts/measure_ranks.py 8 FOLDER --only latency   # the parts that have this in their names
    python scripts/measure_ranks.py 8 FOLDER --dry-run        # show what would run

A part whose file is there is not run again, so an interrupted session is continued by the same command. A part that fails or
takes longer than its limit leaves NAME.failed.json, if it got so far, and does not keep others from running; NAME.log has
what it printed. The Python that runs this needs TokenWeave with `[cuda]`, pytest and transformers for the tests, which fetch SmolLM2's
weights unless TOKENWEAVE_SMOLLM2_GGUF names them; FlashInfer, for its all-reduce, and fa3-fwd are measured where they are
installed, and vLLM where it is. Everything runs with NVLink multicast switched off,
for the baselines too, unless --multicast says otherwise. The figures belong in benchmarks/results once they have been looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenweave.models import read_config
from tokenweave.simulation.memory import weight_bytes
from tokenweave.switches import NO_MULTICAST

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 600  # seconds of a part
EARLIER = 40  # seconds before it benchmarks end their ranks themselves, and say where they were
PATIENCE = 20  # seconds for a part that is told to stop
MODELS = ("Llama-3.1-8B", "Llama-3.3-70B", "Qwen2.5-72B", "Mixtral-8x22B")
HIDDEN = (4096, 8192)
ROWS = ",".join(str(2**n) for n in range(16))
CTAS = "2,4,8,12,16,32"
LONGEST = 32768  # tokens of a step
SHORT, LONG, LONGEST_ALONE = "512,1024,2048,4096", "8192,16384", str(LONGEST)
MOST_GB, MOST_GB_OF_THREE = (
    100,
    19,
)  # of a rank's weights; three engines of vLLM are in memory at once, each with a cache
TESTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("collective", "tests/test_gpu_collective.py", {}),
    (
        "collective-multimem-emulated",
        "tests/test_gpu_collective.py",
        {"TOKENWEAVE_TEST_TRANSPORT": "multimem-emulated"},
    ),
    ("graphs", "tests/test_gpu_graphs.py tests/test_gpu_workspaces.py", {}),
    ("faults", "tests/test_gpu_faults.py", {}),
    ("fp8", "tests/test_gpu_fp8.py", {}),
    ("multimem", "tests/test_gpu_multimem.py", {}),
    ("kernels", "tests/test_gpu_kernels.py", {}),
    ("engine", "tests/test_gpu_engine.py -k 'not many_random_steps'", {}),
    ("engine-soak", "tests/test_gpu_engine.py -k many_random_steps", {}),
    ("smollm2", "tests/test_gpu_smollm2.py", {}),
    ("commands", "tests/test_gpu_trace.py tests/test_gpu_tuning.py", {}),
)
"""Name, arguments of pytest, variables. The collective's soak is in its file."""
VLLM_TESTS = (("vllm", "tests/vllm/test_gpu_real_weights.py"), ("vllm-server", "tests/vllm/test_server.py"))


@dataclass(frozen=True)
class Part:
    """A command whose result becomes ``FOLDER/{name}.json``.

    Attributes:
        command: its words; ``OUT`` stands for the file that it is to write, which for pytest is JUnit's XML.
        environment: variables beside this process's. needs: a file without which it cannot run.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Path | None = None

    @property
    def tests(self) -> bool:
        """Whether pytest runs."""
        return "pytest" in self.command


def parts(
    ranks: int, folder: Path, gpu: str = "h200", *, vllm: bool = True, multicast: bool = False, limit: int = LIMIT
) -> list[Part]:
    """Everything, in the order in which it runs.

    Args:
        gpu: what the files are named after. vllm: whether it is installed. multicast: whether vLLM may use it too. limit: seconds of a part.
    """
    setup = f"{gpu}x{ranks}"
    return [
        *_kernels(ranks, setup, limit),
        *_tests(ranks, setup, vllm),
        *[part for model in MODELS for part in _steps(ranks, setup, folder, model, limit)],
        *([part for model in MODELS for part in _vllm(ranks, setup, folder, model, multicast)] if vllm else []),
    ]


def _tokenweave(words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tokenweave", *words.split())


def _kernels(ranks: int, setup: str, limit: int) -> list[Part]:
    return [
        Part(
            f"{setup}-kernel-{hidden}",
            _tokenweave(
                f"bench kernel --tp {ranks} --hidden {hidden} --tokens {ROWS} --ctas {CTAS} --rounds 20 "
                f"--time-limit {limit - EARLIER} --json OUT"
            ),
        )
        for hidden in HIDDEN
    ]


def _tests(ranks: int, setup: str, vllm: bool) -> list[Part]:
    listed = [*TESTS, *([(name, words, {}) for name, words in VLLM_TESTS] if vllm else [])]
    pytest = (sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--junitxml", "OUT")
    return [
        Part(
            f"{setup}-tests-{name}",
            (*pytest, *([] if name == "vllm-server" else ["-m", "gpu"]), *shlex.split(words)),
            {"TOKENWEAVE_TEST_RANKS": str(ranks), **environment},
        )
        for name, words, environment in listed
    ]


def _steps(ranks: int, setup: str, folder: Path, model: str, limit: int) -> list[Part]:
    """A tuned table, and the prefill steps that are planned with it. The longest steps of a large model run with a quarter of
    its layers, or they would take longer than a part may."""
    name, whole = model.lower(), read_config(model).layers
    table, small = folder / f"{setup}-tune-{name}.json", model == MODELS[0]
    tuning = _tokenweave(
        f"tune --model {model} --tp {ranks} --max-tokens {LONGEST} --seconds 240 --time-limit {limit - EARLIER} --out OUT"
    )
    found = [Part(table.stem, tuning)]
    for tokens, some in ((SHORT, whole), (LONG, whole), (LONGEST_ALONE, whole if small else whole // 4)):
        layers = min(some, _layers(model, ranks, MOST_GB))
        words = (
            f"bench latency --model {model} --tp {ranks} --tokens {tokens} --time-limit {limit - EARLIER} --json OUT"
        )
        words += "" if layers == whole else f" --layers {layers}"
        words += "" if small and tokens == SHORT else " --sustain 0 --no-profile"
        of = name if layers == whole else f"{name}-{layers}-layers"
        sizes = "-to-".join(dict.fromkeys((tokens.split(",")[0], tokens.split(",")[-1])))
        found.append(
            Part(f"{setup}-latency-{of}-{sizes}", _tokenweave(words), {"TOKENWEAVE_PROFILE": str(table)}, table)
        )
    return found


def _vllm(ranks: int, setup: str, folder: Path, model: str, multicast: bool) -> list[Part]:
    """Prompts and decoding, then a trace each, so that no part starts more than three engines."""
    name, table = model.lower(), folder / f"{setup}-tune-{model.lower()}.json"
    layers = _layers(model, ranks, MOST_GB_OF_THREE)
    common = f"bench vllm --model {model} --tp {ranks} --together --json OUT"
    if layers < read_config(model).layers:
        common, name = f"{common} --layers {layers}", f"{name}-{layers}-layers"
    common += " --multicast" if multicast else ""
    trace = "--tokens none --decode none --requests 500 --max-output 128 --trace"
    kinds = {
        "": "--tokens 512,1024,1536,2048,4096,8192,16384 --decode 32 --rounds 14",
        "-sharegpt": f"{trace} sharegpt",
        "-arxiv": f"{trace} arxiv_summarization",
    }
    environment = {"TOKENWEAVE_PROFILE": str(table)}
    return [
        Part(f"{setup}-vllm-{name}{kind}", _tokenweave(f"{common} {words}"), environment, table)
        for kind, words in kinds.items()
    ]


def _layers(model: str, ranks: int, most_gb: float) -> int:
    """As many as fit: all, a half, a quarter and so on."""
    config = read_config(model)
    while weight_bytes(config, ranks) > most_gb * 1e9:
        config = dataclasses.replace(config, layers=config.layers // 2)
    return config.layers


def run(part: Part, folder: Path, environment: Mapping[str, str], limit: float = LIMIT) -> str | None:
    """Runs a part whose file is not there yet. Returns what went wrong, None if nothing did."""
    result, failed, log = (folder / f"{part.name}{ending}" for ending in (".json", ".failed.json", ".log"))
    if part.needs is not None and not part.needs.exists():
        return f"there is no {part.needs.name}, which it needs"
    out = folder / f"{part.name}.{'xml' if part.tests else 'partial.json'}"
    for left in (out, failed):
        left.unlink(missing_ok=True)
    command, began = [str(out) if word == "OUT" else word for word in part.command], time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, **part.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            wrong = f"exit code {code}, see {log.name}" if code else None
        except subprocess.TimeoutExpired:
            wrong = f"it took longer than {limit:g} s, see {log.name}"
        finally:
            _stop(process)
    if part.tests and out.exists():
        found = _tests_found(out) | {"command": shlex.join(part.command), "environment": dict(part.environment)}
        found |= {"seconds": round(time.monotonic() - began, 1)}
        out.unlink()
        out = folder / f"{part.name}.partial.json"
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if wrong is None and not found["passed"]:
            wrong = "no test ran: each was skipped"
    if out.exists():
        out.replace(failed if wrong else result)
    elif wrong is None:
        wrong = f"it wrote no result, see {log.name}"
    return wrong


def _stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, so that ranks in sessions of their own end too; then what is left of this one."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tests_found(junit: Path) -> dict[str, Any]:
    """What pytest's XML says: how many passed, and which did not, with what they said."""
    passed, others = 0, {"failed": {}, "skipped": {}}  # type: int, dict[str, dict[str, str]]
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        name, said = f"{case.get('classname')}::{case.get('name')}", [of for of in case if of.tag != "properties"]
        wrong = [of for of in said if of.tag in ("failure", "error", "skipped")]
        passed += not wrong
        for of in wrong:
            others["skipped" if of.tag == "skipped" else "failed"][name] = of.get("message") or ""
    return {"passed": passed, **others}


def _shown(part: Part, folder: Path) -> str:
    settings = [f"{name}={shlex.quote(value)}" for name, value in part.environment.items()]
    out = folder / f"{part.name}.{'xml' if part.tests else 'json'}"
    return " ".join([*settings, shlex.join(str(out) if word == "OUT" else word for word in part.command)])


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, choices=range(2, 9), metavar="N", help="GPUs, 2 to 8")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the results go")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="parts whose names have one of these in them (comma)"
    )
    parser.add_argument("--gpu", default="h200", help="what the files are named after (default %(default)s)")
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="SECONDS", help="of a part (default %(default)s)")
    parser.add_argument("--multicast", action="store_true", help="leave NVLink multicast as it is")
    parser.add_argument("--dry-run", action="store_true", help="show the commands, vLLM's too, and run nothing")
    args = parser.parse_args(arguments)
    if args.limit <= EARLIER:
        parser.error(f"--limit {args.limit}; expected more than {EARLIER} seconds")
    vllm = args.dry_run or importlib.util.find_spec("vllm") is not None
    folder = args.folder.absolute()
    listed = parts(args.ranks, folder, args.gpu, vllm=vllm, multicast=args.multicast, limit=args.limit)
    listed = [part for part in listed if any(word in part.name for word in args.only.split(","))]
    everywhere = {} if args.multicast else NO_MULTICAST
    if args.dry_run:
        print("".join(f"export {name}={value}\n" for name, value in everywhere.items()), end="")
        print("\n".join(_shown(part, folder) for part in listed))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is stopped too
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which parts would ignore if a shell's background made this one do so
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **everywhere, "PYTHONPATH": path}
    wrong = []
    for part in listed:
        began = time.monotonic()
        if (folder / f"{part.name}.json").exists():
            print(f"{part.name}: is there", flush=True)
            continue
        if failure := run(part, folder, environment, args.limit):
            wrong.append(part.name)
        print(f"{part.name}: {failure or 'done'} ({time.monotonic() - began:.0f} s)", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
