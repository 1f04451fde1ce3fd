"""What ranks share: memory, memory on each host, or nothing. All ranks of a process group decide it once, together.

What their gradients then travel over:

    all ranks on one host                                  "shared"   memory
    several hosts of equally many ranks, more than one     "hosts"    memory on each host, gloo between hosts
    else                                                   "torch"    torch.distributed
"""

import os
import sys
import weakref
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from paceline.contract.variables import SHARED_MEMORY
from paceline.errors import ExitCode, ToldElsewhere, UsageError
from paceline.sums import handshake
from paceline.sums.gather import CPU, gather_over_torch
from paceline.sums.handshake import Refusal, meet_in_memory
from paceline.sums.hosts import Hosts, connect_hosts, group_name, hosts_of_one
from paceline.sums.shared import BULK_BYTES, GROUP, MemoryLayout, SharedMemory

Asked = Literal["auto", "shared", "torch"]
WayTaken = Literal["shared", "hosts", "torch"]
_QUIET = ("switched off", "hosts")  # what nobody needs to be told
_of_group: WeakKeyDictionary[dist.ProcessGroup, SharedMemory | Hosts | None] = WeakKeyDictionary()
"""What belongs to torch's default group, and ends with it; torch keeps that group in a global of its own."""


def shared_memory(asked: Asked = "auto", *, bulk_bytes: int = BULK_BYTES) -> SharedMemory | None:
    """The memory that all ranks of the default group share, None if they do not; see `memory_or_hosts`."""
    decided = memory_or_hosts(asked, bulk_bytes=bulk_bytes)
    return decided if isinstance(decided, SharedMemory) else None


def memory_or_hosts(asked: Asked = "auto", *, bulk_bytes: int = BULK_BYTES) -> SharedMemory | Hosts | None:
    """What the ranks of the default group share: memory, or memory on each of several hosts, or nothing.

    The first call is a collective; later ones give what it gave. Of what takes another way than memory alone, rank 0
    says why, once.

    Args:
        asked: "shared" fails where nothing can be shared, "torch" does not try.
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


def hosts_of_all() -> Hosts | None:
    """As `memory_or_hosts`, if that is hosts; they may have one rank each (a collective)."""
    decided, group = memory_or_hosts(), dist.group.WORLD
    if group is None or group.size() == 1 or isinstance(decided, SharedMemory):
        return None
    if decided is None and _talks_over_gloo(group) and _are_alone(group.size()):
        return hosts_of_one(group, _timeout_seconds(group))
    return decided


def shared_memory_if_made() -> SharedMemory | None:
    """`shared_memory` without being a collective: None before somebody has asked for it."""
    group = dist.group.WORLD
    decided = None if group is None else _of_group.get(group)
    return decided if isinstance(decided, SharedMemory) else None


def way_taken() -> WayTaken:
    """Over what gradients travel, as decided so far."""
    group = dist.group.WORLD
    decided = None if group is None else _of_group.get(group)
    return "torch" if decided is None else "hosts" if isinstance(decided, Hosts) else "shared"


def _made(group: dist.ProcessGroup, asked: Asked, bulk_bytes: int) -> SharedMemory | Hosts | None:
    if not _talks_over_gloo(group):
        why = f"the ranks' backend is {dist.get_backend(group)}"
        if asked == "shared":
            raise _impossible(group, why)
        return None
    layout = MemoryLayout(group.size(), bulk_bytes)
    try:
        met = meet_in_memory(group.rank(), layout, wanted=asked != "torch")
    except Refusal as refusal:
        if asked == "shared":
            raise _impossible(group, str(refusal)) from None
        if not str(refusal).endswith(_QUIET):
            say(f"ranks talk over gloo, not through shared memory: {refusal}")
        return None
    several, place = met.hosts > 1, [peer.rank for peer in met.peers].index(group.rank())
    memory = SharedMemory(
        met.peers,
        place,
        layout,
        _timeout_seconds(group),
        group=group_name(met.host) if several else GROUP,
        of_all=not several,
    )
    # When the group is taken down, or the process ends: who waits for this rank then knows.
    weakref.finalize(group, memory.leave)
    if not several:
        return memory
    say(
        f"gradients are added up in shared memory on each of {met.hosts} hosts ({memory.size} ranks each), and over "
        "gloo between hosts",
    )
    return connect_hosts(memory, met.host, met.hosts)


def _are_alone(size: int) -> bool:
    return len(set(gather_over_torch(handshake.host_key(), size))) == size


def _talks_over_gloo(group: dist.ProcessGroup) -> bool:
    return "cpu:gloo" in str(dist.get_backend_config(group))  # of both, where the program names none


def say(words: str) -> None:
    """Tell the user, on rank 0 of the default group."""
    if dist.group.WORLD is None or dist.group.WORLD.rank() == 0:
        print(f"paceline: {words}", file=sys.stderr, flush=True)


def _impossible(group: dist.ProcessGroup, why: str) -> UsageError | ToldElsewhere:
    if group.rank() != 0:
        return ToldElsewhere("rank 0 tells why memory cannot be shared", ExitCode.USAGE)
    switch = f", {SHARED_MEMORY}={os.environ[SHARED_MEMORY]}" if SHARED_MEMORY in os.environ else ""
    return UsageError(
        f"--collectives shared: the {group.size()} ranks cannot share memory: {why}{switch}. It takes CPU ranks of one "
        "user, on one host or on several with equally many. Choose from: auto, torch, shared"
    )


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    """How long a collective of this group may take, as whoever made it has said."""
    backend = group._get_backend(torch.device(CPU))  # pyright: ignore[reportPrivateUsage]
    return backend.options._timeout.total_seconds()
