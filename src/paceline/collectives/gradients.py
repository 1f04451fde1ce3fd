"""How do the gradients of all ranks become one sum, by the best way that there is here?

Where all ranks share memory: after backward, straight over the tensors that autograd has handed out. There is no core
to spare on a CPU, so nothing is won by sending while backward still computes, and everything that gathers gradients in
buckets is one copy more. Elsewhere `scratch.reduce` and `scratch.tree` over torch.distributed; the bits are the same.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from paceline.collectives.gather import gather_over_torch
from paceline.collectives.shared import SharedMemory
from paceline.collectives.transport import shared_memory
from paceline.collectives.tree import MAX_TENSORS, TreeSum
from paceline.scratch.reduce import GradientReducer
from paceline.scratch.tree import Forest, TreeReducer, added_each

Strides = tuple[int, ...]


def gradients_by_leaf(module: nn.Module, forest: Forest) -> TreeReducer | SharedGradients:
    """What sums gradients over virtual ranks, the leaves of `forest`, in its order (a collective)."""
    memory = _memory_for(module)
    return TreeReducer(module, forest) if memory is None else SharedGradients(module, memory, forest)


def gradients_by_rank(module: nn.Module) -> GradientReducer | SharedGradients:
    """What sums gradients over ranks (a collective)."""
    memory = _memory_for(module)
    if memory is None:
        return GradientReducer(module)
    return SharedGradients(module, memory, Forest([(rank, rank + 1) for rank in range(memory.size)], memory.rank))


def _memory_for(module: nn.Module) -> SharedMemory | None:
    parameters = _trained(module)
    on_cpu = all(p.device.type == "cpu" and not p.is_complex() for p in parameters)
    return shared_memory() if on_cpu and 0 < len(parameters) <= MAX_TENSORS else None


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


class SharedGradients:
    """Sums gradients over the leaves of a forest through shared memory. In the place of a TreeReducer:

        sums = SharedGradients(model, memory, Forest([(0, 2), (2, 3)], memory.rank))
        for virtual_rank in my_virtual_ranks:
            with sums.leaf(virtual_rank, is_last=virtual_rank == my_virtual_ranks[-1]):
                loss(...).backward()
        sums.finish(divisor)

    or, where each rank is one leaf, of a GradientReducer. None is treated as by `reduce.all_reduce_gradients`.
    """

    def __init__(self, module: nn.Module, memory: SharedMemory, forest: Forest) -> None:
        self._parameters = _trained(module)
        self._strides = _agreed_strides(self._parameters, memory.size)
        self._forest = forest
        sizes, dtypes = [p.numel() for p in self._parameters], [p.dtype for p in self._parameters]
        self._sum = TreeSum(memory, sizes, dtypes, forest)
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
    def finish(self, divisor: float | Tensor) -> None:
        """Return when every .grad holds the sum over all leaves, divided by `divisor` (a collective)."""
        try:
            self._take_away()
            own = self._sums.finish()
            # its parameters' own memory in order, whatever the shape
            flat = [None if grads is None else [None if g is None else _flat(g) for g in grads] for grads in own]
            first = own[0] or [None] * len(self._parameters)
            results = self._sum.run(flat, divisor)
            for parameter, strides, grad, result in zip(self._parameters, self._strides, first, results, strict=True):
                if grad is None and result is not None:
                    grad = result.as_strided(parameter.shape, strides)
                parameter.grad = _as_parameter(grad, parameter)
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
            self._sums.add(leaf, [_laid_out(p, s) for p, s in zip(self._parameters, self._strides, strict=True)])
            for parameter in self._parameters:
                parameter.grad = None


def _agreed_strides(parameters: Sequence[nn.Parameter], ranks: int) -> list[Strides]:
    """How each gradient lies in memory while it is summed: as its parameter, where all ranks have that alike, dense."""
    mine = [p.stride() if _is_dense(p) else () for p in parameters]
    told = gather_over_torch(mine, ranks)
    plain = [torch.empty(p.shape, device="meta").stride() for p in parameters]
    same = [all(one[i] == told[0][i] for one in told) and mine[i] != () for i in range(len(parameters))]
    return [own if agreed else other for own, other, agreed in zip(mine, plain, same, strict=True)]


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory without gaps, each once."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != reach:
            return False
        reach *= size
    return tensor.numel() > 0


def _laid_out(parameter: nn.Parameter, strides: Strides) -> Tensor | None:
    """Its gradient with these strides and the parameter's type; the same tensor, if it has them already."""
    grad = parameter.grad
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        raise RuntimeError(f"a gradient of layout {grad.layout}: only dense gradients can be summed over ranks")
    if grad.stride() == strides and grad.dtype == parameter.dtype:
        return grad
    return torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype).copy_(grad)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _as_parameter(grad: Tensor | None, parameter: nn.Parameter) -> Tensor | None:
    """A gradient has its parameter's strides: torch's fused optimizers walk both through memory side by side."""
    if grad is None or grad.stride() == parameter.stride() or not _is_dense(parameter):
        return grad
    return torch.empty_like(parameter).copy_(grad)
