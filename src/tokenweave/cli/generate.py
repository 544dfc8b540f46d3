"""``tokenweave generate``: answers prompts with a tensor-parallel model."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenweave.errors import RequestError, TokenWeaveError

if TYPE_CHECKING:
    from tokenweave.llm import Token

DEFAULT_MAX_TOKENS = 128


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("generate", help="answer prompts with a tensor-parallel model")
    parser.add_argument("--model", required=True, metavar="DIR_OR_GGUF", help="Hugging Face folder or GGUF file")
    parser.add_argument(
        "--tp",
        type=int,
        default=None,
        metavar="N",
        help="ranks; default 1, under torchrun its number of processes",
    )
    parser.add_argument(
        "--mode",
        help="auto (the planner's choice for each step), sequential, fused or woven; default: what the environment "
        "variable TOKENWEAVE_MODE says, else auto",
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="one prompt; its answer is printed as it comes")
    prompts.add_argument("--prompts-file", metavar="FILE", help="one prompt a line; empty lines are left out")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message: use the chat template")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="default %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default %(default)s: the most likely token")
    parser.add_argument("--top-p", type=float, default=1.0, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    parser.add_argument(
        "--dtype", default="auto", help="auto (CPU: float32, CUDA: bfloat16), float32, bfloat16, float16"
    )
    parser.add_argument(
        "--max-batch-tokens", type=int, default=2048, metavar="N", help="most rows of a step; default %(default)s"
    )
    parser.add_argument("--no-graphs", action="store_true", help="run every step launch by launch, not as CUDA graphs")
    parser.add_argument("--json", action="store_true", help="print a JSON list with one object a prompt")


def run(args: argparse.Namespace) -> int:
    """Generates and prints; 0."""
    prompts = _prompts(args)
    from tokenweave.engine.sampling import SamplingParams
    from tokenweave.llm import LLM
    from tokenweave.peers import environment_number, started_ranks

    world_size = started_ranks()
    tp = world_size if args.tp is None else args.tp
    speaks = environment_number("RANK", 0) == 0 or world_size == 1  # of torchrun's processes only the first
    streams = speaks and len(prompts) == 1 and not args.json
    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos
    )

    with (
        _printer() as show,
        LLM(
            args.model,
            tp,
            dtype=args.dtype,
            mode=args.mode,
            max_batch_tokens=args.max_batch_tokens,
            seed=args.seed,
            graphs=not args.no_graphs,
        ) as llm,
    ):
        on_token = show if streams else None
        if args.chat:
            outputs = llm.chat([[{"role": "user", "content": p}] for p in prompts], params, on_token=on_token)
        else:
            outputs = llm.generate(prompts, params, on_token=on_token)
        steps, graphs = llm.steps, llm.graph_record
    if not speaks:
        return 0
    if args.json:
        objects = [json.dumps(_object(p, o), ensure_ascii=False) for p, o in zip(prompts, outputs, strict=True)]
        print("[\n  " + ",\n  ".join(objects) + "\n]")
        return 0
    if streams:
        print()
    else:
        for prompt, output in zip(prompts, outputs, strict=True):
            print(f">>> {prompt}\n{output.outputs[0].text}\n")
    sys.stdout.flush()
    print(summary(outputs, steps, graphs), file=sys.stderr)
    return 0


@contextlib.contextmanager
def _printer() -> Iterator[Callable[[Token], None]]:
    """Prints an answer as it comes. What is said of an error in the middle of it begins on a line of its own."""
    begun = False

    def show(token: Token) -> None:
        nonlocal begun
        begun = begun or token.text != ""
        print(token.text, end="", flush=True)

    try:
        yield show
    except TokenWeaveError:
        if begun:
            print(flush=True)
        raise


def summary(outputs: Sequence[Any], steps: Sequence[Any], graphs: Any = None) -> str:
    """The table after the text: what was generated, how fast, and how the steps were run.

    Args:
        outputs: RequestOutputs of one call.
        steps: its StepRecords. graphs: the GraphRecord, or None.
    """
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    prompt_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    slowest = max(o.metrics.total_ms for o in outputs) / 1000
    ttft = [f"{ms:.0f}" for ms in sorted(o.metrics.ttft_ms for o in outputs)]
    first = " to ".join(dict.fromkeys((ttft[0], ttft[-1]))) + " ms"
    # A mixed step computes prompts, so it counts as one of prefill.
    kinds = {"prefill": [s for s in steps if s.prefill_tokens], "decode": [s for s in steps if not s.prefill_tokens]}
    rows = [
        ("tokens", f"{prompt_tokens} in, {tokens} out"),
        ("time to first token", first),
        ("tokens/s", f"{tokens / slowest:.1f}"),
    ]
    rows += [(f"{kind} plan", _plans(chosen)) for kind, chosen in kinds.items() if chosen]
    for kind, chosen in kinds.items():
        if chosen:
            collectives = sum(s.collectives for s in chosen) / len(chosen)
            kibibytes = sum(s.bytes_sent for s in chosen) / len(chosen) / 1024
            rows.append((f"{kind} step", f"{collectives:.0f} collectives, {kibibytes:,.1f} KiB sent by rank 0"))
    if graphs is not None:
        rows.append(("step graphs", str(graphs)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _plans(steps: Sequence[Any]) -> str:
    """Each mode with its number of steps; for a woven one the rows of its first step's halves."""
    texts = []
    for mode in dict.fromkeys(s.mode for s in steps):
        chosen = [s for s in steps if s.mode == mode]
        cut = chosen[0].split
        rows = chosen[0].prefill_tokens + chosen[0].decode_tokens
        halves = "" if cut is None else f" ({cut} + {rows - cut} rows)"
        texts.append(f"{mode}{halves} x {len(chosen)}")
    return ", ".join(texts)


def _object(prompt: str, output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "ttft_ms": round(output.metrics.ttft_ms, 3),
        "mode_counts": output.mode_counts,
    }


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt is not None:
        return [args.prompt]
    path = Path(args.prompts_file)
    try:
        # Only line feeds end a line: a prompt may hold the others of Unicode. A byte order mark belongs to no prompt.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--prompts-file {path}: cannot be read as UTF-8 text: {error}") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise RequestError(f"--prompts-file {path}: no prompt in it; expected one a line")
    return prompts
