"""Where ranks are on several hosts: who shares memory with whom, and over which connections hosts exchange.

    2 hosts of 3 ranks      share memory: 0 1 2 | 3 4 5      exchange over gloo: 0 3 | 1 4 | 2 5

Each rank exchanges its share of what its host has added up with the ranks that have the same place on the other hosts.
So a host sends what one rank alone would have to send, whatever the number of its ranks.
"""

import os
import weakref
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from paceline.collectives.memory import GROUP, MemoryLayout, MemoryPeer, SharedMemory


@dataclass(frozen=True)
class Hosts:
    """This rank's place on one of several hosts, which all have equally many ranks, and these next to each other."""

    memory: SharedMemory  # of the ranks of this host
    number: int  # of this host, from 0
    count: int  # of hosts
    # Torch owns the group; held here, too, its connections would outlive its end, and nobody would see it come.
    _across: weakref.ref[dist.ProcessGroup]

    @property
    def size(self) -> int:
        """The number of ranks of the world."""
        return self.count * self.memory.size

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return self.number * self.memory.size + self.memory.rank

    def across(self) -> dist.ProcessGroup:
        """The ranks that have our place on their hosts, one of each, in the hosts' order.

        Raises:
            RuntimeError: torch's process groups have been taken down.
        """
        group = self._across()
        if group is None:
            raise RuntimeError(
                "the process groups have been taken down: there is no connection to other hosts any more"
            )
        return group


def group_name(host: int) -> str:
    """What the hang guard calls the ranks that share the memory of this host, of several."""
    return f"{GROUP} on host {host}"


def connect_hosts(memory: SharedMemory, host: int, hosts: int) -> Hosts:
    """Make the process groups between hosts (a collective of all ranks)."""
    made: list[object] = []
    for place in range(memory.size):  # every rank must make all groups, in one order
        members = [number * memory.size + place for number in range(hosts)]
        # not torch's default of half an hour
        timeout = timedelta(seconds=memory.timeout_seconds)
        made.append(dist.new_group(members, timeout=timeout, backend="gloo"))
    own = made[memory.rank]
    assert isinstance(own, dist.ProcessGroup)
    return Hosts(memory, host, hosts, weakref.ref(own))


def hosts_of_one(group: dist.ProcessGroup, timeout_seconds: float) -> Hosts:
    """Where each rank of `group`, of gloo, is alone on its host: memory that it shares with nobody."""
    rank, layout = group.rank(), MemoryLayout(1, bulk_bytes=4096)
    alone = MemoryPeer(rank, os.getpid(), 0, memoryview(bytearray(layout.total_bytes)))
    memory = SharedMemory([alone], 0, layout, timeout_seconds, group=group_name(rank), of_all=False)
    return Hosts(memory, rank, group.size(), weakref.ref(group))
