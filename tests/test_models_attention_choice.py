"""Which attention kernel is taken, and what FlashAttention-3's builds are called with: stand-ins for their operators that
compute from exactly the arguments they get."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tokenweave.engine.buckets import bucket_rows
from tokenweave.errors import RequestError
from tokenweave.models import attention_choice, attention_cuda, attention_flash
from tokenweave.models.attention_choice import differs, expected, pick
from tokenweave.models.attention_flash import FLASH3_BUILDS, Flash3Build, load_flash3
from tokenweave.models.inputs import PackedSequences

CPU = torch.device("cpu")
HOPPER = ("NVIDIA H200", (9, 0))

# The operators' arguments, as flash_attn_3 (and fa3-fwd) declare theirs and as vLLM's fork does.
_TENSORS = (
    "Tensor? k_new{d}, Tensor? v_new{d}, Tensor? q_v{d}, Tensor? out{d}, Tensor? cu_seqlens_q{d}, Tensor? cu_seqlens_k{d}, "
    "Tensor? cu_seqlens_k_new{d}, Tensor? seqused_q{d}, Tensor? seqused_k{d}, int? max_seqlen_q{d}, int? max_seqlen_k{d}, "
    "Tensor? page_table{d}, Tensor? kv_batch_idx{d}, Tensor? leftpad_k{d}, Tensor? rotary_cos{d}, Tensor? rotary_sin{d}, "
    "Tensor? seqlens_rotary{d}, Tensor? q_descale{d}, Tensor? k_descale{d}, Tensor? v_descale{d}, "
)
FLASH_ATTN_3 = (
    "fwd(Tensor q, Tensor k, Tensor v, " + _TENSORS.format(d="=None") + "float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0.0, "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, "
    "int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
VLLM = (
    "fwd(Tensor q, Tensor k, Tensor v, " + _TENSORS.format(d="") + "float softmax_scale, bool is_causal, "
    "int window_size_left, int window_size_right, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, "
    "int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k) -> Tensor[]"
)
SCHEMAS = {"flash-attn-3": FLASH_ATTN_3, "vllm": VLLM}


class Operator:
    """What FlashAttention-3 computes, written out, from its own arguments; everything that we leave out must be neutral."""

    def __init__(self, schema: str) -> None:
        self.names = [part.split()[-1].split("=")[0] for part in schema[4 : schema.index(")")].split(",")]
        self.calls: list[dict] = []
        self.shift = 0  # of the keys: a wrong kernel
        self.error: str | None = None

    def __call__(self, *args):
        given = dict(zip(self.names, args, strict=False))
        self.calls.append(given)
        if self.error is not None:
            raise RuntimeError(self.error)
        neutral = {"window_size_left": -1, "window_size_right": -1, "cp_world_size": 1, "is_rotary_interleaved": False}
        used = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k"}
        for name in given.keys() - used - {"softmax_scale", "is_causal", "num_splits", "sm_margin"}:
            value = given[name]
            assert value is None or value == neutral.get(name, 0), f"{name}={value}"
        q, k, v = given["q"], given["k"], given["v"]
        starts, runs, lengths = (given[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
        assert {given[name].dtype for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")} == {torch.int32}
        assert len(starts) == len(runs) == len(lengths) + 1
        assert given["is_causal"]
        assert given["num_splits"] >= 1
        out = torch.full(q.shape, float("nan"), dtype=q.dtype)
        group = q.shape[1] // k.shape[1]
        for first, end, run, length in zip(starts, starts[1:], runs, lengths, strict=False):
            assert 0 <= end - first <= given["max_seqlen_q"]
            assert length <= given["max_seqlen_k"]
            if end == first:
                continue
            keys, values = (
                x[run + self.shift : run + self.shift + length].repeat_interleave(group, 1).double() for x in (k, v)
            )
            scores = torch.einsum("qhd,khd->hqk", q[first:end].double(), keys) * given["softmax_scale"]
            seen = torch.ones(end - first, length).tril(length - (end - first)).bool()
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        empty = q.new_empty(0)
        return (out, empty, empty, empty) if "s_aux" not in self.names else [out, empty, empty, empty]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Operator]]:
    """Lays an empty extension where a build has its own; loading it registers the stand-in in a namespace of the test's."""
    libraries: dict[Path, Callable[[], None]] = {}
    kept, builds = [], {build.name: build for build in FLASH3_BUILDS}
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: libraries[Path(path)]())
    monkeypatch.delenv(attention_choice.ATTENTION_VARIABLE, raising=False)
    monkeypatch.setattr(attention_choice, "FLASH3_BUILDS", ())
    monkeypatch.setattr(Flash3Build, "label", property(lambda build: f"{build.name} 9"))  # whatever is installed

    def install(name: str, schema: str | None = None) -> Operator:
        schema, build = schema or SCHEMAS.get(name, FLASH_ATTN_3), builds[name]
        package = f"standin_{name.replace('-', '_')}_{tmp_path.name}"
        path = tmp_path / package / build.library.replace("*", ".abi3")
        path.parent.mkdir(parents=True)
        path.touch()
        operator = Operator(schema)

        def load() -> None:
            if hasattr(getattr(torch.ops, package), "fwd"):
                return  # as a library that is loaded already
            library = torch.library.Library(package, "DEF")
            library.define(schema)
            library.impl("fwd", operator, "CPU")
            kept.append(library)

        libraries[path] = load
        builds[name] = Flash3Build(name, package, build.library, package)
        here = [builds[build.name] for build in FLASH3_BUILDS if builds[build.name] is not build]
        monkeypatch.setattr(attention_choice, "FLASH3_BUILDS", tuple(here))
        return operator

    yield install
    for library in kept:
        library._destroy()


@pytest.mark.parametrize("name", ["flash-attn-3", "fa3-fwd", "vllm"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 64), (torch.float16, 128), (torch.bfloat16, 256)])
def test_a_build_that_computes_the_same_is_taken(install, caplog, name, dtype, size):
    operator = install(name)
    with caplog.at_level(logging.INFO, "tokenweave"):
        choice = pick(CPU, dtype, size, *HOPPER)
    assert choice is not None
    assert choice.name == name
    assert choice.why == "FlashAttention-3"
    assert f"heads of {size}: {name} 9: FlashAttention-3" in caplog.text
    prompts, decodes = operator.calls
    assert prompts["q"].stride(0) == 6 * size, "the queries are columns of a fused projection, uncopied"
    assert (prompts["num_splits"], prompts["max_seqlen_q"]) == (1, 256)
    assert (decodes["num_splits"], decodes["max_seqlen_q"]) == (32, 1)
    assert prompts["softmax_scale"] == pytest.approx(size**-0.5)


@pytest.mark.parametrize(
    ("decodes", "splits"), [(1, 32), (64, 32), (65, 16), (128, 16), (129, 8), (1024, 2), (2048, 1)]
)
def test_how_many_blocks_may_share_a_row(install, decodes, splits):
    operator = install("flash-attn-3")
    kernel = load_flash3(attention_choice.FLASH3_BUILDS[0])
    queries, keys = torch.randn(decodes, 2, 8).bfloat16(), torch.randn(decodes, 1, 8).bfloat16()
    starts = torch.arange(decodes + 1, dtype=torch.int32)
    ones = torch.ones(decodes, dtype=torch.int32)
    for most, expected_splits in ((1, splits), (2, 1)):
        got = kernel(queries, keys, keys, PackedSequences(starts, starts, ones, most, 1), 0)
        assert operator.calls[-1]["num_splits"] == expected_splits
        assert torch.equal(got, keys.expand(-1, 2, -1)), "each row sees its own key alone"


@pytest.mark.parametrize("name", [build.name for build in FLASH3_BUILDS])
def test_prompts_leave_a_collective_its_sms_and_decodes_do_not_change(install, name):
    operator = install(name)
    kernel = load_flash3(attention_choice.FLASH3_BUILDS[0])
    queries, keys = torch.randn(4, 2, 8).bfloat16(), torch.randn(4, 1, 8).bfloat16()
    starts, ones = torch.arange(5, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    for most, held, margin in ((2, 0, 0), (2, 8, 8), (1, 8, 0), (2, 0, 0)):  # the bits of decodes depend on the SMs
        kernel(queries, keys, keys, PackedSequences(starts, starts, ones, most, 1), held)
        assert operator.calls[-1].get("sm_margin", 0) == margin


def test_graphs_and_eager_steps_split_alike():
    def of(count: int) -> int:
        empty = torch.empty(count, dtype=torch.int32)
        return attention_flash._splits(PackedSequences(empty, empty, empty, 1, 1))

    for rows in range(1, 3000):
        assert of(bucket_rows(rows)) == of(rows), rows


def test_a_wrong_build_is_refused_and_the_next_one_runs(install, caplog):
    install("flash-attn-3").shift = 1
    install("vllm")
    choice = pick(CPU, torch.bfloat16, 64, *HOPPER)
    assert choice is not None
    assert choice.name == "vllm"
    assert "flash-attn-3 9 is wrong on prompts: a relative error of" in choice.why
    assert "flash-attn-3 9 is wrong on prompts" in caplog.text


def test_a_build_that_raises_is_refused(install, monkeypatch, caplog):
    install("fa3-fwd").error = "This flash attention build\ndoes not support FP16."
    monkeypatch.setattr(attention_choice, "_load_flash2", lambda: attention_flash.flash2)
    choice = pick(CPU, torch.float16, 64, *HOPPER)
    assert choice is not None
    assert choice.name == "torch"
    assert choice.kernel is attention_flash.flash2
    said = "fa3-fwd 9 fails on prompts: This flash attention build does not support FP16."
    assert choice.why == f"torch's FlashAttention-2; {said}"
    assert said in caplog.text


def test_a_kernel_that_is_right_for_prompts_alone_is_refused(install):
    operator = install("flash-attn-3")
    kernel = load_flash3(attention_choice.FLASH3_BUILDS[0])

    def no_decodes(queries, keys, values, packed, held):
        out = kernel(queries, keys, values, packed, held)
        return out * float("nan") if packed.max_queries == 1 else out

    assert differs(kernel, CPU, torch.bfloat16, 64) is None
    assert (
        differs(no_decodes, CPU, torch.bfloat16, 64) == "is wrong on decodes: a relative error of nan, 0.02 is allowed"
    )
    assert len(operator.calls) == 4


def test_nothing_on_a_gpu_and_why(install, caplog):
    assert pick(CPU, torch.float32, 64, *HOPPER) is None
    assert "sequence by sequence, without CUDA graphs: FlashAttention takes bfloat16 and float16" in caplog.text
    assert pick(CPU, torch.bfloat16, 260, *HOPPER) is None
    assert "heads of a multiple of 8 up to 256, and the model's have 260" in caplog.text
    assert pick(CPU, torch.bfloat16, 64, "NVIDIA T4", (7, 5)) is None
    assert "needs compute capability 8.0, and NVIDIA T4 has 7.5" in caplog.text


def test_flash_attention_3_is_for_hopper(install, monkeypatch):
    operator = install("flash-attn-3")
    monkeypatch.setattr(attention_choice, "_load_flash2", lambda: attention_flash.flash2)
    for gpu, capability in (("NVIDIA A100", (8, 0)), ("NVIDIA B200", (10, 0))):
        label, why = expected(gpu, capability)
        assert label == "torch"
        assert why.startswith("torch's FlashAttention-2; FlashAttention-3 is for compute capability 9.0, and NVIDIA")
    assert expected(*HOPPER) == ("flash-attn-3 9", "FlashAttention-3")
    assert not operator.calls, "it says so without running it"


def test_a_forced_kernel(install, monkeypatch):
    install("flash-attn-3")
    wanted = install("vllm")
    monkeypatch.setattr(attention_choice, "_load_flash2", lambda: attention_flash.flash2)
    monkeypatch.setenv("TOKENWEAVE_ATTENTION", "VLLM")
    choice = pick(CPU, torch.bfloat16, 64, *HOPPER)
    assert choice is not None
    assert (choice.name, choice.why) == ("vllm", "FlashAttention-3, because TOKENWEAVE_ATTENTION says so")
    assert expected(*HOPPER) == ("vllm 9", choice.why)
    wanted.shift = 3
    with pytest.raises(RequestError, match=r"TOKENWEAVE_ATTENTION=vllm, .* vllm 9 is wrong on prompts: .* unset"):
        pick(CPU, torch.bfloat16, 64, *HOPPER)
    monkeypatch.setenv("TOKENWEAVE_ATTENTION", "torch")
    assert expected(*HOPPER)[0] == "torch"
    with pytest.raises(RequestError, match=r"TOKENWEAVE_ATTENTION=torch, .* the model runs in torch\.float32"):
        pick(CPU, torch.float32, 64, *HOPPER)
    monkeypatch.setenv("TOKENWEAVE_ATTENTION", "flash-attn-3")
    with pytest.raises(RequestError, match=r"for compute capability 9\.0, and NVIDIA A100 has 8\.0"):
        pick(CPU, torch.bfloat16, 64, "NVIDIA A100", (8, 0))
    monkeypatch.setenv("TOKENWEAVE_ATTENTION", "fa4")
    with pytest.raises(RequestError, match="'fa4'; expected one of auto, flash-attn-3, fa3-fwd, vllm, torch"):
        pick(CPU, torch.bfloat16, 64, *HOPPER)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (FLASH_ATTN_3.replace("Tensor? seqused_k=None, ", ""), "takes no seqused_k"),
        (FLASH_ATTN_3.replace("Tensor v,", "Tensor v, Tensor sinks,"), "wants sinks, which is not known here"),
    ],
)
def test_operators_of_another_shape_are_left_out(install, schema, message):
    install("flash-attn-3", schema)
    with pytest.raises(ImportError, match=message):
        load_flash3(attention_choice.FLASH3_BUILDS[0])


def test_builds_that_are_missing_or_broken(install, monkeypatch, tmp_path):
    with pytest.raises(ImportError, match="fa3-fwd is not installed"):
        load_flash3(Flash3Build("fa3-fwd", "no_such_package", "_C*.so", "no_such_package"))
    (tmp_path / "without_library").mkdir()
    with pytest.raises(ImportError, match=r"vllm is installed without sub/_C\*.so"):
        load_flash3(Flash3Build("vllm", "without_library", "sub/_C*.so", "without_library"))
    install("flash-attn-3")

    def refuse(path):
        raise OSError("undefined symbol: aoti_torch_abi_version")

    monkeypatch.setattr(torch.ops, "load_library", refuse)
    with pytest.raises(ImportError, match="flash-attn-3 does not load: undefined symbol"):
        load_flash3(attention_choice.FLASH3_BUILDS[0])


def test_a_gpu_is_asked_about_once_however_it_is_named(monkeypatch):
    asked = []
    monkeypatch.setattr(attention_choice, "pick", lambda *given: asked.append(given))
    for name, value in (
        ("current_device", 1),
        ("is_current_stream_capturing", False),
        ("get_device_name", HOPPER[0]),
        ("get_device_capability", HOPPER[1]),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    attention_choice._once.cache_clear()
    try:
        for name in ("cuda", "cuda:1", "cuda", "cuda:0"):
            attention_choice.choose(torch.device(name), torch.bfloat16, 64)
        assert asked == [(torch.device("cuda", index), torch.bfloat16, 64, *HOPPER) for index in (1, 0)]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        attention_choice.choose(torch.device("cuda:0"), torch.bfloat16, 64)
        with pytest.raises(RuntimeError, match="before a graph's capture"):
            attention_choice.choose(torch.device("cuda:0"), torch.float16, 64)
    finally:
        attention_choice._once.cache_clear()


def test_cpus_have_no_packed_attention():
    assert not attention_cuda.available(CPU, torch.bfloat16, 64)
    with pytest.raises(RequestError, match=r"no kernel takes torch\.bfloat16 heads of 64 on cpu"):
        attention_cuda.attend_packed(*(torch.empty(1, 1, 64).bfloat16() for _ in range(3)), None)
