"""Broadcast the model once, then all-reduce every gradient after backward."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.collectives.buckets import grad_of
from paceline.collectives.reducer import check_gradients
from paceline.collectives.replicate import broadcast_module
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.validation import check_model


class Manual(Strategy):
    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> None:
        check_model(model, "manual", world)
        broadcast_module(model)
        super().__init__(model, make_optimizer(model.parameters()), world, virtual_ranks=virtual_ranks)
        self._names = {p: name for name, p in model.named_parameters()}
        self._numels = [p.numel() for p in self.parameters]

    def _reduce(self, divisor: float | Tensor) -> None:
        check_gradients(self.parameters, [*map(grad_of, self.parameters)], self._numels, self._names)
        all_reduce_gradients(self.parameters, divisor)

    def reset(self) -> None:
        all_reduce_gradients(self.parameters, 1.0)  # other ranks may wait for this rank's gradients
        super().reset()


@torch.no_grad()
def all_reduce_gradients(parameters: Sequence[nn.Parameter], divisor: Tensor | float) -> None:
    """Replace each .grad by its sum over ranks, divided by `divisor`. It stays None if no rank has a gradient."""
    if not parameters:
        return
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if is_used:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total = grad.contiguous()  # a collective sends memory, so strides must be the same on every rank
            dist.all_reduce(total)
            wide = total.float() if total.element_size() < 4 else total  # 70,000 tokens are infinite in float16
            parameter.grad = grad.copy_(wide.div_(divisor))
