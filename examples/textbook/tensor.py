"""One layer's work is shared: each rank computes a share of the hidden units (tensor parallelism).

`up` is cut by rows: a rank has some of the hidden units, and needs the whole input for them. `down` is cut by columns:
a rank knows its hidden units' part of every output, and the output is the sum over ranks (Shoeybi et al. 2019,
"Megatron-LM"). What stands between them works on each unit by itself, so between the two nothing travels.

    y = down(relu(up(x)))      2 ranks     rank 0: units 0 1    rank 1: units 2 3
    forward                    x is everywhere;            y     = sum over ranks of their parts
    backward                   dL/dy is everywhere;        dL/dx = sum over ranks of their parts

So two functions are all there is: one is nothing on the way forward and a sum on the way back, the other the reverse.
A bias of `down` is added after the sum, or it would count N times.

Memory of each rank, for P parameters: P/N weights, gradients and optimizer state, and its share of the hidden units.
Run me: `torchrun --nproc-per-node 2 examples/textbook/tensor.py`, or alone with `python`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx


def sum_of_ranks(mine: Tensor) -> Tensor:
    """The sum of all ranks' tensors (a collective)."""
    total = mine.contiguous().clone()
    dist.all_reduce(total)
    return total


class EnterShares(Function):
    """Into the ranks' shares: every rank takes the whole input, so its gradient is the sum of what each rank finds."""

    @staticmethod
    def forward(ctx: FunctionCtx, whole: Tensor) -> Tensor:
        """The input itself."""
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Tensor:
        """A collective."""
        return sum_of_ranks(gradients[0])


class LeaveShares(Function):
    """Out of them: the output is the sum of the ranks' parts, so each part's gradient is the output's."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor) -> Tensor:
        """A collective."""
        return sum_of_ranks(part)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Tensor:
        """The gradient itself."""
        return gradients[0]


class SharedMLP(nn.Module):
    """`down(relu(up(x)))`, of which this rank holds a share of the hidden units; N must divide their number."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        """Cut this rank's share out of the whole layers, the same on every rank."""
        super().__init__()
        number, ranks = dist.get_rank(), dist.get_world_size()
        self.up = nn.Parameter(up.weight.detach().chunk(ranks, dim=0)[number].clone())
        self.up_bias = nn.Parameter(up.bias.detach().chunk(ranks)[number].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(ranks, dim=1)[number].clone())
        self.down_bias = nn.Parameter(down.bias.detach().clone())  # whole, and the same everywhere

    def forward(self, x: Tensor) -> Tensor:
        """(samples, outputs) of (samples, inputs), whole on every rank (a collective)."""
        hidden = torch.relu(EnterShares.apply(x) @ self.up.T + self.up_bias)  # pyright: ignore[reportUnknownMemberType]
        return LeaveShares.apply(hidden @ self.down.T) + self.down_bias  # pyright: ignore[reportUnknownMemberType]


def _main() -> None:
    from demo import joined_world, say_once

    with joined_world() as (rank, world_size):
        torch.manual_seed(0)
        up, down = nn.Linear(6, 4 * world_size, dtype=torch.float64), nn.Linear(4 * world_size, 3, dtype=torch.float64)
        x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
        shared = SharedMLP(up, down)
        shared(x).square().sum().backward()
        assert x.grad is not None and shared.up.grad is not None
        here, x.grad = x.grad, None
        down(torch.relu(up(x))).square().sum().backward()  # what one process computes
        assert x.grad is not None and up.weight.grad is not None
        apart = max(
            (here - x.grad).abs().max().item(),
            (shared.up.grad - up.weight.grad.chunk(world_size)[rank]).abs().max().item(),
        )
        say_once(f"hidden units {4 * world_size}, of each rank 4")
        say_once(f"gradients differ from one process's by less than 1e-12: {apart < 1e-12}")


if __name__ == "__main__":
    _main()
