"""Sums of metrics over virtual ranks, which travel while a step computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.sums.pending import Pending, sent
from paceline.sums.places import place_hash, places
from paceline.sums.ranks import ranks
from paceline.sums.tree import tree_sum

NAME = "totals of the step"
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
    finish, (_, columns) = ranks().start_sum(slots, NAME), leaves.shape

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
    exchange = ranks(group)
    if group is not None or name != LOOP_NUMBERS or (size := exchange.size) == 1:
        return exchange.start_sum(numbers, name)()
    hashes = [0.0] * size
    hashes[dist.get_rank()] = float(place_hash(where))
    total = exchange.start_sum(torch.cat([numbers, sent(hashes, numbers.device)]), name)()
    told: list[float] = total[len(numbers) :].tolist()
    gather = partial(exchange.gather, device=numbers.device, name=f"places of {name}")
    places().compare([int(one) for one in told], name, gather)
    return total[: len(numbers)]
