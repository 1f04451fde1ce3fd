"""Communicators exchange tensors and messages between the ranks of a process group. All ranks choose the kind once:

    all ranks on one host                                      "shared"   memory
    several hosts with the same number of ranks (2 or more)    "hosts"    gradients: memory and, between hosts, gloo
    otherwise                                                  "torch"    torch.distributed

    make_communicator()                       # the first call is a collective
    get_communicator().start_sum(numbers, "name")()

torch.distributed sends all tensors that are not on the CPU, and all tensors until the choice is made. Each kind has a
transport, which sums gradients.
"""

from weakref import WeakKeyDictionary

import torch.distributed as dist

from paceline.collectives.torch_collectives import Group
from paceline.collectives.torch_communicator import Communicator, TransportChoice

_chosen: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()
"""Weak keys: an entry ends with torch's process group."""


def get_communicator(group: Group = None) -> Communicator:
    """The communicator of a group (default: all ranks). Before `make_communicator`, one over torch.distributed."""
    key = group or dist.group.WORLD
    return (key and _chosen.get(key)) or Communicator(group)


def make_communicator(choice: TransportChoice = "auto", group: Group = None) -> Communicator:
    """Make the communicator of a group: the default one, or one with all ranks in the same order.

    The first call is a collective. Later calls return its result. Rank 0 prints once why ranks do not share memory.

    Args:
        choice: "shared" fails if memory cannot be shared, "torch" does not try.
        group: a group with only some of the ranks uses torch.distributed.

    Raises:
        UsageError: on rank 0, if `choice` is "shared" and memory cannot be shared.
        ReportedByPeer: on the other ranks.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1 or (group is not None and group.size() < world.size()):
        return get_communicator(group)
    if world not in _chosen:
        from paceline.collectives.shm_communicator import create_communicator

        _chosen[world] = create_communicator(world, choice)
    if group is not None:
        _chosen[group] = _chosen[world]
    return _chosen[world]
