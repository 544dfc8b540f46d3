"""``tokenweave bench vllm``: the same engine arguments with the plugin off and on, in one run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenweave.cache import cache_dir
from tokenweave.cli.arguments import (
    check_folder,
    check_output,
    check_picture,
    check_seed,
    check_time_limit,
    numbers,
    some,
)
from tokenweave.errors import RequestError

if TYPE_CHECKING:
    from tokenweave.simulation import Trace

_MARGIN = 16  # tokens of the longest sequence beyond what is asked for
# KV cache of a rank where several engines share a GPU: vLLM sizes it by what it sees taken while it starts, which with others
# beside it is theirs too.
_SHARED_KV_GIB, _SHARED_KV_GIB_CPU = 16.0, 0.25


def add_parser(kinds: Any) -> None:
    summary = "vLLM with the plugin off (as it starts, and at its best) and on"
    parser = kinds.add_parser(
        "vllm",
        help=summary,
        description=f"Measure {summary}: prefill latency, decoding, and throughput and waiting times of a trace.",
    )
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder, or the name of a built-in configuration (random weights)")
    add("--tp", type=int, default=2, help="tensor-parallel ranks, a GPU each (default 2)")
    add("--configs", default="default,best,tokenweave", help="engines to compare (default %(default)s)")
    add("--together", action="store_true", help="hold all engines in memory at once, and measure in paired rounds")
    add("--starts", type=int, default=1, help="without --together: start each so often, in turns (default 1)")
    add("--tokens", default="512,1024,2048,4096,8192", help="prompts to prefill (default %(default)s; none: skip)")
    add("--rounds", type=int, default=20, help="samples of each prefill (default 20)")
    add("--decode", default="1,8,32,128", help="requests that decode at once (default %(default)s; none: skip)")
    add("--decode-context", type=int, default=512, help="tokens of their prompts (default 512)")
    add("--decode-steps", type=int, default=64, help="tokens that each makes (default 64)")
    add("--trace", help="CSV files of prompt and output lengths, sharegpt, arxiv_summarization; separated by commas")
    add("--requests", type=int, default=500, help="of each trace (default 500)")
    add("--rate", type=float, help="requests a second, Poisson (default: as the trace says, or all at once)")
    add("--max-output", type=int, help="cut the trace's outputs to so many tokens")
    add("--layers", type=int, help="so many layers only; with random weights")
    add("--dummy", action="store_true", help="random weights; implied by a built-in name")
    add("--dtype", default="auto", help="vLLM's (default auto)")
    add("--max-batched-tokens", type=int, default=8192, help="of a step (default 8192, vLLM's on large GPUs)")
    add("--max-num-seqs", type=int, help="requests of a step (default: vLLM's; `best` may take fewer)")
    add("--memory", type=float, help="share of GPU memory for each engine (default 0.9; --together: 0.9 / engines)")
    add("--kv-gib", type=float, help="KV cache of each rank (default: what --memory leaves; --together: 16)")
    add("--engine-args", default="{}", metavar="JSON", help="more arguments of every engine")
    add("--multicast", action="store_true", help="let vLLM and NCCL use NVLink multicast (default: none may)")
    add("--seed", type=int, default=0, help="of prompts, the trace's choice and orders")
    add("--json", type=Path, metavar="FILE", help="write the result, after each phase")
    add("--plot", type=Path, metavar="FILE", help="draw the result (.svg, .png or .pdf)")
    add("--logs", type=Path, metavar="FOLDER", help="what the engines print (default: a folder in the temporary one)")
    add("--time-limit", type=float, default=600, help="seconds for a start, and for each answer (default 600)")


def run(args: argparse.Namespace) -> int:
    """Measures; 0, or 1 if an engine failed."""
    from tokenweave.bench.vllm import configurations
    from tokenweave.bench.vllm.bench import VllmBench
    from tokenweave.bench.vllm.plots import plot
    from tokenweave.bench.vllm.report import text

    names = _check(args)
    folder, weightless = configurations.model_folder(args.model, cache_dir("models"))
    dummy = weightless or args.dummy
    if args.layers is not None and not dummy:
        raise RequestError("--layers needs random weights: add --dummy, or name a built-in configuration")
    config = _config(args, names, folder, dummy)
    bench = VllmBench(config, _environment(), _monitor(), lambda line: print(line, file=sys.stderr, flush=True))
    result = bench.run()
    print(text(result), flush=True)
    if args.plot is not None and result["rows"]:
        plot(result, args.plot)
    print(f"the engines' logs are in {config.logs}", file=sys.stderr)
    return 1 if result["failed"] or not result["rows"] else 0


def _config(args: argparse.Namespace, names: tuple[str, ...], folder: Path, dummy: bool) -> Any:
    """``bench.vllm.Config`` of the arguments."""
    from tokenweave.bench.vllm.bench import Config
    from tokenweave.bench.vllm.configurations import attention_heads, model_context

    heads, _ = attention_heads(folder)
    if heads % args.tp:
        raise RequestError(f"--tp {args.tp}; vLLM wants it to divide the model's {heads} query heads")
    tokens, batches = _sizes("--tokens", args.tokens), _sizes("--decode", args.decode)
    context = model_context(folder)
    traces = tuple(_trace(name, args, context - _MARGIN) for name in (args.trace.split(",") if args.trace else ()))
    longest = [*tokens, *([args.decode_context + args.decode_steps] if batches else [])]
    longest += [int((trace.prompts + trace.outputs).max()) for trace in traces]
    if max(longest) > context:
        raise RequestError(f"sequences of {max(longest)} tokens; the model's context is {context}")
    engine: dict[str, Any] = {
        "model": str(folder),
        "tensor_parallel_size": args.tp,
        "dtype": args.dtype,
        "max_model_len": min(context, max(longest) + _MARGIN),
        "max_num_batched_tokens": args.max_batched_tokens,
        "gpu_memory_utilization": args.memory or 0.9 / (len(names) if args.together else 1),
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "seed": args.seed,
        **({} if (kv_gib := _kv_gib(args)) is None else {"kv_cache_memory_bytes": int(kv_gib * 2**30)}),
        **({"load_format": "dummy"} if dummy else {}),
        **({"hf_overrides": {"num_hidden_layers": args.layers}} if args.layers is not None else {}),
        **({"max_num_seqs": args.max_num_seqs} if args.max_num_seqs is not None else {}),
        **_engine_arguments(args.engine_args),
    }
    return Config(
        model=Path(args.model).name + (f", {args.layers} layers" if args.layers is not None else ""),
        folder=folder,
        tp=args.tp,
        configurations=names,
        engine=engine,
        tokens=tokens,
        batches=batches,
        context=args.decode_context,
        steps=args.decode_steps,
        traces=traces,
        rounds=args.rounds,
        starts=args.starts,
        together=args.together,
        multicast=args.multicast,
        seed=args.seed,
        time_limit=args.time_limit,
        logs=args.logs or Path(tempfile.mkdtemp(prefix="tokenweave-vllm-logs-")),
        json=args.json,
    )


def _kv_gib(args: argparse.Namespace) -> float | None:
    """KV cache of a rank; None: vLLM's choice."""
    from tokenweave.doctor.vllm import installed_vllm

    if args.kv_gib is not None or not args.together:
        return args.kv_gib
    found = installed_vllm()
    return _SHARED_KV_GIB_CPU if found is not None and found.cpu else _SHARED_KV_GIB


def _trace(name: str, args: argparse.Namespace, longest: int) -> Trace:
    """Requests of a trace that fit into ``longest`` tokens, with their arrivals."""
    import numpy as np

    from tokenweave.simulation import poisson, read_trace, sized

    trace = read_trace(name)
    if args.max_output is not None:
        trace = dataclasses.replace(trace, outputs=np.minimum(trace.outputs, args.max_output))
    trace = trace.kept(trace.prompts + trace.outputs <= longest)
    if not len(trace):
        raise RequestError(f"--trace {name}: no request fits into the model's {longest} tokens")
    trace = sized(trace, args.requests, args.seed, keep_order=trace.arrivals is not None and args.rate is None)
    if args.rate is not None:
        return dataclasses.replace(trace, arrivals=poisson(len(trace), args.rate, args.seed))
    return trace


def _check(args: argparse.Namespace) -> tuple[str, ...]:
    """The configurations; refuses what can be refused before an engine starts."""
    from tokenweave.bench.vllm.configurations import CONFIGURATIONS
    from tokenweave.doctor.vllm import VLLM_INSTALL, installed_vllm, plugin_is_visible

    asked = some("--configs", args.configs, CONFIGURATIONS)
    for option, value, least in (
        ("--tp", args.tp, 1),
        ("--rounds", args.rounds, 1),
        ("--starts", args.starts, 1),
        ("--requests", args.requests, 1),
        ("--decode-context", args.decode_context, 1),
        ("--decode-steps", args.decode_steps, 2),
        ("--max-batched-tokens", args.max_batched_tokens, 1),
        *((("--layers", args.layers, 1),) if args.layers is not None else ()),
        *((("--max-output", args.max_output, 1),) if args.max_output is not None else ()),
        *((("--max-num-seqs", args.max_num_seqs, 1),) if args.max_num_seqs is not None else ()),
    ):
        if value < least:
            raise RequestError(f"{option} {value}; expected at least {least}")
    if args.memory is not None and not 0 < args.memory < 1:
        raise RequestError(f"--memory {args.memory}; expected a share between 0 and 1")
    check_seed(args.seed)
    check_time_limit(args.time_limit)
    check_output("--json", args.json)
    check_picture("--plot", args.plot)
    if args.logs is not None:
        check_folder("--logs", args.logs)
    if args.kv_gib is not None and not 0 < args.kv_gib < 1e6:
        raise RequestError(f"--kv-gib {args.kv_gib}; expected a positive number")
    if args.together and args.starts > 1:
        raise RequestError("--starts counts starts one after the other; --together starts each engine once")
    if not (_sizes("--tokens", args.tokens) or _sizes("--decode", args.decode) or args.trace):
        raise RequestError("nothing to measure: --tokens none, --decode none and no --trace")
    found = installed_vllm()
    if found is None:
        raise RequestError(f"vLLM is not installed here: {VLLM_INSTALL}")
    if not found.cpu:
        import torch

        if torch.cuda.device_count() < args.tp:
            raise RequestError(f"--tp {args.tp} needs as many GPUs; torch sees {torch.cuda.device_count()}")
    if "tokenweave" in asked and not plugin_is_visible():
        raise RequestError(
            "vLLM would not find the plugin: it looks for an installed package's entry point, and TokenWeave is imported "
            "from its sources; pip install --no-deps -e . in TokenWeave's checkout (with sources and their "
            "src/tokenweave.egg-info it finds it too)"
        )
    return asked


def _sizes(option: str, words: str) -> tuple[int, ...]:
    return () if words == "none" else numbers(option, words)


def _engine_arguments(words: str) -> dict[str, Any]:
    try:
        found = json.loads(words)
    except json.JSONDecodeError as error:
        raise RequestError(f"--engine-args {words!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(f"--engine-args {words!r}; expected a JSON object, e.g. '{{\"enforce_eager\": true}}'")
    return found


def _environment() -> dict[str, Any]:
    from tokenweave.bench import environment

    return environment.describe()


def _monitor() -> Any:
    """Of the first GPU; None where there is none."""
    import torch

    from tokenweave.bench.environment import Monitor

    return Monitor(0) if torch.cuda.device_count() else None
