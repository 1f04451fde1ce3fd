"""Shares of the gradients' sum: the bits of the whole sum, and never more of it in memory than promised."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
from tests.run_ranks import run_ranks
from tests.sums.test_tree import SIZES, VIRTUAL, Mixed, bits, forest_of, take_step, wanted_gradients
from tests.worlds import worlds
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.sums import shares
from paceline.sums.exchange import AllToAll
from paceline.sums.reducer import sum_to_shares
from paceline.sums.shards import Shards
from paceline.sums.tree import Forest


def shares_have_the_bits_of_the_whole(rank: int, world_size: int) -> None:
    for virtual_ranks in VIRTUAL:
        forest = forest_of(rank, world_size, virtual_ranks)
        for bucket_bytes in (600, 25 << 20) if virtual_ranks == 7 else (600,):
            model = Mixed()
            shards = Shards(model, rank, world_size, bucket_bytes=bucket_bytes)
            reducer = sum_to_shares(shards, forest)
            for salt in range(4):
                model.zero_grad()
                take_step(model, reducer, forest, salt)
                divisor = 3.0 + salt
                reducer.finish(torch.tensor(divisor, dtype=torch.float64) if salt % 2 else divisor)
                for index, gradient in enumerate(wanted_gradients(virtual_ranks, salt, divisor)):
                    weight, case = model.weights[index], (virtual_ranks, salt, index)
                    assert weight.grad is None  # nobody holds a whole one
                    if (piece := shards.pieces.get(weight)) is None:
                        continue
                    found = piece.parameter.grad
                    assert (found is None) == (gradient is None), case
                    if gradient is not None and found is not None:
                        assert bits(found) == bits(gradient.reshape(-1)[piece.start : piece.stop]), case


LAYERS, WIDTH = 16, 64  # 16 KiB each


def memory(rank: int, world_size: int) -> None:
    """With one micro-batch: a few buckets of whole gradients at a time, and shares; afterwards shares alone."""
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    one = WIDTH * WIDTH * 4
    shards = Shards(layers, rank, world_size, bucket_bytes=one)
    reducer = sum_to_shares(shards, Forest([(r, r + 1) for r in range(world_size)], rank))
    weights = {bucket.weights.untyped_storage().data_ptr() for bucket in shards.buckets}
    gc.collect()
    old = {storage for storage in storages() if storage not in weights}
    most = [0]

    def look(_: Tensor) -> None:
        most[0] = max(most[0], sum(size for place, size in storages().items() if place not in old | weights))

    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(look)  # after the reducer's own
    for _ in range(2):
        with reducer.leaf(rank, is_last=True):
            layers(torch.ones(1, WIDTH)).sum().backward()
        whole, share, little = LAYERS * one, LAYERS * one // world_size, 40 * WIDTH * 4 * LAYERS // 8
        on_their_way = (shares.MOST_UNDER_WAY + 2) * 2 * one  # sent and received
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
    """Address and bytes of all memory that Python's tensors hold."""
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("planted")


def errors(rank: int, world_size: int) -> None:
    """After an error on one rank, or on all, nobody waits for ever and the next step is right."""
    layers = nn.Sequential(*[nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(3)])
    with torch.no_grad():
        for weight in layers.parameters():
            weight.copy_(torch.eye(3))
    shards = Shards(layers, rank, world_size, bucket_bytes=1)
    reducer = sum_to_shares(shards, Forest([(r, r + 1) for r in range(world_size)], rank))
    x = torch.full((1, 3), rank + 1.0, dtype=torch.float64)

    def step() -> None:
        with reducer.leaf(rank, is_last=True):
            layers(x).sum().backward()
        reducer.finish(1)
        for piece in shards.pieces.values():
            gradient = piece.parameter.grad
            assert gradient is not None and (gradient == world_size * (world_size + 1) / 2).all()

    def fail() -> None:
        with pytest.raises(ArithmeticError, match="planted"), reducer.leaf(rank, is_last=True):
            layers[2](layers[1](Broken.apply(layers[0](x)))).sum().backward()
        layers.zero_grad()
        reducer.reset()

    def again() -> None:
        with reducer.leaf(rank, is_last=True):
            layers(x).sum().backward()
        with pytest.raises(UsageError, match="second gradient"), reducer.leaf(rank, is_last=True):
            layers(x).sum().backward()
        layers.zero_grad()
        reducer.reset()

    step()
    for failure in (fail, again):
        failure()
        step()
        if rank == world_size - 1:
            failure()
        else:
            with reducer.leaf(rank, is_last=True):
                layers(x).sum().backward()
            reducer.finish(1)
        step()


def all_of_shares(rank: int, world_size: int, folder: str) -> None:
    for size in worlds(rank, SIZES, folder):
        shares_have_the_bits_of_the_whole(rank, size)
        errors(rank, size)
        if size == 2:
            memory(rank, size)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(150)
def test_shares_have_the_bits_of_the_whole_sum_and_leave_no_more_behind(tmp_path: Path) -> None:
    # in one start: it costs more than all checks; a traceback names the check
    run_ranks(all_of_shares, max(SIZES), tmp_path, str(tmp_path / "worlds"), timeout=140)


def test_a_world_of_one_sends_nothing() -> None:
    own = [torch.arange(64.0)]
    assert AllToAll(Forest([(0, 4)], 0), own).end() is own[0]
