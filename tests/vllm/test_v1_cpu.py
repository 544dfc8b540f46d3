"""What the wrapped V1 runner tells the prefix veto of vLLM's scheduler; see test_plugin.py for engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import CachedRequestData

from tokenweave.integrations.vllm import v1_cpu
from tokenweave.integrations.vllm.requests import Requests, Rows

PROMPT = list(range(100))


def scheduled(
    *, new: dict[str, int] | None = None, resumed: dict[str, int] | None = None, running: dict[str, int] | None = None
) -> Any:
    """A step's requests, each with its number of computed tokens; all have the same prompt."""
    resumed, running = resumed or {}, running or {}
    cached = CachedRequestData.make_empty()
    cached.req_ids = [*running, *resumed]
    cached.num_computed_tokens = [*running.values(), *resumed.values()]
    cached.resumed_req_ids = set(resumed)
    cached.all_token_ids = {name: [*PROMPT, 7] for name in resumed}
    return SimpleNamespace(
        finished_req_ids=set(),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=PROMPT, num_computed_tokens=computed)
            for name, computed in (new or {}).items()
        ],
        scheduled_cached_reqs=cached,
    )


def test_a_resumed_request_brings_its_hits() -> None:
    requests = Requests()
    v1_cpu._note(requests, scheduled(new={"reader": 0, "writer": 0}))
    requests.planned(["reader", "writer"])
    v1_cpu._note(requests, scheduled(running={"reader": 100, "writer": 100}))
    assert not requests.hazard([Rows("reader", 1, 100), Rows("writer", 1, 100)], 1)
    v1_cpu._note(requests, scheduled(resumed={"reader": 64, "writer": 0}))
    step = [Rows("reader", 37, 64), Rows("writer", 101, 0)]
    assert requests.hazard(step, 50)  # positions 13 to 63 are written behind the cut
    assert not requests.hazard(step, 101)
