"""What a rank takes of its machine: threads, and memory that the allocator keeps.

No torch here: it may be called before anything is imported.
"""

import ctypes
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.errors import Write, flag, plural
from paceline.host.cgroup import usable_cores

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h
TOP_PAD_BYTES = 64 << 20
ACTIVATION_BYTES = 2 << 30  # of a step, assumed: not known before the first
GAPS = 2  # the heap may become so many times as large as what is in it (measured: up to 1.5 times)


class CpuAllocation(msgspec.Struct, frozen=True):
    """The cores of one rank."""

    host: str
    cores: tuple[int, ...]
    """the numbers of the cores that its threads may run on"""
    limit: int
    """how many of them it may use at a time: a container's quota, Slurm's grant"""
    threads: int = 0
    """that it has"""


def cpu_model() -> str:
    """Its vector width alone is not enough: the libraries have kernels for single models."""
    with suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1].strip()
    return "unknown"


def current_cpu_allocation(threads: int) -> CpuAllocation:
    """The seat of this process, which has `threads` threads."""
    every = range(os.cpu_count() or 1)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else every
    return CpuAllocation(os.uname().nodename, tuple(sorted(cores)), usable_cores(), threads)


def share(seats: Sequence[CpuAllocation], rank: int) -> int:
    """The threads that `rank` should have: its part of the cores that it shares, at least 1.

    A wrong number is the largest loss that goes unnoticed (2 ranks x 2 threads on 2 cores: 0.62 of the speed).
    Ranks have exchanged their seats. From these follows which of them share cores, with any launcher:

        torchrun, our agent: all ranks of a host may run on all its cores      cores / ranks
        srun --cpus-per-task, mpirun --bind-to: each on cores of its own       these
    """
    mine = seats[rank]
    sharing = [seat for seat in seats if seat.host == mine.host and set(seat.cores) & set(mine.cores)]
    return max(1, mine.limit // len(sharing))


def thread_warnings(seats: Sequence[CpuAllocation], *, may_idle: bool = False, write: Write = flag) -> list[str]:
    """One line for each kind of host that has more threads than cores, or (a GPU's may) leaves most of them idle."""
    hosts_of: dict[str, list[str]] = {}
    for host in dict.fromkeys(seat.host for seat in seats):
        complaint = _complaint([seat for seat in seats if seat.host == host], may_idle, write)
        if complaint:
            hosts_of.setdefault(complaint, []).append(host)
    lines: list[str] = []
    for complaint, hosts in hosts_of.items():
        more = f" and {plural(len(hosts) - 1, 'more host')}" if len(hosts) > 1 else ""
        lines.append(f"{hosts[0]}{more}: {complaint}")
    return lines


def _complaint(seats: Sequence[CpuAllocation], may_idle: bool, write: Write) -> str:
    granted = min(
        len({core for seat in seats for core in seat.cores}),
        sum({seat.cores: seat.limit for seat in seats}.values()),
    )
    ranks, threads = len(seats), sum(seat.threads for seat in seats)
    each = max(1, granted // ranks)
    most = plural(max(seat.threads for seat in seats), "thread")
    have = f"{plural(ranks, 'rank')} x {most} on {plural(granted, 'core')}"
    if threads > granted:
        if ranks > granted:
            rest = "" if threads == ranks else f" and {write('threads_per_rank', 1)}"
            return f"{have}: the ranks take turns. Faster: {plural(granted, 'process', 'processes')}{rest}"
        if crowded := _crowded(seats):
            ranks, cores = crowded
            return f"{have}: {ranks} of them are bound to {plural(cores, 'core')} and take turns. Bind them apart"
        return f"{have}: more threads than cores make every rank slower. Use {write('threads_per_rank', each)}"
    if 2 * threads < granted and not may_idle:
        return f"{have}: {granted - threads} cores are idle. Use {write('threads_per_rank', each)}"
    return ""


def _crowded(seats: Sequence[CpuAllocation]) -> tuple[int, int] | None:
    """(ranks, cores): ranks that may run only on these cores, which are fewer than the ranks."""
    for place in seats:
        there = sum(set(seat.cores) <= set(place.cores) for seat in seats)
        cores = min(len(place.cores), place.limit)
        if there > cores:
            return there, cores
    return None


def keep_memory(*, free_bytes: int | None, state_bytes: int, env: Mapping[str, str] = os.environ) -> str:
    """Tune glibc's malloc for a training on the CPU, for this whole process and for good; return why not, or "".

    glibc gives large blocks back to the kernel, which zeroes them again: page faults take 11 to 37 % of a CPU step
    (measured). Three settings keep freed memory in the process: no block has a mapping of its own, the heap never
    shrinks, and it grows by 64 MiB. The price is memory, as a heap has gaps: so it is done only if there is room, and
    never with an allocator or a setting of the user.

    `free_bytes` is what this rank may still take (None: not known), `state_bytes` what its weights, gradients and
    optimizer state will take; `env` may hold the user's settings of the allocator.
    """
    own = next((name for name in env if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"), None)
    if own is not None:
        return f"{own} is set"
    if re.search("malloc", env.get("LD_PRELOAD", "")):
        return "LD_PRELOAD names another allocator"
    needed = ACTIVATION_BYTES + GAPS * state_bytes
    if free_bytes is not None and free_bytes < needed:
        return f"{free_bytes >> 20:,} MiB are free for this rank, and it wants {needed >> 20:,} MiB of room"
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):  # musl, macOS
        return "the C library is not glibc"
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, TOP_PAD_BYTES))
    done = [libc.mallopt(name, value) for name, value in settings]
    return "" if all(done) else "glibc has refused"


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes; 0 if the kernel does not report it."""
    with suppress(OSError, AttributeError):  # not ru_maxrss: a process inherits its parent's
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"^VmHWM:\s*([0-9]+) kB", status, re.MULTILINE)[1]) << 10  # pyright: ignore[reportOptionalSubscript]
    return 0
