"""The GPUs of this machine, and the processes that use them, from drivers and the kernel. Without torch.

A lost GPU, or a question that a driver does not answer (MIG, memory shared with the CPU), does not affect the rest.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
SHARE_GPUS = ("gloo", "mpi")  # backends over which several ranks may compute on one GPU
DEV, KFD = Path("/dev"), Path("/sys/class/kfd/kfd/topology/nodes")
PCI = Path("/sys/bus/pci/devices")
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. `links` has the connection to each GPU, in the order of their indices ("-" for itself)."""

    index: int
    name: str
    driver: str
    memory: int  # bytes; 0: the driver does not say
    memory_used: int  # bytes
    processes: tuple[int, ...] = ()  # of others, as far as the driver shows them
    ecc_errors: int = 0  # uncorrected, since the machine started
    links: tuple[str, ...] = ()
    lost: str = ""  # why it does not answer, in the driver's words


def gpus_here() -> tuple[Gpu, ...]:
    """All NVIDIA GPUs of this machine; none without a driver."""
    return ask_driver(_gpus, ())


def count_gpus() -> int | None:
    """GPUs of this machine that ranks may use: NVIDIA's or AMD's that no variable hides; None: unknown."""
    if count := sum(len(parts) if parts is not None else 1 for parts in ask_driver(_mig, [])):
        return _visible(count, *VISIBLE[:1])
    amd = _amd_gpus()
    return amd and _visible(amd, *VISIBLE)


def show_own_mig(local_rank: int, local_size: int) -> None:
    """If GPUs are partitioned (MIG), let CUDA show this process the instance of its rank; else it takes the first one.

    Call it before CUDA is used. A variable that shows one instance to this process already is not changed.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not (DEV / "nvidiactl").exists() or (given is not None and "MIG-" not in given):
        return
    found = ask_driver(_mig, [])
    parts = given.split(",") if given else [part for gpu in found for part in gpu or ()]
    if len(parts) >= max(2, local_size) and all(gpu is not None for gpu in found):
        os.environ["CUDA_VISIBLE_DEVICES"] = parts[local_rank].strip()


def cores_near(uuid: str) -> set[int]:
    """The cores of the NUMA node of the NVIDIA GPU `uuid`, as torch writes it; none if unknown."""

    def address(nvml: Any) -> str:
        found = nvml.nvmlDeviceGetPciInfo(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")).busId
        return (found if isinstance(found, str) else found.decode()).lower()[-12:]  # the kernel's has 4 digits less

    if not uuid or not (where := ask_driver(address, "")):
        return set()
    cores: set[int] = set()
    with suppress(OSError, ValueError):
        for run in (PCI / where / "local_cpulist").read_text().strip().split(","):
            first, _, last = run.partition("-")
            cores |= {*range(int(first), int(last or first) + 1)}
    return cores


def _mig(nvml: Any) -> list[list[str] | None]:
    """The MIG instances of each GPU; None for a GPU without MIG."""
    found: list[list[str] | None] = []
    for index in range(int(nvml.nvmlDeviceGetCount())):
        parts: list[str] | None = None
        with suppress(nvml.NVMLError):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetMigMode(gpu)[0]:
                parts = []
                for number in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu))):
                    with suppress(nvml.NVMLError):  # a place without a part
                        parts.append(str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number))))
        found.append(parts)
    return found


def _amd_gpus() -> int | None:
    """The number of AMD's GPUs, by the kernel: NVML knows none; None: unknown."""
    if not (DEV / "kfd").exists():
        return 0
    found = 0
    for node in KFD.glob("*/gpu_id"):
        with suppress(OSError):  # of another container
            found += node.read_text().strip() not in ("", "0")  # 0: a CPU
    return found or None


def _visible(count: int, *variables: str) -> int:
    for variable in variables:
        if (value := os.environ.get(variable)) is not None:
            count = min(count, len([v for v in value.split(",") if v.strip() not in ("", "-1")]))
    return count


def ask_driver(question: Callable[[Any], T], otherwise: T) -> T:
    """The answer to a question that is given pynvml, initialised; `otherwise` without a driver."""
    import pynvml  # takes longer than all other facts together where there is no driver

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    return otherwise


def query(nvml: Any, question: Callable[[], T], otherwise: T) -> T:
    """The answer to a question; `otherwise` if the driver does not answer this one."""
    with suppress(nvml.NVMLError):
        return question()
    return otherwise


def _gpus(nvml: Any) -> tuple[Gpu, ...]:
    driver = str(nvml.nvmlSystemGetDriverVersion())
    handles: list[Any] = []
    lost: dict[int, str] = {}
    for index in range(int(nvml.nvmlDeviceGetCount())):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError as error:
            handles.append(None)
            lost[index] = str(error)
    return tuple(
        Gpu(i, "?", driver, 0, 0, lost=lost[i]) if handle is None else _gpu(nvml, driver, i, handles)
        for i, handle in enumerate(handles)
    )


def _gpu(nvml: Any, driver: str, index: int, handles: list[Any]) -> Gpu:
    handle = handles[index]
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    memory = query(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle), None)
    return Gpu(
        index=index,
        name=query(nvml, lambda: str(nvml.nvmlDeviceGetName(handle)), "?"),
        driver=driver,
        memory=int(memory.total) if memory else 0,
        memory_used=int(memory.used) if memory else 0,
        processes=query(nvml, lambda: tuple(int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)), ()),
        ecc_errors=query(nvml, lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds)), 0),
        links=tuple("-" if i == index else _link(nvml, handle, other) for i, other in enumerate(handles)),
    )


def _link(nvml: Any, handle: Any, other: Any) -> str:
    """How two GPUs reach each other, the best first: nvlink, switch, bridge, cpu, node, sockets."""
    if other is None:
        return "?"
    with suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetP2PStatus(handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "nvlink"
    with suppress(nvml.NVMLError):
        level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(handle, other))
        return {0: "board", 10: "switch", 20: "bridge", 30: "cpu", 40: "node", 50: "sockets"}.get(level, str(level))
    return "?"
