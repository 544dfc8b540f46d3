"""The command line's dispatch: help is instant, errors are one line and a code, Ctrl-C and closed pipes are quiet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tokenweave
from tokenweave.cli import doctor
from tokenweave.cli.main import COMMANDS, main
from tokenweave.errors import ModelError


def _run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenweave", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_help_names_every_command_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom tokenweave.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'transformers'} & sys.modules.keys()\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: tokenweave {command}" in shown
    assert COMMANDS[command][1:] in " ".join(shown.split())
    assert "`" not in shown, "help is plain text"


def test_version():
    assert _run("--version").stdout == f"tokenweave {tokenweave.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["--frobnicate"], ["doctor", "--frobnicate"]])
def test_usage_errors(arguments):
    done = _run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: tokenweave")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "command"), [(["compile", "--hiden"], "compile"), (["bench", "kernel", "--tq=2"], "bench kernel")]
)
def test_an_unknown_option_is_answered_with_the_usage_of_its_command(words, command, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: tokenweave {command} [-h]")
    assert f"tokenweave {command}: error: unrecognized arguments: {words[-1]}" in shown


def _raise(error: BaseException):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModelError("/no/where: no such model"), 2, "tokenweave: error: /no/where: no such model\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            ModuleNotFoundError("No module named 'gguf'", name="gguf"),
            2,
            "tokenweave: error: the package 'gguf' is not installed; `tokenweave doctor` says how to get what is missing\n",
        ),
    ],
)
def test_errors_become_a_line_and_an_exit_code(monkeypatch, capsys, error, code, message):
    monkeypatch.setattr(doctor, "run", _raise(error))
    assert main(["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.err == message
    assert captured.out == ""


def test_faults_of_the_program_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(doctor, "run", _raise(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is always full")
def test_a_full_disk_is_an_error():
    command = [sys.executable, "-m", "tokenweave", "doctor"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "tokenweave: error: the output: No space left on device; make room and try again\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed):
    command = f"{sys.executable} -m tokenweave doctor {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == b""


def test_a_reader_that_went_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        command = [sys.executable, "-m", "tokenweave", "doctor"]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, env=buffered)
    assert done.returncode == 141
    assert done.stderr == ""


def test_public_names_are_importable_and_listed():
    for name in tokenweave.__all__:
        assert getattr(tokenweave, name) is not None
        assert name in dir(tokenweave)
    with pytest.raises(AttributeError, match="frobnicate"):
        tokenweave.frobnicate  # noqa: B018
