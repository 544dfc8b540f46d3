"""The plugin's parts that need no engine: tables of cut steps, the prefix hazard, the version gate, what keeps it off."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenweave.integrations.vllm.checks import engine_problem, model_problem
from tokenweave.integrations.vllm.cut import Tables, split_tables
from tokenweave.integrations.vllm.measured import Measured
from tokenweave.integrations.vllm.metrics import Steps
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.requests import Requests, Rows
from tokenweave.integrations.vllm.switch import RANGES, verdict
from tokenweave.planning import Mode


def seen(starts: torch.Tensor, lengths: torch.Tensor, first_row: int) -> dict[int, tuple[int, int]]:
    """Row of the step -> (request, positions that it attends to), as attention reads these tables."""
    rows = {}
    for request, length in enumerate(lengths.tolist()):
        begin, end = starts[request].item(), starts[request + 1].item()
        for row in range(begin, end):
            rows[first_row + row] = (request, length - (end - 1 - row))
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_both_splits_attend_to_what_they_attend_to_uncut(seed: int) -> None:
    generator = random.Random(seed)
    counts = [generator.choice((1, 1, 2, 5, 17, 60)) for _ in range(generator.randint(1, 9))]
    contexts = [generator.choice((0, 0, 3, 100)) for _ in counts]
    padding = generator.randint(0, 4)  # requests that a graph has room for and the step does not have
    rows = sum(counts)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist(), *[rows] * padding], dtype=torch.int32)
    lengths = torch.tensor([c + n for c, n in zip(contexts, counts, strict=True)] + [0] * padding, dtype=torch.int32)
    whole = seen(starts, lengths, 0)
    assert len(whole) == rows
    for cut in {1, rows - 1, rows, generator.randint(1, rows), *starts.tolist()} - {0}:
        prefix = split_tables(starts, lengths, 0, cut)
        suffix = split_tables(starts, lengths, cut, None)
        assert seen(*prefix, 0) | seen(*suffix, cut) == whole
        assert max(seen(*prefix, 0), default=0) < cut
        for table, _ in (prefix, suffix):
            assert table[0] == 0
            assert bool((table[1:] >= table[:-1]).all())
        assert suffix[0][-1] == rows - cut
        assert all(int(table.min()) >= 0 for _, table in (prefix, suffix))
    assert starts[-1] == rows  # nothing was written


def test_grown_tables_are_the_runners_own_buffers() -> None:
    ids, starts, blocks = torch.arange(64), torch.zeros(9, dtype=torch.int32), torch.arange(24).view(8, 3)
    slots = torch.arange(128).view(2, 64)
    tables = Tables(ids[:10], ids[:10], starts[:3], starts[:2], blocks[:2], slots[1][:10], None)
    grown = tables.grown(64, 8)
    assert grown.token_ids.equal(ids)
    assert grown.slots.equal(slots[1])
    assert grown.block_table.equal(blocks)
    assert grown.query_start_loc.numel() == 9
    assert grown.addresses() == tables.addresses()
    ids[40] = -7
    assert grown.positions[40] == -7


def requests(**prompts: tuple[list[int], int]) -> Requests:
    live = Requests()
    for name, (prompt, cached) in prompts.items():
        live.add(name, prompt, cached)
    return live


def test_a_hit_that_the_suffix_writes_is_a_hazard() -> None:
    prompt = list(range(100))
    live = requests(reader=([*prompt[:64], 7, 7], 64), writer=(prompt, 0))
    step = [Rows("reader", 2, 64), Rows("writer", 100, 0)]
    assert live.hazard(step, 50)  # positions 48 to 63 are written behind the cut
    assert live.hazard(step, 2)
    assert not live.hazard(step, 66)  # all 64 that were found cached are written before it
    assert live.hazard(step, 1)  # the reader itself is cut, and its first row comes first
    assert not live.hazard(list(reversed(step)), 100)  # the reader is behind the cut
    assert not live.hazard(list(reversed(step)), 50)


def test_what_was_cached_before_is_no_hazard() -> None:
    prompt = list(range(100))
    live = requests(reader=([*prompt[:64], 7, 7], 64), writer=([*prompt[:32], *[9] * 68], 0))
    step = [Rows("reader", 2, 64), Rows("writer", 100, 0)]
    assert not live.hazard(step, 40)  # tokens behind the cut differ: those blocks are not the reader's
    assert live.hazard(step, 20)
    live.planned([rows.request for rows in step])
    assert not live.hazard([Rows("reader", 2, 66), Rows("writer", 100, 100)], 20)  # the next step: all is written


def test_a_hit_is_forgotten_once_its_step_is_planned() -> None:
    prompt = list(range(100))
    live = requests(reader=([*prompt[:64], 7, 7], 64), other=([*prompt[:64], 8, 8], 64), writer=(prompt, 0))
    step = [Rows("reader", 1, 65), Rows("writer", 100, 0)]  # a writer of the blocks that the reader once found
    assert live.hazard(step, 20)
    live.planned(["reader"])
    assert not live.hazard(step, 20)
    assert live.hazard([Rows("other", 1, 65), Rows("writer", 100, 0)], 20)  # was not in that step
    live.add("reader", [*prompt[:64], 7, 7], 64)  # again, after a preemption
    assert live.hazard(step, 20)


def test_a_writer_behind_the_hit_or_a_reader_without_one_is_no_hazard() -> None:
    live = requests(reader=(list(range(70)), 64), other=(list(range(200)), 0))
    assert not live.hazard([Rows("reader", 6, 64), Rows("other", 50, 64)], 10)  # writes positions from 64 on
    live = requests(reader=(list(range(70)), 0), other=(list(range(200)), 0))
    assert not live.hazard([Rows("reader", 70, 0), Rows("other", 50, 0)], 90)


def test_tokens_that_are_not_known_may_be_the_readers() -> None:
    live = requests(reader=(list(range(70)), 64), decode=(list(range(10)), 0), another=([5, 6, 7], 0))
    assert not live.hazard([Rows("reader", 6, 64), Rows("another", 1, 40)], 6)  # it begins otherwise
    assert live.hazard([Rows("reader", 6, 64), Rows("decode", 1, 40)], 6)
    live.remove("decode")
    assert not live.known("decode")
    assert live.hazard([Rows("reader", 6, 64), Rows("decode", 1, 40)], 6)


@pytest.mark.parametrize("switch", [None, "", "0", " 0 "])
def test_without_the_switch_nothing_is_said(switch: str | None) -> None:
    assert verdict(switch, "0.26.0", "cuda").module is None
    assert verdict(switch, "9.9", "tpu").why == ""


@pytest.mark.parametrize(
    ("switch", "version", "platform", "module", "says"),
    [
        ("1", "0.26.0", "cuda", "v0_26", "on for vLLM 0.26.0"),
        ("1", "0.26.1+cu130", "cuda", "v0_26", "on for"),
        ("1", "0.29.0", "cuda", None, "never measured"),
        ("force", "0.29.0", "cuda", "v0_26", "on for"),
        ("force", "0.30.0", "cuda", "v0_30", "on for"),
        ("FORCE", "0.33.2", "cuda", "v0_30", "on for"),
        ("force", "0.32.0+cpu", "cpu", "v0_30", "on for"),
        ("1", "0.32.0+cpu", "cpu", None, "CPU build was never measured"),
        ("force", "0.25.4", "cuda", None, "outside 0.26 to 0.33"),
        ("force", "0.34.0", "cuda", None, "outside 0.26 to 0.33"),
        ("force", "1.0.0", "cuda", None, "outside"),
        ("force", "nightly", "cuda", None, "outside"),
        ("1", "0.26.0", "another", None, "platform is another"),
        ("yes", "0.26.0", "cuda", None, "expected 0, 1 or force"),
    ],
)
def test_version_gate(switch: str, version: str, platform: str, module: str | None, says: str) -> None:
    found = verdict(switch, version, platform)
    assert found.module == module
    assert says in found.why


def test_version_ranges_leave_no_gap() -> None:
    for earlier, later in itertools.pairwise(RANGES):
        assert later.first == (earlier.last[0], earlier.last[1] + 1)


def engine(**changes: Any) -> SimpleNamespace:
    """A configuration that nothing speaks against, with ``changes`` of "part.name"."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(runner_type="generate", is_moe=False, is_multimodal_model=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, enable_expert_parallel=False),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        lora_config=None,
        speculative_config=None,
        kv_transfer_config=None,
        use_v2_model_runner=True,
    )
    for name, value in changes.items():
        part, _, rest = name.partition("__")
        setattr(getattr(config, part) if rest else config, rest or part, value)
    return config


def offloading(group_size: int = 0, gb: float = 0.0) -> SimpleNamespace:
    """vLLM's settings of weight offloading."""
    prefetch, uva = SimpleNamespace(offload_group_size=group_size), SimpleNamespace(cpu_offload_gb=gb)
    return SimpleNamespace(prefetch=prefetch, uva=uva)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_config__runner_type": "pooling"}, Reason.NOT_GENERATING),
        ({"model_config__is_multimodal_model": True}, Reason.SUBMODEL),
        ({"parallel_config__tensor_parallel_size": 1}, Reason.ONE_RANK),
        ({"parallel_config__pipeline_parallel_size": 2}, Reason.PIPELINE_PARALLEL),
        ({"parallel_config__decode_context_parallel_size": 2}, Reason.CONTEXT_PARALLEL),
        ({"parallel_config__prefill_context_parallel_size": 2}, Reason.CONTEXT_PARALLEL),
        ({"parallel_config__enable_expert_parallel": True, "model_config__is_moe": True}, Reason.EXPERT_PARALLEL),
        ({"parallel_config__data_parallel_size": 2, "model_config__is_moe": True}, Reason.EXPERT_PARALLEL),
        ({"parallel_config__data_parallel_size": 2}, None),
        ({"parallel_config__use_ubatching": True}, Reason.MICROBATCHING),
        ({"lora_config": object()}, Reason.LORA),
        ({"speculative_config": object()}, Reason.SPECULATIVE),
        ({"kv_transfer_config": object()}, Reason.KV_CONNECTOR),
        ({"model_config__enable_prompt_embeds": True}, Reason.PROMPT_EMBEDS),
        ({"model_config__enable_sleep_mode": True}, Reason.SLEEP_MODE),
        ({"offload_config": offloading(group_size=8)}, Reason.OFFLOADING),
        ({"offload_config": offloading(gb=4.0)}, Reason.OFFLOADING),
        ({"offload_config": offloading()}, None),
        ({"cache_config__cache_dtype": "fp8"}, Reason.KV_CACHE_DTYPE),
        ({"cache_config__calculate_kv_scales": True}, Reason.KV_CACHE_DTYPE),
        ({"model_config__enable_return_routed_experts": True}, Reason.ROUTED_EXPERTS),  # until vLLM 0.30
        ({"aux_output_config": SimpleNamespace(enable_return_routed_experts=True)}, Reason.ROUTED_EXPERTS),
        ({"aux_output_config": SimpleNamespace(enable_return_routed_experts=False)}, None),
        ({"use_v2_model_runner": False}, Reason.RUNNER),
        ({}, None),
    ],
)
def test_what_keeps_an_engine_stock(changes: dict[str, Any], reason: Reason | None) -> None:
    found = engine_problem(engine(**changes), "", "cuda")
    assert (found and found[0]) is reason


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_each_platform_has_the_hooks_of_one_runner(platform: str) -> None:
    needed = platform == "cuda"
    assert engine_problem(engine(use_v2_model_runner=needed), "", platform) is None
    found = engine_problem(engine(use_v2_model_runner=not needed), "", platform)
    assert found == (Reason.RUNNER, f"set VLLM_USE_V2_MODEL_RUNNER={needed:d}")


def test_a_model_inside_another_one_stays_stock() -> None:
    assert engine_problem(engine(), "language_model", "cuda") == (Reason.SUBMODEL, "language_model")


@pytest.mark.parametrize("variable", ["VLLM_BATCH_INVARIANT", "VLLM_USE_BREAKABLE_CUDAGRAPH"])
def test_environment_that_keeps_an_engine_stock(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert engine_problem(engine(), "", "cuda") is not None
    monkeypatch.setenv(variable, "0")
    assert engine_problem(engine(), "", "cuda") is None


class RMSNorm(torch.nn.Module):
    pass


class SiluAndMul(torch.nn.Module):
    pass


class Attention(torch.nn.Module):
    sliding_window = None
    kv_sharing_target_layer_name = None
    layer_name = "model.layers.0.self_attn.attn"


class Linear(torch.nn.Module):
    reduce_results = True
    quant_method: object = object()


def built_model() -> torch.nn.Module:
    def module(**children: torch.nn.Module) -> Any:
        made = torch.nn.Module()
        for name, child in children.items():
            made.add_module(name, child)
        return made

    attention = module(qkv_proj=Linear(), o_proj=Linear(), rotary_emb=torch.nn.Module(), attn=Attention())
    mlp = module(gate_up_proj=Linear(), down_proj=Linear(), act_fn=SiluAndMul())
    layer = module(self_attn=attention, mlp=mlp, input_layernorm=RMSNorm(), post_attention_layernorm=RMSNorm())
    return module(layers=torch.nn.ModuleList([layer]), embed_tokens=torch.nn.Module())


def gelu(layer: Any) -> None:
    layer.mlp.act_fn = torch.nn.GELU()


def extra(layer: Any) -> None:
    layer.add_module("adapter", torch.nn.Linear(1, 1))


def window(layer: Any) -> None:
    layer.self_attn.attn.sliding_window = 512


def reduced_elsewhere(layer: Any) -> None:
    layer.mlp.down_proj.reduce_results = False


def scaled(layer: Any) -> None:
    layer.self_attn.do_llama_4_scaling = True


def other_norm(layer: Any) -> None:
    layer.input_layernorm = torch.nn.LayerNorm(1)


def prefetched(layer: Any) -> None:
    """As vLLM's offloaders do it."""
    layer.forward = layer.forward


def hooked_attention(layer: Any) -> None:
    layer.self_attn.register_forward_pre_hook(lambda *given: None)


def hooked_mlp(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda *given: None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (prefetched, Reason.LAYERS),
        (hooked_attention, Reason.LAYERS),
        (hooked_mlp, Reason.LAYERS),
        (gelu, Reason.LAYERS),
        (extra, Reason.LAYERS),
        (scaled, Reason.LAYERS),
        (other_norm, Reason.LAYERS),
        (window, Reason.SLIDING_WINDOW),
        (reduced_elsewhere, Reason.QUANTISATION),
        (None, None),
    ],
)
def test_layers_that_are_not_walked_past(change: Any, reason: Reason | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenweave.integrations.vllm.checks.plain_vocabulary", lambda layer: True)
    model: Any = built_model()
    if change is not None:
        change(model.layers[0])
    found = model_problem(model, SimpleNamespace(experts_problem=lambda block: None))  # type: ignore[arg-type]
    assert (found and found[0]) is reason


def test_the_fastest_mode_as_measured() -> None:
    measured = Measured((1024, 4096), stock=(20.0, 60.0), fused=(18.0, 59.9), woven=(19.0, 54.0))
    assert measured.best(1024) is Mode.FUSED
    assert measured.best(640) is Mode.FUSED
    assert measured.best(4096) is Mode.WOVEN
    assert measured.best(16384) is Mode.WOVEN
    assert measured.best(4096, allow_woven=False) is Mode.SEQUENTIAL  # within the margin
    assert measured.best(2048) is Mode.WOVEN  # 0.925 of stock's time, fused 0.949
    slow = Measured((1024,), stock=(10.0,), fused=(10.0,), woven=(12.0,))
    assert slow.best(1024) is Mode.SEQUENTIAL


def test_reasons_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps()
    with caplog.at_level(logging.INFO, logger="vllm.tokenweave"):
        logging.getLogger("vllm").propagate = True
        for _ in range(3):
            steps.count(Reason.CACHE_GROUPS, "two of them")
        steps.count(Reason.WHOLE_GRAPH)
        steps.ran(Mode.WOVEN, 1024, graph=True)
        steps.ran(Mode.WOVEN, 1000)
    assert caplog.text.count("stock vLLM runs (cache_groups)") == 1
    assert "two of them" in caplog.text
    assert "(whole_graph)" not in caplog.text  # every server has those
    assert steps.line() == (
        "steps by mode: woven 2 steps / 2024 tokens (1 as graphs); as stock, by reason: cache_groups 3, whole_graph 1"
    )
    with caplog.at_level(logging.INFO, logger="vllm.tokenweave"):
        steps.count(Reason.PREFIX_HAZARD)
    assert "a step is not woven (prefix_hazard)" in caplog.text  # but fused, or stock for another reason
    assert steps.line().endswith("cache_groups 3, whole_graph 1; not woven: prefix_hazard 1")


@pytest.mark.parametrize("version", [2, 3])
def test_a_split_gets_a_schedule_of_its_own_where_attention_takes_one(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends import fa_utils

    from tokenweave.integrations.vllm.compat import v0_26

    @dataclasses.dataclass
    class Metadata:
        num_actual_tokens: int = 90
        max_query_len: int = 60
        query_start_loc: Any = None
        max_seq_len: int = 70
        seq_lens: Any = None
        block_table: Any = None
        slot_mapping: Any = None
        scheduler_metadata: Any = "the builder's"
        max_num_splits: int = 32

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        fa_utils, "get_scheduler_metadata", lambda **given: asked.append(given) or "ours", raising=False
    )
    attention = SimpleNamespace(
        impl=SimpleNamespace(vllm_flash_attn_version=version),
        num_heads=16,
        num_kv_heads=4,
        head_size=128,
        kv_cache_torch_dtype=torch.bfloat16,
    )
    starts, lengths = torch.tensor([0, 20, 50], dtype=torch.int32), torch.tensor([20, 40], dtype=torch.int32)
    step = Metadata()
    cut = v0_26.cut_metadata(
        step,
        attention=attention,
        block_size=32,
        tokens=50,
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=torch.zeros(2, 3),
        slot_mapping=torch.arange(50),
        max_query_len=50,
        max_seq_len=64,
    )
    assert (step.scheduler_metadata, step.num_actual_tokens) == ("the builder's", 90)
    assert (cut.num_actual_tokens, cut.max_num_splits) == (50, 1)
    if version != 3:
        assert (cut.scheduler_metadata, asked) == (None, [])
        return
    assert cut.scheduler_metadata == "ours"
    (given,) = asked
    # What the call of attention will say of itself; a schedule for another call would be read wrongly.
    assert (given["batch_size"], given["max_seqlen_q"], given["max_seqlen_k"]) == (
        2,
        cut.max_query_len,
        cut.max_seq_len,
    )
    assert given["cu_seqlens_q"] is cut.query_start_loc
    assert given["cache_seqlens"] is cut.seq_lens
    assert (given["num_splits"], given["causal"], given["page_size"]) == (1, True, 32)
    assert (given["num_heads_q"], given["num_heads_kv"], given["headdim"]) == (16, 4, 128)
