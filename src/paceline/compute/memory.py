"""The memory of a rank on its device: what is free, what a computation needs, and what backward keeps."""

import ctypes
import gc
import resource
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compute.blocks import find_blocks
from paceline.compute.resources import peak_resident_memory, read_process_memory_field
from paceline.host.cgroup import free_memory

NO_CPU_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch raises a RuntimeError
UNLIMITED = 1 << 62
LIMITED_FRACTION = 0.9  # of the free memory, in trials on the CPU


def is_out_of_memory(error: BaseException | None) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and NO_CPU_MEMORY in str(error)
    )


class MemoryMeter:
    """Measures the memory that this rank needs in addition to what it holds now.

    On a GPU torch's allocator counts. On the CPU it is the resident memory of the process, because that is what the
    limit of a container or of the machine counts.
    """

    def __init__(self, device: torch.device, local_ranks: int) -> None:
        self._device, self._gpu = device, device.type != "cpu"
        self._limits: tuple[int, int] | None = None
        self._held_bytes: int | None = None
        if self._gpu:
            torch.accelerator.empty_cache()
            free_bytes = int(torch.get_device_module(device).mem_get_info(device)[0])
        else:
            machine_bytes = free_memory()
            free_bytes = UNLIMITED if machine_bytes is None else machine_bytes // local_ranks
            soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
            if soft != resource.RLIM_INFINITY:  # `ulimit -d`
                free_bytes = min(free_bytes, max(0, soft - _used_data_bytes()))
        self.free_bytes = free_bytes  # that this rank may still allocate

    def start(self) -> None:
        trim_host_memory()
        if self._gpu:
            torch.accelerator.reset_peak_memory_stats(self._device)
        if self._held_bytes is None:
            self._held_bytes = self._current_bytes()

    def _current_bytes(self) -> int:
        return torch.accelerator.memory_allocated(self._device) if self._gpu else read_process_memory_field("VmRSS")

    def peak(self) -> int:
        """The peak since `start` minus the memory at the start, in bytes. Without a start, minus the current memory."""
        held_bytes = self._current_bytes() if self._held_bytes is None else self._held_bytes
        peak_bytes = torch.accelerator.max_memory_allocated(self._device) if self._gpu else peak_resident_memory()
        return max(0, peak_bytes - held_bytes)

    def set_limit(self) -> None:
        """On the CPU: more allocation than the free memory raises an error. Otherwise the kernel kills the process."""
        if not self._gpu:
            soft, hard = self._limits = resource.getrlimit(resource.RLIMIT_DATA)
            lowest = min(limit for limit in (soft, hard, UNLIMITED) if limit != resource.RLIM_INFINITY)
            # the rest is for pages that a forked process copies, and for the kernel
            limit_bytes = _used_data_bytes() + int(LIMITED_FRACTION * self.free_bytes)
            resource.setrlimit(resource.RLIMIT_DATA, (min(lowest, limit_bytes), hard))

    def remove_limit(self) -> None:
        """End the limit, if there is one."""
        if self._limits is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._limits)
            self._limits = None


def _used_data_bytes() -> int:
    """What counts for RLIMIT_DATA, without free chunks of glibc's heaps if the C library reports them."""
    data_bytes = read_process_memory_field("VmData")
    with suppress(AttributeError):
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _MallInfo2
        data_bytes -= mallinfo2().fordblks
    return data_bytes


class _MallInfo2(ctypes.Structure):
    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def trim_host_memory() -> None:
    """Return free memory to the system, and reset the process's peak (both Linux with glibc)."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def storage_bytes(tensors: Iterable[Any]) -> int:
    """The bytes of the storages of these tensors, each storage once. Only this rank's part of a DTensor counts."""
    storages: dict[int, int] = {}
    for value in tensors:
        local: Any = value.to_local() if hasattr(value, "to_local") else value
        if isinstance(local, Tensor):
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class SavedForBackward:
    """Counts the bytes that forwards keep for backward, in total and in each repeated layer of some models."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._modules = [module for model in models for module in find_blocks(model, None, flag="").values()]
        self._current = list[int]()
        self._bytes = Counter[int | None]()

    @contextmanager
    def count(self) -> Generator[None]:
        """Count inside."""
        seen = set[int]()

        def keep(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter) and (key := tensor.untyped_storage().data_ptr()) not in seen:
                seen.add(key)
                self._bytes[self._current[0] if self._current else None] += tensor.untyped_storage().nbytes()
            return tensor

        def leave(*_: object) -> None:
            self._current.pop()

        with ExitStack() as stack:
            for module in self._modules:
                before = module.register_forward_pre_hook(lambda module, _: self._current.append(id(module)))
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
            yield

    @property
    def recomputable_fraction(self) -> float:
        """The fraction that is not kept if backward computes these layers again, one at a time."""
        inside = [count for module, count in self._bytes.items() if module is not None]
        return (sum(inside) - max(inside, default=0)) / max(1, self._bytes.total())
