"""Energy by a counter that moves in steps: its power is right, whatever the steps, or it is refused with the reason."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tokenweave.bench import environment
from tokenweave.bench.energy import Change, EnergyWatch, RankPower, power, rank_power, refused
from tokenweave.bench.latency import measure

WATTS = 690.0


class SteppedGpu:
    """A GPU under constant load, whose counter is refreshed every ``refresh`` seconds; its clock runs as it is told to.

    ``read`` and ``clock`` are a watch's, and ``wait`` stands for the pause between two readings, which is sometimes long.
    """

    def __init__(self, refresh: float, seed: int, watts: float = WATTS) -> None:
        self._random = random.Random(seed)
        self.now, self._refresh, self._watts = self._random.uniform(5, 6), refresh, watts
        self.until = self.now

    def read(self) -> float:
        self.now += 50e-6
        return self._watts * self._refresh * int(self.now / self._refresh)

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        late = self._random.random() < 0.02
        self.now += seconds + (self._random.uniform(0, 6e-3) if late else self._random.uniform(0, 3e-4))
        return self.now >= self.until


def _watched(gpu: SteppedGpu, window: float) -> EnergyWatch:
    """What a watch sees of a window, without waiting for it."""
    watch = EnergyWatch(gpu.read, gpu.clock)
    gpu.until = gpu.now + window
    watch._left = SimpleNamespace(wait=gpu.wait)
    watch._run()
    assert watch.failure is None
    return watch


@pytest.mark.parametrize("refresh", [0.02, 0.1])
def test_power_is_right_whatever_the_refresh_where_two_readings_are_not(refresh):
    window, worst_of_two = 1.2, 0.0
    for seed in range(200):
        gpu = SteppedGpu(refresh, seed)
        before, began = gpu.read(), gpu.now
        watch = _watched(gpu, window)
        worst_of_two = max(worst_of_two, abs((gpu.read() - before) / (gpu.now - began) / WATTS - 1))
        assert len(watch.changes) >= min(11, window / refresh - 1)
        assert power(watch.changes) == pytest.approx(WATTS, rel=0.01)
        assert refused([rank_power(watch, 700.0)]) is None
    assert worst_of_two > 0.6 * refresh / window, "two readings are off by up to a refresh: the test would show nothing"
    assert worst_of_two > (0.05 if refresh == 0.1 else 0.01)


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_thread_sees_a_counter_change_in_real_time():
    began, refresh = time.perf_counter(), 0.02
    with EnergyWatch(lambda: 50.0 * int((time.perf_counter() - began) / refresh)) as watch:
        _until(lambda: len(watch.changes) >= 15)
    seen = len(watch.changes)
    assert power(watch.changes) == pytest.approx(50 / refresh, rel=0.1)  # a busy host may come late
    time.sleep(0.05)
    assert len(watch.changes) == seen, "it reads on after it was left"


def test_a_counter_that_fails_is_told_and_not_raised():
    def lost() -> float:
        raise OSError("GPU is lost")

    with EnergyWatch(lost) as watch:
        pass
    assert "GPU is lost" in (refused([rank_power(watch, 700.0)]) or "")


def test_what_cannot_be_is_refused():
    right = RankPower(12, 1.1, 690.0, 700.0)
    assert refused([right, right]) is None
    assert refused([right, RankPower(12, 1.1, 775.0, 700.0)]) is None, "1465 W of 1400 W are within 5 %"
    assert "1485 W, the GPUs' power limits 1400 W" in (refused([right, RankPower(12, 1.1, 795.0, 700.0)]) or "")
    assert refused([right, RankPower(12, 1.1, 795.0, None)]) is None, "nothing to compare with"
    assert "rank 1's GPU changed 9 times" in (refused([right, RankPower(9, 1.0, 690.0, 700.0)]) or "")
    assert "rank 1's GPU: its energy counter can't be read" in (refused([right, rank_power(None, 700.0)]) or "")
    assert power([]) is power([Change(1.0, 2.0)]) is None


class _Replays:
    """A GPU in real time, which is busy with replays of 1 ms; its counter changes every ``per_change`` replays."""

    def __init__(self, per_change: int, watts: float = WATTS) -> None:
        self.issued, self.windows = 0, [0]
        self._per_change, self._watts = per_change, watts

    def replay(self) -> None:
        self.issued += 1

    def energy(self) -> contextlib.AbstractContextManager:
        gpu, first = self, self.issued

        class Watch(contextlib.nullcontext):
            failure = None

            @property
            def changes(self) -> list[Change]:
                count = (gpu.issued - first) // gpu._per_change
                gap = 1e-3 * gpu._per_change
                return [Change(gap * i, gpu._watts * gap * i) for i in range(count)]

        return Watch()

    def limit_w(self) -> float:
        return 700.0

    def sample(self) -> None:
        pass

    def take(self) -> dict:
        self.windows.append(self.issued)
        return {"sm_mhz": None, "power_w": None, "celsius": None, "limits": None}


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return 1.0 * _Event.replays()


def _sustained(monkeypatch, gpu: _Replays, seconds: float) -> dict:
    _Event.replays = lambda: gpu.issued - gpu.windows[-1]
    monkeypatch.setattr(measure.torch.cuda, "Event", _Event)
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure.dist, "barrier", lambda group: None)
    monkeypatch.setattr(measure.dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(measure.dist, "all_gather_object", lambda every, mine, group: every.__setitem__(0, mine))
    return measure.sustained(gpu, 1000.0, seconds, None, gpu)


def test_replays_are_lengthened_until_the_counter_has_changed_often_enough(monkeypatch):
    gpu = _Replays(per_change=100)
    found = _sustained(monkeypatch, gpu, 0.5)  # a window of 0.375 s: 3 changes
    assert found["energy"]["changes"] >= 10
    assert found["ms"] == 1.0
    assert found["joules"] == pytest.approx(WATTS * 1e-3)
    assert gpu.issued < 2500, "no longer than it has to be"
    at_once = _Replays(per_change=20)
    _sustained(monkeypatch, at_once, 0.5)
    assert at_once.issued == 125 + 375


def test_a_counter_that_hardly_changes_gives_no_energy_but_the_reason(monkeypatch):
    gpu = _Replays(per_change=1000)
    found = _sustained(monkeypatch, gpu, 0.5)
    assert found["joules"] is None
    assert "changed 4 times in the longest window" in found["energy"]["refused"]
    assert gpu.issued == 125 + 375 + 4000


def test_an_impossible_power_gives_no_energy_but_the_reason(monkeypatch):
    found = _sustained(monkeypatch, _Replays(per_change=20, watts=900.0), 0.4)
    assert found["joules"] is None
    assert "900 W, the GPUs' power limits 700 W" in found["energy"]["refused"]


class _NVMLError(Exception):
    pass


def _nvml(**more):
    def no_counter(handle):
        raise _NVMLError("Not Supported")

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetClockInfo": lambda handle, which: 1500,
        "nvmlDeviceGetPowerUsage": lambda handle: 690000,
        "nvmlDeviceGetTemperature": lambda handle, which: 55,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 4,
        "nvmlDeviceGetTotalEnergyConsumption": no_counter,
        "nvmlDeviceGetEnforcedPowerLimit": no_counter,
        "NVML_CLOCK_SM": 1,
        "NVML_TEMPERATURE_GPU": 0,
        "NVMLError": _NVMLError,
    }
    return SimpleNamespace(**{**functions, **more})


@pytest.mark.parametrize("readable", [True, False])
def test_the_monitor_watches_nvmls_counter_where_there_is_one(readable, monkeypatch):
    began = time.perf_counter()
    counter = {
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 8000 * int((time.perf_counter() - began) / 20e-3),
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700000,
    }
    monkeypatch.setattr(environment.importlib, "import_module", lambda name: _nvml(**(counter if readable else {})))
    monkeypatch.setattr(environment.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="x"))
    monitor = environment.Monitor(0)
    watch = monitor.energy()
    if not readable:
        assert watch is None
        assert monitor.limit_w() is None
        return
    assert watch is not None
    assert monitor.limit_w() == 700.0
    with watch:
        _until(lambda: len(watch.changes) >= 10)
    assert power(watch.changes) == pytest.approx(400, rel=0.2)  # 8 J every 20 ms
