"""Sums of metrics over virtual ranks, which travel while a step computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.sums.gather import start_sum
from paceline.sums.pending import Pending, sent
from paceline.sums.places import place_hash, places
from paceline.sums.shared import SharedMemory
from paceline.sums.sharing import shared_memory
from paceline.sums.tree import tree_sum
from paceline.sums.words import gather_over_ranks

_NAME = "totals of the step"
LOOP_NUMBERS = "numbers of the loop"


@dataclass(frozen=True)
class Totals:
    """What a `start_totals` gave: sums over virtual ranks, and sums over ranks."""

    sums: list[float]
    votes: list[float]


def start_totals(leaves: Tensor, votes: Sequence[float] = ()) -> Callable[[], Pending[Totals]]:
    """Start adding up over ranks; the returned function waits for the other ranks, but not for the device.

    Args:
        leaves: (V, k) float64, row v what virtual rank v has to add; rows of other ranks' virtual ranks are zeros. The
            rows are added up in the order of `tree`, so that the world size does not show in a single bit.
        votes: what this rank has to say, m numbers; added up over ranks in no particular order.

    Returns:
        To be called once; `numbers` are the k sums, then the m votes.
    """
    # One slot for each virtual rank: adding zeros to it changes nothing, so everybody gets all leaves as they are.
    slots = torch.cat([leaves.flatten(), sent(votes, leaves.device)])
    finish, (_, columns) = _started(slots, _NAME), leaves.shape

    def wait() -> Pending[Totals]:
        everything = finish()
        rows = everything[: leaves.numel()].view(leaves.shape).unbind()
        sums = tree_sum({(v, v + 1): row for v, row in enumerate(rows)}, torch.add, len(rows))
        numbers = torch.cat([sums, everything[leaves.numel() :]])
        return Pending(numbers, lambda found: Totals(found[:columns], found[columns:]))

    return wait


def sum_over_ranks(
    numbers: Tensor, name: str, group: dist.ProcessGroup | None = None, *, where: Sequence[int] = ()
) -> Tensor:
    """(n,) float64, a few numbers: added up over all ranks or a group, the same on all of them (a collective).

    Numbers of the loop must come from the same place of the program on all ranks, and from the same `where`: see
    `places`.

    Raises:
        TrainingError: with MISMATCH, if they do not; ToldElsewhere on all ranks but one.
    """
    if group is not None:
        return start_sum(numbers, name, group)()
    if name != LOOP_NUMBERS or (size := dist.get_world_size()) == 1:
        return _started(numbers, name)()
    hashes = [0.0] * size
    hashes[dist.get_rank()] = float(place_hash(where))
    total = _started(torch.cat([numbers, sent(hashes, numbers.device)]), name)()
    told: list[float] = total[len(numbers) :].tolist()
    gather = partial(gather_over_ranks, size=size, device=numbers.device)
    places().compare([int(one) for one in told], name, gather)
    return total[: len(numbers)]


def _started(slots: Tensor, name: str) -> Callable[[], Tensor]:
    if dist.get_world_size() == 1:
        return lambda: slots
    memory = shared_memory() if slots.device.type == "cpu" else None
    if memory is not None and slots.nbytes <= memory.totals.data_bytes:
        return StartedSum(memory, slots, name).finish
    return start_sum(slots, name)


class StartedSum:
    """A small sum over ranks that has begun, in shared memory; the hang guard asks it as it asks torch's `Work`."""

    def __init__(self, memory: SharedMemory, slots: Tensor, name: str = _NAME) -> None:
        """Begin with this rank's `slots`, float64."""
        self._memory, self._size, self._sum = memory, len(slots), slots
        self._is_over, self._error = False, ""
        if isinstance(memory.running, StartedSum):  # its slots of two ticks ago are written over now
            memory.running.finish()
        channel = memory.totals
        with memory.operation(channel, memory.called("all_reduce", name, f"[{self._size}]", slots.dtype), self):
            slot = channel.write()
            channel.typed(slots.dtype)[slot][memory.rank][: self._size] = slots
            self._tick = channel.publish()
            memory.running = self

    def is_completed(self) -> bool:
        """Whether all ranks have begun it, or some never will."""
        return self._is_over or bool(self._error) or self._memory.totals.arrived(self._tick)

    def finish(self) -> Tensor:
        """The sum, in the order of ranks."""
        if self._is_over:
            return self._sum
        if self._error:
            raise RuntimeError(f"this sum has failed already: {self._error}")
        memory, channel = self._memory, self._memory.totals
        try:
            channel.wait()
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            memory.leave()
            raise
        of_rank: list[Any] = channel.typed(self._sum.dtype)[self._tick & 1]
        total = of_rank[0][: self._size].clone()
        for other in of_rank[1:]:
            total += other[: self._size]
        self._sum, self._is_over, memory.running = total, True, None
        return total
