"""Gradients summed in shared memory have the bits of the sum over gloo, and of one process."""

import pytest
import torch
from tests.collectives.odd_model import Odd, by_leaf, grads, over_torch
from tests.collectives.one_backward import one_backward
from tests.run_ranks import run_ranks
from torch import Tensor, nn

from paceline.collectives import shm_communicator
from paceline.collectives.communicator import make_communicator
from paceline.collectives.reducer import make_reducer
from paceline.collectives.shm_communicator import SharedMemoryBucketReducer
from paceline.collectives.sum_tree import LeafPartition
from paceline.data.plan import virtual_ranks_of

pytestmark = pytest.mark.ranks


def compare(rank: int, world_size: int, leaves: list[int]) -> int:
    shm_communicator.BULK_BYTES = 64 << 10  # so that a sum takes several chunks
    memory = make_communicator().memory
    assert memory is not None
    compared = 0
    for virtual_ranks in leaves:
        shares = [virtual_ranks_of(virtual_ranks, number, world_size) for number in range(world_size)]
        partition = LeafPartition([(share.start, share.stop) for share in shares], rank)
        for left_out in (None, virtual_ranks - 1):
            models = [Odd() for _ in range(3)]
            shared = make_reducer(models[0], partition, in_order=True)
            assert isinstance(shared._transport, SharedMemoryBucketReducer)
            for step in range(2):
                found = by_leaf(shared, models[0], shares[rank], left_out)
                over_gloo = by_leaf(over_torch(models[1], partition), models[1], shares[rank], left_out)
                alone = over_torch(models[2], LeafPartition([(0, virtual_ranks)], 0))
                one_process = by_leaf(alone, models[2], range(virtual_ranks), left_out)
                assert found == one_process, (virtual_ranks, left_out, step)
                assert found == over_gloo, (virtual_ranks, left_out, step)
                assert found["of_nobody"] is None and found["large"] is not None
                assert (found["of_two"] is None) == (virtual_ranks == 2 and left_out == 1)
                compared += 1
    if world_size == 2:  # a sum of two has one order only
        models = [Odd(), Odd()]
        partition = LeafPartition.one_leaf_per_rank(world_size, rank)
        several = [make_reducer(models[0], partition, in_order=False), over_torch(models[1], partition, in_order=False)]
        assert isinstance(several[0]._transport, SharedMemoryBucketReducer)
        for model, sums in zip(models, several, strict=True):
            for part in range(2):
                with one_backward(sums, rank, is_last=part == 1):
                    model(rank + 5 * part).backward()
            sums.finish(torch.tensor(3.0))
        assert grads(models[0]) == grads(models[1])
        compared += 1
    return compared


@pytest.mark.parametrize(
    ("world_size", "leaves"),
    [(2, [2, 3, 6]), pytest.param(3, [3, 4, 8], marks=pytest.mark.slow), pytest.param(4, [7], marks=pytest.mark.slow)],
)
def test_the_sum_is_that_of_gloo_and_of_one_process(world_size, leaves, tmp_path):
    everybody = run_ranks(compare, world_size, tmp_path, leaves)
    assert everybody == [4 * len(leaves) + (world_size == 2)] * world_size


def odd_strides_of_one_rank(rank: int, world_size: int, in_memory: bool) -> bool:
    """Ranks may have different strides for a parameter. Sums match elements by index, not by memory."""
    assert make_communicator().memory is not None
    model = nn.Conv2d(3, 5, 3)
    with torch.no_grad():
        model.weight.copy_(torch.arange(135.0).view(5, 3, 3, 3))
    if rank == 1:
        model = model.to(memory_format=torch.channels_last)
    partition = LeafPartition.one_leaf_per_rank(world_size, rank)
    sums = make_reducer(model, partition, in_order=False) if in_memory else over_torch(model, partition, in_order=False)
    (model.weight.square().sum() * (rank + 1)).backward()
    sums.finish(1.0)
    grad = model.weight.grad
    assert grad is not None and grad.stride() == model.weight.stride()
    assert model.bias is not None and model.bias.grad is None
    return torch.equal(grad, torch.arange(135.0).view(5, 3, 3, 3) * 6)


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [True, False])
def test_ranks_may_lay_a_parameter_out_differently(in_memory, tmp_path):
    assert run_ranks(odd_strides_of_one_rank, 2, tmp_path, in_memory) == [True, True]


def goes_on(rank: int, world_size: int) -> Tensor | None:
    assert make_communicator().memory is not None
    model = nn.Linear(2, 1, bias=False)
    partition = LeafPartition([(0, 2), (2, 4)], rank)
    sums = make_reducer(model, partition, in_order=True)
    for attempt in range(2):
        try:
            for leaf in range(*partition.ranges[rank]):
                with one_backward(sums, leaf, is_last=leaf % 2 == 1):
                    (model.weight.sum() * (leaf + 1)).backward()
                    if attempt == 0 and leaf % 2 == 1:
                        raise ValueError("the user's own")
        except ValueError:
            model.zero_grad(set_to_none=True)
    sums.finish(2.0)
    return model.weight.grad


def test_an_error_in_a_step_leaves_nothing_in_the_next(tmp_path):
    for grad in run_ranks(goes_on, 2, tmp_path):
        assert grad is not None and grad.tolist() == [[5.0, 5.0]]
