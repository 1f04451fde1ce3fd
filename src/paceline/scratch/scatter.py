"""How does each rank get the sum of *its share* of the gradients, without anybody ever holding all sums?

As in `tree`, gradients are added up over virtual ranks in the order of one fixed tree, in buckets, while backward
still runs. But the sums of a share stay with the rank that updates it (`zero`): a reduce-scatter, half of what an
all-reduce sends. What a bucket's gradients took is free as soon as the bucket has arrived, so with one micro-batch for
each rank no more than a few buckets of whole gradients exist at any time.

    bucket, 2 ranks     rank 0 sends its gradients of share 1, and receives rank 1's of share 0
                        rank 0 keeps the sum of share 0, rank 1 of share 1

With several micro-batches for each rank the gradients are added up before they leave, and so exist as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.scratch.reduce import divide, named
from paceline.scratch.tree import Forest, added_each, tree_sum
from paceline.scratch.zero import ALIGNED, Bucket, Shards, round_up

MOST_ON_THEIR_WAY = 2  # buckets: one travels while the next one fills


class Scattering(Protocol):
    """A sum over all leaves, on its way to those who keep a share of it each."""

    def end(self) -> Tensor:
        """(n / N,): this rank's share of the sum; new memory, or that of the given sums."""
        ...


Scatter = Callable[[Forest, Sequence[Tensor], "dist.ProcessGroup | None", str], Scattering]
"""(forest, own subtrees' sums (n,) each, group, name): begins it. Any number may be begun before the first one ends."""


class AllToAll:
    """The transport that torch.distributed has everywhere: every rank gets all subtrees of its share, and adds."""

    def __init__(
        self, forest: Forest, own: Sequence[Tensor], group: dist.ProcessGroup | None = None, name: str = ""
    ) -> None:
        """n must be equal shares for all ranks."""
        self._nodes, self._own = forest.nodes(), own[0]
        world_size, counts = len(self._nodes), [len(nodes) for nodes in self._nodes]
        self._share = len(own[0]) // world_size
        self._work: dist.Work | None = None
        if world_size > 1:
            self._own = own[0] if len(own) == 1 else torch.stack([o.view(world_size, -1) for o in own], 1).flatten()
            self._received = own[0].new_empty(sum(counts) * self._share)
            self._work = dist.all_to_all_single(
                self._received, named(self._own, name),
                [count * self._share for count in counts], [counts[forest.rank] * self._share] * world_size,
                group=group, async_op=True,
            )  # fmt: skip

    def end(self) -> Tensor:
        """See Scattering."""
        if self._work is None:
            return self._own
        self._work.wait()
        order = [node for nodes in self._nodes for node in nodes]
        parts = dict(zip(order, self._received.view(-1, self._share).unbind(), strict=True))
        total = tree_sum(parts, Tensor.add_, self._nodes[-1][-1][1]).clone()
        parts.clear()  # with the clone: else the subtrees of all ranks would stay, held by the sum and a cycle
        return total


class ScatterReducer:
    """Gives each piece of `Shards` its gradient; used as `tree.TreeReducer`, whose rules hold here too.

        shards = Shards(model, rank, world_size)
        reducer = ScatterReducer(shards, Forest([(0, 2), (2, 3)], rank))
        for virtual_rank in my_virtual_ranks:
            with reducer.leaf(virtual_rank, is_last=virtual_rank == my_virtual_ranks[-1]):
                loss(...).backward()
        reducer.finish(divisor)                  # the pieces' .grad is the sum over all virtual ranks, divided

    The module's own parameters have no gradient then. A piece's is None where no virtual rank has used its parameter.
    """

    def __init__(
        self,
        shards: Shards,
        forest: Forest,
        *,
        group: dist.ProcessGroup | None = None,
        scatter: Scatter = AllToAll,
    ) -> None:
        self._shards, self._buckets, self._forest = shards, shards.buckets, forest
        self._group, self._scatter = group, scatter
        self._bucket_of = {p: index for index, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._forget()
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._bucket_of]

    @contextmanager
    def leaf(self, virtual_rank: int, *, is_last: bool, counted: bool = True) -> Generator[None]:
        """Around one backward of a virtual rank; see `tree.TreeReducer.leaf`."""
        if self._leaf is None and not self._started:
            for piece in self._shards.pieces.values():  # of the last step: its memory is needed now
                piece.parameter.grad = None
        if self._leaf not in (None, virtual_rank):
            self._take_away()
        self._leaf, self._leaving = virtual_rank, is_last and counted
        yield
        self._leaving = False
        if not counted:
            for parameter in self._bucket_of:
                parameter.grad = None
            self._leaf = None

    @torch.no_grad()
    def finish(self, divisor: float | Tensor) -> None:
        """Return when every piece's .grad holds the sum over all virtual ranks, divided by `divisor`."""
        try:
            self._end_all()
            for bucket, share in zip(self._buckets, self._arrived, strict=True):
                self._hand_out(bucket, share, divisor)
        finally:
            self._forget()

    def reset(self) -> None:
        """Make the reducer usable again after an exception, as `GradientReducer.reset` does."""
        try:
            self._end_all()
        finally:
            self._forget()

    def remove(self) -> None:
        """Take the hooks off the parameters: backward is again what it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _forget(self) -> None:
        self._leaf: int | None = None
        self._leaving = False
        self._missing = [set(bucket.parameters) for bucket in self._buckets]
        self._sums = [self._forest.partial_sums(added_each) for _ in self._buckets]
        self._started = 0
        self._on_their_way: deque[Scattering] = deque()
        self._arrived: list[Tensor] = []

    def _on_gradient(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        bucket = self._bucket_of[parameter]
        if not self._leaving and bucket >= self._started:
            return
        if parameter not in self._missing[bucket]:
            raise RuntimeError("a second backward in the step's last micro-batch: its gradients would be lost")
        self._missing[bucket].remove(parameter)
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start_next()

    @torch.no_grad()
    def _take_away(self) -> None:
        for index in range(self._started, len(self._buckets)):
            self._add_leaf(index)

    def _add_leaf(self, index: int) -> None:
        parameters = self._buckets[index].parameters
        if self._leaf is not None and any(p.grad is not None for p in parameters):
            self._sums[index].add(self._leaf, [p.grad for p in parameters])  # not copied: they become the sum's own
            for parameter in parameters:
                parameter.grad = None

    @torch.no_grad()
    def _start_next(self) -> None:
        index = self._started
        self._started += 1
        self._add_leaf(index)
        bucket, world_size = self._buckets[index], self._shards.world_size
        own = [_packed(bucket, sums, world_size) for sums in self._sums[index].finish()]
        self._sums[index] = self._forest.partial_sums(added_each)  # the gradients are copied: let them go
        self._on_their_way.append(self._scatter(self._forest, own, self._group, f"bucket {index}"))
        while len(self._on_their_way) > MOST_ON_THEIR_WAY:
            self._end_first()

    def _end_first(self) -> None:
        self._arrived.append(self._on_their_way.popleft().end())

    def _end_all(self) -> None:
        while self._started < len(self._buckets):
            self._start_next()
        while self._on_their_way:
            self._end_first()

    def _hand_out(self, bucket: Bucket, share: Tensor, divisor: float | Tensor) -> None:
        sums = divide(share[: bucket.share], divisor)
        used: list[float] = share[bucket.share :].tolist()
        for run in bucket.runs[self._shards.rank]:
            if used[run.index]:
                piece = self._shards.pieces[bucket.parameters[run.index]]
                piece.parameter.grad = sums[run.at : run.at + run.stop - run.start]


def _packed(bucket: Bucket, grads: Sequence[Tensor | None] | None, world_size: int) -> Tensor:
    """Each rank's share of the gradients, then one number for each parameter: 1 where there is a gradient.

    (n * (share + flags),): every rank needs to know of its own pieces which ones nobody has used, and a message of
    their own would cost a round trip.
    """
    parameters = bucket.parameters
    flat = [None] * len(parameters) if grads is None else [None if g is None else g.reshape(-1) for g in grads]
    packed = parameters[0].new_zeros(world_size, bucket.share + round_up(len(parameters), ALIGNED))
    for row, runs in zip(packed, bucket.runs, strict=True):
        for run in runs:
            if (gradient := flat[run.index]) is not None:
                row[run.at : run.at + run.stop - run.start] = gradient[run.start : run.stop]
    for index, gradient in enumerate(flat):
        if gradient is not None:
            packed[:, bucket.share + index] = 1
    return packed.flatten()
