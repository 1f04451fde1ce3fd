"""Gives all ranks equally many forwards, for strategies that gather parameters in each one (fsdp).

A rank with fewer runs stand-ins, whose outputs and gradients count for nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.control import sent
from paceline.collectives.torch_collectives import labelled
from paceline.data.loader import MicroBatch
from paceline.data.plan import ranks_share
from paceline.rank.world import World

Part = tuple[int | None, Tensor]
"""A virtual rank, None for a stand-in, and the samples that it evaluates."""


def as_many_as_any(microbatches: Sequence[MicroBatch], world: World) -> Sequence[MicroBatch]:
    """A step's micro-batches of this rank, and stand-ins after them, as many on every rank (a collective)."""
    most = sent([len(microbatches)], world.device)
    dist.all_reduce(labelled(most, "number of micro-batches"), op=dist.ReduceOp.MAX)
    first, missing = microbatches[0], int(most) - len(microbatches)
    # each an object of its own: the step knows its last one by identity
    return [*microbatches, *(replace(first, work=replace(first.work, counted=False)) for _ in range(missing))]


def as_many_parts_as_any(parts: list[Part], samples: int, virtual_ranks: int, world: World, size: int) -> list[Part]:
    """The same for an evaluation in batches of `size`; which is known without asking."""

    def number(rank: int) -> int:
        shares = (range(v, samples, virtual_ranks) for v in ranks_share(virtual_ranks, rank, world.size))
        return sum(-(-len(share) // size) for share in shares)

    missing = max(map(number, range(world.size))) - len(parts)
    return [*parts, *[(None, torch.zeros(1, dtype=torch.int64))] * missing]
