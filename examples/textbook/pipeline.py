"""The layers are shared: each rank is a stage, and the micro-batches of a batch flow through them (pipelining).

A stage receives what the stage before has computed, computes its own layers, and sends on. Backward goes the other
way: a stage receives the gradient of what it has sent. With one batch only one stage would ever work; cut into M
micro-batches, which follow each other, S stages stand idle for (S-1)/(M+S-1) of the time only: the bubble (Huang et al.
2018, "GPipe").

    2 stages, 3 micro-batches      time ->   0   1   2   3   4   5   6   7
    rank 0                                   F0  F1  F2  .   .   B0  B1  B2
    rank 1                                   .   F0  F1  F2  B0  B1  B2  .         2 of 8 are idle: 1/4

Gradients of the micro-batches add up in .grad, as ever; what is summed is the loss's *sum*, divided once at the end.

Memory of each rank, for P parameters: P/S weights, gradients, optimizer state; what M micro-batches leave for backward.
Run me: `torchrun --nproc-per-node 2 examples/textbook/pipeline.py`, or alone with `python`.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def train_step(
    stage: nn.Module, shape: Sequence[int], batches: Sequence[tuple[Tensor, Tensor]], loss: Callable[..., Tensor]
) -> float:
    """Forward and backward of all micro-batches through all stages: GPipe's order (a collective).

    Args:
        stage: this rank's layers; all stages together are the model.
        shape: of one sample as this stage receives it.
        batches: (inputs, targets) of each micro-batch; the first stage needs the inputs, the last one the targets.
        loss: (outputs, targets) -> the sum over the samples.

    Returns:
        The sum of all losses, on the last stage; 0 elsewhere. Each .grad is the sum's gradient.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    received: list[Tensor] = []
    computed: list[Tensor] = []
    total = 0.0
    for inputs, targets in batches:  # all forwards
        here = inputs
        if rank > 0:
            here = torch.empty(len(inputs), *shape, dtype=inputs.dtype)
            dist.recv(here, src=rank - 1)
            here.requires_grad_()
        out = stage(here)
        if rank < last:
            dist.send(out.detach(), dst=rank + 1)
        else:
            out = loss(out, targets)
            total += out.item()
        received.append(here)
        computed.append(out)
    for here, out in zip(received, computed, strict=True):  # all backwards
        gradient = None
        if rank < last:
            gradient = torch.empty_like(out)
            dist.recv(gradient, src=rank + 1)
        out.backward(gradient)
        if rank > 0:
            assert here.grad is not None
            dist.send(here.grad, dst=rank - 1)
    return total


def bubble(stages: int, microbatches: int) -> float:
    """The share of the time in which a stage waits, if all stages take equally long."""
    return (stages - 1) / (microbatches + stages - 1)


def _main() -> None:
    from demo import joined_world, say_once

    def squares(out: Tensor, targets: Tensor) -> Tensor:
        return (out - targets).square().sum()

    with joined_world() as (rank, world_size):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.Tanh()) for _ in range(world_size)]
        x, y = torch.randn(13, 6, dtype=torch.float64), torch.randn(13, 6, dtype=torch.float64)
        batches = [*zip(x.chunk(4), y.chunk(4), strict=True)]  # 4, 4, 4 and 1: uneven ones need nothing special
        train_step(layers[rank], (6,), batches, squares)
        mine = [p.grad for p in layers[rank].parameters()]
        for p in layers[rank].parameters():
            p.grad = None
        squares(nn.Sequential(*layers)(x), y).backward()  # what one process computes
        whole = [p.grad for p in layers[rank].parameters()]
        apart = max(
            float((a - b).abs().max()) for a, b in zip(mine, whole, strict=True) if a is not None and b is not None
        )
        say_once(f"stages {world_size}, micro-batches 4: idle {bubble(world_size, 4):.0%} of the time")
        say_once(f"gradients differ from one process's by less than 1e-12: {apart < 1e-12}")


if __name__ == "__main__":
    _main()
