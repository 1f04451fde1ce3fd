"""Batch norm by the statistics of the whole global batch, though each rank holds only its share of it.

Plain BatchNorm on N ranks normalises each share by itself: another function than one process computes, and running
statistics that differ from rank to rank. Here every rank learns the mean and variance of the union.

Example, one channel, 2 ranks that hold 3 and 1 values:

    rank 0: 1 2 3    count 3, mean 2, M2 = (1-2)^2 + (2-2)^2 + (3-2)^2 = 2
    rank 1: 6        count 1, mean 6, M2 = 0
    union:  1 2 3 6  count 4, mean 3, M2 = 2 + 0 + (6 - 2)^2 * 3 * 1 / 4 = 14, variance 14 / 4 = 3.5

Not (mean of the means) = 4, and not E[x^2] - E[x]^2, which loses all digits where the mean is large.
Run me: `torchrun --nproc-per-node 2 examples/textbook/batchnorm.py`, or alone with `python`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Statistics = tuple[Tensor, Tensor, Tensor]
"""Count (), mean (C,) and sum of squared deviations, M2 (C,), in float64."""


def union(a: Statistics, b: Statistics) -> Statistics:
    """Of two sets together, either of which may be empty (Chan, Golub, LeVeque 1979)."""
    count = a[0] + b[0]
    share, delta = b[0] / count.clamp(min=1), b[1] - a[1]
    return count, a[1] + delta * share, a[2] + b[2] + delta.square() * a[0] * share


class GlobalBatchNorm(nn.Module):
    """(N, C) -> (N, C), normalised over all ranks' inputs; N may differ between ranks. For training only."""

    def __init__(self, features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.mean, self.variance = torch.zeros(features), torch.ones(features)  # running statistics
        self.eps, self.momentum = eps, momentum

    def forward(self, input: Tensor) -> Tensor:
        """Exchange count, mean and M2, then normalise (a collective; backward is one, too)."""
        with torch.no_grad():
            count, mean, m2 = self._of_all_ranks(input)
            for running, new in ((self.mean, mean), (self.variance, m2 / (count - 1))):
                running.mul_(1 - self.momentum).add_((self.momentum * new).to(running.dtype))
            invstd = (m2 / count + self.eps).rsqrt()
        output: Any = _Normalised.apply(input, self.weight, self.bias, mean, invstd, count)
        return output

    def _of_all_ranks(self, input: Tensor) -> Statistics:
        zeros = torch.zeros(input.shape[1], dtype=torch.float64)
        mine = torch.cat([zeros.new_tensor([len(input)]), zeros, zeros])
        if len(input) > 0:
            mean = input.mean(0)
            mine = torch.cat([mine[:1], mean.double(), (input - mean).square().sum(0).double()])
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        total = (mine.new_zeros(()), zeros, zeros)
        for each in gathered:  # in the order of ranks: every rank computes the very same bits
            mean, m2 = each[1:].chunk(2)
            total = union(total, (each[0], mean, m2))
        return total


class _Normalised(torch.autograd.Function):
    """(input - mean) * invstd * weight + bias. Mean and invstd depend on all inputs, so backward has to exchange sums.

    The gradient of the input, with x = input - mean, g = the output's gradient and sums over all ranks' N values:

        weight * invstd * (g - sum(g) / N - x * invstd^2 * sum(g x) / N)          (Ioffe, Szegedy 2015, section 3)
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, count: Tensor
    ) -> Tensor:
        ctx.save_for_backward(input - mean.to(input.dtype), weight, invstd, count)
        return (input - mean.to(input.dtype)) * (invstd * weight).to(input.dtype) + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, invstd, count = ctx.saved_tensors
        sums = torch.stack([gradient.sum(0), (gradient * x).sum(0)])  # (2, C)
        own_sum, own_product = sums.clone()  # the parameters' gradients: summed over ranks like any other's
        dist.all_reduce(sums)
        mean_gradient, mean_product = sums / count
        inner = mean_gradient.to(x.dtype) + x * (invstd.square() * mean_product).to(x.dtype)
        grad_input = (gradient - inner) * (invstd * weight).to(x.dtype)
        return grad_input, (own_product * invstd).to(weight.dtype), own_sum, None, None, None


def _main() -> None:
    from demo import joined_world, of_all_ranks, say_once

    with joined_world() as (rank, world_size):
        shares = [[1.0, 2.0, 3.0], [6.0], [], [8.0, 10.0]]  # per rank, uneven on purpose; one even has none
        mine = torch.tensor(shares[rank % len(shares)]).reshape(-1, 1)  # (N, C=1)
        layer = GlobalBatchNorm(1, momentum=1.0)  # momentum 1: running statistics = this batch's
        output = layer(mine).detach()
        padded = torch.full((3,), torch.nan)
        padded[: len(output)] = output.flatten()
        everything = [value for each in range(world_size) for value in shares[each % len(shares)]]
        reference = nn.BatchNorm1d(1)(torch.tensor(everything).reshape(-1, 1)).flatten().tolist()
        say_once(f"union of all ranks: {everything}")
        say_once(f"mean {float(layer.mean):g}, unbiased variance {float(layer.variance):g} on every rank")
        for each, row in enumerate(of_all_ranks(padded)):
            say_once(f"  rank {each}: {shares[each % len(shares)]} -> {[round(x, 3) for x in row if x == x]}")
        say_once(f"one process normalises the union to {[round(x, 3) for x in reference]}")


if __name__ == "__main__":
    _main()
