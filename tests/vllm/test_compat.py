"""What the compatibility modules say of vLLM, asked of the version that is installed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from graph_stand_ins import Buffers, make_runtime, run

pytest.importorskip("vllm")

from vllm.config import CompilationMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, FlashAttentionMetadataBuilder

from tokenweave.integrations.vllm import checks, switch
from tokenweave.integrations.vllm.reasons import Reason
from vllm import __version__ as version


class Captured(Exception):
    """vLLM has come to its graphs, and need not go on."""


@pytest.fixture
def compat() -> ModuleType:
    found = switch.verdict("force", version, "cuda")
    assert found.module is not None, found.why
    return switch.compat(found.module)


def test_whether_vllm_warms_up_after_its_capture(compat: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker import gpu_worker

    ran: list[str] = []

    def capture(**kwargs: Any) -> int:
        ran.append("capture")
        raise Captured

    worker: Any = object.__new__(gpu_worker.Worker)
    worker.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
    )
    worker.model_config = SimpleNamespace(enforce_eager=False)
    worker.use_v2_model_runner = True
    worker._get_cudagraph_capture_context = contextlib.nullcontext
    worker.model_runner = SimpleNamespace(
        lora_config=None,
        maybe_remove_all_loras=lambda config: None,
        capture_model=capture,
        eplb=SimpleNamespace(suppress=contextlib.nullcontext),
    )
    monkeypatch.setattr(gpu_worker, "kernel_warmup", lambda *args: None)
    monkeypatch.setattr(gpu_worker, "warmup_kernels", lambda *args: ran.append("warm-up"))
    with pytest.raises(Captured):
        worker.compile_or_warm_up_model()
    assert ran == (["capture"] if compat.WARMS_UP_AFTER_CAPTURE else ["warm-up", "capture"])


def test_steps_metadata_differ_only_in_what_a_cut_replaces(compat: ModuleType) -> None:
    short, long = metadata([0, 20, 50], [20, 40]), metadata([0, 600, 601, 603], [600, 9000, 70])
    pattern, other = (cut(compat, step) for step in (short, long))
    assert compat.metadata_problem(short, None) is None
    different = {f.name for f in dataclasses.fields(short) if not same(getattr(short, f.name), getattr(long, f.name))}
    assert {"num_actual_tokens", "max_query_len", "seq_lens", "slot_mapping"} <= different, "the steps differ"
    for field in dataclasses.fields(FlashAttentionMetadata):
        assert same(getattr(pattern, field.name), getattr(other, field.name)), field.name


def test_which_metadata_can_be_cut(compat: ModuleType) -> None:
    step: Any = metadata([0, 20, 50], [20, 40])
    assert compat.metadata_problem(step, None) is None
    step.use_cascade = True  # a field of the older versions
    assert compat.metadata_problem(step, None) == "cascade attention"
    assert "SimpleNamespace, and FlashAttention's is needed" in compat.metadata_problem(SimpleNamespace(), None)


@pytest.mark.usefixtures("no_gpu")
def test_metadata_that_cannot_be_cut_turns_the_engine_off(compat: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").propagate = True
    runtime, buffers = make_runtime(), Buffers()
    runtime.compat.metadata_problem = compat.metadata_problem  # the stand-in's metadata is no backend's
    for _ in range(2):
        assert run(runtime, buffers, [1024]) is None
    assert runtime.off is Reason.ATTENTION_BACKEND
    assert runtime.steps.reasons[Reason.ATTENTION_BACKEND] > 0
    assert caplog.text.count("stock vLLM runs (attention_backend)") == 1
    assert "it is object, and FlashAttention's is needed" in caplog.text


@pytest.mark.parametrize(
    "settings", [{"prefetch": {"offload_group_size": 2}}, {"uva": {"cpu_offload_gb": 1}}, {}], ids=str
)
def test_offloaded_weights_are_seen_in_vllms_configuration(settings: dict[str, Any]) -> None:
    from vllm.config import VllmConfig

    config: Any = VllmConfig(offload_config=settings)  # type: ignore[arg-type]
    assert checks._offloads(config) is bool(settings)


def test_a_layer_that_vllms_offloader_has_wrapped_is_not_walked(
    compat: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    monkeypatch.setattr(checks, "plain_vocabulary", lambda layer: True)
    model: Any = torch.nn.Module()
    model.embed_tokens, model.layers = torch.nn.Module(), torch.nn.ModuleList([torch.nn.Module()])
    offloader: Any = object.__new__(PrefetchOffloader)
    offloader._hook_module_forward(0, model.layers[0])
    found = checks.model_problem(model, compat)
    assert found is not None
    assert found[0] is Reason.LAYERS
    assert found[1].startswith("layers.0 ")


def metadata(starts: list[int], lengths: list[int]) -> FlashAttentionMetadata:
    """Of a step, by vLLM's builder for a plain causal model."""
    builder: Any = object.__new__(FlashAttentionMetadataBuilder)
    builder.aot_schedule, builder.use_full_cuda_graph = False, True
    builder.cache_config, builder.kv_cache_dtype = SimpleNamespace(cache_dtype="auto"), torch.bfloat16
    builder.aot_sliding_window, builder.kv_cache_spec = (-1, -1), SimpleNamespace(sliding_window=None)
    builder.max_num_splits, builder.max_cudagraph_size = 32, 512
    builder.dcp_world_size, builder.rswa_window, builder.mm_prefix_query_ranges_np = 1, None, None
    tokens, requests = starts[-1], len(lengths)
    common = CommonAttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=max(b - a for a, b in itertools.pairwise(starts)),
        max_seq_len=max(lengths),
        block_table_tensor=torch.arange(requests * 4).view(requests, 4),
        slot_mapping=torch.arange(tokens),
        is_prefilling=torch.ones(requests, dtype=torch.bool),
        rswa_prefix_lens=torch.tensor(lengths),
    )
    return builder.build(0, common)


def cut(compat: ModuleType, pattern: FlashAttentionMetadata) -> Any:
    """Always the same split, by different patterns."""
    return compat.cut_metadata(
        pattern,
        attention=SimpleNamespace(impl=SimpleNamespace(vllm_flash_attn_version=2)),
        block_size=16,
        tokens=7,
        query_start_loc=torch.tensor([0, 7]),
        seq_lens=torch.tensor([9]),
        block_table=torch.zeros(1, 4),
        slot_mapping=torch.arange(7),
        max_query_len=7,
        max_seq_len=9,
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.equal(other)
    return type(one) is type(other) and one == other
