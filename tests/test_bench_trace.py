"""``tokenweave trace``: on two CPU ranks as it is, and what it reads out of a GPU's trace."""

import errno
import gzip
import json
import os
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tokenweave.bench.steps import PrefillSteps, norm_alone
from tokenweave.bench.trace.events import Span, gpu_spans, kind_of, layer_of, summary, tagged, union_us
from tokenweave.bench.trace.record import Recorder, _exported, annotated
from tokenweave.cli.main import main
from tokenweave.models.config import ModelConfig
from tokenweave.models.dummy import dummy_model
from tokenweave.planning import Mode, Plan

TINY = ModelConfig(
    family="llama", hidden=64, intermediate=96, layers=3, heads=8, kv_heads=4, head_dim=16, vocab=160, context=1024
)


def test_the_command_writes_traces_and_pictures(tmp_path, capfd):
    arguments = ["--model", "SmolLM2-135M", "--layers", "2", "--tokens", "64", "--tp", "2"]
    arguments += ["--device", "cpu", "--dtype", "fp32", "--out", str(tmp_path / "out")]
    assert main(["trace", *arguments]) == 0
    result = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert result["plan"]["mode"] == "woven"
    step = result["steps"]["eager"]
    assert 0 < step["hidden_ms"] < step["busy_ms"] <= step["span_ms"]
    assert {"GEMM", "attention", "collective"} <= step["by_kind_ms"].keys()
    assert len(step["waiting_ms"]) == 2
    assert min(step["waiting_ms"]) >= 0
    words = "".join(ElementTree.parse(tmp_path / "out" / "layer-eager.svg").getroot().itertext())
    assert words is not None
    assert (tmp_path / "out" / "layer-eager.png").stat().st_size > 1000
    for rank in range(2):
        trace = json.loads(gzip.decompress((tmp_path / "out" / f"rank{rank}-eager.json.gz").read_bytes()))
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"compute mlp_1 suffix", "collective embedding prefix"} <= names
    assert "collectives hidden" in capfd.readouterr().out


def _recorded(folder, mode):
    group, rank = dist.group.WORLD, dist.get_rank()
    model = dummy_model(TINY, rank=rank, world_size=2, group=group, dtype=torch.float32)
    steps = PrefillSteps(model, 48, group, torch.device("cpu"), wrap=annotated)
    plain = PrefillSteps(model, 48, group, torch.device("cpu"))
    with torch.inference_mode():
        if mode == "no_comm":
            variants = [s.of_collective(mode, "norm", None, 48, norm_alone) for s in (steps, plain)]
        else:
            plan = Plan(Mode(mode), split=16 if mode == "woven" else None)
            variants = [s.of_plan(mode, "given", plan, 48) for s in (steps, plain)]
        same = torch.equal(variants[0].walk(), variants[1].walk())
        recorder = Recorder(group, torch.device("cpu"))
        spans = recorder.record(variants[0].walk, folder / f"{rank}.json")
    waiting = recorder.waiting_ms(spans)
    steps.close()
    plain.close()
    return same, spans, waiting


@pytest.mark.parametrize("mode", ["sequential", "fused", "woven", "no_comm"])
def test_each_stage_of_each_split_is_recorded_where_it_ran(mode, tmp_path):
    stages = ["embedding", *(f"{half}_{layer}" for layer in range(3) for half in ("attention", "mlp"))]
    splits = ["prefix", "suffix"] if mode == "woven" else ["step"]
    for same, spans, waiting in run_ranks(2, _recorded, tmp_path, mode):
        assert same, "naming the calls changes nothing"
        comm = [span for span in spans if span.lane == "communication"]
        assert [(span.stage, span.split) for span in comm] == [(stage, split) for stage in stages for split in splits]
        compute = [(span.stage, span.split) for span in spans if span.kind == "GEMM"]
        assert sorted(set(compute)) == sorted((stage, split) for stage in stages[1:] for split in splits)
        assert len({span.stream for span in spans}) == len(splits), "a woven step has a thread for its collectives"
        assert len(waiting) == 2
        layer = layer_of(spans, 1)
        assert {"attention_1", "mlp_1"} <= {span.stage for span in layer}
        assert len(layer) < len(spans)


class _Profiler:
    """Exports what it was made with; as torch's, it does not say where that was cut short."""

    def __init__(self, text):
        self.text = text

    def export_chrome_trace(self, path):
        Path(path).write_text(self.text)


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz"])
def test_a_trace_that_cannot_be_written_leaves_that_of_before(name, tmp_path, monkeypatch):
    path = tmp_path / name
    assert _exported(_Profiler('{"traceEvents": [1]}'), path) == {"traceEvents": [1]}
    before = path.read_bytes()
    assert json.loads(gzip.decompress(before) if name.endswith("gz") else before) == {"traceEvents": [1]}
    with pytest.raises(OSError, match="the profiler's trace is not whole") as cut:
        _exported(_Profiler('{"traceEvents": ['), path)
    assert (cut.value.errno, cut.value.filename) == (errno.ENOSPC, tempfile.gettempdir())

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as full_disk:
        _exported(_Profiler('{"traceEvents": [2]}'), path)
    assert full_disk.value.filename == str(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [name]


def _event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def _gpu_trace():
    """Two launches in an annotation, a collective in another, and the NCCL kernel with which the ranks met."""
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            _event("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=1),
            _event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5, 5, tid=7, stream=7, correlation=1),
            _event("user_annotation", "compute attention_0 step", 3, 6),
            _event("cuda_runtime", "cudaLaunchKernel", 4, 1, correlation=2),
            _event("cuda_driver", "cuLaunchKernel", 6, 1, correlation=3),
            _event("user_annotation", "collective attention_0 step", 10, 4),
            _event("cuda_driver", "cuLaunchKernelEx", 11, 1, correlation=4),
            _event("kernel", "nvjet_hsh_128x256_64x4", 12, 8, tid=7, stream=7, correlation=2),
            _event("kernel", "rope_cache", 20, 1, tid=7, stream=7, correlation=3),
            _event("kernel", "twoshot_ring", 21, 9, tid=9, stream=9, correlation=4),
        ]
    }


def test_kernels_belong_to_the_annotation_that_launched_them():
    spans = gpu_spans(_gpu_trace())
    assert [(span.name, span.kind, span.stage, span.stream) for span in spans] == [
        ("nvjet_hsh_128x256_64x4", "GEMM", "attention_0", 7),
        ("rope_cache", "other", "attention_0", 7),
        ("twoshot_ring", "collective", "attention_0", 9),
    ]


def test_a_collective_may_be_launched_in_the_middle_of_a_compute():
    trace = {
        "traceEvents": [
            _event("user_annotation", "compute mlp_0 suffix", 0, 10),
            _event("user_annotation", "collective mlp_0 prefix", 4, 2),
            *(_event("cuda_driver", "cuLaunchKernel", at, 0.5, correlation=at) for at in (1, 5, 8, 12)),
            *(_event("kernel", "some", 20 + at, 1, tid=7, stream=7, correlation=at) for at in (1, 5, 8, 12)),
        ]
    }
    found = [(span.stage, span.split) for span in gpu_spans(trace)]
    assert found == [("mlp_0", "suffix"), ("mlp_0", "prefix"), ("mlp_0", "suffix"), (None, None)]


def test_a_graphs_kernels_take_the_stages_of_the_eager_step():
    eager = gpu_spans(_gpu_trace())
    graph = [Span(span.name, span.start + 100, span.end + 90, 3) for span in eager]
    assert [span.stage for span in tagged(graph, eager)] == ["attention_0"] * 3
    with pytest.raises(ValueError, match="or others"):
        tagged(graph[1:], eager)
    assert layer_of(graph, 0) == []


def test_the_figures_of_a_step():
    spans = [Span("gemm", 0, 40, 1), Span("twoshot_ring", 30, 60, 2), Span("silu_mul", 70, 100, 1)]
    assert union_us(spans) == 90
    found = summary(spans)
    assert found["span_ms"] == pytest.approx(0.1)
    assert found["busy_ms"] == pytest.approx(0.09)
    assert found["hidden_ms"] == pytest.approx(0.01)
    assert found["by_kind_ms"] == pytest.approx({"GEMM": 0.04, "collective": 0.03, "other": 0.03})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, cutlass::bfloat16_t>>", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "GEMM"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("void c10d::symmetric_memory::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>", "collective"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>", "collective"),
        ("twoshot_ring", "collective"),
        ("oneshot", "collective"),
        ("add_rmsnorm", "norm"),
        ("rope_cache", "other"),
        ("silu_mul", "other"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("aten::mm", "GEMM"),
        ("aten::mul", "other"),
        ("collective mlp_3 suffix", "collective"),
    ],
)
def test_kernels_are_known_by_their_names(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "no model 'nowhere'"),
        (["--model", "SmolLM2-135M", "--tp", "1"], "--tp 1"),
        (["--model", "SmolLM2-135M", "--tokens", "64,128"], "expected one number"),
        (["--model", "SmolLM2-135M", "--tokens", "1"], "at least 2 for --mode woven"),
        (["--model", "SmolLM2-135M", "--layers", "99"], "the model has 30"),
        (["--model", "SmolLM2-135M", "--layers", "4", "--layer", "4"], "expected 0 to 3"),
        (["--model", "SmolLM2-135M", "--tokens", "999999"], "context is"),
        (["--model", "SmolLM2-135M", "--dtype", "fp32"], "cannot be captured"),
    ],
)
def test_arguments_that_cannot_be(arguments, message, tmp_path, capsys):
    assert main(["trace", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
