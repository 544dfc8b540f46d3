"""One rank's TokenWeave inside vLLM: its buffers, its plans, and how a planned step runs."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tokenweave.collective import Workspace
from tokenweave.engine.batch import beside
from tokenweave.errors import CollectiveError
from tokenweave.execution import collective_of, overlap_of
from tokenweave.integrations.vllm.choice import EAGER_ROWS, Choice
from tokenweave.integrations.vllm.cut import Tables, split_tables
from tokenweave.integrations.vllm.decide import decide
from tokenweave.integrations.vllm.graphs import TILE, CaptureError, Graphs
from tokenweave.integrations.vllm.metrics import Steps
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.requests import Requests, Rows
from tokenweave.integrations.vllm.step import Cut, Planned, Step
from tokenweave.integrations.vllm.trials import Trials
from tokenweave.integrations.vllm.walk import Inputs, attentions, stages_of
from tokenweave.integrations.vllm.ways import Ways
from tokenweave.models.config import ModelConfig
from tokenweave.overlap import CpuThread, CudaStream, Overlap
from tokenweave.planning import Mode, Planner, asked_mode
from tokenweave.planning.machine import Machine, machine_of
from tokenweave.planning.profile_table import Identity
from tokenweave.stages import Split, Stage
from tokenweave.tuning import agreed_profile
from tokenweave.tuning.identity import identity_here
from tokenweave.weave import run_stages

log = logging.getLogger("vllm.tokenweave")
T = TypeVar("T")


class Unrecoverable(CollectiveError):
    """The engine has to end: neither TokenWeave nor stock vLLM can go on from here."""


def close(overlap: Overlap, workspace: Workspace | None) -> None:
    """Gives a runtime's buffers back, its thread and its group."""
    overlap.close()
    if workspace is not None:
        workspace.close()


class Runtime:
    """Buffers and plans of one model on one rank.

    Every rank of the tensor-parallel group creates it, and calls :attr:`set_up`'s parts. What may fail on one rank alone is a part
    of its own, or the end of one, so that ranks which agree behind each never wait for one that stays away.

    Args:
        model: vLLM's inner model (``LlamaModel`` or alike).
        numbers: of it, for the planner.
        vllm_config: of the engine.
        compat: the version's compatibility module.
        group: the tensor-parallel group. peers: its ranks once more, for what hosts tell each other (gloo).
        device: of this rank. dtype: of the rows.
        steps: counts them.

    Attributes:
        off: why everything runs as stock from now on, or None.
        choice: which mode is the fastest for a step.
        ways: how a step runs whose graph is not made.
        requests: that are live.
        graphs: of this rank; None where steps run launch by launch.

    Raises:
        RequestError: the mode does not exist.
    """

    def __init__(
        self,
        model: Any,
        numbers: ModelConfig,
        vllm_config: Any,
        compat: ModuleType,
        group: dist.ProcessGroup,
        peers: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        steps: Steps,
    ) -> None:
        self.model, self.vllm_config, self.compat, self.device = model, vllm_config, compat, device
        self.max_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_requests = vllm_config.scheduler_config.max_num_seqs
        self.max_length = vllm_config.model_config.max_model_len
        self.off: Reason | None = None
        self.steps = steps
        self.requests = Requests()
        self.peers = peers
        self._group, self._numbers, self._mode = group, numbers, asked_mode()
        on_gpu = device.type == "cuda"
        self.residual = torch.zeros(self.max_rows, numbers.hidden, dtype=dtype, device=device)
        self.graphs = Graphs(self, self._least_rows()) if on_gpu and self._may_capture() else None
        self.ways = Ways(numbers.layers, alike=self.dense)
        self._overlap: Overlap = CudaStream(device) if on_gpu else CpuThread()
        self._machine: Machine | None = None
        self._here: Identity | None = None
        self.warmed_up = False

    @property
    def set_up(self) -> Sequence[Callable[[], None]]:
        """What has to be called before anything else, in order; all ranks have to be through with one before any begins the next.

        Raises:
            CollectiveError: no workspace can be had.
            RequestError, ModelError: the planner does not know the GPU or such a model.
        """
        return self._share, self._identify, self._plan

    def _share(self) -> None:
        self.workspace = Workspace(
            self._group,
            max_tokens=self.max_rows,
            hidden=self._numbers.hidden,
            dtype=self.residual.dtype,
            device=self.device,
            channels=1,
            regions=1,
            staging=False,
        )

    def _identify(self) -> None:
        gpu = "cpu" if self.device.type == "cpu" else None
        workspace = self.workspace
        self._machine = machine_of(gpu, workspace.world_size, workspace.transport)
        if gpu is None:  # a table's ranks exchange it: what may fail on one of them comes before
            self._here = identity_here(self._numbers, workspace.world_size, workspace.transport, own_attention=False)

    def _plan(self) -> None:
        assert self._machine is not None
        profile = agreed_profile(self._numbers, self._machine, self._group, here=self._here, own_attention=False)
        planner = Planner(self._numbers, mode=self._mode or "auto", costs=profile or self._machine)
        self.choice = Choice(planner, self._mode, plain=self.vllm_config.quant_config is None)

    @functools.cached_property
    def stages(self) -> list[Stage]:
        """Of the model; asked for when its weights are loaded and processed."""
        return stages_of(self.model, self.compat)

    @functools.cached_property
    def layer_names(self) -> list[str]:
        """vLLM's names of the attention layers, in order."""
        return [layer.layer_name for layer in attentions(self.model)]

    @functools.cached_property
    def dense(self) -> bool:
        """Whether layers are alike, and no row meets another but in attention. Not so where weights are quantised (some layers
        may not be, one scale may be that of all rows) and in mixtures of experts (whose kernels set up on their first run)."""
        return self.vllm_config.quant_config is None and not hasattr(self.model.layers[0], "block_sparse_moe")

    @functools.cached_property
    def trials(self) -> Trials | None:
        """What is run as the engine starts; None where there are no graphs."""
        return None if self.graphs is None else Trials(self, self.graphs)

    def addresses(self) -> tuple[int, ...]:
        """Of what a graph reads besides the runner's buffers, as far as vLLM may move it."""
        first, last = self.model.layers[0], self.model.layers[-1]
        return (
            first.self_attn.attn.kv_cache.data_ptr(),
            last.self_attn.attn.kv_cache.data_ptr(),
            first.input_layernorm.weight.data_ptr(),
            last.input_layernorm.weight.data_ptr(),
        )

    def turn_off(self, reason: Reason, detail: str = "") -> None:
        """All further steps run as stock; said once. Our memory is given back, but for the workspace: peers may read it."""
        if self.off is not None:
            return
        self.off = reason
        self.steps.say(reason, detail, warn=True)
        self.steps.engine(reason)
        try:
            if self.device.type == "cuda":  # no kernel waits for a peer for longer than the workspace's time limit
                torch.cuda.synchronize(self.device)
            if self.graphs is not None:
                self.graphs.drop()
            self.residual = torch.empty(0)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        except Exception:  # a GPU that has failed: stock's next step will say so
            log.debug("TokenWeave: memory could not be given back", exc_info=True)

    def expect_intact(self) -> None:
        """To be asked before every step.

        Raises:
            Unrecoverable: an earlier step's collective has failed. Tokens were sampled from what it left, and its keys and values
                are in the cache, so that stock could not go on from there either.
        """
        try:
            self.workspace.check()
        except CollectiveError as error:
            raise _unrecoverable(
                f"tokens were sampled from a step that failed, and its keys and values are in the cache: {error}"
            ) from error

    def use(self, mode: Mode | str | None) -> None:
        """Sets the mode of all further steps, on every rank at the same step: ``"auto"``, a mode, or None for auto."""
        self.choice.mode = None if mode is None else asked_mode(mode)

    def prepare(self, step: Sequence[Rows], tables: Tables) -> Step | None:
        """Decides about a step that stock vLLM would launch kernel by kernel or piece by piece; None, with the reason counted, if
        stock runs it."""
        try:
            decided = decide(self, step, tables)
        except Exception as error:  # whatever it is: vLLM goes on
            log.exception("TokenWeave: a step could not be planned")
            self._expect_failed_everywhere(error)
            self.turn_off(Reason.ERROR, str(error))
            return None
        finally:
            self.requests.planned(rows.request for rows in step)
        if isinstance(decided, Reason):
            self.steps.count(decided)
            return None
        return decided

    def forward(self, metadata: Any, inputs_embeds: torch.Tensor | None) -> torch.Tensor | None:
        """Runs the planned step of this forward pass, if there is one.

        Returns:
            [rows, hidden], the final norm of all rows, in the workspace: valid until the next step begins. None: stock.
        """
        if not isinstance(metadata, Planned):
            return None
        if self._run(metadata.step, inputs_embeds):
            return self.workspace.buffer(metadata.step.cut.rows)
        metadata.restore()
        return None

    def _run(self, step: Step, inputs_embeds: torch.Tensor | None) -> bool:
        """Whether the step could be run."""
        if self.off is not None:
            return False
        if inputs_embeds is not None:
            self.steps.count(Reason.INPUT_EMBEDS)
            return False
        self.expect_intact()
        try:
            if step.graph is None or self.graphs is None:
                self.walk(step.cut)
            else:
                self.graphs.run(step.graph, step.cut.tables)
        except Unrecoverable:
            raise
        except Exception as error:  # whatever it is: keys and values are written again, and vLLM goes on
            log.exception("TokenWeave: a step failed")
            if not isinstance(error, CaptureError):
                self.expect_intact()  # what failed may have been a collective, also one of an earlier step
            self._expect_failed_everywhere(error)
            self.turn_off(Reason.ERROR, str(error))
            return False
        self.steps.ran(step.cut.plan.mode, step.cut.rows, graph=step.graph is not None)
        return True

    @torch.inference_mode()
    def walk(self, cut: Cut, row_count: torch.Tensor | None = None, layers: int | None = None) -> None:
        """All launches of a step, on the current stream and the overlap's.

        Args:
            row_count: int32 [1], the rows of the whole step that are real; None if all are.
            layers: how many of the model's first ones to run; None for all.
        """
        rows = cut.tables.token_ids.shape[0]
        edges = [0, rows] if cut.plan.split is None else [0, cut.plan.split, rows]
        overlap = overlap_of(cut.plan, self._overlap)
        splits = [
            self._split(cut, start, stop, name, row_count if stop == rows else None, overlap.reached)
            for start, stop, name in zip(edges, edges[1:], ("prefix", "suffix"), strict=False)
        ]
        collective = collective_of(cut.plan, rows, self.workspace)
        stages = self.stages if layers is None else self.stages[: 1 + 2 * layers]
        run_stages(stages, splits, collective, self.workspace, overlap)

    def anywhere(self, true: bool) -> bool:
        """Whether it is true on any rank; every rank asks. The hosts meet: neither the GPU nor its memory has a part in it."""
        found = torch.tensor([true], dtype=torch.int32, device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.peers)
        return bool(found)

    def together(self, call: Callable[[], T]) -> T:
        """The result of a call that all ranks make.

        Raises:
            Exception: what the call raised; CollectiveError if it failed on another rank alone.
        """
        failed = None
        try:
            result = call()
        except Exception as error:  # whatever it is, the other ranks have to hear of it
            failed = error
        if self.anywhere(failed is not None):
            raise failed or CollectiveError("what all ranks do together failed on another rank, whose log says why")
        return result

    def _expect_failed_everywhere(self, error: Exception) -> None:
        """Returns where a step failed on all ranks, which then run it as stock.

        Raises:
            Unrecoverable: this rank waited for as long as the others' kernels wait for it, and not all of them failed. They have
                launched what it has not, so that its next collective, of stock, would meet another one of theirs.
        """
        ranks, until = dist.get_world_size(self.peers), time.monotonic() + self.workspace.time_limit
        failed = [f"tokenweave/failed/{self.workspace.handle}/{rank}" for rank in range(ranks)]
        try:
            store = self.peers.get_group_store()  # unlike a collective it can be asked who has come
            store.set(failed[dist.get_rank(self.peers)], "")
            while not store.check(failed) and time.monotonic() < until:
                time.sleep(0.01)
            if store.check(failed):
                return
        except RuntimeError as unreachable:  # the rank that keeps the store may be gone
            log.warning("TokenWeave: the other ranks do not answer: %s", unreachable)
        raise _unrecoverable(f"a step failed on rank {self.workspace.rank}, and others run it: {error}") from error

    def close(self) -> None:
        """Gives the buffers back, as far as there are any."""
        close(self._overlap, getattr(self, "workspace", None))

    def close_with(self, owner: object) -> None:
        """Closes when ``owner`` is gone; not as the program exits, when all memory goes."""
        weakref.finalize(owner, close, self._overlap, self.workspace).atexit = False

    def _split(
        self,
        cut: Cut,
        start: int,
        stop: int,
        name: str,
        row_count: torch.Tensor | None,
        reached: Callable[[str], None],
    ) -> Split:
        tables, tokens, whole = cut.tables, stop - start, cut.tables.token_ids.shape[0]
        starts, lengths = split_tables(tables.query_start_loc, tables.seq_lens, start, None if stop == whole else stop)
        metadata = self.compat.cut_metadata(
            tables.metadata,
            attention=next(attentions(self.model)),
            block_size=self.vllm_config.cache_config.block_size,
            tokens=tokens,
            query_start_loc=starts,
            seq_lens=lengths,
            block_table=tables.block_table,
            slot_mapping=tables.slots[start:stop],
            max_query_len=min(tokens, cut.longest_query),
            max_seq_len=cut.longest_sequence,
        )
        context = self.compat.forward_context(self.vllm_config, self.layer_names, metadata, tables.slots[start:stop])
        real = padding = None
        if row_count is not None:
            real = (row_count - start).clamp_(min=0) if start else row_count
            if not self.dense:  # rows of padding must be finite there
                last = torch.arange(max(0, tokens - TILE), tokens, device=self.device, dtype=torch.int32)
                padding = (last >= real).unsqueeze(1)
        rows = tables.token_ids[start:stop], tables.positions[start:stop]
        inputs = beside(Inputs(*rows, context, padding, reached=reached), cut.plan, name)
        return Split(start, tokens, inputs, self.residual[start:stop], row_count=real)

    def _may_capture(self) -> bool:
        from vllm.config import CUDAGraphMode

        config, version = self.vllm_config, self.compat.flash_version(next(attentions(self.model)))
        if version != 3:  # only that one makes its schedule on the device
            if self.steps.first_rank:
                log.info("TokenWeave: FlashAttention %d: no step graphs, steps of %d rows or more", version, EAGER_ROWS)
            return False
        return not config.model_config.enforce_eager and config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE

    def _least_rows(self) -> int:
        """One more than the largest step that is left to stock vLLM.

        Those are the steps that it replays as whole graphs of its own; and all that it has graphs for where what its pieces
        take was not measured at the start.
        """
        from vllm.config import CUDAGraphMode

        config = self.vllm_config.compilation_config
        whole = config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL
        return (config.max_cudagraph_capture_size or 0) + 1 if whole or not self.compat.WARMS_UP_AFTER_CAPTURE else 1


def _unrecoverable(what: str) -> Unrecoverable:
    text = f"{what}. The engine has to end; start it again, with TOKENWEAVE=0 if that comes back"
    log.error("TokenWeave: %s", text)
    return Unrecoverable(text)
