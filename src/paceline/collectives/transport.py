"""Through shared memory or torch.distributed? Decided once for each process group, by all its ranks together."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from paceline.collectives.gather import CPU
from paceline.collectives.handshake import SWITCH, Refusal, meet_in_memory
from paceline.collectives.shared import BULK_BYTES, Layout, SharedMemory
from paceline.errors import ExitCode, ToldElsewhere, UsageError

Asked = Literal["auto", "shared", "torch"]
QUIET = ("switched off", "hosts")  # what nobody needs to be told
_of_group: WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None] = WeakKeyDictionary()
"""What belongs to torch's default group, and ends with it; torch keeps that group in a global of its own."""


def shared_memory(asked: Asked = "auto", *, bulk_bytes: int = BULK_BYTES) -> SharedMemory | None:
    """The memory that all ranks of the default group share, None if they do not: then rank 0 says why, once.

    The first call is a collective; later ones give what it gave.

    Args:
        asked: "shared" fails where it is impossible, "torch" does not try.
        bulk_bytes: how much each rank hands over at once.

    Raises:
        UsageError: `asked` is "shared", and it is impossible; on rank 0, ToldElsewhere on the others.
    """
    group = dist.group.WORLD
    if group is None or group.size() == 1:
        return None
    if group not in _of_group:
        _of_group[group] = _made(group, asked, bulk_bytes)
    return _of_group[group]


def shared_memory_if_made() -> SharedMemory | None:
    """The same without being a collective: None before somebody has asked for it."""
    group = dist.group.WORLD
    return None if group is None else _of_group.get(group)


def _made(group: dist.ProcessGroup, asked: Asked, bulk_bytes: int) -> SharedMemory | None:
    if dist.get_backend(group) != "gloo":
        why = f"the ranks' backend is {dist.get_backend(group)}"
        if asked == "shared":
            raise _impossible(group, why)
        return None
    layout = Layout(group.size(), bulk_bytes)
    try:
        peers = meet_in_memory(group.rank(), layout, wanted=asked != "torch")
    except Refusal as refusal:
        if asked == "shared":
            raise _impossible(group, str(refusal)) from None
        if group.rank() == 0 and not str(refusal).endswith(QUIET):
            print(f"paceline: ranks talk over gloo, not through shared memory: {refusal}", file=sys.stderr, flush=True)
        return None
    memory = SharedMemory(peers, group.rank(), layout, _timeout_seconds(group))
    # When the group is taken down, or the process ends: who waits for this rank then knows.
    weakref.finalize(group, memory.leave)
    return memory


def _impossible(group: dist.ProcessGroup, why: str) -> UsageError | ToldElsewhere:
    if group.rank() != 0:
        return ToldElsewhere("rank 0 tells why memory cannot be shared", ExitCode.USAGE)
    switch = f", {SWITCH}={os.environ[SWITCH]}" if SWITCH in os.environ else ""
    return UsageError(
        f"--collectives shared: the {group.size()} ranks cannot share memory: {why}{switch}. It takes CPU ranks of one "
        "host and user. Choose from: auto, torch, shared"
    )


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    """How long a collective of this group may take, as whoever made it has said."""
    backend = group._get_backend(torch.device(CPU))  # pyright: ignore[reportPrivateUsage]
    return backend.options._timeout.total_seconds()
