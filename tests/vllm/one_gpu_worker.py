"""vLLM's worker for ranks that share one GPU; vLLM imports it in each of them, by ``worker_cls``."""

from __future__ import annotations

from vllm.distributed.device_communicators import custom_all_reduce
from vllm.v1.worker import gpu_worker

from shared_gpu import seem_alone


class Worker(gpu_worker.Worker):
    """On the first GPU, whatever its rank."""

    def init_device(self) -> None:
        """As vLLM's, which starts NCCL and makes its all-reduce over peers' memory."""
        seem_alone(self.rank)
        self.local_rank = 0
        # vLLM asks whether GPU 0 reaches GPU 1, which there is none of; a GPU reaches its own memory.
        custom_all_reduce._can_p2p = lambda rank, world_size: True
        super().init_device()
