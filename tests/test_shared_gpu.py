"""Ranks that share a GPU: MPS is started for them and ended, whatever becomes of it; a script stands for its daemon here."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest

import shared_gpu

# The daemon writes its pid as NVIDIA's does, and has a child as that has servers.
DAEMON = """#!/bin/sh
echo "$1 ${CUDA_VISIBLE_DEVICES-all}" >> "$CUDA_MPS_LOG_DIRECTORY/../calls"
pid="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
  setsid sh -c 'sleep 600 & echo $$ > "$0"; wait' "$pid" > /dev/null 2>&1 &
  while [ ! -s "$pid" ]; do sleep 0.05; done
else
  read word
  echo "$word" >> "$CUDA_MPS_LOG_DIRECTORY/../calls"
  QUIT
fi
"""
HEEDS = 'main=$(cat "$pid"); kill $(cat /proc/$main/task/$main/children) $main'
DEAF = "exit 0"


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the script is to be; its calls are written beside the daemon's folder."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(shared_gpu, "PATIENCE", 1.0)
    monkeypatch.setattr(shared_gpu.tempfile, "tempdir", str(tmp_path))
    shared_gpu._take_turns.cache_clear()
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin" / shared_gpu.CONTROL


def _install(control: Path, text: str) -> None:
    control.write_text(text)
    control.chmod(0o755)


@pytest.mark.parametrize("quit_", [HEEDS, DEAF])
def test_mps_is_there_within_the_context_and_gone_after(control: Path, quit_: str) -> None:
    _install(control, DAEMON.replace("QUIT", quit_))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with shared_gpu.side_by_side(2) as environment:
            assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
            folder = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
            daemon = int((folder / "nvidia-cuda-mps-control.pid").read_text())
            processes = [daemon, *shared_gpu._children(daemon)]
            assert len(processes) == 2
            assert all(map(shared_gpu._runs, processes))
    deadline = time.monotonic() + 5
    while any(map(shared_gpu._runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(shared_gpu._runs, processes))
    assert not folder.exists()
    assert (control.parent.parent / "calls").read_text().splitlines() == ["-d all", " 0", "quit"]


@pytest.mark.parametrize(
    ("text", "why"), [("", f"there is no {shared_gpu.CONTROL}"), ("#!/bin/sh\necho no GPU; exit 3\n", "with 3: no GPU")]
)
def test_without_mps_they_take_turns_which_is_said_once(control: Path, text: str, why: str) -> None:
    if text:
        _install(control, text)
    with pytest.warns(UserWarning, match=why), shared_gpu.side_by_side(2) as environment:
        assert environment == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with shared_gpu.side_by_side(2) as environment:
            assert environment == {}


def test_they_take_turns_where_that_is_asked_for(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(control, DAEMON)
    monkeypatch.setenv("TOKENWEAVE_TEST_TURNS", "1")
    with pytest.warns(UserWarning, match="TOKENWEAVE_TEST_TURNS"), shared_gpu.side_by_side(2) as environment:
        assert environment == {}
    assert not (control.parent.parent / "calls").exists()


@pytest.mark.parametrize(("value", "shared"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, value: str | None, shared: bool) -> None:
    if value is None:
        monkeypatch.delenv("TOKENWEAVE_TEST_SHARE_GPU", raising=False)
    else:
        monkeypatch.setenv("TOKENWEAVE_TEST_SHARE_GPU", value)
    assert shared_gpu.shares_gpu() is shared
