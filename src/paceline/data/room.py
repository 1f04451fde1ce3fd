"""Checks before the first step that there is room for what loader processes hand over; later it looks like a crash.

Loader processes pass tensors through /dev/shm, each with a descriptor of its own, and work ahead of the training:

    bytes = bytes of a batch x (2 ahead x processes + 1 in use) x ranks on this machine
    files = tensors of a batch x (2 ahead x processes + 1 in use)
"""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.nested import tensors

AHEAD = 2  # batches that each process has ready: DataLoader's prefetch_factor
OTHER_FILES = 64  # that a training holds besides
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Room:
    """What needs room on this machine."""

    largest_batch: int
    """samples of the largest micro-batch of the run"""
    num_workers: int
    """loader processes of each rank; without any there is nothing to check"""
    local_ranks: int


def check_room(batch: Any, samples: int, room: Room) -> None:
    """Raise UsageError where batches of the kind of `batch`, which has `samples` samples, will not fit."""
    num_workers, local_ranks = room.num_workers, room.local_ranks
    if not num_workers:
        return
    if sys.platform == "linux" and not Path(SHARED_MEMORY).is_dir():
        raise UsageError(code="no-shared-memory", folder=SHARED_MEMORY)
    found = [*tensors(batch)]
    held = AHEAD * num_workers + 1
    needed_bytes = sum(t.nbytes for t in found) * room.largest_batch // samples * held * local_ranks
    free_bytes = _free_bytes()
    if free_bytes is not None and free_bytes < needed_bytes:
        raise UsageError(
            code="shared-memory-too-small", folder=SHARED_MEMORY, free=_mib(free_bytes), num_workers=num_workers,
            local_ranks=local_ranks, needed=_mib(needed_bytes),
        )  # fmt: skip
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed_files = len(found) * held + OTHER_FILES
    if files != resource.RLIM_INFINITY and files < needed_files:
        raise UsageError(code="too-few-open-files", files=files, num_workers=num_workers, needed_files=needed_files)


def _free_bytes() -> int | None:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:  # not Linux: another way of sharing, whose room is not known
        return None
    return status.f_bavail * status.f_frsize


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
