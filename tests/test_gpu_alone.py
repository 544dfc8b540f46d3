"""Every kernel on one GPU for 2 to 8 ranks, which share this process and run one after the other, against float64.

    PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu_alone.py

What more GPUs would add is the waiting, the ordering between GPUs and the speed: test_gpu_collective.py and the
files beside it, with TOKENWEAVE_TEST_RANKS.
"""

from __future__ import annotations

import pytest
import torch

from alone_cases import Alone, fine, run, small
from collective_cases import Case, fresh_seed
from kernel_edits import ROUNDED_VECTORS, compiled_from
from tokenweave.cuda import launch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


def _name(what: Alone) -> str:
    return f"{what.kernel}-{what.case.tokens}x{what.case.hidden}"


@pytest.mark.parametrize("what", small(), ids=_name)
def test_options(what):
    run(what, fresh_seed(), rounds=4)


@pytest.mark.parametrize("what", fine(), ids=_name)
def test_float32_vectors_are_not_rounded(what):
    run(what, fresh_seed())


@pytest.fixture
def rounded_vectors():
    launch.loaded.cache_clear()
    with compiled_from(*ROUNDED_VECTORS):
        yield
    launch.loaded.cache_clear()


@pytest.mark.parametrize("what", [what for what in (*small(), *fine()) if what.fine], ids=_name)
def test_rounded_float32_vectors_are_noticed(rounded_vectors, what):
    with pytest.raises(AssertionError, match=r"of the elements are off by more than one rounding"):
        run(what, fresh_seed())


@pytest.mark.parametrize("ranks", range(2, 9))
def test_any_number_of_ranks(ranks):
    seed = fresh_seed()
    for tokens in sorted({1, ranks - 1, ranks, ranks + 1, 257}):
        run(Alone(Case(tokens, 4096), "twoshot_registers", ranks), seed)
        run(Alone(Case(tokens, 4096), "twoshot_multimem", ranks, transport="multimem-emulated"), seed)
        if tokens <= 64:  # what an inbox holds where there are most ranks
            run(Alone(Case(tokens, 4096, replicated=True), "oneshot", ranks), seed, rounds=4)
    run(Alone(Case(300, 4096, ctas=1), "twoshot_ring", ranks), seed)
    run(Alone(Case(257, 2048, torch.float16, ctas=1), "twoshot_ring", ranks), seed)
    run(Alone(Case(257, 2880, ctas=1), "twoshot_ring", ranks, fp8="row", both=True), seed)
