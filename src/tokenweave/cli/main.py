"""``tokenweave COMMAND ...``: dispatch, and what an error looks like to a user."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from tokenweave import __version__
from tokenweave.errors import TokenWeaveError

COMMANDS = {
    "generate": "answer prompts with a tensor-parallel model",
    "plan": "show how a batch would be run on given GPUs, with its waves and predicted times",
    "predict": "predict prefill times in each mode on given GPUs, before renting any",
    "simulate": "simulate a fleet that serves a trace: throughput and waiting times with and without TokenWeave",
    "tune": "measure what a model's parts take on this machine's GPUs, for the planner",
    "bench": "measure the fused collective, whole prefill steps or vLLM on this machine's GPUs",
    "trace": "record one step of a model, eagerly and as a CUDA graph, and draw a layer on its two streams",
    "compile": "compile the GPU kernels, with no GPU, and show registers, spills and shared memory",
    "doctor": "show what this machine has, which transport would be used, and what is missing",
}
"""Subcommand -> help. Each is a module of this package, imported only when it is the one that runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments after the program's name; None for ``sys.argv``'s.

    Returns:
        The exit code: the subcommand's own, 2 for an error that the user can act on, 130 after Ctrl-C.

    Raises:
        SystemExit: argparse printed help, the version or a usage error.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    _open_closed_streams()
    try:
        args = _parser(argv).parse_args(argv)
        code = int(args.run(args))
        sys.stdout.flush()  # here, where a reader that went away is known to be no error
        return code
    except TokenWeaveError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "tokenweave":
            raise
        return _fail(
            f"the package {error.name!r} is not installed; `tokenweave doctor` says how to get what is missing"
        )
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # e.g. `| head`: the reader has what it wanted
        _discard_output()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_output()
        return _fail(f"{error.filename or 'the output'}: {error.strerror}; make room and try again")


def _open_closed_streams() -> None:
    """What the caller closed (``>&-``) goes nowhere: sockets must not take the numbers that libraries print to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one's, unless something took it
            setattr(sys, name, os.fdopen(null if null == number else os.dup(null), "w" if number else "r"))


def _discard_output() -> None:
    """Else the flush at exit complains again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Of a subcommand too: an argument that it does not know is its own error, with its usage, not the program's."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="tokenweave", description="Hides the communication of tensor-parallel LLM inference.")
    parser.add_argument("--version", action="version", version=f"tokenweave {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((arg for arg in argv if not arg.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name == chosen:
            module = importlib.import_module(f"tokenweave.cli.{name}")
            module.add_parser(subparsers)
            subparsers.choices[name].description = f"{summary[0].upper()}{summary[1:]}."
            subparsers.choices[name].set_defaults(run=module.run)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _fail(message: str) -> int:
    print(f"tokenweave: error: {message}", file=sys.stderr)
    return 2
