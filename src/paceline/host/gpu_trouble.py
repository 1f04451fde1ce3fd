"""What holds the GPU of a process back, as the driver says: heat, power, memory errors, others. Without torch."""

import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

DRIVER = Path("/dev/nvidiactl")
SLOWED = {  # NVML's bits: why the clocks are lower than they might be
    0x20: "slowed down by its temperature",
    0x40: "slowed down by its temperature, by the hardware",
    0x80: "slowed down by the power supply",
    0x04: "at its power limit",
}


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
            now, most = nvml.nvmlDeviceGetClockInfo(gpu, 1), nvml.nvmlDeviceGetMaxClockInfo(gpu, 1)  # 1: NVML_CLOCK_SM
            degrees = nvml.nvmlDeviceGetTemperature(gpu, 0)  # 0: NVML_TEMPERATURE_GPU
            return [f"{' and '.join(words)} ({now:,} of {most:,} MHz, {degrees} °C)"]
    return []


def _damaged(nvml: Any, gpu: Any) -> list[str]:
    with suppress(nvml.NVMLError):
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        if errors := int(nvml.nvmlDeviceGetTotalEccErrors(gpu, *kinds)):
            return [f"{errors:,} memory errors that could not be corrected"]
    return []
