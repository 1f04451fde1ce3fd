"""A model with gradients of all kinds, and its gradients summed over virtual ranks, for comparisons of bits."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tests.collectives.one_backward import one_backward
from torch import Tensor, nn

from paceline.collectives.buckets import BUCKET_BYTES, group_into_buckets, trainable_parameters
from paceline.collectives.reducer import Reducer
from paceline.collectives.sum_tree import LeafPartition
from paceline.collectives.torch_communicator import TorchBucketReducer

LARGE = 40_000  # elements: several chunks of 64 KiB


class Odd(nn.Module):
    """Parameters of all kinds: large, small, empty, strided, of several types, and used by some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.large = nn.Parameter(torch.randn(LARGE))
        self.conv = nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(70, 300).t())
        self.brief = nn.Parameter(torch.randn(500).bfloat16())
        self.precise = nn.Parameter(torch.randn(129, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.of_two = nn.Parameter(torch.randn(33))
        self.of_nobody = nn.Parameter(torch.randn(7))
        self.odd_strides = nn.Parameter(torch.randn(6, 9))
        self.odd_strides.register_hook(lambda grad: grad.t().contiguous().t())

    def forward(self, leaf: int) -> Tensor:
        generator = torch.Generator().manual_seed(leaf)
        total = self.empty.sum() + self.frozen.sum()
        for name, p in self.named_parameters():
            if name in ("empty", "frozen", "of_nobody") or (name == "of_two" and leaf not in (1, 2)):
                continue
            values = torch.randn(p.shape, generator=generator) * 10.0 ** (leaf % 3 * 3)
            total = total + (p * values.to(p.dtype) * (p if leaf % 2 else 1)).sum()
        return total


def grads(model: nn.Module) -> dict[str, tuple[bytes, torch.dtype, tuple[int, ...]] | None]:
    found = {}
    for name, p in model.named_parameters():
        g = p.grad
        found[name] = None if g is None else (g.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), g.dtype)
        assert g is None or g.stride() == p.stride() or p.numel() < 2, name
    return found


def over_torch(
    model: nn.Module, partition: LeafPartition, *, bucket_bytes: int = BUCKET_BYTES, in_order: bool = True
) -> Reducer:
    buckets = group_into_buckets(trainable_parameters(model), bucket_bytes)
    return Reducer(partition, TorchBucketReducer(buckets, partition, in_order=in_order))


def by_leaf(sums: Reducer, model: nn.Module, share: range, left_out: int | None) -> dict:
    model.zero_grad(set_to_none=True)
    for leaf in share:
        for part in range(2):  # two micro-batches
            with one_backward(sums, leaf, is_last=leaf == share[-1] and part == 1, counted=leaf != left_out):
                model(leaf + 100 * part).backward()
    sums.finish(torch.tensor(17.0, dtype=torch.float64))
    return grads(model)


@contextmanager
def counted_exchanges() -> Generator[list[int]]:
    """The number of elements of each all-reduce and all-to-all that starts in this context."""
    sizes: list[int] = []
    real = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **options: Any) -> Any:
            sizes.append(tensor.numel())
            return function(tensor, *args, **options)

        return call

    for name, function in real.items():
        setattr(dist, name, counting(function))
    try:
        yield sizes
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
