"""Gradient reduction gives the exact sum over ranks for unused, accumulated, reordered and failing gradients."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.odd_model import counted_exchanges, over_torch
from tests.collectives.one_backward import one_backward
from tests.run_ranks import run_ranks
from torch import Tensor, nn

from paceline.collectives.buckets import BUCKET_BYTES, compute_bucket_assignment
from paceline.collectives.reducer import Reducer
from paceline.collectives.sum_tree import LeafPartition
from paceline.errors import UsageError

# ---- buckets: pure


@settings(deadline=None)
@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_buckets_hold_everything_once_last_first_and_no_more_than_they_can(sizes: list[int], capacity: int) -> None:
    buckets = compute_bucket_assignment(sizes, capacity)
    assert [i for bucket in buckets for i in bucket] == list(reversed(range(len(sizes))))
    for bucket in buckets:
        assert bucket and (len(bucket) == 1 or sum(sizes[i] for i in bucket) <= capacity)
    for before, after in pairwise(buckets):  # none is opened while the last one has room
        assert sum(sizes[i] for i in before) + sizes[after[0]] > capacity


@settings(deadline=None)
@given(st.lists(st.integers(1, 50)), st.integers(1, 60), st.integers(1, 60))
def test_the_first_bucket_leaves_as_soon_as_it_is_worth_a_message(sizes: list[int], capacity: int, first: int) -> None:
    one, *others = compute_bucket_assignment(sizes, capacity, first) or [[]]
    assert sum(sizes[i] for i in one[:-1]) < first
    assert not others or sum(sizes[i] for i in one) >= first
    assert others == compute_bucket_assignment(sizes[: len(sizes) - len(one)], capacity)


def test_the_docstrings_example() -> None:
    assert compute_bucket_assignment([4, 4, 4, 9, 2], capacity=8) == [[4], [3], [2, 1], [0]]


# ---- on three ranks


class Mixed(nn.Module):
    """Parameters of two types and two layouts. Each is used only by the ranks in `used_by`."""

    used_by = ((0, 1, 2), (0, 1, 2), (1,), (), (0, 2), (0, 1, 2), (0, 1, 2))

    def __init__(self) -> None:
        super().__init__()
        double, single = torch.float64, torch.float32
        self.weights = nn.ParameterList(
            [
                torch.ones(4, 3, dtype=double),
                torch.ones(5, dtype=single),
                torch.ones(2, dtype=double),
                torch.ones(3, dtype=double),
                torch.ones((), dtype=single),
                nn.Parameter(torch.ones(3, 6, dtype=double).t()),
                torch.ones(300, dtype=double),
            ]
        )
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def loss(self, values: list[Tensor], used: list[int], order: int = 1) -> Tensor:
        """The gradient of each used weight is this rank's value, for both orders of the sum."""
        return sum(((self.weights[i] * values[i]).sum().double() for i in used[::order]), torch.zeros(()))


def values_of(rank: int, salt: int = 0) -> list[Tensor]:
    torch.manual_seed(1000 * salt + rank)
    return [torch.randn_like(w) for w in Mixed().weights]


def used_on(rank: int) -> list[int]:
    return [i for i, ranks in enumerate(Mixed.used_by) if rank in ranks]


def assert_sums(model: Mixed, divisor: float, world_size: int, *salts: int) -> None:
    for index, weight in enumerate(model.weights):
        users = [rank for rank in Mixed.used_by[index] if rank < world_size]
        if not users:
            assert weight.grad is None, index  # an optimizer must go on skipping it
            continue
        wanted = sum(values_of(rank, salt)[index] for rank in users for salt in salts)
        tolerance = 1e-15 if weight.dtype == torch.float64 else 1e-6
        assert weight.grad is not None and weight.grad.dtype == weight.dtype
        torch.testing.assert_close(weight.grad, wanted / divisor, rtol=tolerance, atol=tolerance)
    assert model.frozen.grad is None


DIVISORS = ((3.0, 3.0), (7, 7.0), (torch.tensor(0.3, dtype=torch.float64), 0.3))


def over_ranks(model: nn.Module, rank: int, world_size: int, bucket_bytes: int = BUCKET_BYTES) -> Reducer:
    return over_torch(
        model, LeafPartition.one_leaf_per_rank(world_size, rank), bucket_bytes=bucket_bytes, in_order=False
    )


def buckets(rank: int, world_size: int) -> None:
    for bucket_bytes in (1, 100, 25 << 20):
        model = Mixed()
        reducer = over_ranks(model, rank, world_size, bucket_bytes)
        for salt, (divisor, number) in enumerate(DIVISORS):
            model.zero_grad()
            # Ranks use the weights in opposite orders, so their hooks fire in opposite orders.
            with one_backward(reducer, rank, is_last=True):
                model.loss(values_of(rank, salt), used_on(rank), -1 if rank == 1 else 1).backward()
            reducer.finish(divisor)
            assert_sums(model, number, world_size, salt)
        model.zero_grad(set_to_none=False)  # zeros in the reducer's own pieces, added to by the next backward
        model.loss(values_of(rank, 9), used_on(rank)).backward()  # outside of every `leaf`: sent in `finish`
        reducer.finish(3)
        assert_sums(model, 3.0, world_size, 9)


def accumulation(rank: int, world_size: int) -> None:
    model = Mixed()
    reducer = over_ranks(model, rank, world_size, 100)
    for _ in range(2):
        model.zero_grad()
        with counted_exchanges() as sizes:
            for salt in (0, 1):
                with one_backward(reducer, rank, is_last=False):
                    model.loss(values_of(rank, salt), used_on(rank)).backward()
            assert sizes == []
            with one_backward(reducer, rank, is_last=True):
                model.loss(values_of(rank, 2), used_on(rank)).backward()
            reducer.finish(3)
        assert_sums(model, 3.0, world_size, 0, 1, 2)
        # Used in an earlier micro-batch only, on any rank: what is in .grad still counts.
        model.zero_grad()
        with one_backward(reducer, rank, is_last=False):
            model.loss(values_of(rank, 0), used_on(rank)).backward()
        with one_backward(reducer, rank, is_last=True):
            model.loss(values_of(rank, 0), used_on(rank)[-1:]).backward()
        reducer.finish(1)
        for index in range(6):  # the last weight alone was used twice
            users = Mixed.used_by[index]
            wanted = sum(values_of(r)[index] for r in users) if users else None
            grad = model.weights[index].grad
            assert grad is None if wanted is None else torch.allclose(grad, wanted, rtol=1e-6, atol=1e-6), index


def overlap(rank: int, world_size: int) -> None:
    """All buckets but the last are sent during backward, with one message each, which includes the flags."""
    layers = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    reducer = over_ranks(layers, rank, world_size, 2 * 8 * 8 * 4)
    during: list[int] = []
    with counted_exchanges() as sizes:
        layers[0].weight.register_hook(lambda _: during.append(len(sizes)))
        with one_backward(reducer, rank, is_last=True):
            layers(torch.ones(2, 8)).sum().backward()
        assert during == [1]  # when the first layer's gradient came, the last two layers' were on their way
        reducer.finish(1)
        assert sizes == [2 * 64 + 2] * 2  # two gradients and two flags each


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("planted")


def errors(rank: int, world_size: int) -> None:
    layers = nn.Sequential(*[nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(3)])
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(3))  # type: ignore[union-attr]
    reducer = over_ranks(layers, rank, world_size, 1)
    data = torch.full((1, 3), float(rank + 1), dtype=torch.float64)

    def backward(*, is_last: bool = True) -> None:
        with one_backward(reducer, rank, is_last=is_last):
            layers(data).sum().backward()

    def step() -> None:
        layers.zero_grad()
        backward()
        reducer.finish(1)
        assert torch.equal(layers[0].weight.grad, torch.full((3, 3), 6.0).double())

    def fail() -> None:
        with pytest.raises(ArithmeticError, match="planted"), one_backward(reducer, rank, is_last=True):
            layers[2](layers[1](Broken.apply(layers[0](data)))).sum().backward()
        reducer.reset()

    step()
    fail()  # on every rank
    step()
    if rank == 1:  # on one rank, in the middle; the others do not wait for ever
        fail()
    else:
        backward()
        reducer.finish(1)
    step()
    for is_last in (True, False):  # too late: the buckets have left
        backward()
        with pytest.raises(UsageError, match="second gradient"):
            backward(is_last=is_last)
        reducer.reset()
    step()
    layers.zero_grad()
    with pytest.raises(KeyError), one_backward(reducer, rank, is_last=False):
        raise KeyError
    with counted_exchanges() as sizes:
        backward()
        assert len(sizes) == 3
        reducer.finish(1)


def small_types(rank: int, world_size: int) -> None:
    tokens = torch.tensor(70_000.0, dtype=torch.float64)  # infinite in float16
    for dtype in (torch.float16, torch.bfloat16):
        model = nn.ParameterList([torch.ones(3, dtype=dtype)])
        reducer = over_ranks(model, rank, world_size)
        with one_backward(reducer, rank, is_last=True):
            (model[0] * 700.0).sum().backward()
        reducer.finish(tokens)
        torch.testing.assert_close(model[0].grad, torch.full((3,), 700.0 * 3 / 70_000).to(dtype), rtol=0.01, atol=0)


def everything(rank: int, world_size: int) -> None:
    buckets(rank, world_size)
    accumulation(rank, world_size)
    overlap(rank, world_size)
    errors(rank, world_size)
    small_types(rank, world_size)


@pytest.mark.ranks
def test_reduction_on_three_ranks(tmp_path: Path) -> None:
    run_ranks(everything, 3, tmp_path)  # in one start: it costs more than all checks; a traceback names the check
