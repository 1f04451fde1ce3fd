"""What each GPU of this machine does now, as its driver says. Without torch, and without ever waiting for a driver."""

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from paceline.runs.machine import GpuUse

STALE_SECONDS = 5.0  # an older answer says nothing of now
CLOCK_SM, CORE_SENSOR = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU

T = TypeVar("T")
DRIVER = Path("/dev/nvidiactl")
SLOWED = {  # NVML's bits: why the clocks are lower than they might be
    0x20: "slowed down by its temperature",
    0x40: "slowed down by its temperature, by the hardware",
    0x80: "slowed down by the power supply",
    0x04: "at its power limit",
}


class GpuAnswer(NamedTuple):
    """All GPUs, and the bytes of GPU memory of each process that the driver knows."""

    gpus: tuple[GpuUse, ...] = ()
    memory_of: dict[int, int] = {}  # noqa: RUF012 - never changed


class GpuReader:
    """Asks the driver in a thread of its own: it may take seconds, or never answer. One question at a time."""

    def __init__(self) -> None:
        self._answer, self._answered_seconds = GpuAnswer(), float("-inf")
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self.here = DRIVER.exists()
        """whether there is a driver to be asked"""

    def latest(self, wait_seconds: float = 0.0) -> GpuAnswer:
        """The newest answer, or nothing if that is stale; asks for the next one, and waits so long for it."""
        if not self.here:
            return GpuAnswer()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="paceline-gpu-use", daemon=True)
            self._thread.start()
        if wait_seconds:
            self._thread.join(wait_seconds)
        fresh = time.monotonic() - self._answered_seconds < STALE_SECONDS
        return self._answer if fresh else GpuAnswer()

    def _ask(self) -> None:
        try:
            if self._nvml is None:
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
            self._answer, self._answered_seconds = gpu_answer(self._nvml), time.monotonic()
        except Exception:  # no driver after all, one that was taken away, one of another version: nothing is known
            self._answer = GpuAnswer()


def gpu_answer(nvml: Any) -> GpuAnswer:
    """All that the driver says; `nvml` is pynvml, initialised. A GPU that is lost must not hide the others."""
    gpus: list[GpuUse] = []
    memory_of: dict[int, int] = {}
    for index in range(int(nvml.nvmlDeviceGetCount())):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            gpus.append(GpuUse(index, held_back=f"does not answer: {error}"))
            continue
        gpus.append(_use(nvml, index, handle))
        with suppress(nvml.NVMLError):
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                memory_of[int(process.pid)] = memory_of.get(int(process.pid), 0) + int(process.usedGpuMemory or 0)
    return GpuAnswer(tuple(gpus), memory_of)


def _use(nvml: Any, index: int, handle: Any) -> GpuUse:
    def told(question: Callable[[], T]) -> T | None:
        with suppress(nvml.NVMLError):
            return question()
        return None

    memory = told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    return GpuUse(
        index=index,
        name=told(lambda: str(nvml.nvmlDeviceGetName(handle))) or "",
        busy=told(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100),
        memory_bytes=int(memory.used) if memory is not None else None,
        memory_total_bytes=int(memory.total) if memory is not None else None,
        watts=told(lambda: round(int(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000, 1)),
        degrees=told(lambda: float(nvml.nvmlDeviceGetTemperature(handle, CORE_SENSOR))),
        mhz=told(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, CLOCK_SM))),
        most_mhz=told(lambda: float(nvml.nvmlDeviceGetMaxClockInfo(handle, CLOCK_SM))),
        held_back=" and ".join(told(lambda: slowed_by(nvml, handle)) or ()),
    )


def ask_gpus(pids: Collection[int], *, wait_seconds: float = 0.0) -> dict[int, str]:
    """By pid, in words: filled in by a thread of its own, since a driver may never answer; it is awaited so long."""
    found: dict[int, str] = {}
    if pids and DRIVER.exists():
        asking = threading.Thread(target=_ask, args=(pids, found), name="paceline-gpus", daemon=True)
        asking.start()
        asking.join(wait_seconds)
    return found


def _ask(pids: Collection[int], found: dict[int, str]) -> None:
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        found.update(gpu_troubles(pids, pynvml))


def gpu_troubles(pids: Collection[int], nvml: Any) -> dict[int, str]:
    """By pid of those that compute on a GPU that something holds back; `nvml` is pynvml, initialised."""
    found: dict[int, str] = {}
    for index in range(int(nvml.nvmlDeviceGetCount())):
        with suppress(nvml.NVMLError):  # a GPU that is lost must not hide the others
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            here = {int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
            words = [*_slowed(nvml, gpu), *_damaged(nvml, gpu)]
            for pid in here & {*pids}:
                shared = [f"shared with process {', '.join(map(str, sorted(here - {pid})))}"] if here - {pid} else []
                if words or shared:
                    found[pid] = f"GPU {index}: {'; '.join([*words, *shared])}"
    return found


def slowed_by(nvml: Any, gpu: Any) -> list[str]:
    """Why a GPU's clocks are lower than they might be.

    Raises:
        NVMLError: the driver does not say.
    """
    reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
    return [text for bit, text in SLOWED.items() if reasons & bit]


def _slowed(nvml: Any, gpu: Any) -> list[str]:
    with suppress(nvml.NVMLError):
        words = slowed_by(nvml, gpu)
        if words:
            now, most = nvml.nvmlDeviceGetClockInfo(gpu, CLOCK_SM), nvml.nvmlDeviceGetMaxClockInfo(gpu, CLOCK_SM)
            degrees = nvml.nvmlDeviceGetTemperature(gpu, CORE_SENSOR)
            return [f"{' and '.join(words)} ({now:,} of {most:,} MHz, {degrees} °C)"]
    return []


def _damaged(nvml: Any, gpu: Any) -> list[str]:
    with suppress(nvml.NVMLError):
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        if errors := int(nvml.nvmlDeviceGetTotalEccErrors(gpu, *kinds)):
            return [f"{errors:,} memory errors that could not be corrected"]
    return []
