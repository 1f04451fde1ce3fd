"""How do the gradients of all ranks become one sum, by the best way that there is here?

Where all ranks share memory: after backward, straight over the tensors that autograd has handed out. There is no core
to spare on a CPU, so nothing is won by sending while backward still computes, and everything that gathers gradients in
buckets is one copy more. Where those of each host do: `leaving`. Elsewhere `scratch.reduce` and `scratch.tree` over
torch.distributed. The bits of `gradients_by_leaf` are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from paceline.collectives.across import by_leaf, by_rank
from paceline.collectives.hosts import Hosts
from paceline.collectives.lanes import MAX_TENSORS
from paceline.collectives.layout import agreed_strides, flat, give, kinds, laid_out, trained
from paceline.collectives.leaving import LeavingGradients
from paceline.collectives.shared import SharedMemory
from paceline.collectives.transport import memory_or_hosts
from paceline.collectives.tree import TreeSum
from paceline.scratch.reduce import GradientReducer, divide
from paceline.scratch.tree import Forest, TreeReducer, added_each


def gradients_by_leaf(module: nn.Module, forest: Forest) -> TreeReducer | SharedGradients | LeavingGradients:
    """What sums gradients over virtual ranks, the leaves of `forest`, in its order (a collective)."""
    if len(forest.owned) == 1:
        return SharedGradients(module, None, forest)
    match _shared_for(module):
        case None:
            return TreeReducer(module, forest)
        case SharedMemory() as memory:
            return SharedGradients(module, memory, forest)
        case Hosts() as hosts:
            return LeavingGradients(module, hosts, forest, by_leaf(forest, hosts.memory.size))


def gradients_by_rank(module: nn.Module) -> GradientReducer | SharedGradients | LeavingGradients:
    """What sums gradients over ranks (a collective)."""
    shared = _shared_for(module)
    if shared is None:
        return GradientReducer(module)
    forest = Forest([(rank, rank + 1) for rank in range(shared.size)], shared.rank)
    if isinstance(shared, SharedMemory):
        return SharedGradients(module, shared, forest)
    return LeavingGradients(module, shared, forest, by_rank(forest, shared.memory.size))


def _shared_for(module: nn.Module) -> SharedMemory | Hosts | None:
    parameters = trained(module)
    on_cpu = all(p.device.type == "cpu" and not p.is_complex() for p in parameters)
    return memory_or_hosts() if on_cpu and 0 < len(parameters) <= MAX_TENSORS else None


class SharedGradients:
    """Sums gradients over the leaves of a forest through shared memory. In the place of a TreeReducer:

        sums = SharedGradients(model, memory, Forest([(0, 2), (2, 3)], memory.rank))
        for virtual_rank in my_virtual_ranks:
            with sums.leaf(virtual_rank, is_last=virtual_rank == my_virtual_ranks[-1]):
                loss(...).backward()
        sums.finish(divisor)

    or, where each rank is one leaf, of a GradientReducer. None is treated as by `reduce.all_reduce_gradients`.
    One process that has all leaves needs no memory: what it has added up is the sum.
    """

    def __init__(self, module: nn.Module, memory: SharedMemory | None, forest: Forest) -> None:
        self._parameters = trained(module)
        self._strides = agreed_strides(self._parameters, len(forest.owned))
        self._forest = forest
        self._sum = None if memory is None else TreeSum(memory, *kinds(self._parameters), forest)
        self._forget()

    @contextmanager
    def leaf(self, virtual_rank: int, *, is_last: bool, counted: bool = True) -> Generator[None]:
        """Around one backward of a virtual rank; as `TreeReducer.leaf`, `is_last` makes no difference here."""
        del is_last
        if self._leaf not in (None, virtual_rank):
            self._take_away()
        self._leaf = virtual_rank
        try:
            yield
        except BaseException:
            self._forget()
            raise
        if not counted:
            for parameter in self._parameters:
                parameter.grad = None
            self._leaf = None

    def paused(self) -> AbstractContextManager[None]:
        """As `GradientReducer.paused`: makes no difference here."""
        return nullcontext()

    @torch.no_grad()
    def finish(self, divisor: float | Tensor) -> bool:
        """Return when every .grad holds the sum over all leaves, divided by `divisor` (a collective).

        Returns:
            Whether all of them are known to be finite, on all ranks alike.
        """
        try:
            self._take_away()
            own = self._sums.finish()
            first = own[0] or [None] * len(self._parameters)
            flats = [None if grads is None else [flat(g) for g in grads] for grads in own]
            results = _divided(flats[0] or first, divisor) if self._sum is None else self._sum.run(flats, divisor)
            for parameter, strides, grad, result in zip(self._parameters, self._strides, first, results, strict=True):
                give(parameter, strides, grad, result)
            return self._sum is not None and self._sum.finite
        finally:
            self._forget()

    def _forget(self) -> None:
        self._leaf: int | None = None
        self._sums = self._forest.partial_sums(added_each)

    @torch.no_grad()
    def _take_away(self) -> None:
        """The gradients that are there become a leaf."""
        if any(p.grad is not None for p in self._parameters):
            leaf = self._forest.owned[self._forest.rank][0] if self._leaf is None else self._leaf
            self._sums.add(leaf, [laid_out(p.grad, p, s) for p, s in zip(self._parameters, self._strides, strict=True)])
            for parameter in self._parameters:
                parameter.grad = None


def _divided(sums: Sequence[Tensor | None], divisor: float | Tensor) -> Sequence[Tensor | None]:
    for total in sums:
        if total is not None:
            divide(total, divisor)
    return sums
