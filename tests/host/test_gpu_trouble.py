"""What a driver says of GPUs that are held back: a stand-in for NVIDIA's library, whose real bits and names it has."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from tests.rendered import rendered

from paceline.guard.report import format_report
from paceline.host import machine_log as gpu_trouble
from paceline.host.machine_log import find_gpu_problems, query_gpu_problems
from paceline.protocol.evidence import Diagnosis, Evidence, StopKind


class Driver:
    """Four GPUs, each a dictionary; asked for what is not in it, or about a lost one, it raises."""

    NVMLError = pynvml.NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    NVML_VOLATILE_ECC = pynvml.NVML_VOLATILE_ECC

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self._gpus = gpus

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - the library's
        return len(self._gpus)

    def __getattr__(self, name: str) -> Any:
        def ask(gpu: Any, *kind: int) -> Any:
            told = self._gpus[gpu] if isinstance(gpu, int) else gpu
            if name == "nvmlDeviceGetHandleByIndex" and told:
                return told
            if name not in told:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return told[name]

        return ask


def running(*pids: int) -> dict[str, Any]:
    return {"nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in pids]}


HOT = running(11) | {
    "nvmlDeviceGetCurrentClocksThrottleReasons": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "nvmlDeviceGetClockInfo": 405, "nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetTemperature": 91,
}  # fmt: skip
SHARED = running(12, 4711) | {"nvmlDeviceGetTotalEccErrors": 3, "nvmlDeviceGetCurrentClocksThrottleReasons": 1}
HEALTHY = running(13) | {"nvmlDeviceGetTotalEccErrors": 0, "nvmlDeviceGetCurrentClocksThrottleReasons": 1}  # idle


def test_each_cause_is_told_of_its_process_and_a_lost_gpu_hides_nothing() -> None:
    found = find_gpu_problems([11, 12, 13, 14], Driver({}, HOT, SHARED, HEALTHY))
    assert found.keys() == {11, 12}
    rendered(found[pid] for pid in (11, 12))


def test_the_bits_are_the_drivers() -> None:
    assert set(gpu_trouble.THROTTLE_REASONS) == {
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown, pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, pynvml.nvmlClocksThrottleReasonSwPowerCap,
    }  # fmt: skip
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_TEMPERATURE_GPU) == (1, 0)


def test_without_a_driver_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(gpu_trouble, "NVIDIA_DEVICE_FILE", tmp_path / "none")
    monkeypatch.setattr(gpu_trouble.threading, "Thread", None)  # would fail if it were begun
    assert query_gpu_problems([1]) == {}


def test_who_waits_for_the_driver_has_its_answer_and_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    driver: Any = Driver(HOT)
    entered, never = threading.Event(), threading.Event()
    driver.nvmlInit = lambda: never.wait(0.2)  # it takes its time
    driver.nvmlShutdown = lambda: None
    monkeypatch.setattr(gpu_trouble, "NVIDIA_DEVICE_FILE", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert query_gpu_problems([11], wait_seconds=50).keys() == {11}

    def hang() -> None:
        entered.set()
        never.wait()

    driver.nvmlInit = hang
    try:
        assert query_gpu_problems([11], wait_seconds=0.05) == {}
        assert entered.wait(50)
    finally:
        never.set()


def test_a_diagnosis_says_it() -> None:
    ranks = [Evidence(0, "n1", 1), Evidence(1, "n1", 2, gpu="GPU 1: hot")]
    shown = format_report(Diagnosis(StopKind.BEHIND, (1,)), ranks, waited_seconds=9, folder="", run="")
    assert "rank 1's GPU 1: hot" in shown
