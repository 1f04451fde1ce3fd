"""N ranks train with an N-th of the gradients' and of the optimizer's memory each.

Adam keeps two numbers for every parameter, the same ones on every rank, and every rank holds every gradient. Here each
rank keeps them for its share only: it is given the sum of its share of the gradients (`scatter`), updates that share,
and an all-gather brings the updated shares together (ZeRO stage 2: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models"). The update of an element-wise optimizer does not depend on who else is
updated beside it, so the result has the very same bits.

    parameters   a (6 elements), b (12), laid side by side, 2 ranks
                 a a a a a a b b b | b b b b b b b b b
    rank 0 updates a and the first 3 of b, rank 1 the other 9

Memory of each rank, for P parameters and Adam: P weights, P/N gradients, 2P/N state.
Run me: `torchrun --nproc-per-node 2 examples/textbook/zero.py`, or alone with `python`.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from scatter import sum_of_share
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

VECTOR = 64  # elements: shares begin where a vector does, so an element meets the same instruction in any share


class ShardedOptimizer:
    """An optimizer of which each rank has a share. All parameters have one type, and are used in each step."""

    def __init__(self, module: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        """Lay the parameters side by side; they stay the same objects. `make` an optimizer of this rank's share."""
        self._parameters, world_size = list(module.parameters()), dist.get_world_size()
        flat = torch.cat([p.detach().flatten() for p in self._parameters])
        self._flat = pad(flat, (0, -len(flat) % (VECTOR * world_size)))
        at = 0
        for parameter in self._parameters:
            parameter.data = self._flat[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()
        self.share = nn.Parameter(self._flat.chunk(world_size)[dist.get_rank()])
        self.optimizer = make([self.share])

    @torch.no_grad()
    def step(self, divisor: float) -> None:
        """Take one step with the sum of all ranks' gradients, divided (a collective)."""
        gradients = [p.grad.flatten() for p in self._parameters if p.grad is not None]
        for parameter in self._parameters:
            parameter.grad = None
        self.share.grad = sum_of_share(_padded_like(torch.cat(gradients), self._flat)).div_(divisor)
        self.optimizer.step()
        dist.all_gather([*self._flat.chunk(dist.get_world_size())], self.share.detach().clone())


def _padded_like(values: Tensor, longer: Tensor) -> Tensor:
    return pad(values, (0, len(longer) - len(values)))


def _main() -> None:
    from demo import joined_world, of_all_ranks, say_once

    with joined_world() as (_, world_size):
        torch.manual_seed(0)
        model = nn.Linear(100, 10)
        sharded = ShardedOptimizer(model, lambda share: torch.optim.Adam(share, lr=0.1))
        model(torch.ones(4, 100)).sum().backward()
        sharded.step(4 * world_size)
        state = sum(t.numel() for state in sharded.optimizer.state.values() for t in state.values())
        say_once(f"{sum(p.numel() for p in model.parameters())} parameters; numbers that each rank keeps:")
        for what, count in (("gradients", sharded.share.numel()), ("optimizer", state)):
            everybody = of_all_ranks(torch.tensor([count]))
            say_once(f"{what}   " + "   ".join(f"rank {r}: {n:.0f}" for r, [n] in enumerate(everybody)))


if __name__ == "__main__":
    _main()
