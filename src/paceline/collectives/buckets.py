"""Groups gradients into buckets; packs, divides and lays them out in memory."""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_not

import torch
from torch import Tensor, nn

from paceline.collectives.sum_tree import Grads
from paceline.collectives.torch_collectives import Group, all_gather_json
from paceline.errors import UsageError

BUCKET_BYTES = 25 << 20  # large enough for the full bandwidth of the network
is_present, grad_of = partial(is_not, None), attrgetter("grad")
FIRST_BUCKET_BYTES = 1 << 20  # of the first bucket, if buckets are larger: it is sent early
ALIGNED_BYTES = 64
Bucket = Sequence[nn.Parameter]
Layout = tuple[Sequence[int], Sequence[int]]  # the shape and strides of a tensor


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def compute_bucket_assignment(sizes: Sequence[int], capacity: int, first: int = 0) -> list[list[int]]:
    """Group item indices, last item first, into runs of at most `capacity` bytes. A larger item gets a separate run.

    Backward reaches the last layers first: their bucket is sent while the other layers compute. The first bucket is
    full at `first` bytes.

        compute_bucket_assignment([4, 4, 4, 9, 2], capacity=8) == [[4], [3], [2, 1], [0]]
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


def assign_items_to_least_loaded(sizes: Sequence[int], holders: int) -> list[list[int]]:
    """Distribute item indices over holders: the largest item first, each to the holder with the smallest total."""
    loads, indices_by_holder = [0] * holders, [list[int]() for _ in range(holders)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        holder = loads.index(min(loads))
        loads[holder] += sizes[index]
        indices_by_holder[holder].append(index)
    return indices_by_holder


def group_into_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, kinds: Mapping[nn.Parameter, int] | None = None
) -> list[list[nn.Parameter]]:
    """The parameters in buckets of one type and one of the `kinds` each, in the order in which backward fills them."""
    by_kind: dict[tuple[torch.dtype, torch.device, int], list[int]] = defaultdict(list)
    for position, parameter in enumerate(parameters):
        by_kind[parameter.dtype, parameter.device, (kinds or {}).get(parameter, 0)].append(position)
    buckets: list[list[int]] = []
    for positions in by_kind.values():
        sizes = [parameters[i].numel() * parameters[i].element_size() for i in positions]
        first = FIRST_BUCKET_BYTES if bucket_bytes > FIRST_BUCKET_BYTES else 0
        buckets += [[positions[i] for i in run] for run in compute_bucket_assignment(sizes, bucket_bytes, first)]
    buckets.sort(key=min, reverse=True)  # a bucket is full when its earliest layer has its gradient
    return [[parameters[i] for i in bucket] for bucket in buckets]


class PackedBucket:
    """A bucket of gradients in one tensor: the elements of each gradient, then one flag for each: 0 for None, else 1.

    (2, 3) and (4,) float32, the second without gradient -> (34,): 6 numbers, 10 zeros; 4 zeros, 12 more; 1, 0. Each
    gradient begins at a multiple of 64 bytes, like those of autograd: a fused optimizer may choose its kernel by that.
    Its elements are in the memory order of its layout, so that a device copies all gradients in one kernel. After the
    sum over ranks, a flag is the number of ranks that used the parameter. A separate message would cost a round trip.
    """

    def __init__(
        self, parameters: Bucket, layouts: Sequence[Layout] | None = None, padded_size: Callable[[int], int] = int
    ) -> None:
        """`layouts`: the same on all ranks. None: contiguous. `padded_size`: from the size to that of the tensor."""
        self._parameters = parameters
        self._layouts = [_contiguous_layout(p) for p in parameters] if layouts is None else layouts
        self._orders = [_memory_order(strides) for _, strides in self._layouts]
        gaps = [-p.numel() % (ALIGNED_BYTES // p.element_size()) for p in parameters]
        self._sizes = [size for p, gap in zip(parameters, gaps, strict=True) for size in (p.numel(), gap)]
        self.size = sum(self._sizes) + len(parameters)
        like = parameters[0].detach()
        self._gaps = [(like.new_zeros(gap),) if gap else () for gap in gaps]
        self._flags, self._padding = like.new_ones(len(parameters)), like.new_zeros(padded_size(self.size) - self.size)

    def pack(self, grads: Sequence[Tensor | None] | None) -> Tensor:
        """The tensor; `grads` may be None if no parameter has a gradient."""
        grads = [None] * len(self._parameters) if grads is None else grads
        flags, pieces = self._flags, list[Tensor]()
        for index, (grad, order, gap) in enumerate(zip(grads, self._orders, self._gaps, strict=True)):
            if grad is None:
                grad = torch.zeros_like(self._parameters[index])
                flags = flags.clone() if flags is self._flags else flags
                flags[index] = 0
            pieces.append((grad if order is None else grad.permute(order)).reshape(-1))
            pieces += gap
        return torch.cat([*pieces, flags, self._padding])

    def unpack(self, flat: Tensor, used_here: Sequence[bool]) -> None:
        """Set each .grad to its part of `flat`, a sum over ranks, or to None if no rank used the parameter."""
        *pieces, flags = flat[: self.size].split([*self._sizes, len(self._parameters)])
        # Read the flags only if this rank did not use all parameters: on a GPU the host would wait.
        used_anywhere: Sequence[float] = used_here if all(used_here) else flags.tolist()
        parts = zip(pieces[::2], self._layouts, used_anywhere, strict=True)
        assign_grads(self._parameters, [piece.as_strided(*layout) if used else None for piece, layout, used in parts])


def _memory_order(strides: Sequence[int]) -> list[int] | None:
    """The dimensions in the order of memory. None: they are in this order."""
    order = sorted(range(len(strides)), key=lambda dimension: -strides[dimension])
    return None if order == [*range(len(strides))] else order


def divide(total: Tensor, divisor: float | Tensor) -> Tensor:
    """`total` /= `divisor`, without a change of type.

    Computed at least in float32. A GPU would first convert a scalar tensor to the type of `total`, and 70,000 tokens
    are infinite in float16.
    """
    if isinstance(divisor, float) and divisor == 1.0:
        return total
    if total.element_size() < 4:
        return total.copy_(total.float().div_(divisor))
    return total.div_(divisor)


def divide_in_place(totals: Iterable[Tensor], divisor: float | Tensor) -> None:
    has_effect = isinstance(divisor, Tensor) or divisor != 1.0
    for group, number in group_tensors_by_dtype(totals, divisor) if has_effect else ():
        if group[0].element_size() < 4:
            for total in group:
                divide(total, divisor)
        else:
            torch._foreach_div_(group, number)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def group_tensors_by_dtype(
    tensors: Iterable[Tensor], number: float | Tensor
) -> Generator[tuple[list[Tensor], float | Tensor]]:
    """Groups of tensors of one type, each with `number` in the form for a foreach kernel: on a GPU, of that type."""
    groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    for dtype, group in groups.items():
        yield group, number.to(dtype) if isinstance(number, Tensor) and number.device.type != "cpu" else number


def numels_and_dtypes(parameters: Sequence[nn.Parameter]) -> tuple[list[int], list[torch.dtype]]:
    return [p.numel() for p in parameters], [p.dtype for p in parameters]


def agree_on_gradient_layouts(parameters: Bucket, ranks: int, group: Group = None) -> list[Layout]:
    """The layout of each gradient in a sum: that of its parameter, if dense and equal on all ranks (a collective)."""
    if not parameters:
        return []
    strides = [p.stride() if _is_dense(p) else () for p in parameters]
    by_rank = all_gather_json(strides, ranks, parameters[0].device, group, name="layouts of gradients")
    agreed = [s != () and all(other[i] == by_rank[0][i] for other in by_rank) for i, s in enumerate(strides)]
    pairs = zip(parameters, strides, agreed, strict=True)
    return [(p.shape, stride) if same else _contiguous_layout(p) for p, stride, same in pairs]


def _contiguous_layout(parameter: Tensor) -> Layout:
    return parameter.shape, torch.empty(parameter.shape, device="meta").stride()


def _is_dense(tensor: Tensor) -> bool:
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != reach:
            return False
        reach *= size
    return tensor.numel() > 0


def convert_gradients_to_layouts(
    grads: Grads | None, dtypes: Sequence[torch.dtype], layouts: Sequence[Layout]
) -> Grads | None:
    """The list, with a copy in place of each gradient that has other strides or another type."""
    for index, grad in enumerate(grads or ()):
        if grads and grad is not None and (grad.stride() != layouts[index][1] or grad.dtype != dtypes[index]):
            grads[index] = torch.empty_strided(*layouts[index], dtype=dtypes[index], device=grad.device).copy_(grad)
    return grads


def assign_grads(parameters: Sequence[nn.Parameter], sums: Sequence[Tensor | None]) -> None:
    for parameter, grad in zip(parameters, sums, strict=True):
        # torch's fused optimizers read parameter and gradient in memory order: their strides must be equal.
        if grad is not None and grad.stride() != parameter.stride() and _is_dense(parameter):
            grad = torch.empty_like(parameter).copy_(grad)
        parameter.grad = grad


def sparse_gradient_error(what: str, strategy: str = "") -> UsageError:
    by = f"strategy {strategy}" if strategy else "this strategy"
    return UsageError(code="sparse-gradient", what=what, strategy=by)
