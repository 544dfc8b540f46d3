"""A vLLM engine in a process group of its own: started, asked, and ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenweave.errors import TokenWeaveError

_ENDING = 20.0  # seconds that an engine gets to end by itself
_LEAVING = 3.0  # seconds that its workers get after it, and Python's cleaner of their shared memory
_LAST_WORDS = 5.0  # seconds between the end of its answers and that of its log, which says why
_LAST_LINES = 30


class EngineFailed(TokenWeaveError, RuntimeError):
    """An engine did not start, ended, or did not answer in time; the message ends with the end of its log."""


class EngineProcess:
    """One engine; use it as a context manager.

    Args:
        name: of its configuration.
        arguments: of vLLM's ``AsyncEngineArgs``.
        environment: of its processes.
        folder: for its arguments and its log.
        time_limit: seconds for its start, and for each command.

    Attributes:
        ready: what the engine said of itself, see :mod:`tokenweave.bench.vllm.engine`; empty before :meth:`wait_ready`.
        log: what it and its workers printed.
    """

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        folder: Path,
        time_limit: float,
    ) -> None:
        self.name, self._limit = name, time_limit
        self.ready: dict[str, Any] = {}
        self.log = folder / f"{name}.log"
        settings = folder / f"{name}.json"
        settings.write_text(json.dumps(dict(arguments)))
        self._buffer, self._broken = b"", False
        self._started = time.monotonic()
        self._replies, theirs = os.pipe()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tokenweave.bench.vllm.engine", str(settings), str(theirs)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                start_new_session=True,  # its workers end with it
            )
        os.close(theirs)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def wait_ready(self) -> dict[str, Any]:
        """Waits for the engine's start; EngineFailed, with the end of its log, if it ends or the time limit passes."""
        self.ready = {**self._answer(self._started + self._limit), "start_s": time.monotonic() - self._started}
        return self.ready

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Runs a command, and returns its answer; EngineFailed as above."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None
        return self._answer(time.monotonic() + self._limit)

    def end(self) -> None:
        """Tells the engine to end, and doesn't wait: several end at the same time."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def close(self) -> None:
        """Ends the engine and all of its processes."""
        if self._replies < 0:
            return
        self.end()
        if not self._broken:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING)
        with contextlib.suppress(ProcessLookupError):
            leaving = time.monotonic() + (_LEAVING if self._process.poll() is not None else 0.0)
            while time.monotonic() < leaving:
                os.killpg(self._process.pid, 0)
                time.sleep(0.02)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._replies)
        self._replies = -1

    def said(self, word: str, most: int = 60) -> list[str]:
        """Lines of the log with this word, in any case, each once."""
        lines = self.log.read_text(errors="replace").splitlines()
        return list(dict.fromkeys(line.strip() for line in lines if word in line.casefold()))[:most]

    def _answer(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._failed(f"did not answer within {self._limit:.0f} s")
            if select.select([self._replies], [], [], min(left, 1.0))[0]:
                if not (data := os.read(self._replies, 1 << 16)):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(_LAST_WORDS)
                    raise self._failed("ended")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer

    def _failed(self, what: str) -> EngineFailed:
        self._broken = True
        last = self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return EngineFailed("\n".join([f"vLLM ({self.name}): {what}; the end of its log:", *last]))
