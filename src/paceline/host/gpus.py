"""The GPUs of this machine and the processes that use them, from drivers and the kernel. Without torch.

A lost GPU does not affect the data of other GPUs. A query that the driver does not support (MIG, memory shared with the
CPU) does not affect other queries.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
GPU_SHARING_BACKENDS = ("gloo", "mpi")  # backends with which several ranks may use one GPU
DEV, KFD = Path("/dev"), Path("/sys/class/kfd/kfd/topology/nodes")
PCI_DEVICES_FOLDER = Path("/sys/bus/pci/devices")
VISIBLE_DEVICES_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. `links` has the connection to each GPU, in the order of their indices ("-" for itself)."""

    index: int
    name: str
    driver: str
    memory: int  # bytes; 0 if unknown
    memory_used: int  # bytes
    processes: tuple[int, ...] = ()  # the pids that the driver reports
    ecc_errors: int = 0  # uncorrected, since the machine started
    links: tuple[str, ...] = ()
    lost: str = ""  # the driver's message if it does not answer


def list_gpus() -> tuple[Gpu, ...]:
    return call_with_nvml(_gpus, ())


def count_gpus() -> int | None:
    """The number of GPUs for ranks on this machine: those of NVIDIA or AMD that no variable hides; None: unknown."""
    if count := sum(len(parts) if parts is not None else 1 for parts in call_with_nvml(_mig, [])):
        return _visible(count, *VISIBLE_DEVICES_VARIABLES[:1])
    amd = _amd_gpus()
    return amd and _visible(amd, *VISIBLE_DEVICES_VARIABLES)


def select_mig_instance(local_rank: int, local_size: int) -> None:
    """If GPUs are partitioned (MIG), make only the instance of this rank visible; otherwise CUDA uses the first one.

    Call it before CUDA is used. If a variable already shows one instance to this process, the function does nothing.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not (DEV / "nvidiactl").exists() or (visible is not None and "MIG-" not in visible):
        return
    gpus = call_with_nvml(_mig, [])
    instances = visible.split(",") if visible else [instance for gpu in gpus for instance in gpu or ()]
    if len(instances) >= max(2, local_size) and all(gpu is not None for gpu in gpus):
        os.environ["CUDA_VISIBLE_DEVICES"] = instances[local_rank].strip()


def cpu_cores_near_gpu(uuid: str) -> set[int]:
    """The cores of the NUMA node of the NVIDIA GPU with this `uuid`, in torch's format; none if unknown."""

    def address(nvml: Any) -> str:
        bus_id = nvml.nvmlDeviceGetPciInfo(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")).busId
        return (bus_id if isinstance(bus_id, str) else bus_id.decode()).lower()[-12:]  # the kernel uses 4 digits less

    if not uuid or not (pci_address := call_with_nvml(address, "")):
        return set()
    cores: set[int] = set()
    with suppress(OSError, ValueError):
        for core_range in (PCI_DEVICES_FOLDER / pci_address / "local_cpulist").read_text().strip().split(","):
            first, _, last = core_range.partition("-")
            cores |= {*range(int(first), int(last or first) + 1)}
    return cores


def _mig(nvml: Any) -> list[list[str] | None]:
    """The instances of each GPU; None for one that is whole or lost."""
    gpus: list[list[str] | None] = []
    for _, gpu, _ in gpu_handles(nvml):
        instances: list[str] | None = None
        with suppress(nvml.NVMLError):
            if gpu is not None and nvml.nvmlDeviceGetMigMode(gpu)[0]:
                instances = []
                for number in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu))):
                    with suppress(nvml.NVMLError):  # no instance with this number
                        handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
                        instances.append(str(nvml.nvmlDeviceGetUUID(handle)))
        gpus.append(instances)
    return gpus


def _amd_gpus() -> int | None:
    if not (DEV / "kfd").exists():
        return 0
    count = 0
    for node in KFD.glob("*/gpu_id"):
        with suppress(OSError):  # a GPU of a different container
            count += node.read_text().strip() not in ("", "0")  # 0: a CPU
    return count or None


def _visible(count: int, *variables: str) -> int:
    for variable in variables:
        if (value := os.environ.get(variable)) is not None:
            count = min(count, len([v for v in value.split(",") if v.strip() not in ("", "-1")]))
    return count


def call_with_nvml(question: Callable[[Any], T], otherwise: T) -> T:
    """Call `question` with an initialised pynvml; return its result, or `otherwise` without a driver."""
    import pynvml  # without a driver this import takes longer than all other facts together

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    return otherwise


def query_nvml_or_default(nvml: Any, question: Callable[[], T], otherwise: T) -> T:
    with suppress(nvml.NVMLError):
        return question()
    return otherwise


def gpu_handles(nvml: Any) -> Iterator[tuple[int, Any, str]]:
    """The index and the handle of each GPU; for a lost one None, and the driver's message."""
    for index in range(int(nvml.nvmlDeviceGetCount())):
        try:
            yield index, nvml.nvmlDeviceGetHandleByIndex(index), ""
        except nvml.NVMLError as error:
            yield index, None, str(error)


def count_ecc_errors(nvml: Any, gpu: Any) -> int:
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return query_nvml_or_default(nvml, lambda: int(nvml.nvmlDeviceGetTotalEccErrors(gpu, *kinds)), 0)


def _gpus(nvml: Any) -> tuple[Gpu, ...]:
    driver = str(nvml.nvmlSystemGetDriverVersion())
    found = [*gpu_handles(nvml)]
    handles = [handle for _, handle, _ in found]
    return tuple(
        Gpu(i, "?", driver, 0, 0, lost=lost) if handle is None else _gpu(nvml, driver, i, handles)
        for i, handle, lost in found
    )


def _gpu(nvml: Any, driver: str, index: int, handles: list[Any]) -> Gpu:
    handle = handles[index]
    memory = query_nvml_or_default(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle), None)
    processes = query_nvml_or_default(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), ())
    return Gpu(
        index=index, name=query_nvml_or_default(nvml, lambda: str(nvml.nvmlDeviceGetName(handle)), "?"),
        driver=driver, memory=int(memory.total) if memory else 0, memory_used=int(memory.used) if memory else 0,
        processes=tuple(int(process.pid) for process in processes), ecc_errors=count_ecc_errors(nvml, handle),
        links=tuple("-" if i == index else _link(nvml, handle, other) for i, other in enumerate(handles)),
    )  # fmt: skip


def _link(nvml: Any, handle: Any, other: Any) -> str:
    """The kind of the connection of two GPUs, from best to worst: nvlink, board, switch, bridge, cpu, node, sockets."""
    if other is None:
        return "?"
    with suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetP2PStatus(handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "nvlink"
    with suppress(nvml.NVMLError):
        level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(handle, other))
        return {0: "board", 10: "switch", 20: "bridge", 30: "cpu", 40: "node", 50: "sockets"}.get(level, str(level))
    return "?"
