"""The same model on every rank to start from.

Rank 0's parameters and buffers are broadcast, once, before training. From then on equal gradients keep equal copies
equal. Buffers (BatchNorm's running statistics) are no parameters, and are easily forgotten. A broadcast fits by
position, not by name: `paceline.collectives.replicate` compares the models first, and
names the rank that has another one.

Run me: `torchrun --nproc-per-node 2 examples/textbook/replicate.py`, or alone with `python`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def copy_from_rank(module: nn.Module, src: int = 0) -> None:
    """Give every rank the parameters and buffers of rank `src`, in place (a collective).

    Example, `nn.Linear(1, 1)` on 2 ranks that started from different random numbers:

        before: rank 0: weight 0.5, bias 1.0       rank 1: weight -0.3, bias 0.2
        after:  rank 0: weight 0.5, bias 1.0       rank 1: weight  0.5, bias 1.0
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        sent = tensor.contiguous()  # a collective sends memory, so strides must be the same on every rank
        dist.broadcast(sent, src=src)
        tensor.copy_(sent)


def _main() -> None:
    from demo import joined_world, of_all_ranks, say_once

    def show(what: str, mine: Tensor) -> None:
        say_once(f"{what:<18}" + "   ".join(f"rank {rank}: {values}" for rank, values in enumerate(of_all_ranks(mine))))

    with joined_world() as (rank, world_size):
        model = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0]]) + 10 * rank)
        show("before broadcast", model.weight.detach()[0])
        copy_from_rank(model)
        show("after broadcast", model.weight.detach()[0])
        # The other way to hand something out: scatter gives each rank a piece of its own.
        pieces = [torch.tensor([10.0 * each, 10.0 * each + 1]) for each in range(world_size)]
        mine = torch.zeros(2)
        show("before scatter", mine)
        dist.scatter(mine, pieces if rank == 0 else None, src=0)
        show("after scatter", mine)


if __name__ == "__main__":
    _main()
