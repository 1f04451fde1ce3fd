"""The NVIDIA GPUs of this machine, and who else is at work on them, as the driver says. Without torch."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. `links` says how each other one is reached, in the order of their indices ("-" for itself)."""

    index: int
    name: str
    driver: str
    memory: int  # bytes
    memory_used: int  # bytes
    processes: tuple[int, ...] = ()  # of others, as far as the driver shows them
    ecc_errors: int = 0  # uncorrected, since the machine started
    links: tuple[str, ...] = ()


def gpus_here() -> tuple[Gpu, ...]:
    """All GPUs of this machine; none without a driver."""
    return _driver_says(_gpus, ())


def count_gpus() -> int:
    """NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible; 0 without a driver."""
    count = _driver_says(lambda nvml: int(nvml.nvmlDeviceGetCount()), 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))


def _driver_says(question: Callable[[Any], T], otherwise: T) -> T:
    """The answer; `otherwise` without a driver, or where a GPU has fallen off the bus."""
    import pynvml  # takes longer than all other facts together where there is no driver

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    return otherwise


def _gpus(nvml: Any) -> tuple[Gpu, ...]:
    driver = str(nvml.nvmlSystemGetDriverVersion())
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(int(nvml.nvmlDeviceGetCount()))]
    return tuple(_gpu(nvml, driver, i, handles) for i in range(len(handles)))


def _gpu(nvml: Any, driver: str, index: int, handles: list[Any]) -> Gpu:
    handle = handles[index]
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    processes: list[int] = []
    errors = 0
    with suppress(nvml.NVMLError):  # not every GPU, driver or container says
        processes = [int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    with suppress(nvml.NVMLError):
        errors = int(
            nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        )
    return Gpu(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),
        driver=driver,
        memory=int(memory.total),
        memory_used=int(memory.used),
        processes=tuple(processes),
        ecc_errors=errors,
        links=tuple("-" if other is handle else _link(nvml, handle, other) for other in handles),
    )


def _link(nvml: Any, handle: Any, other: Any) -> str:
    """How two GPUs reach each other, the best first: nvlink, switch, bridge, cpu, node, sockets."""
    with suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetP2PStatus(handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "nvlink"
    with suppress(nvml.NVMLError):
        level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(handle, other))
        return {0: "board", 10: "switch", 20: "bridge", 30: "cpu", 40: "node", 50: "sockets"}.get(level, str(level))
    return "?"
