"""How do gradients of different samples on different ranks become the gradient of all of them together?

By adding them up over ranks and dividing once. Three ways, each faster than the one before, all with the same result:
one message per parameter after backward (`all_reduce_gradients`: slow, small messages cost as much as larger ones);
in buckets of many parameters (`assign_buckets`); and in buckets that travel while backward still computes the
gradients of earlier layers (`GradientReducer`). Dense gradients only.

    rank 0: [1, 2, 3] --.                            .--> / 2 = [1.5, 2.5, 3.5]
                        +-- all-reduce: [3, 5, 7] ---+
    rank 1: [2, 3, 4] --'                            '--> / 2 = [1.5, 2.5, 3.5]

Run me: `torchrun --nproc-per-node 2 -m paceline.scratch.reduce`, or alone with `python -m`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def all_reduce_gradients(parameters: Iterable[nn.Parameter], divisor: float | Tensor | None = None) -> None:
    """Replace each .grad by its sum over ranks, divided by `divisor`: all of data parallelism.

    A parameter may be unused, its .grad None, on some ranks: these contribute zeros, because all ranks must join
    every collective, or a rank's next message would be added to another parameter's. Unused on *all* ranks, it stays
    None: an optimizer skips None, but for a zero it would still decay the weight (AdamW) or move it by old momentum.

    Args:
        parameters: the same ones in the same order on every rank.
        divisor: a number, or a scalar tensor of any float type on the gradients' device; the same on every rank. By
            default the world size, so that .grad becomes the mean over ranks. To train on shares of different sizes,
            back-propagate sums, and divide by the number of samples of all ranks: a mean of means would be wrong.
    """
    in_order = list(parameters)
    if not in_order:
        return
    if divisor is None:
        divisor = dist.get_world_size()
    used = torch.tensor([p.grad is not None for p in in_order], dtype=torch.uint8, device=in_order[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)  # one small message: used by any rank?
    for parameter, is_used in zip(in_order, used.tolist(), strict=True):
        if is_used:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total = grad.contiguous()  # a collective sends memory, so strides must be the same on every rank
            dist.all_reduce(total)
            parameter.grad = grad.copy_(divide(total, divisor))


def assign_buckets(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Group item indices, last item first, into runs of at most `capacity` bytes (a larger item gets its own run).

    Last first, because backward reaches the last layers first: their bucket can travel while the rest computes.

        assign_buckets([4, 4, 4, 9, 2], capacity=8) == [[4], [3], [2, 1], [0]]

    Args:
        sizes: of the items, in bytes.
        capacity: of a bucket, in bytes.
    """
    buckets: list[list[int]] = []
    room = 0
    for index in reversed(range(len(sizes))):
        if not buckets or sizes[index] > room:
            buckets.append([])
            room = capacity
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets


class GradientReducer:
    """Sums gradients over ranks while backward still runs.

        reducer = GradientReducer(model)
        with reducer.paused():
            loss(first_microbatch).backward()   # only adds to .grad
        loss(last_microbatch).backward()        # starts each bucket as soon as its last gradient is there
        reducer.finish()                        # waits; .grad is the mean over ranks

    Every rank starts the buckets in the same order (0, 1, 2, ...), whatever order its own gradients arrive in, and
    starts all of them, even those without a gradient: otherwise messages would be paired wrongly, or waited for.
    So every step ends with `finish`, or after an error with `reset`, on every rank.
    """

    def __init__(self, module: nn.Module, *, bucket_bytes: int = 25 << 20, group: dist.ProcessGroup | None = None):
        """Hook into the parameters of `module` that require a gradient now.

        Args:
            module: the same on every rank (`replicate.broadcast_module` makes sure).
            bucket_bytes: large enough to use the network well, small enough that the first bucket leaves early.
            group: the ranks to sum over; by default all. Other collectives that run during backward (synchronised
                batch norm) need a group of their own: within one, all ranks must start everything in one order.
        """
        self._group = group
        self._buckets = buckets_of([p for p in module.parameters() if p.requires_grad], bucket_bytes)
        self._bucket_of = {p: index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._paused = False
        self._forget()
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._bucket_of]

    @contextmanager
    def paused(self) -> Generator[None]:
        """Inside, backward only adds to .grad: every micro-batch of an accumulated step except the last."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @torch.no_grad()
    def finish(self, divisor: float | Tensor | None = None) -> None:
        """Return when every .grad holds the sum over ranks, divided by `divisor`.

        None is treated as by `all_reduce_gradients`. Each .grad is then a piece of its bucket, a new tensor.

        Args:
            divisor: a number, or a scalar tensor of any float type on the gradients' device; the same on every rank.
                By default the number of ranks, which gives the mean.
        """
        if divisor is None:
            divisor = dist.get_world_size(self._group)
        try:
            self._start_rest()
            for parameters, flat, work in self._in_flight:
                work.wait()
                unpack(divide(flat, divisor), parameters)
        finally:
            self._forget()

    def reset(self) -> None:
        """Make the reducer usable again after an exception in forward or backward; .grad is as the exception left it.

        The buckets that this rank has not started are started here: other ranks, which may be waiting in `finish`,
        have started them, and messages of the next step must not meet those of this one.
        """
        try:
            self._start_rest()
            for _, _, work in self._in_flight:
                work.wait()
        finally:
            self._forget()

    def remove(self) -> None:
        """Take the hooks off the parameters: backward is again what it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _forget(self) -> None:
        self._missing = [set(bucket) for bucket in self._buckets]
        self._next = 0  # the first bucket not yet started
        self._in_flight: list[tuple[list[nn.Parameter], Tensor, dist.Work]] = []

    def _on_gradient(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        bucket = self._bucket_of[parameter]
        if self._paused and bucket >= self._next:
            return
        missing = self._missing[bucket]
        if parameter not in missing:
            raise RuntimeError(
                "a second backward in one step: its gradients would miss the buckets that have left. Run every "
                "backward of the step but the last inside `with reducer.paused()`, and `finish()` after the last."
            )
        missing.remove(parameter)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._start_next()

    def _start_rest(self) -> None:
        while self._next < len(self._buckets):
            self._start_next()

    @torch.no_grad()
    def _start_next(self) -> None:
        parameters = self._buckets[self._next]
        flat = named(pack(parameters, [p.grad for p in parameters]), f"bucket {self._next}")
        self._next += 1
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None  # None only for ranks outside the group
        self._in_flight.append((parameters, flat, work))


def buckets_of(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters in buckets, one type in each, ordered by when backward will have filled them."""
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for position, parameter in enumerate(parameters):
        alike[parameter.dtype, parameter.device].append(position)
    buckets: list[list[int]] = []
    for positions in alike.values():
        sizes = [parameters[i].numel() * parameters[i].element_size() for i in positions]
        buckets += [[positions[i] for i in run] for run in assign_buckets(sizes, bucket_bytes)]
    buckets.sort(key=min, reverse=True)  # full when its earliest layer has its gradient
    return [[parameters[i] for i in bucket] for bucket in buckets]


def named(tensor: Tensor, name: str) -> Tensor:
    """Give the collective that `tensor` is passed to a name, for whoever watches; torch itself takes no notice."""
    vars(tensor)["collective"] = name
    return tensor


def pack(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None] | None, padded: int = 0) -> Tensor:
    """All gradients in one tensor, then one number for each: 1 where there is a gradient, 0 where it is None.

    (2, 3) and (4,), the second without gradient -> (12,): 6 numbers, 4 zeros, 1, 0. After the sum over ranks the last
    ones tell how many ranks used each parameter; a message of their own would cost a round trip. Zeros fill it up to
    the length `padded`. `grads` of None are None for each.
    """
    grads = [None] * len(parameters) if grads is None else grads
    used = parameters[0].new_ones(len(parameters))
    for index, grad in enumerate(grads):
        if grad is None:
            used[index] = 0
    pieces = [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, grads, strict=True)]
    padding = max(0, padded - sum(p.numel() for p in pieces) - len(used))
    return torch.cat([*pieces, used, used.new_zeros(padding)])


def unpack(flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Give each parameter its piece of `flat`, of the length of an unpadded `pack`, as .grad."""
    *pieces, used = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for index, (parameter, piece) in enumerate(zip(parameters, pieces, strict=True)):
        # Looked at only if this rank did not use it itself: on a GPU, looking means waiting.
        if parameter.grad is not None or used[index] != 0:
            grad = piece.view(parameter.shape)
            # A gradient has its parameter's strides: torch's fused optimizers walk both through memory side by side.
            parameter.grad = grad if parameter.is_contiguous() else torch.empty_like(parameter).copy_(grad)


def divide(total: Tensor, divisor: float | Tensor) -> Tensor:
    """`total` /= `divisor`, keeping its type.

    Through float32 at least: a GPU would turn a scalar tensor into the type of `total` first, and 70,000 tokens are
    infinite in float16.
    """
    if total.element_size() < 4:
        return total.copy_(total.float().div_(divisor))
    return total.div_(divisor)


def _main() -> None:
    from paceline.scratch._demo import joined_world, of_all_ranks, say

    def show(what: str, mine: Tensor | None) -> None:
        assert mine is not None
        say(f"{what:<32}" + "   ".join(f"rank {rank}: {values}" for rank, values in enumerate(of_all_ranks(mine))))

    with joined_world() as (rank, world_size):
        data = torch.tensor([1.0, 2.0, 3.0]) + rank
        show("gradients", data)
        total = data.clone()
        dist.all_reduce(total)
        show("all-reduced: their sum", total)
        show("divided by the world size", total / world_size)

        parameter = nn.Parameter(torch.zeros(3))
        (parameter * data).sum().backward()  # the gradient of parameter * data is data
        all_reduce_gradients([parameter])
        show("all_reduce_gradients", parameter.grad)

        model = nn.ParameterDict({"first": torch.zeros(3), "second": torch.zeros(3)})
        reducer = GradientReducer(model, bucket_bytes=12)  # a bucket for each
        ((model["first"] + model["second"]) * data).sum().backward()  # starts both
        reducer.finish()
        show("GradientReducer, bucket 0", model["second"].grad)
        show("GradientReducer, bucket 1", model["first"].grad)


if __name__ == "__main__":
    _main()
