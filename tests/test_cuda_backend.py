"""What the GPU transports hand to their kernels, with a driver that only records: addresses, counts, launch shapes."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tokenweave.collective import agreement, cuda_backend, selftest, workspace
from tokenweave.collective import fused_allreduce_rmsnorm as fused
from tokenweave.collective.arguments import MAX_BLOCKS
from tokenweave.collective.kernels import HAS_RESIDUAL, ROW_COUNT, ROWS, Kernel, ring_depth
from tokenweave.collective.symmetric import FLAG_BYTES, RECORD_WORDS, STATE_WORDS, Symmetric
from tokenweave.collective.workspace import Workspace
from tokenweave.cuda import launch
from tokenweave.errors import CollectiveError

HIDDEN, PEER = 4096, 1 << 40  # the peer's memory lies that far from ours
ROW = HIDDEN * 2


class _Recorder:
    """Stands in for a loaded kernel."""

    launches: ClassVar[list[SimpleNamespace]] = []

    def __init__(self, kernel):
        self.kernel = kernel

    def launch(self, blocks, stream, args, *params, cluster=1, overlap=False):
        self.launches.append(
            SimpleNamespace(
                kernel=self.kernel, blocks=blocks, args=args, params=params, cluster=cluster, overlap=overlap
            )
        )


@pytest.fixture
def two_ranks(monkeypatch):
    """Rank 0 of two, bf16, with symmetric memory that is plain CPU memory; and the list of launches."""

    def allocate(group, *, max_tokens, hidden, dtype, device, channels, regions, fp8_regions):
        # A row before and behind it belong to somebody else.
        memory = torch.zeros(regions * max_tokens + 2, hidden, dtype=dtype)[1:-1].view(regions, max_tokens, hidden)
        flags = regions * max_tokens * hidden * dtype.itemsize
        return Symmetric(
            data=memory,
            fp8=torch.zeros(fp8_regions, max_tokens, hidden).to(torch.float8_e4m3fn),
            scales=torch.zeros(fp8_regions * max_tokens + 2)[1:-1].view(fp8_regions, max_tokens),
            addresses=[memory.data_ptr(), memory.data_ptr() + PEER],
            multicast=0,
            flags=flags,
            inboxes=flags + channels * FLAG_BYTES,
            inbox_bytes=3 * 2 * 512 * hidden * 2,
            inbox_rows=512,
            state=torch.zeros(channels, STATE_WORDS, dtype=torch.int32),
            record=torch.zeros(channels, RECORD_WORDS, dtype=torch.int32),
            handle=None,
        )

    _Recorder.launches = []
    monkeypatch.setattr(workspace, "allocate", allocate)
    monkeypatch.setattr(workspace, "choose_transport", lambda *_: ("p2p", "a test"))
    monkeypatch.setattr(selftest, "failure", lambda of: None)
    monkeypatch.setattr(agreement, "_exchanged", lambda *values: None)  # there is no other rank
    monkeypatch.setattr(workspace.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(workspace.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(workspace.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(cuda_backend, "loaded", lambda kernel, device: _Recorder(kernel))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=7))
    return _Recorder.launches


def _open(**options) -> Workspace:
    return Workspace(SimpleNamespace(), max_tokens=2048, hidden=HIDDEN, dtype=torch.bfloat16, **options)


def _call(of: Workspace, tokens: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, residual) of a call in the workspace, with a weight of ones."""
    residual = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
    rows, _ = fused(options.pop("partial", of.buffer(tokens)), residual, weight, 1e-5, of, **options)
    return rows, residual


def test_two_shots_in_place(two_ranks):
    with _open() as of:
        rows, residual = _call(of, 1024, ctas=8, channel=1, cluster=4)
        (launch,) = two_ranks
        here = of.buffer(1024).data_ptr()
        assert rows.data_ptr() == here
        assert (launch.kernel.name, launch.blocks, launch.cluster) == ("twoshot_ring", 8, 4)
        assert not launch.overlap  # blocks are given: it runs beside something
        assert launch.params[0].value == ring_depth(launch.kernel, 8)
        assert launch.kernel.options == HAS_RESIDUAL
        args = launch.args
        assert list(args.x[:2]) == list(args.out[:2]) == [here, here + PEER]
        memory = of.symmetric
        assert list(args.flags[:2]) == [base + memory.flags + FLAG_BYTES for base in memory.addresses]
        assert args.residual == residual.data_ptr()
        assert args.state == memory.state[1].data_ptr()
        assert args.record == memory.record[1].data_ptr()
        assert (args.rank, args.tokens, args.n_rows) == (0, 1024, 1024)
        assert (of.collectives, of.copies, of.bytes_sent) == (1, 0, 1024 * ROW)


def test_a_call_that_has_the_gpu_to_itself(two_ranks):
    with _open() as of:
        _call(of, 1024)
        (launch,) = two_ranks
        assert (launch.kernel.name, launch.blocks, launch.overlap) == ("twoshot_registers", 64, True)


def test_results_go_to_another_part_of_the_workspace(two_ranks):
    with _open() as of:
        out = of.buffer(64, start=100, region=1)
        rows, _ = _call(of, 64, out=out)
        args = two_ranks[0].args
        assert rows.data_ptr() == out.data_ptr()
        assert list(args.x[:2]) == [of.buffer(1).data_ptr(), of.buffer(1).data_ptr() + PEER]
        assert list(args.out[:2]) == [out.data_ptr(), out.data_ptr() + PEER]


def test_memory_outside_is_staged(two_ranks, caplog):
    caplog.set_level(logging.INFO, "tokenweave.collective.cuda_backend")
    with _open() as of:
        partial = torch.randn(64, HIDDEN).bfloat16()
        of.staging(64, 1).fill_(3)
        rows, _ = _call(of, 64, partial=partial)
        args = two_ranks[0].args
        assert list(args.x[:2]) == [of.staging(1, 0).data_ptr(), of.staging(1, 0).data_ptr() + PEER]
        assert list(args.out[:2]) == [of.staging(1, 1).data_ptr(), of.staging(1, 1).data_ptr() + PEER]
        assert rows.data_ptr() == partial.data_ptr()
        assert (rows == 3).all()  # what the kernel left in the staging
        assert of.copies == 2
        (said,) = (record.getMessage() for record in caplog.records)
        assert f"outside of {of.handle} are copied through its staging" in said
        with pytest.raises(CollectiveError, match=r"channel=1 .* staging regions serve channel 0"):
            _call(of, 64, partial=partial, channel=1)
    with _open(staging=False) as of, pytest.raises(CollectiveError, match="staging=True"):
        _call(of, 64, partial=partial)


def test_staged_results_keep_the_rows_behind_the_row_count(two_ranks):
    with _open() as of:
        of.staging(8, 1).fill_(3)
        partial = torch.ones(8, HIDDEN).bfloat16()
        rows, _ = _call(of, 8, partial=partial, row_count=torch.tensor([5], dtype=torch.int32))
        assert two_ranks[0].kernel.options == HAS_RESIDUAL | ROW_COUNT
        assert (rows[:5] == 3).all()
        assert (rows[5:] == 1).all()


def test_sampled_rows(two_ranks):
    with _open() as of:
        picked = torch.tensor([3, 9, 40])
        for layout in ("sharded", "replicated"):
            rows, residual = _call(of, 64, rows=picked, layout=layout)
            launch = two_ranks[-1]
            assert rows.shape == (3, HIDDEN)
            assert launch.kernel.options == HAS_RESIDUAL | ROWS
            args = launch.args
            assert (args.tokens, args.n_rows, args.rows) == (64, 3, picked.data_ptr())
            assert (args.x[0], args.residual) == (of.buffer(1).data_ptr(), residual.data_ptr())


def test_one_shot_of_more_rows_than_an_inbox_holds(two_ranks):
    with _open(channels=2) as of:
        rows, residual = _call(of, 1100, layout="replicated", channel=1)
        assert [launch.blocks for launch in two_ranks] == [512, 512, 76]
        memory = of.symmetric
        for launch, first in zip(two_ranks, (0, 512, 1024), strict=True):
            args = launch.args
            assert args.x[0] == args.out[0] == rows.data_ptr() + first * ROW
            assert args.residual == residual.data_ptr() + first * ROW
            assert args.tokens == args.n_rows == launch.blocks
            assert launch.overlap
            inboxes, most = launch.params
            assert list(inboxes.of[:2]) == [base + memory.inboxes + memory.inbox_bytes for base in memory.addresses]
            assert most.value == 512
        assert (of.collectives, of.bytes_sent) == (3, 1100 * ROW)
        with pytest.raises(CollectiveError, match="1100 rows with layout='replicated' and row_count"):
            _call(of, 1100, layout="replicated", row_count=torch.tensor([5], dtype=torch.int32))


def test_quantised_rows(two_ranks):
    with _open(fp8_regions=1) as of:
        residual = torch.zeros(64, HIDDEN, dtype=torch.bfloat16)
        weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
        options = {"out_dtype": torch.float8_e4m3fn, "layout": "replicated"}
        rows, scales = fused(of.buffer(64), residual, weight, 1e-5, of, **options)
        args = two_ranks[-1].args
        assert args.fp8[0] == rows.data_ptr() == of.fp8(1).data_ptr()
        assert args.scales[0] == scales.data_ptr()
        assert args.out[0] is None


@pytest.mark.parametrize("static", [False, True])
def test_two_shots_of_quantised_rows_are_written_by_the_peers_too(two_ranks, static):
    with _open(fp8_regions=1) as of:
        scale = torch.ones(1) if static else None
        kept = of.buffer(64, start=5, region=1)
        out, own = of.fp8(64, start=9), None if static else of.scales(64, start=9)
        options = {"out_dtype": torch.float8_e4m3fn, "out": out, "out_scales": own, "scale": scale}
        rows, _ = _call(of, 64, **options, unquantised=kept)
        args = two_ranks[-1].args
        assert rows.data_ptr() == out.data_ptr()
        for table, tensor in ((args.x, of.buffer(64)), (args.out, kept), (args.fp8, out), (args.scales, own)):
            start = None if tensor is None else tensor.data_ptr()
            assert list(table[:2]) == [start, start and start + PEER]
        assert args.scale == (scale.data_ptr() if static else None)
        assert of.copies == 0


@pytest.mark.parametrize("static", [False, True])
def test_every_part_of_a_one_shot_has_its_own_sampled_and_quantised_rows(two_ranks, static):
    with _open(fp8_regions=1) as of:
        picked, kept = torch.arange(900, 2000), of.buffer(1100, region=1)
        scale = torch.ones(1) if static else None
        options = {"out_dtype": torch.float8_e4m3fn, "scale": scale, "unquantised": kept}
        rows, residual = _call(of, 2048, rows=picked, layout="replicated", **options)
        for launch, first in zip(two_ranks, (0, 512, 1024), strict=True):
            args = launch.args
            assert (args.tokens, args.n_rows) == (2048, launch.blocks)
            assert (args.x[0], args.residual) == (of.buffer(1).data_ptr(), residual.data_ptr())  # rows are of all
            assert args.rows == picked.data_ptr() + first * picked.itemsize
            assert args.out[0] == kept.data_ptr() + first * ROW
            assert args.fp8[0] == rows.data_ptr() + first * HIDDEN
            assert args.scales[0] == (None if static else of.scales(1, start=first).data_ptr())
            assert args.scale == (scale.data_ptr() if static else None)


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (9, 0)], ids=str)
def test_quantised_rows_need_a_gpu_that_converts_to_fp8(two_ranks, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "this GPU")
    with _open(fp8_regions=1) as of:
        options = {"out_dtype": torch.float8_e4m3fn}
        arguments = torch.zeros(64, HIDDEN, dtype=torch.bfloat16), torch.ones(HIDDEN, dtype=torch.bfloat16), 1e-5, of
        if capability >= (8, 9):
            fused(of.buffer(64), *arguments, **options)
            assert len(two_ranks) == 1
        else:
            with pytest.raises(CollectiveError, match=r"compute capability 8\.9 or newer, and this GPU has less"):
                fused(of.buffer(64), *arguments, **options)
            assert not two_ranks


@pytest.mark.parametrize(
    ("capability", "found", "says"),
    [
        ((7, 5), True, "this GPU has less than compute capability 8.0"),
        ((8, 0), True, ""),
        ((9, 0), True, ""),
        ((9, 0), False, "cuda-core is not installed"),
    ],
)
def test_kernels_are_available_from_ampere_on(monkeypatch, caplog, capability, found, says):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if found else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "this GPU")
    asked = launch.available.__wrapped__  # its answers are kept
    with caplog.at_level(logging.WARNING, "tokenweave.cuda.launch"):
        assert asked(torch.device("cuda", 0)) is not bool(says)
        assert asked(torch.device("cpu")) is False
    assert len(caplog.messages) == bool(says)
    assert says in caplog.text


def test_the_same_call_has_the_same_signature_and_another_has_not(two_ranks):
    with _open() as of:
        for tokens, ctas, start in ((64, 8, 0), (64, 8, 0), (63, 8, 0), (64, 9, 0), (64, 8, 1)):
            _call(of, tokens, ctas=ctas, partial=of.buffer(tokens, start=start))
        one, again, *others = (launch.args.signature for launch in two_ranks)
        assert one == again
        assert len({one, *others}) == 4


def test_only_what_lies_in_the_workspace_has_an_offset(two_ranks):
    with _open(fp8_regions=1, staging=False) as of:
        data, scales, start = of.symmetric.data, of.symmetric.scales, of.buffer(1).data_ptr()
        rows = of.regions * of.max_tokens

        def around(first: int, n: int) -> torch.Tensor:
            """Rows of the memory that the workspace is part of, counted from its first one."""
            return data.as_strided((n, HIDDEN), (HIDDEN, 1), data.storage_offset() + first * HIDDEN)

        assert [of.offset_of(around(first, 2)) for first in (0, 1, rows - 2)] == [0, ROW, (rows - 2) * ROW]
        assert [of.offset_of(around(*outside)) for outside in ((-1, 1), (-1, 2), (rows - 1, 2), (rows, 1))] == [
            None
        ] * 4
        assert of.offset_of(of.buffer(4)[:, : HIDDEN // 2]) is None  # its rows are apart
        assert of.offset_of(of.buffer(4).view(torch.float16)) is None
        assert of.offset_of(of.fp8(2, start=3)) == of.fp8(1).data_ptr() + 3 * HIDDEN - start
        assert of.offset_of(of.fp8(2).view(torch.uint8)) is None
        assert of.offset_of(of.scales(2, start=3)) == scales.data_ptr() + 12 - start
        last = scales.as_strided((3,), (1,), scales.storage_offset() + of.max_tokens - 2)
        assert of.offset_of(last[:2]) is not None
        assert of.offset_of(last) is None
    assert of.offset_of(around(0, 1)) is None  # closed


@pytest.mark.parametrize("shape", [{"ctas": 8}, {}, {"layout": "replicated"}], ids=str)
def test_every_call_that_must_not_meet_another_has_its_own_signature(two_ranks, shape):
    """Peers find each other by it: what makes a kernel read, send or add something else has to be in it."""
    ones, few = torch.ones(HIDDEN, dtype=torch.bfloat16), torch.arange(10)
    count = torch.tensor([9], dtype=torch.int32)
    calls = [
        {"tokens": 64},
        {"tokens": 63},
        {"tokens": 64, "has_residual": False},
        {"tokens": 64, "bias": ones},
        {"tokens": 64, "post_norm": ones},
        {"tokens": 64, "weight_offset": 1.0},
        {"tokens": 64, "row_count": count},
        {"tokens": 64, "rows": few},
        {"tokens": 63, "rows": few},  # another batch, of which as many rows are sent
        {"tokens": 64, "rows": few[:9]},
        {"tokens": 64, "rows": few, "bias": ones},
    ]
    with _open() as of:
        out = of.buffer(64, region=1)
        for options in calls:
            n = len(options["rows"]) if "rows" in options else options["tokens"]
            _call(of, **options, **shape, out=out[:n])
    signatures = [made.args.signature for made in two_ranks]
    assert len(set(signatures)) == len(signatures) == len(calls)


@pytest.mark.parametrize(
    "changed",
    [{"name": "twoshot_ring"}, {"options": 3}, {"groups": 2}, {"stages": 8}, {"blocks": 9}, {"tokens": 63}, {"n": 63}],
    ids=str,
)
def test_a_signature_has_every_number_of_a_launch(changed):
    shape = {"name": "twoshot_registers", "options": 1, "groups": 4, "stages": 0, "blocks": 8, "tokens": 64, "n": 64}

    def signature(name, options, groups, stages, blocks, tokens, n):
        kernel = Kernel(name, 2, 0, HIDDEN, "bfloat16", options, 128, groups, stages)
        return cuda_backend._signature(kernel, blocks, tokens, n, 0, None)

    assert signature(**shape) != signature(**{**shape, **changed})


@pytest.mark.parametrize("ranks", range(2, 9))
def test_all_ranks_launch_the_same(two_ranks, ranks):
    """Whatever the last one owns: fewer rows than the others, or none. All but the rank's own index and addresses."""
    residual, weight = torch.zeros(400, HIDDEN, dtype=torch.bfloat16), torch.ones(HIDDEN, dtype=torch.bfloat16)
    names = set()
    with _open() as of:
        of.world_size = ranks
        for tokens in range(1, 400):
            for options in ({}, {"ctas": 4}, {"layout": "replicated"}):
                made = set()
                for of.rank in (0, ranks - 1):
                    fused(of.buffer(tokens), residual[:tokens], weight, 1e-5, of, **options)
                    launch = two_ranks.pop()
                    depths = tuple(p.value for p in launch.params if hasattr(p, "value"))
                    kernel = dataclasses.replace(launch.kernel, rank=0)
                    made.add((kernel, launch.blocks, launch.args.signature, launch.overlap, depths))
                    names.add(kernel.name)
                assert len(made) == 1, f"{tokens} tokens of {ranks} ranks, {options}: {made}"
    assert names == {"twoshot_ring", "twoshot_registers", "oneshot"}


def test_a_failed_kernel_is_an_error_at_the_next_call(two_ranks):
    with _open() as of:
        of.symmetric.record[1] = torch.tensor([1, 2, 0, 1, 5, 44, 43, 0x1234], dtype=torch.int32)
        with pytest.raises(
            CollectiveError, match=r"rank 0 .*time limit: peer 1, channel 1, phase end, block 5, epoch 44"
        ):
            _call(of, 64)
        assert not two_ranks


def test_nothing_is_launched_for_no_rows(two_ranks):
    with _open() as of:
        assert _call(of, 0)[0].shape == (0, HIDDEN)
        assert _call(of, 8, rows=torch.empty(0, dtype=torch.int64))[0].shape == (0, HIDDEN)
        assert not two_ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ctas": 0}, f"ctas=0; expected 1 to {MAX_BLOCKS}"),
        ({"ctas": 6, "cluster": 4}, "cluster=4 does not divide ctas=6"),
        ({"bias": torch.ones(HIDDEN)}, "all of them in"),
    ],
)
def test_what_only_kernels_ask(two_ranks, options, message):
    with _open() as of, pytest.raises(CollectiveError, match=message):
        _call(of, 8, **options)
