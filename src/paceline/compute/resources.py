"""CPU resources of a rank: its threads, and the memory that the allocator keeps.

This module does not import torch, because it runs before other imports.
"""

import ctypes
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.errors import OptionRenderer, format_option, plural
from paceline.host.cgroup import usable_cores

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h
TOP_PAD_BYTES = 64 << 20
ACTIVATION_BYTES = 2 << 30  # assumption for a step, because it is unknown before the first step
HEAP_SIZE_FACTOR = 2  # assumed size of the heap relative to its contents (measured: up to 1.5)


class CpuAllocation(msgspec.Struct, frozen=True):
    host: str
    cores: tuple[int, ...]  # on which its threads may run
    limit: int  # how many of them it may use at a time, by the quota of a container or of Slurm
    threads: int = 0


def cpu_model() -> str:
    """The model name of the CPU. The vector width is not enough, because libraries have kernels for single models."""
    with suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1].strip()
    return "unknown"


def current_cpu_allocation(threads: int) -> CpuAllocation:
    every = range(os.cpu_count() or 1)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else every
    return CpuAllocation(os.uname().nodename, tuple(sorted(cores)), usable_cores(), threads)


def recommended_thread_count(allocations: Sequence[CpuAllocation], rank: int) -> int:
    """The number of threads that `rank` should have: its part of the common cores, at least 1.

    Too many threads are slow (2 ranks x 2 threads on 2 cores: 0.62 of the speed). `allocations` are those of all ranks.
    They show which ranks have common cores, with any launcher:

        torchrun, our agent: all ranks of a node may run on all its cores      cores / ranks
        srun --cpus-per-task, mpirun --bind-to: each rank has separate cores   its cores
    """
    mine = allocations[rank]
    sharing = [other for other in allocations if other.host == mine.host and set(other.cores) & set(mine.cores)]
    return max(1, mine.limit // len(sharing))


def thread_warnings(
    allocations: Sequence[CpuAllocation], *, may_idle: bool = False, write: OptionRenderer = format_option
) -> list[str]:
    """Warnings about nodes with more threads than cores, or with mostly idle cores unless `may_idle`.

    Nodes with the same problem have one line. `write` formats an option.
    """
    hosts_of: dict[str, list[str]] = {}
    for host in dict.fromkeys(allocation.host for allocation in allocations):
        complaint = _complaint([allocation for allocation in allocations if allocation.host == host], may_idle, write)
        if complaint:
            hosts_of.setdefault(complaint, []).append(host)
    lines: list[str] = []
    for complaint, hosts in hosts_of.items():
        others = f" and {plural(len(hosts) - 1, 'more host')}" if len(hosts) > 1 else ""
        lines.append(f"{hosts[0]}{others}: {complaint}")
    return lines


def _complaint(allocations: Sequence[CpuAllocation], may_idle: bool, write: OptionRenderer) -> str:
    granted = min(
        len({core for allocation in allocations for core in allocation.cores}),
        sum({allocation.cores: allocation.limit for allocation in allocations}.values()),
    )
    ranks, threads = len(allocations), sum(allocation.threads for allocation in allocations)
    per_rank = max(1, granted // ranks)
    max_threads = plural(max(allocation.threads for allocation in allocations), "thread")
    usage = f"{plural(ranks, 'rank')} x {max_threads} on {plural(granted, 'core')}"
    if threads > granted:
        if ranks > granted:
            rest = "" if threads == ranks else f" and {write('threads_per_rank', 1)}"
            return f"{usage}: the ranks take turns. Faster: {plural(granted, 'process', 'processes')}{rest}"
        if crowded := _crowded(allocations):
            ranks, cores = crowded
            return f"{usage}: {ranks} of them are bound to {plural(cores, 'core')} and take turns. Bind them apart"
        return f"{usage}: more threads than cores make every rank slower. Use {write('threads_per_rank', per_rank)}"
    if 2 * threads < granted and not may_idle:
        return f"{usage}: {granted - threads} cores are idle. Use {write('threads_per_rank', per_rank)}"
    return ""


def _crowded(allocations: Sequence[CpuAllocation]) -> tuple[int, int] | None:
    """(ranks, cores), if there are ranks that may run only on fewer cores than ranks."""
    for allocation in allocations:
        ranks = sum(set(other.cores) <= set(allocation.cores) for other in allocations)
        cores = min(len(allocation.cores), allocation.limit)
        if ranks > cores:
            return ranks, cores
    return None


def tune_malloc(*, free_bytes: int | None, state_bytes: int, env: Mapping[str, str] = os.environ) -> str:
    """Tune glibc's malloc for training on the CPU, permanently for this process.

    glibc returns large blocks to the kernel, which zeroes them again: page faults take 11 to 37 % of a CPU step
    (measured). Three settings keep freed memory in the process: large blocks have no separate mapping, the heap never
    shrinks, and it grows by 64 MiB. A heap has gaps and so needs more memory. Therefore the settings apply only if
    enough memory is free, and the user has not configured an allocator.

    Args:
        free_bytes: memory that is free for this rank. None: unknown.
        state_bytes: size of its weights, gradients and optimizer state.
        env: may have the user's settings of the allocator.

    Returns the reason if malloc was not tuned; otherwise an empty string.
    """
    setting = next((name for name in env if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"), None)
    if setting is not None:
        return f"{setting} is set"
    if re.search("malloc", env.get("LD_PRELOAD", "")):
        return "LD_PRELOAD sets a different allocator"
    needed = ACTIVATION_BYTES + HEAP_SIZE_FACTOR * state_bytes
    if free_bytes is not None and free_bytes < needed:
        return f"{free_bytes >> 20:,} MiB are free for this rank, and it needs {needed >> 20:,} MiB"
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):  # musl, macOS
        return "the C library is not glibc"
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, TOP_PAD_BYTES))
    done = [libc.mallopt(name, value) for name, value in settings]
    return "" if all(done) else "glibc rejected the settings"


def peak_resident_memory() -> int:
    """The largest resident memory of this process so far, in bytes; 0 if the kernel does not report it."""
    return read_process_memory_field("VmHWM")  # not ru_maxrss: a process inherits its parent's


def read_process_memory_field(name: str) -> int:
    """A value of /proc/self/status in bytes, for example VmRSS; 0 if the kernel does not report it."""
    with suppress(OSError):
        if match := re.search(rf"^{name}:\s*([0-9]+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(match[1]) << 10
    return 0
