"""Each rank gets the sum of *its share* of the gradients, and nobody ever holds all sums.

A reduce-scatter, half of what an all-reduce sends. What a rank has sent it may forget, so of N ranks each keeps an N-th
of the gradients' memory: that is what `zero` needs. The sums have the order of `tree`, so the bits do not depend on N.

    2 ranks     rank 0 sends its gradients of share 1, and receives rank 1's of share 0
                rank 0 keeps the sum of share 0, rank 1 of share 1

Run me: `torchrun --nproc-per-node 2 examples/textbook/scatter.py`, or alone with `python`.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from tree import add_up


def sum_of_share(flat: Tensor) -> Tensor:
    """(n / N,): this rank's share of the sum of all ranks' `flat`, (n,), N equal shares (a collective)."""
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat)  # share r goes to rank r
    of_ranks = received.view(dist.get_world_size(), -1)  # everybody's numbers of our share
    return add_up((0, len(of_ranks)), {(rank, rank + 1): row for rank, row in enumerate(of_ranks)})


def _main() -> None:
    from demo import joined_world, of_all_ranks, say_once

    with joined_world() as (rank, world_size):
        gradients = torch.arange(2.0 * world_size) + 10 * rank
        for each, values in enumerate(of_all_ranks(gradients)):
            say_once(f"rank {each} has        {values}")
        for each, values in enumerate(of_all_ranks(sum_of_share(gradients))):
            say_once(f"rank {each} keeps      {values}, the sum of share {each}")


if __name__ == "__main__":
    _main()
