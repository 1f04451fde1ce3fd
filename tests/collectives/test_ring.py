"""The ring sum in shared memory has the bits of gloo's all-reduce, for any number of ranks and any sizes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.collectives.memory_harness import in_threads
from tests.run_ranks import run_ranks
from torch import Tensor

from paceline.collectives.communicator import make_communicator
from paceline.collectives.ddp import RingSum
from paceline.collectives.shm_collectives import gloo_ring_part_size
from paceline.collectives.sum_tree import LeafPartition

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (0, 1, 5, 4097, 300_001)


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Their sum depends on the order, and the smallest lose bits in a multiplication."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    exponents = torch.randint(-3, 4, (size,), generator=generator)
    exponents[::3] = -41
    return (torch.randn(size, generator=generator) * 10.0**exponents).to(dtype)


def against_gloo(rank: int, world_size: int) -> list[str]:
    asked = [(size, dtype) for dtype in FLOATS for size in SIZES]
    own, expected = ([values(rank, *each) for each in asked] for _ in range(2))
    for tensor in expected:
        if len(tensor):
            dist.all_reduce(tensor.mul_(1 / world_size))
    memory = make_communicator().memory
    assert memory is not None
    found = RingSum(
        memory, *map(list, zip(*asked, strict=True)), LeafPartition.one_leaf_per_rank(world_size, rank)
    ).run([[tensor.mul_(1 / world_size) for tensor in own]])
    return [str(each) for each, a, b in zip(asked, found, expected, strict=True) if a is None or not same(a, b)]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.ranks
def test_bits_are_those_of_torchs_own_all_reduce(tmp_path: Path) -> None:
    assert run_ranks(against_gloo, 4, tmp_path) == [[]] * 4  # test_ddp.py: of 2 and 3


def as_gloo_adds(all_ranks: list[Tensor]) -> Tensor:
    ranks, size = len(all_ranks), len(all_ranks[0])
    part = gloo_ring_part_size(size, all_ranks[0].element_size(), ranks)
    whole = torch.empty_like(all_ranks[0])
    for number in range(ranks):
        here = slice(number * part, min((number + 1) * part, size))
        total = all_ranks[number - 1][here].clone()
        for back in range(2, ranks + 1):
            total = all_ranks[(number - back) % ranks][here] + total
        whole[here] = total
    return whole


@pytest.mark.parametrize("world_size", [3, 5])
def test_however_it_is_cut_and_whatever_the_divisor(world_size: int) -> None:
    sizes = [3, 70, 4096, 20_011, 1]  # several to a chunk, several chunks to one

    def act(memory):
        own = [values(memory.rank, size, torch.float32) * 0.1 for size in sizes]
        total = RingSum(
            memory, sizes, [torch.float32] * len(sizes), LeafPartition.one_leaf_per_rank(world_size, memory.rank)
        )
        return total.run([own], 3.0)

    expected = [
        as_gloo_adds([values(rank, size, torch.float32) * 0.1 for rank in range(world_size)]) / 3 for size in sizes
    ]
    for found in in_threads(world_size, act):
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))
