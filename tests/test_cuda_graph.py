"""What surrounds a capture, without a GPU; captured graphs themselves are in test_gpu_cuda_graph.py."""

import gc
import threading

import pytest

from tokenweave.cuda.graph import _NoCollection


def test_no_garbage_is_collected_while_any_thread_captures():
    off, entered, leave = _NoCollection(), threading.Event(), threading.Event()

    def other():
        with off:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    assert gc.isenabled()
    with off:
        thread.start()
        assert entered.wait(10)
    assert not gc.isenabled(), "the first to begin has ended, the other still captures"
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_collections_are_as_before_after_a_failed_capture_and_after_nested_ones():
    off = _NoCollection()
    with pytest.raises(RuntimeError, match="broken"), off:
        raise RuntimeError("broken")
    assert gc.isenabled()
    gc.disable()
    try:
        with off, off:
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
