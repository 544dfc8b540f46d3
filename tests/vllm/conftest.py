"""What tests here share."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made and replayed by stand-ins that only write down what was asked of them."""
    from graph_stand_ins import stand_in

    stand_in(monkeypatch)
