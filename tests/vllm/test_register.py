"""What the entry point says of models that are none of ours. Nothing is built, see test_plugin.py for an engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tokenweave.integrations import vllm as plugin

THEIRS = type("GemmaForCausalLM", (), {"__module__": "vllm.model_executor.models.gemma"})
OURS = type("LlamaForCausalLM", (), {"__module__": "tokenweave.integrations.vllm.models"})


class Registry:
    """vLLM's, as far as it is asked."""

    def __init__(self) -> None:
        self.found: Any = THEIRS, "GemmaForCausalLM"

    def resolve_model_cls(self, architectures: Any, model_config: Any) -> Any:
        return self.found


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr(plugin, "_builds_first_rank", lambda: True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    registry = Registry()
    plugin._name_others(registry)
    return registry


def config(runner_type: str = "generate") -> SimpleNamespace:
    return SimpleNamespace(runner_type=runner_type)


def test_an_architecture_that_is_not_ours_is_named_once(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    plugin._name_others(registry)  # vLLM may load a plugin again
    for _ in range(3):
        assert registry.resolve_model_cls([], model_config=config()) == registry.found
        assert registry.resolve_model_cls([], config()) == registry.found
    (record,) = caplog.records
    assert record.getMessage() == (
        "TokenWeave: stock vLLM runs: GemmaForCausalLM is none of LlamaForCausalLM, MistralForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM, nor run as one"
    )
    registry.found = THEIRS, "Gemma2ForCausalLM"  # of another engine in this process
    registry.resolve_model_cls([], config())
    assert len(caplog.records) == 2


def test_ours_drafts_and_other_ranks_say_nothing(
    registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.resolve_model_cls([], config("draft"))
    registry.found = OURS, "LlamaForCausalLM"
    registry.resolve_model_cls([], config())
    registry.found = THEIRS, "GemmaForCausalLM"
    monkeypatch.setattr(plugin, "_builds_first_rank", lambda: False)
    registry.resolve_model_cls([], config())
    assert not caplog.records


def test_what_the_registry_gives_is_handed_on_whatever_it_is(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.found = None
    assert registry.resolve_model_cls([], config()) is None
    assert not caplog.records
