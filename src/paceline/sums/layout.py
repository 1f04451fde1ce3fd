"""How gradients lie in memory, so that ranks can add them up place by place, and optimizers read them."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.sums.gather import gather_over_torch

Strides = tuple[int, ...]


def kinds(parameters: Sequence[nn.Parameter]) -> tuple[list[int], list[torch.dtype]]:
    """Elements and types."""
    return [p.numel() for p in parameters], [p.dtype for p in parameters]


def agreed_strides(parameters: Sequence[nn.Parameter], ranks: int) -> list[Strides]:
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


def laid_out(grad: Tensor | None, parameter: nn.Parameter, strides: Strides) -> Tensor | None:
    """The gradient with these strides and the parameter's type; the same tensor, if it has them already."""
    if grad is None:
        return None
    if grad.stride() == strides and grad.dtype == parameter.dtype:
        return grad
    return torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device=grad.device).copy_(grad)


def check_dense(grads: Iterable[tuple[nn.Parameter, Tensor | None]], names: Mapping[nn.Parameter, str]) -> None:
    """Raise UsageError if one of these gradients is sparse."""
    for parameter, grad in grads:
        if grad is not None and grad.layout is not torch.strided:
            name = names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")
            raise sparse_gradient(f"the gradient of {name} has the layout {grad.layout}")


def sparse_gradient(what: str, strategy: str = "") -> UsageError:
    """An error for a gradient that is not dense; `what` says which."""
    return UsageError(
        f"{what}, and {f'strategy {strategy}' if strategy else 'this strategy'} adds up dense gradients only. Leave "
        "sparse=True out (of nn.Embedding, nn.EmbeddingBag, F.embedding; then use Adam in place of SparseAdam). Or use "
        "strategy 'ddp', or 'single' for one process"
    )


def flat(tensor: Tensor | None) -> Tensor | None:
    """(n,): the same memory in its order, whatever the shape."""
    return None if tensor is None else tensor.as_strided((tensor.numel(),), (1,))


def give(parameter: nn.Parameter, strides: Strides, grad: Tensor | None, result: Tensor | None) -> None:
    """Let .grad be the sum: `grad`, in whose memory it is, or `result` (n,) where this rank had nothing to add."""
    if grad is None and result is not None:
        grad = result.as_strided(parameter.shape, strides)
    # A gradient has its parameter's strides: torch's fused optimizers walk both through memory side by side.
    if grad is not None and grad.stride() != parameter.stride() and _is_dense(parameter):
        grad = torch.empty_like(parameter).copy_(grad)
    parameter.grad = grad
