"""Two green contexts that share a GPU's SMs: some for collectives, the rest for GEMMs. Streams of theirs, for torch."""

from __future__ import annotations

from typing import Any

import torch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, which green contexts ask for


def split_streams(device: int, sms: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream, int, int]:
    """Streams of at least ``sms`` SMs and of all others, and how many each has.

    The contexts live as long as the process. The driver gives SMs in groups (of 8 on Hopper), so both may have more or
    fewer than asked for.

    Raises:
        RuntimeError: the driver has no green contexts, or refuses the split.
    """
    from cuda.bindings import driver

    whole = _done(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, _, rest = _done(driver.cuDevSmResourceSplitByCount(1, whole, 0, sms))
    streams = []
    for resource, priority in ((groups[0], -1), (rest, 0)):
        described = _done(driver.cuDevResourceGenerateDesc([resource], 1))
        flags = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        context = _done(driver.cuGreenCtxCreate(described, device, flags))
        stream = _done(driver.cuGreenCtxStreamCreate(context, _NON_BLOCKING, priority))
        streams.append(torch.cuda.ExternalStream(int(stream), device=device))
    return streams[0], streams[1], int(groups[0].sm.smCount), int(rest.sm.smCount)


def _done(answer: tuple[Any, ...]) -> Any:
    """A binding's results without the status, which is an error unless it is 0."""
    status, *results = answer
    if int(status):
        raise RuntimeError(f"the driver answers {status!r}")
    return results[0] if len(results) == 1 else results
