"""vLLM's V2 runner asks its model state to prepare attention for every step: there a step is planned."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tokenweave.integrations.vllm.cut import Tables
from tokenweave.integrations.vllm.reasons import Reason
from tokenweave.integrations.vllm.requests import Rows
from tokenweave.integrations.vllm.runtime import Runtime
from tokenweave.integrations.vllm.step import Planned
from tokenweave.integrations.vllm.warm_up import warm_up


@functools.cache
def state_class(on: bool) -> type:
    """vLLM's default state, or a subclass of it that plans."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    if not on:
        return DefaultModelState

    class TokenWeaveModelState(DefaultModelState):
        """What it does not know of its methods' arguments it passes through."""

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            tokens = new_req_data.prefill_token_ids or new_req_data.prompt_token_ids or []
            self._runtime.requests.add(new_req_data.req_id, tokens, new_req_data.num_computed_tokens)

        def remove_request(self, req_id: str) -> None:
            super().remove_request(req_id)
            self._runtime.requests.remove(req_id)

        def prepare_attn(
            self,
            input_batch: Any,
            cudagraph_mode: Any,
            block_tables: tuple[torch.Tensor, ...],
            slot_mappings: torch.Tensor,
            *args: Any,
            for_capture: bool = False,
            **kwargs: Any,
        ) -> dict[str, Any]:
            build = functools.partial(
                super().prepare_attn,
                input_batch,
                cudagraph_mode,
                block_tables,
                slot_mappings,
                *args,
                for_capture=for_capture,
                **kwargs,
            )
            stock, runtime = functools.cache(build), self._runtime
            if runtime.off is not None or for_capture:
                return stock()
            runtime.expect_intact()
            whole = cudagraph_mode == CUDAGraphMode.FULL
            first = runtime.compat.WARMS_UP_AFTER_CAPTURE and not runtime.warmed_up
            if not any(map(runtime.requests.known, input_batch.req_ids[:1])):  # then none is
                reason = Reason.DUMMY
            elif whole and not first:  # decoding: hundreds of steps a second, of hundreds of requests
                reason = Reason.WHOLE_GRAPH
            elif (tables := _tables(input_batch, block_tables, slot_mappings, self._pattern(stock))) is None:
                reason = Reason.CACHE_GROUPS
            else:
                if first:
                    warm_up(runtime, tables, functools.partial(self._stock_step, tables, input_batch, args))
                    stock.cache_clear()  # its builder's buffers were used meanwhile
                    if runtime.off is not None:
                        return stock()
                    tables = dataclasses.replace(tables, metadata=self._pattern(stock))
                if not whole:
                    planned = runtime.prepare(_rows(input_batch), tables)
                    return stock() if planned is None else Planned(planned, stock)
                reason = Reason.WHOLE_GRAPH
            runtime.requests.planned(input_batch.req_ids)
            runtime.steps.count(reason)
            return stock()

        def _pattern(self, stock: Callable[[], dict[str, Any]]) -> Any | None:
            """Attention metadata for those of the splits to follow; None where layers have caches of different kinds.

            vLLM's builder costs the host more than all else of a replayed step, so it is not asked again where all that
            differs between steps is replaced.
            """
            if not self._runtime.compat.SAME_PATTERN:
                return _of_all_layers(stock())
            if not hasattr(self, "_first_pattern"):
                self._first_pattern = _of_all_layers(stock())
            return self._first_pattern

        def _stock_step(self, tables: Tables, batch: Any, more: tuple[Any, ...], rows: int) -> Callable[[], object]:
            """vLLM's own step of ``rows`` rows, in as few requests as may be; overwrites the runner's buffers.

            It is replayed piece by piece where vLLM has such graphs, of a few more rows, which attention does not see.
            """
            config = self.vllm_config.compilation_config
            pieces = config.cudagraph_mode.mixed_mode() == CUDAGraphMode.PIECEWISE
            graphs = [size for size in config.cudagraph_capture_sizes or () if pieces and size >= rows]
            mode, padded = (CUDAGraphMode.PIECEWISE, min(graphs)) if graphs else (CUDAGraphMode.NONE, rows)
            requests = -(-rows // self.model_config.max_model_len)
            grown = tables.grown(padded, self.max_num_reqs)
            buffers = SimpleNamespace(
                device=self.device,
                input_ids=grown.token_ids,
                positions=grown.positions,
                query_start_loc=grown.query_start_loc,
                seq_lens=grown.seq_lens,
                is_padding=torch.zeros(rows, dtype=torch.bool, device=self.device),
            )
            dummy = type(batch).make_dummy(requests, rows, buffers)
            slots = grown.slots.fill_(-1).unsqueeze(0)
            metadata = super().prepare_attn(dummy, mode, (grown.block_table[:requests],), slots, *more)
            by_layer = dict.fromkeys(metadata, slots[0])

            def step() -> object:
                with self._runtime.compat.stock_context(metadata, self.vllm_config, padded, by_layer, mode):
                    return self.model.model(grown.token_ids, grown.positions, None, None)

            return step

        @property
        def _runtime(self) -> Runtime:
            return self.model.tokenweave

    return TokenWeaveModelState


def _rows(batch: Any) -> list[Rows]:
    counts, context = batch.num_scheduled_tokens.tolist(), batch.num_computed_tokens_np.tolist()
    return [Rows(*row) for row in zip(batch.req_ids, counts, context, strict=True)]


def _of_all_layers(metadata: dict[str, Any]) -> Any | None:
    """The metadata that all layers share; None where they do not."""
    patterns = {id(pattern): pattern for pattern in metadata.values()}
    return next(iter(patterns.values())) if len(patterns) == 1 else None


def _tables(
    batch: Any, block_tables: tuple[torch.Tensor, ...], slots: torch.Tensor, pattern: Any | None
) -> Tables | None:
    """Of the real rows: vLLM's pieces have some more. None where layers have caches of different kinds."""
    if len(block_tables) != 1 or pattern is None:
        return None
    rows = batch.num_tokens
    return Tables(
        batch.input_ids[:rows],
        batch.positions[:rows],
        batch.query_start_loc,
        batch.seq_lens,
        block_tables[0],
        slots[0, :rows],
        pattern,
    )
