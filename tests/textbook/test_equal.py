"""The textbook computes the very bits of the product, and what is simple in it is right."""

import math
from pathlib import Path

import norm
import pipeline as pipelining
import pytest
import torch
import tree
from batchnorm import GlobalBatchNorm
from hypothesis import given, settings
from hypothesis import strategies as st
from reduce import OverlappingReducer, all_reduce_gradients
from replicate import copy_from_rank
from sampler import dealt
from scatter import sum_of_share
from tensor import SharedMLP
from tests.collectives.odd_model import over_torch
from tests.collectives.one_backward import one_backward
from tests.collectives.test_reducer import DIVISORS, Mixed, assert_sums, used_on, values_of
from tests.collectives.test_sum_tree import bits, cuts
from tests.run_ranks import run_ranks
from tests.worlds import worlds
from torch import nn
from zero import ShardedOptimizer

from paceline.collectives import buckets
from paceline.collectives.batchnorm import SyncBatchNorm
from paceline.collectives.communicator import make_communicator
from paceline.collectives.norm import ShardedNorm
from paceline.collectives.reducer import make_shard_reducer
from paceline.collectives.replicate import broadcast_module
from paceline.collectives.shards import ParameterShards
from paceline.collectives.sum_tree import LeafPartition, split_into_subtrees
from paceline.data.plan import BatchPlan, virtual_ranks_of

SIZES = (2, 3)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 5))
def test_samples_are_dealt_as_the_products(samples, ranks, batch):
    plan = BatchPlan(samples, ranks * batch, ranks, shuffle=False)
    for rank, share in enumerate(dealt(samples, ranks)):
        steps = [plan.indices(0, step, rank).tolist() for step in range(plan.steps_per_epoch)]
        assert share == [index for step in steps for index in step]
        assert [*map(len, steps[:-1])] == [batch] * (len(steps) - 1)


@settings(deadline=None)
@given(cuts())
def test_the_tree_is_cut_as_the_products(owned):
    leaves = owned[-1][1]
    for run in owned:
        assert tree.complete_subtrees(run, (0, leaves)) == split_into_subtrees(run, leaves)


@pytest.mark.parametrize("size", [1, 64, 65, 1000, 6400])
def test_the_norm_is_the_products(size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).exp2() ** 9
    mine = math.sqrt(norm.pairwise_sum(norm.squares(values)))
    assert mine == ShardedNorm([size], [[(0, 0, size)]], 0, torch.device("cpu"))({0: values}).result()


def net(salt: int) -> nn.Sequential:
    torch.manual_seed(salt)
    return nn.Sequential(nn.Linear(7, 50), nn.ReLU(), nn.Linear(50, 3))


def loss(model: nn.Module, leaf: int) -> torch.Tensor:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(leaf))
    return model(x).square().sum() * 10.0 ** (leaf % 3)


def flat_gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def same_weights(mine: nn.Module, products: nn.Module) -> None:
    for a, b in zip(mine.parameters(), products.parameters(), strict=True):
        assert bits(a) == bits(b)


def of_ranks(rank: int, size: int) -> LeafPartition:
    return LeafPartition([(each, each + 1) for each in range(size)], rank)


def replicate(rank: int, _: int) -> None:
    mine, products = (nn.Sequential(net(rank), nn.BatchNorm1d(3)) for _ in range(2))
    mine[1].running_mean += rank
    copy_from_rank(mine, 1)
    broadcast_module(products, 1)
    same_weights(mine, products)
    assert float(mine[1].running_mean.sum()) == 3


def five_lines(rank: int, size: int) -> None:
    for divisor, number in ((None, float(size)), *DIVISORS):
        model = Mixed()
        model.loss(values_of(rank), used_on(rank)).backward()
        all_reduce_gradients(model.parameters(), divisor)
        assert_sums(model, number, size, 0)
    weight = nn.Parameter(torch.zeros(2, 3))
    grad = torch.arange(6.0).reshape(2, 3)
    weight.grad = grad.t().contiguous().t() if rank == 1 else grad.clone()  # the same numbers, other strides
    all_reduce_gradients([weight])
    torch.testing.assert_close(weight.grad, grad)
    all_reduce_gradients([])  # no parameters: nothing to do, on any rank
    for dtype in (torch.float16, torch.bfloat16):
        small = nn.Parameter(torch.ones(3, dtype=dtype))
        small.grad = torch.full((3,), 700.0, dtype=dtype)
        all_reduce_gradients([small], torch.tensor(70_000.0, dtype=torch.float64))  # infinite in float16
        torch.testing.assert_close(small.grad, torch.full((3,), 0.01 * size).to(dtype), rtol=0.01, atol=0)


def reduce(rank: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # the textbook packs without gaps, and the order in which gloo adds up depends on the length
        patch.setattr(buckets, "ALIGNED_BYTES", 4)
        overlapping(rank, size)


def overlapping(rank: int, size: int) -> None:
    mine, products = net(0), net(0)
    for model in (mine, products):
        model.unused = nn.Module()
        model.unused.weight = nn.Parameter(torch.ones(2))
    ours = OverlappingReducer(mine, 500)
    reducer = over_torch(products, of_ranks(rank, size), bucket_bytes=500, in_order=False)
    for step in range(2):
        for model in (mine, products):
            model.zero_grad()
        loss(mine[:3], rank + 10 * step).backward()
        ours.finish(7.0)
        with one_backward(reducer, rank, is_last=True):
            loss(products[:3], rank + 10 * step).backward()
        reducer.finish(7.0)
        assert mine.unused.weight.grad is None and products.unused.weight.grad is None
        assert bits(flat_gradients(mine)) == bits(flat_gradients(products))


def batchnorm(rank: int, size: int) -> None:
    mine, products = GlobalBatchNorm(3), SyncBatchNorm(3)
    for counts in ((4, 1, 2), (3, 2, 0)):
        torch.manual_seed(rank)
        values = torch.randn(counts[rank], 3).mul(3).add(5)
        inputs = [values.clone().requires_grad_() for _ in range(2)]
        outputs = [layer(x) for layer, x in zip((mine, products), inputs, strict=True)]
        assert bits(outputs[0]) == bits(outputs[1])
        for output in outputs:
            (output * torch.arange(3.0).add(rank)).square().sum().backward()
        assert bits(inputs[0].grad) == bits(inputs[1].grad)
        assert bits(flat_gradients(mine)) == bits(flat_gradients(products))
        assert bits(mine.mean) == bits(products.running_mean) and bits(mine.variance) == bits(products.running_var)


def by_leaf(rank: int, size: int) -> None:
    """The sum over 5 virtual ranks."""
    shares = [virtual_ranks_of(5, each, size) for each in range(size)]
    products, owned = net(0), [(share.start, share.stop) for share in shares]
    reducer = over_torch(products, LeafPartition(owned, rank))
    leaves: dict[tuple[int, int], torch.Tensor] = {}
    for leaf in shares[rank]:
        with one_backward(reducer, leaf, is_last=leaf == shares[rank][-1]):
            loss(products, leaf).backward()
        mine = net(0)
        loss(mine, leaf).backward()
        leaves[leaf, leaf + 1] = flat_gradients(mine)
    reducer.finish(1.0)
    assert bits(tree.sum_over_leaves(leaves, owned)) == bits(flat_gradients(products))


def scatter(rank: int, size: int) -> None:
    flat = torch.randn(4 * size, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    whole = tree.sum_over_leaves({(rank, rank + 1): flat}, of_ranks(rank, size).ranges)
    assert bits(sum_of_share(flat)) == bits(whole.chunk(size)[rank])


def zero(rank: int, size: int) -> None:
    mine, products = net(0), net(0)
    sharded = ShardedOptimizer(mine, lambda share: torch.optim.AdamW(share, lr=0.1))
    optimizer = torch.optim.AdamW(products.parameters(), lr=0.1)
    shards = ParameterShards(products, rank, size)
    shards.shard_optimizer(optimizer)
    reducer = make_shard_reducer(shards, of_ranks(rank, size))
    for step in range(3):
        loss(mine, rank + 10 * step).backward()
        sharded.step(4.0 * size)
        with one_backward(reducer, rank, is_last=True):
            loss(products, rank + 10 * step).backward()
        reducer.finish(4.0 * size)
        optimizer.step()
        same_weights(mine, products)
    count = sum(p.numel() for p in mine.parameters())
    assert sharded.share.numel() * size >= count > sharded.share.numel()


def tensor(rank: int, size: int) -> None:
    layers = [nn.Linear(5, 4 * size), nn.Linear(4 * size, 3)]
    for layer in layers:
        fill(layer)
    up, down = (layer.double() for layer in layers)
    mine, x = SharedMLP(up, down), torch.linspace(-1, 1, 35, dtype=torch.float64).view(7, 5).requires_grad_()
    mine(x).square().sum().backward()
    (here,) = (x.grad,)
    x.grad = None
    down(torch.relu(up(x))).square().sum().backward()
    for cut, whole in (
        (here, x.grad),
        (mine.up.grad, up.weight.grad.chunk(size)[rank]),
        (mine.up_bias.grad, up.bias.grad.chunk(size)[rank]),
        (mine.down.grad, down.weight.grad.chunk(size, dim=1)[rank]),
        (mine.down_bias.grad, down.bias.grad),
    ):
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


def pipeline(rank: int, size: int) -> None:
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double() for _ in range(size)]
    for layer in layers:
        fill(layer[0])
    x, y = (torch.linspace(-1, 1, 33, dtype=torch.float64).view(11, 3) * sign for sign in (1, -2))
    batches = [*zip(x.split([5, 5, 1]), y.split([5, 5, 1]), strict=True)]
    total = pipelining.train_step(layers[rank], (3,), batches, lambda out, y: (out - y).square().sum())
    found = [p.grad.clone() for p in layers[rank].parameters()]
    layers[rank].zero_grad()
    whole = (nn.Sequential(*layers)(x) - y).square().sum()
    whole.backward()
    assert rank < size - 1 or math.isclose(total, whole.item(), rel_tol=1e-12)
    for mine, p in zip(found, layers[rank].parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=0, atol=1e-12)


def fill(layer: nn.Linear) -> None:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(layer.weight.numel())
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))


def everything(rank: int, _: int, folder: str) -> None:
    for size in worlds(rank, SIZES, folder):
        make_communicator("torch" if size == 3 else "auto")
        for page in (replicate, five_lines, reduce, batchnorm, by_leaf, scatter, zero, tensor, pipeline):
            page(rank, size)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(270)
def test_the_textbook_has_the_bits_of_the_product(tmp_path: Path) -> None:
    run_ranks(everything, max(SIZES), tmp_path, str(tmp_path / "worlds"), timeout=240)  # a traceback names the page
