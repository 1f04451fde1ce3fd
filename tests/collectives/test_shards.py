"""Sharded updates and sums have the bits of unsharded ones, and free their memory."""

import copy
import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.one_backward import one_backward
from tests.collectives.test_sum_tree import SIZES, Mixed, Reduced, same_bits
from tests.run_ranks import run_ranks
from tests.worlds import worlds
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from paceline.collectives.reducer import make_shard_reducer
from paceline.collectives.shards import ALIGNMENT_ELEMENTS, MAX_PENDING_BUCKETS, ParameterShards
from paceline.collectives.sum_tree import LeafPartition
from paceline.collectives.torch_collectives import start_reduce_scatter
from paceline.strategies.optimizer_scope import ELEMENT_WISE_OPTIMIZERS

# ---- shares: pure

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=8)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(1, 7), st.sampled_from([500, 25 << 20]), st.randoms(use_true_random=False))
def test_every_element_has_exactly_one_rank(
    shapes: list[tuple[int, ...]], world_size: int, bucket_bytes: int, random: Any
) -> None:
    generator = torch.Generator().manual_seed(random.randrange(2**30))
    plain = nn.ParameterList(
        nn.Parameter(torch.randn(shape, generator=generator).to(random.choice(DTYPES)), random.random() < 0.8)
        for shape in shapes
    )
    covered = [torch.zeros(p.numel(), dtype=torch.int32) for p in plain]
    for rank in range(world_size):
        module = copy.deepcopy(plain)
        before = list(module.parameters())
        shards = ParameterShards(module, rank, world_size, bucket_bytes=bucket_bytes)
        pieces = shards.pieces
        everybody = shards.ranges_by_rank()  # what the others think that we have
        assert everybody[rank] == {p: (piece.start, piece.stop) for p, piece in pieces.items()}
        sizes: dict[torch.dtype, int] = {}
        for index, parameter in enumerate(module.parameters()):
            assert parameter is before[index] and torch.equal(parameter, plain[index])
            if (piece := pieces.get(parameter)) is None:
                continue
            assert parameter.requires_grad and 0 <= piece.start < piece.stop <= parameter.numel()
            assert torch.equal(piece.parameter, parameter.detach().flatten()[piece.start : piece.stop])
            assert (
                piece.start % ALIGNMENT_ELEMENTS == 0
            )  # or the first elements would meet another instruction than in the whole
            covered[index][piece.start : piece.stop] += 1
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + piece.stop - piece.start
        for dtype, size in sizes.items():
            alike = [p for p in plain if p.dtype == dtype and p.requires_grad]
            assert size <= sum(p.numel() for p in alike) / world_size + ALIGNMENT_ELEMENTS * (
                len(alike) + len(shards.buckets)
            )
    for count, parameter in zip(covered, plain, strict=True):
        assert (count == int(parameter.requires_grad)).all()


def test_the_module_stays_what_it_is() -> None:
    first, second, norm = nn.Linear(5, 5), nn.Linear(5, 5), nn.BatchNorm1d(5)
    tied = nn.Parameter(torch.randn(5, 5))
    module = nn.Sequential(first, second, norm).eval()
    first.weight = second.weight = tied
    norm.weight.requires_grad_(False)
    first.bias = nn.Parameter(torch.arange(10.0).reshape(5, 2).t()[0])  # with gaps in memory
    frozen_at = norm.weight.data_ptr()
    before, x = dict(module.named_parameters()), torch.randn(3, 5)
    output = module(x)
    shards = ParameterShards(module, 1, 2)
    assert all(p is before[n] for n, p in module.named_parameters())
    assert second.weight is first.weight is tied
    assert norm.weight.data_ptr() == frozen_at and norm.weight not in shards.pieces
    assert torch.equal(module(x), output)
    # A piece is the parameter's own memory: what the optimizer does to it is done.
    piece = shards.pieces[tied]
    with torch.no_grad():
        piece.parameter.fill_(7.0)
    assert (tied.flatten()[piece.start : piece.stop] == 7.0).all()


# ---- updates, on ranks

WORLD_SIZES = (1, 2, 3)
STEPS = 4
Make = Callable[[Iterable[Any]], Optimizer]


class Model(nn.Module):
    """Parameters smaller and larger than a shard, of two types. The last is never used, the fourth sometimes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = ((37, 11), (), (130,), (65, 3), (1,), (700,), (9,))
        dtypes = [torch.float32, torch.float32, torch.float64] * 3
        self.weights = nn.ParameterList(
            torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)
        )


def give_gradients(model: Model, step: int, *, contiguous: bool) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, weight in enumerate(model.weights):
        gradient = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        weight.grad = None if index == 6 or (index == 3 and step == 1) else gradient
    if not contiguous:
        model.weights[0].grad = torch.randn(model.weights[0].shape[::-1], generator=generator).t()


def groups(model: Model, **options: Any) -> list[dict[str, Any]]:
    """Three groups with different options, not in the model's order. A rank may have no elements of a group."""
    w = list(model.weights)
    return [
        {"params": [w[5], w[0], w[6]], "lr": 0.02, **options},
        {"params": [w[1], w[4]], "lr": 0.5, **options, "weight_decay": 0.0},
        {"params": [w[2], w[3]], **options},
    ]


def cases() -> list[tuple[str, Make, dict[str, Any]]]:
    """(name, class, options): each class in ELEMENT_WISE_OPTIMIZERS, its fused form, and variants with more state."""
    found: list[tuple[str, Make, dict[str, Any]]] = []
    for kind in ELEMENT_WISE_OPTIMIZERS:
        options: dict[str, Any] = {} if kind is torch.optim.Rprop else {"weight_decay": 0.1}
        found.append((kind.__name__, kind, options))
        found.append((f"{kind.__name__} foreach", kind, {**options, "foreach": True}))
        if "fused" in kind.__init__.__annotations__:
            found.append((f"{kind.__name__} fused", kind, {**options, "fused": True}))
    momentum = {"weight_decay": 0.1, "momentum": 0.9}
    found += [("SGD nesterov", torch.optim.SGD, {**momentum, "nesterov": True})]
    found += [("SGD dampened", torch.optim.SGD, {**momentum, "dampening": 0.5, "fused": True})]
    found += [("AdamW amsgrad", torch.optim.AdamW, {"amsgrad": True}), ("Adam fused amsgrad", torch.optim.Adam, {
        "amsgrad": True, "fused": True})]  # fmt: skip
    found += [("RMSprop centered", torch.optim.RMSprop, {**momentum, "centered": True})]
    return found


def trained(
    make: Make, options: dict[str, Any], place: Callable[[Model], ParameterShards | None]
) -> tuple[Model, Optimizer]:
    model = Model()
    optimizer = make(groups(model, **({k: v for k, v in options.items() if k == "weight_decay"})), **options)
    if shards := place(model):
        shards.shard_optimizer(optimizer)
    schedule = StepLR(optimizer, 2, 0.3)
    for step in range(STEPS):
        # torch's fused updates read memory in order, whatever a gradient's strides say
        give_gradients(model, step, contiguous=bool(options.get("fused")))
        for parameter, piece in shards.pieces.items() if shards else ():
            whole = parameter.grad
            piece.parameter.grad = None if whole is None else whole.reshape(-1)[piece.start : piece.stop].clone()
        optimizer.step()
        schedule.step()
    return model, optimizer


def kept(optimizer: Optimizer) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for parameter, state in optimizer.state.items():
        alike = [v for k, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape and k != "step"]
        found.append((parameter.numel(), sum(v.element_size() for v in alike)))
    return found


def sharded_updates(rank: int, world_size: int) -> None:
    for name, make, options in cases():
        plain, whole = trained(make, options, lambda _: None)
        model, optimizer = trained(make, options, lambda m: ParameterShards(m, rank, world_size, bucket_bytes=1500))
        for index, (found, wanted) in enumerate(zip(model.weights, plain.weights, strict=True)):
            whole_bytes = torch.uint8
            same = torch.equal(found.detach().flatten().view(whole_bytes), wanted.detach().flatten().view(whole_bytes))
            assert same, (name, world_size, index)
            assert found.grad is None or found.grad.shape == found.shape
        assert not torch.equal(plain.weights[0], Model().weights[0])  # something was done
        room = 2 * sum(ALIGNMENT_ELEMENTS * per_element for _, per_element in kept(whole))  # a piece and a bucket's end
        total = sum(count * per_element for count, per_element in kept(whole))
        assert sum(n * each for n, each in kept(optimizer)) <= total / world_size + room, (name, world_size)


def everything(rank: int, world_size: int, folder: str) -> None:
    for size in worlds(rank, WORLD_SIZES, folder):
        sharded_updates(rank, size)


@pytest.mark.ranks
@pytest.mark.timeout(450)
def test_sharded_updates_have_the_bits_of_the_plain_optimizer_and_an_nth_of_its_state(tmp_path: Path) -> None:
    run_ranks(everything, 3, tmp_path, str(tmp_path / "worlds"), timeout=420)


def shares(model: Mixed, partition: LeafPartition, bucket_bytes: int) -> Reduced:
    shards = ParameterShards(model, partition.rank, len(partition.ranges), bucket_bytes=bucket_bytes)

    def own(weight: nn.Parameter, wanted: Tensor | None) -> tuple[Tensor | None, Tensor | None] | None:
        assert weight.grad is None  # nobody holds a whole one
        if (piece := shards.pieces.get(weight)) is None:
            return None
        return piece.parameter.grad, None if wanted is None else wanted.reshape(-1)[piece.start : piece.stop]

    return make_shard_reducer(shards, partition), own


LAYERS, WIDTH = 16, 64  # 16 KiB each


def memory(rank: int, world_size: int) -> None:
    """With one micro-batch: full gradients of a few buckets at a time, and shards; at the end only shards."""
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    one = WIDTH * WIDTH * 4
    shards = ParameterShards(layers, rank, world_size, bucket_bytes=one)
    reducer = make_shard_reducer(shards, LeafPartition.one_leaf_per_rank(world_size, rank))
    weights = {bucket.weights.untyped_storage().data_ptr() for bucket in shards.buckets}
    gc.collect()
    old = {storage for storage in storages() if storage not in weights}
    most = [0]

    def look(_: Tensor) -> None:
        most[0] = max(most[0], sum(size for place, size in storages().items() if place not in old | weights))

    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(look)  # after the reducer's own
    for _ in range(2):
        with one_backward(reducer, rank, is_last=True):
            layers(torch.ones(1, WIDTH)).sum().backward()
        whole, share, little = LAYERS * one, LAYERS * one // world_size, 40 * WIDTH * 4 * LAYERS // 8
        on_their_way = (MAX_PENDING_BUCKETS + 2) * 2 * one  # sent and received
        assert most[0] <= share + on_their_way + little < whole + share
        reducer.finish(1)
        held = sum(p.grad.numel() * 4 for piece in shards.pieces.values() if (p := piece.parameter).grad is not None)
        assert held <= share * 1.01
        for _ in range(100):  # a thread of torch may be the last to let go
            gc.collect()
            left = sum(size for place, size in storages().items() if place not in old | weights)
            if left <= share * 1.1 + little:
                break
            time.sleep(0.05)
        assert left <= share * 1.1 + little
        assert all(layer.weight.grad is None for layer in layers)


def storages() -> dict[int, int]:
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def all_of_shares(rank: int, world_size: int, folder: str) -> None:
    for size in worlds(rank, SIZES, folder):
        same_bits(rank, size, shares)
        if size == 2:
            memory(rank, size)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(450)
def test_shares_have_the_bits_of_the_whole_sum_and_leave_no_more_behind(tmp_path: Path) -> None:
    # in one start: it costs more than all checks; a traceback names the check
    run_ranks(all_of_shares, max(SIZES), tmp_path, str(tmp_path / "worlds"), timeout=420)


def test_a_world_of_one_sends_nothing() -> None:
    own = [torch.arange(64.0)]
    assert start_reduce_scatter(LeafPartition([(0, 4)], 0), own, "")() is own[0]
