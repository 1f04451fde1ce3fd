"""Gradients in buckets and in memory: how they are packed, divided and laid out.

How gradients of many parameters travel together: which ones, in which order, packed into one tensor each.

How gradients lie in memory, so that ranks can add them up place by place, and optimizers read them.
"""

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from paceline.collectives.torch_collectives import gather_over_torch
from paceline.errors import UsageError

BUCKET_BYTES = 25 << 20  # large enough to use the network well
FIRST_BYTES = 1 << 20  # where buckets are larger: the first one leaves early
ALIGNED_BYTES = 64


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that receive gradients, in the module's order."""
    return [p for p in module.parameters() if p.requires_grad]


def assign_buckets(sizes: Sequence[int], capacity: int, first: int = 0) -> list[list[int]]:
    """Group item indices, last item first, into runs of at most `capacity` bytes (a larger item gets its own run).

    Last first, because backward reaches the last layers first: their bucket can travel while the rest computes.

        assign_buckets([4, 4, 4, 9, 2], capacity=8) == [[4], [3], [2, 1], [0]]

    Args:
        sizes: of the items, in bytes.
        capacity: of a bucket, in bytes.
        first: the first one is full as soon as it has so many.
    """
    buckets: list[list[int]] = []
    room = assigned = 0
    for index in reversed(range(len(sizes))):
        if not buckets or (assigned >= first and sizes[index] > room):
            buckets.append([])
            room = capacity if assigned >= first else 0
        buckets[-1].append(index)
        room, assigned = room - sizes[index], assigned + sizes[index]
    return buckets


def buckets_of(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters in buckets, one type in each, ordered by when backward will have filled them."""
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for position, parameter in enumerate(parameters):
        alike[parameter.dtype, parameter.device].append(position)
    buckets: list[list[int]] = []
    for positions in alike.values():
        sizes = [parameters[i].numel() * parameters[i].element_size() for i in positions]
        first = FIRST_BYTES if bucket_bytes > FIRST_BYTES else 0
        buckets += [[positions[i] for i in run] for run in assign_buckets(sizes, bucket_bytes, first)]
    buckets.sort(key=min, reverse=True)  # full when its earliest layer has its gradient
    return [[parameters[i] for i in bucket] for bucket in buckets]


def pack(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None] | None, padded: int = 0) -> Tensor:
    """All gradients in one tensor, then one number for each: 1 where there is a gradient, 0 where it is None.

    (2, 3) and (4,) float32, the second without gradient -> (34,): 6 numbers, 10 zeros; 4 zeros, 12 more; 1, 0. Each
    begins at a multiple of 64 bytes, as autograd's own gradients do: a fused optimizer may choose another kernel by it.
    After the sum over ranks the last ones tell how many ranks used each parameter; a message of their own would cost a
    round trip. Zeros fill it up to the length `padded`. `grads` of None are None for each.
    """
    grads = [None] * len(parameters) if grads is None else grads
    constant = partial(_constant, parameters[0].device, parameters[0].dtype)
    used = constant(1, len(parameters))
    pieces: list[Tensor] = []
    for index, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        if grad is None:
            used = used.clone()
            used[index] = 0
        pieces.append((torch.zeros_like(parameter) if grad is None else grad).flatten())
        pieces += [constant(0, gap)] if (gap := _gap(parameter)) else []
    padding = max(0, padded - sum(p.numel() for p in pieces) - len(used))
    return torch.cat([*pieces, used, constant(0, padding)])


@lru_cache(maxsize=256)
def _constant(device: torch.device, dtype: torch.dtype, value: int, size: int) -> Tensor:
    """(size,), which nobody changes: a step on a device makes it once only."""
    return torch.full((size,), value, device=device, dtype=dtype)


def packed_size(parameters: Sequence[nn.Parameter]) -> int:
    """The elements of an unpadded `pack`."""
    return sum(p.numel() + _gap(p) for p in parameters) + len(parameters)


def _gap(parameter: Tensor) -> int:
    """Elements after it, up to a multiple of 64 bytes."""
    return -parameter.numel() % (ALIGNED_BYTES // parameter.element_size())


def unpack(flat: Tensor, parameters: Sequence[nn.Parameter], used_here: Sequence[bool]) -> None:
    """Give each parameter its piece of `flat`, a sum of unpadded `pack`s, as .grad; None where no rank has used it."""
    *pieces, used = flat.split([*(n for p in parameters for n in (p.numel(), _gap(p))), len(parameters)])
    # Looked at only if this rank did not use all of them itself: on a GPU, looking means waiting.
    used_anywhere: Sequence[float] = used_here if all(used_here) else used.tolist()
    for parameter, piece, is_used in zip(parameters, pieces[::2], used_anywhere, strict=True):
        if is_used:
            grad = piece.view(parameter.shape)
            # A gradient has its parameter's strides: torch's fused optimizers walk both through memory side by side.
            parameter.grad = grad if parameter.is_contiguous() else torch.empty_like(parameter).copy_(grad)


def divide(total: Tensor, divisor: float | Tensor) -> Tensor:
    """`total` /= `divisor`, keeping its type.

    Through float32 at least: a GPU would turn a scalar tensor into the type of `total` first, and 70,000 tokens are
    infinite in float16.
    """
    if isinstance(divisor, float) and divisor == 1.0:
        return total
    if total.element_size() < 4:
        return total.copy_(total.float().div_(divisor))
    return total.div_(divisor)


def divide_each(totals: Iterable[Tensor], divisor: float | Tensor) -> None:
    """`divide` for all of them, in few kernels."""
    for group, number in by_type(totals, divisor):
        if group[0].element_size() < 4:
            for total in group:
                divide(total, divisor)
        else:
            torch._foreach_div_(group, number)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def by_type(tensors: Iterable[Tensor], number: float | Tensor) -> Generator[tuple[list[Tensor], float | Tensor]]:
    """The tensors of each type together, and `number` as a kernel for many of them takes it: a GPU's in their type.

    None if the host knows that `number`, a factor or divisor, is 1.
    """
    if isinstance(number, float) and number == 1.0:
        return
    groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    for dtype, group in groups.items():
        yield group, number.to(dtype) if isinstance(number, Tensor) and number.device.type != "cpu" else number


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
