"""Gradients of different samples on different ranks become the gradient of all of them together.

By adding them up over ranks and dividing once. Two ways with the same result: one message per parameter after backward
(`all_reduce_gradients`: slow, small messages cost as much as larger ones); and in buckets of many parameters, which
travel while backward still computes the gradients of earlier layers (`OverlappingReducer`). Dense gradients only.

    rank 0: [1, 2, 3] --.                            .--> / 2 = [1.5, 2.5, 3.5]
                        +-- all-reduce: [3, 5, 7] ---+
    rank 1: [2, 3, 4] --'                            '--> / 2 = [1.5, 2.5, 3.5]

Run me: `torchrun --nproc-per-node 2 examples/textbook/reduce.py`, or alone with `python`.
"""

from collections.abc import Iterable

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
    used = torch.tensor([p.grad is not None for p in in_order], dtype=torch.uint8, device=in_order[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)  # one small message: used by any rank?
    for parameter, is_used in zip(in_order, used.tolist(), strict=True):
        if is_used:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total = grad.contiguous()  # a collective sends memory, so strides must be the same on every rank
            dist.all_reduce(total)
            parameter.grad = grad.copy_(_divided(total, dist.get_world_size() if divisor is None else divisor))


class OverlappingReducer:
    """Sums gradients of one type over ranks while backward still runs.

        reducer = OverlappingReducer(model)
        loss.backward()        # starts each bucket as soon as its last gradient is there
        reducer.finish(n)      # waits; .grad is the sum over ranks, divided by n

    Every rank starts the buckets in the same order (0, 1, 2, ...), whatever order its own gradients arrive in, and
    starts all of them, even those without a gradient: otherwise messages would be paired wrongly, or waited for.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 << 20) -> None:
        """Hook into the parameters that require a gradient now; `bucket_bytes` at most in each bucket of several."""
        self._buckets: list[list[nn.Parameter]] = []
        room = 0
        # Last first, because backward reaches the last layers first: their bucket travels while the rest computes.
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            if not self._buckets or parameter.nbytes > room:
                self._buckets.append([])
                room = bucket_bytes
            self._buckets[-1].append(parameter)
            room -= parameter.nbytes
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._begin_step()

    @torch.no_grad()
    def finish(self, divisor: float | Tensor) -> None:
        """Return when every .grad holds the sum over ranks, divided by `divisor`; None as `all_reduce_gradients`."""
        while len(self._started) < len(self._buckets):
            self._start_next()
        for bucket, (flat, work) in zip(self._buckets, self._started, strict=True):
            work.wait()
            *pieces, used = flat.split([*(p.numel() for p in bucket), len(bucket)])
            for parameter, piece, is_used in zip(bucket, pieces, used.tolist(), strict=True):
                parameter.grad = _divided(piece, divisor).view(parameter.shape) if is_used else None
        self._begin_step()

    def _begin_step(self) -> None:
        self._missing = [set(bucket) for bucket in self._buckets]
        self._started: list[tuple[Tensor, dist.Work]] = []

    def _on_gradient(self, parameter: Tensor) -> None:
        for bucket in self._missing:
            bucket.discard(parameter)  # pyright: ignore[reportArgumentType]  # what autograd hands us is the parameter
        while len(self._started) < len(self._buckets) and not self._missing[len(self._started)]:
            self._start_next()

    @torch.no_grad()
    def _start_next(self) -> None:
        bucket = self._buckets[len(self._started)]
        pieces = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket]
        used = bucket[0].new_tensor([p.grad is not None for p in bucket])  # travels along: who used what
        flat = torch.cat([*pieces, used])
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None  # None only for ranks outside the group
        self._started.append((flat, work))


def _divided(total: Tensor, divisor: float | Tensor) -> Tensor:
    """`total` /= `divisor`; through float32 at least, because 70,000 tokens are infinite in float16."""
    if total.element_size() < 4:
        return total.copy_(total.float().div_(divisor))
    return total.div_(divisor)


def _main() -> None:
    from demo import joined_world, of_all_ranks, say_once

    def show(what: str, mine: Tensor | None) -> None:
        assert mine is not None
        say_once(f"{what:<32}" + "   ".join(f"rank {rank}: {values}" for rank, values in enumerate(of_all_ranks(mine))))

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
        reducer = OverlappingReducer(model, bucket_bytes=12)  # a bucket for each
        ((model["first"] + model["second"]) * data).sum().backward()  # starts both
        reducer.finish(world_size)
        show("OverlappingReducer, bucket 0", model["second"].grad)
        show("OverlappingReducer, bucket 1", model["first"].grad)


if __name__ == "__main__":
    _main()
