"""FlashInfer's all-reduce + residual add + RMSNorm (TensorRT-LLM's kernels), as vLLM calls it. A rival, if it is installed."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist


class FlashInferFusion:
    """Its workspace for one hidden size; all ranks of ``group`` create it together.

    Args:
        max_tokens: rows of the largest batch.

    Raises:
        ImportError: FlashInfer isn't installed. RuntimeError, ValueError: it refuses these ranks or sizes.
    """

    def __init__(self, group: dist.ProcessGroup, max_tokens: int, hidden: int) -> None:
        self._comm = importlib.import_module("flashinfer.comm")
        self._group, self._hidden = group, hidden
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._handles, self._pointers, self._metadata = self._comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            tp_rank=self._rank,
            tp_size=self._ranks,
            max_token_num=max_tokens,
            hidden_dim=hidden,
            use_fp32_lamport=False,
            group=group,
            create_metadata=True,
        )

    def takes(self, tokens: int, one_shot: bool) -> bool:
        """Its two-shot shares rows out, and wants more of them than ranks."""
        return one_shot or tokens > self._ranks

    def run(
        self,
        rows: torch.Tensor,
        residual_in: torch.Tensor,
        residual_out: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        one_shot: bool,
    ) -> None:
        """Normalised rows in place of the partial sums ``rows``, [tokens, hidden]; all of the residual on every rank."""
        # fp32 sums, programmatic dependent launch. The kernels read the residual before they wait for their predecessor,
        # so in a chain of them completion may only be signalled at the end.
        self._comm.trtllm_allreduce_fusion(
            allreduce_in=rows,
            world_size=self._ranks,
            world_rank=self._rank,
            token_num=rows.shape[0],
            hidden_dim=self._hidden,
            workspace_ptrs=self._pointers,
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            fp32_acc=True,
            pattern_code=self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            use_oneshot=one_shot,
            allreduce_out=None,
            residual_in=residual_in,
            residual_out=residual_out,
            norm_out=rows,
            quant_out=None,
            scale_out=None,
            rms_gamma=weight,
            rms_eps=eps,
            scale_factor=None,
            layout_code=None,
            metadata=self._metadata,
        )

    def close(self) -> None:
        """Frees the memory; no call may be in flight. Collective."""
        self._comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(self._handles, group=self._group)
