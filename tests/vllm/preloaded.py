"""A process that has imported vLLM and forks the ranks of one engine after the other: the import takes most of a start.

pytest's side is :func:`run`. The other side is this file as a program: it reads a JSON line per engine, forks its ranks,
waits for them, and answers with their exit codes. It ends, and with it all ranks, when its input does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

_GRACE = 10.0  # seconds between the first rank's failure and the end of the others
_LEAVING = 3.0  # seconds that the workers of a rank that has ended get, and Python's cleaner of their shared memory
_preloaded: subprocess.Popen[str] | None = None


def run(
    folder: Path, environments: Sequence[Mapping[str, str]], time_limit: float, base: Mapping[str, str]
) -> list[int | None]:
    """Runs ``harness.main(folder, rank)`` on a forked process for each environment; its output is in ``log{rank}.txt``.

    Args:
        environments: all variables of each rank.
        time_limit: seconds; then the ranks are killed.
        base: variables of the process that imports vLLM, for its first start.

    Returns:
        Exit codes; None for a rank that was killed.
    """
    global _preloaded
    if _preloaded is None or _preloaded.poll() is not None:
        _preloaded = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(base)
        )
        atexit.register(_preloaded.kill)
    assert _preloaded.stdin is not None
    assert _preloaded.stdout is not None
    job = {"folder": str(folder), "environments": [dict(e) for e in environments], "time_limit": time_limit}
    _preloaded.stdin.write(json.dumps(job) + "\n")
    _preloaded.stdin.flush()
    answer = _preloaded.stdout.readline()
    if not answer:
        raise RuntimeError(f"the process that imports vLLM ended with {_preloaded.wait()}; its errors are above")
    return json.loads(answer)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the import prints is no answer
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401

    while line := sys.stdin.readline():
        job = json.loads(line)
        ranks = [_fork(job["folder"], rank, env) for rank, env in enumerate(job["environments"])]
        answers.write(json.dumps(_wait(ranks, job["time_limit"])) + "\n")
        answers.flush()


def _fork(folder: str, rank: int, environment: Mapping[str, str]) -> int:
    """The process id of a new rank, in a session of its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        with open(os.devnull) as nothing, open(f"{folder}/log{rank}.txt", "w") as log:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.clear()
        os.environ.update(environment)
        import harness

        harness.main(Path(folder), rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the other rank may be gone already: an orderly end of the process group would wait for it


def _wait(ranks: Sequence[int], time_limit: float) -> list[int | None]:
    """Exit codes of the ranks, None of those that had to be killed; nothing of their sessions is left."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + time_limit
    try:
        while len(codes) < len(ranks) and time.monotonic() < deadline:
            if select.select([sys.stdin], [], [], 0.05)[0]:
                break  # no job comes now: it is the input's end
            for pid in set(ranks) - codes.keys():
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        deadline = min(deadline, time.monotonic() + _GRACE)
    finally:
        leaving = time.monotonic() + (_LEAVING if len(codes) == len(ranks) else 0.0)
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < leaving:
                    os.killpg(pid, 0)
                    time.sleep(0.02)
                os.killpg(pid, signal.SIGKILL)
            if pid not in codes:
                os.waitpid(pid, 0)
    return [codes.get(pid) for pid in ranks]


if __name__ == "__main__":
    _serve()
