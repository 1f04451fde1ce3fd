"""Says how many CPU threads each rank should have, and what is wrong with the number that it has. Pure, no torch.

A wrong number is the largest loss that goes unnoticed (measured: 2 ranks x 2 threads on 2 cores: 0.62 of the speed).
Ranks exchange where they may run; from that follows who shares cores with whom, whatever has started them:

    torchrun, our agent: all ranks of a host may run on all its cores      cores / ranks
    srun --cpus-per-task, mpirun --bind-to: each on cores of its own       these
"""

import os
from collections.abc import Sequence

import msgspec

from paceline.errors import plural
from paceline.host.cgroup import usable_cores


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
    """The threads that `rank` should have: its part of the cores that it shares, at least 1."""
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
