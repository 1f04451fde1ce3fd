"""What a rank takes of its machine: threads, memory that the allocator keeps, room for batches in /dev/shm."""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UsageError, plural
from paceline.host.cgroup import usable_cores
from paceline.nested import tensors

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h
TOP_PAD_BYTES = 64 << 20
ACTIVATION_BYTES = 2 << 30  # of a step, assumed: not known before the first
GAPS = 2  # the heap may become so many times as large as what is in it (measured: up to 1.5 times)
AHEAD = 2  # batches that each process has ready: DataLoader's prefetch_factor
OTHER_FILES = 64  # that a training holds besides
SHARED_MEMORY = "/dev/shm"


class Seat(msgspec.Struct, frozen=True):
    """Where one rank may run."""

    host: str
    cores: tuple[int, ...]
    """the numbers of the cores that its threads may run on"""
    limit: int
    """how many of them it may use at a time: a container's quota, Slurm's grant"""
    threads: int = 0
    """that it has"""


def own_seat(threads: int) -> Seat:
    """The seat of this process, which has `threads` threads."""
    every = range(os.cpu_count() or 1)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else every
    return Seat(os.uname().nodename, tuple(sorted(cores)), usable_cores(), threads)


def share(seats: Sequence[Seat], rank: int) -> int:
    """The threads that `rank` should have: its part of the cores that it shares, at least 1.

    A wrong number is the largest loss that goes unnoticed (2 ranks x 2 threads on 2 cores: 0.62 of the speed).
    Ranks have exchanged where they may run; from that follows who shares cores with whom, whatever has started them:

        torchrun, our agent: all ranks of a host may run on all its cores      cores / ranks
        srun --cpus-per-task, mpirun --bind-to: each on cores of its own       these
    """
    mine = seats[rank]
    sharing = [seat for seat in seats if seat.host == mine.host and set(seat.cores) & set(mine.cores)]
    return max(1, mine.limit // len(sharing))


def complaints(seats: Sequence[Seat], *, may_idle: bool = False) -> list[str]:
    """One line for each kind of host that has more threads than cores, or (a GPU's may) leaves most of them idle."""
    told: dict[str, list[str]] = {}
    for host in dict.fromkeys(seat.host for seat in seats):
        words = _complaint([seat for seat in seats if seat.host == host], may_idle)
        if words:
            told.setdefault(words, []).append(host)
    return [f"{_named(hosts)}: {words}" for words, hosts in told.items()]


def _complaint(seats: Sequence[Seat], may_idle: bool) -> str:
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
            rest = "" if threads == ranks else " and --threads-per-rank 1"
            return f"{have}: the ranks take turns. Faster: {plural(granted, 'process', 'processes')}{rest}"
        if crowded := _crowded(seats):
            ranks, cores = crowded
            return f"{have}: {ranks} of them are bound to {plural(cores, 'core')} and take turns. Bind them apart"
        return f"{have}: more threads than cores make every rank slower. Use --threads-per-rank {each}"
    if 2 * threads < granted and not may_idle:
        return f"{have}: {granted - threads} cores are idle. Use --threads-per-rank {each}"
    return ""


def _crowded(seats: Sequence[Seat]) -> tuple[int, int] | None:
    """(ranks, cores): ranks that may run only on these cores, which are fewer than the ranks."""
    for place in seats:
        there = sum(set(seat.cores) <= set(place.cores) for seat in seats)
        cores = min(len(place.cores), place.limit)
        if there > cores:
            return there, cores
    return None


def _named(hosts: Sequence[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{hosts[0]} and {plural(len(hosts) - 1, 'more host')}"


def room_needed(state_bytes: int) -> int:
    """Bytes that must be free for a rank whose weights, gradients and optimizer state take `state_bytes`."""
    return ACTIVATION_BYTES + GAPS * state_bytes


def keep_memory(*, free_bytes: int | None, state_bytes: int, env: Mapping[str, str] = os.environ) -> str:
    """Tune glibc's malloc for a training on the CPU, for this whole process and for good; return why not, or "".

    glibc gives large blocks back to the kernel, which zeroes them again: page faults take 11 to 37 % of a CPU step
    (measured). Three settings keep freed memory in the process: no block has a mapping of its own, the heap never
    shrinks, and it grows by 64 MiB. The price is memory, as a heap has gaps: so it is done only where there is room,
    and never under an allocator or a setting of the user's own.

    `free_bytes` is what this rank may still take (None: not known), `state_bytes` what its weights, gradients and
    optimizer state will take; `env` may hold the user's own settings of the allocator.
    """
    own = next((name for name in env if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"), None)
    if own is not None:
        return f"{own} is set"
    if re.search("malloc", env.get("LD_PRELOAD", "")):
        return "LD_PRELOAD names another allocator"
    needed = room_needed(state_bytes)
    if free_bytes is not None and free_bytes < needed:
        return f"{free_bytes >> 20:,} MiB are free for this rank, and it wants {needed >> 20:,} MiB of room"
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):  # musl, macOS
        return "the C library is not glibc"
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, TOP_PAD_BYTES))
    done = [libc.mallopt(name, value) for name, value in settings]
    return "" if all(done) else "glibc has refused"


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes; 0 where the kernel does not say."""
    with suppress(OSError, AttributeError):  # not ru_maxrss: a process inherits its parent's
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"^VmHWM:\s*([0-9]+) kB", status, re.MULTILINE)[1]) << 10  # pyright: ignore[reportOptionalSubscript]
    return 0


@dataclass(frozen=True)
class Room:
    """What needs room on this machine."""

    largest_batch: int
    """samples of the largest micro-batch of the run"""
    num_workers: int
    """loader processes of each rank; without any there is nothing to check"""
    local_ranks: int


def check_room(batch: Any, samples: int, room: Room) -> None:
    """Raise UsageError where batches of the kind of `batch`, which has `samples` samples, will not fit.

    Loader processes pass tensors through /dev/shm, each with a descriptor of its own, and work ahead of the training;
    without room for them it would later look like a crash:

        bytes = bytes of a batch x (2 ahead x processes + 1 in use) x ranks on this machine
        files = tensors of a batch x (2 ahead x processes + 1 in use)
    """
    num_workers, local_ranks = room.num_workers, room.local_ranks
    if not num_workers:
        return
    if sys.platform == "linux" and not Path(SHARED_MEMORY).is_dir():
        raise UsageError(
            f"there is no {SHARED_MEMORY}, by which loader processes hand over batches. Mount a tmpfs there, or take "
            "--num-workers 0"
        )
    found = [*tensors(batch)]
    held = AHEAD * num_workers + 1
    needed_bytes = sum(t.nbytes for t in found) * room.largest_batch // samples * held * local_ranks
    free_bytes = _free_bytes()
    if free_bytes is not None and free_bytes < needed_bytes:
        raise UsageError(
            f"{SHARED_MEMORY} has {_mib(free_bytes)} free, and {num_workers} loader processes for each of "
            f"{local_ranks} ranks keep up to {_mib(needed_bytes)} of batches there. Make it larger "
            "(Docker: --shm-size=1g), delete what lies in it, or take fewer --num-workers or a smaller --batch-size"
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed_files = len(found) * held + OTHER_FILES
    if files != resource.RLIM_INFINITY and files < needed_files:
        raise UsageError(
            f"a process may open {files} files here (ulimit -n), and {num_workers} loader processes hand over up to "
            f"{needed_files} at a time. Raise the limit, or take fewer --num-workers"
        )


def _free_bytes() -> int | None:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:  # not Linux: another way of sharing, whose room is not known
        return None
    return status.f_bavail * status.f_frsize


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
