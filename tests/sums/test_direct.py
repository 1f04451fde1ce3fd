"""Sums from rank to rank: their bits, whatever else is on its way, and what the hang guard sees of them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from tests.run_ranks import RankFailedError, run_ranks
from torch import Tensor

from paceline.sums.direct import MOST_RANKS, DirectSums, goes_direct, sent_directly
from paceline.sums.tree import ALIGNED, Forest, tree_sum
from paceline.worker.guard import Guard

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
CPU = torch.device("cpu")
_T = TypeVar("_T")


def forest_of(cuts: list[int], rank: int) -> Forest:
    return Forest([*pairwise(cuts)], rank)


def values(rank: int, dtype: torch.dtype, size: int, salt: int) -> Tensor:
    """Of sizes so different that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    return (torch.randn(size, generator=generator) * 10.0 ** (rank * 3)).to(dtype)


def wanted(forest: Forest, dtype: torch.dtype, size: int, salt: int) -> Tensor:
    parts = {own[0]: values(rank, dtype, size, salt) for rank, own in enumerate(forest.nodes())}
    return tree_sum(parts, torch.add, forest.leaves)


def bits(rank: int, world_size: int) -> None:
    """Two lists of sums, step after step, that end in another order than they began, and a user's messages between."""
    cuts = [0, 4, 8] if world_size == 2 else [0, 2, 3, 4]  # not as many leaves as ranks
    forest = forest_of(cuts, rank)
    sizes = [ALIGNED * world_size * n for n in (40_000, 1, 70)]
    lists = [DirectSums(forest, sizes, DTYPES, ["a", "b", "c"]) for _ in range(2)]
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(3):
        sent = sent_directly()
        mine, theirs = torch.full((5,), float(rank)), torch.empty(5)
        coming = dist.irecv(theirs, before)
        for one in lists:
            one.ask(None)
        begun = [
            [one.begin(values(rank, dtype, size, 2 * step + n)) for size, dtype in zip(sizes, DTYPES, strict=True)]
            for n, one in enumerate(lists)
        ]
        dist.send(mine, after)
        assert coming is not None and coming.wait() and theirs.tolist() == [float(before)] * 5
        for one in begun:
            one[0].gather()
        for n in (1, 0):
            for total, size, dtype in zip(begun[n], sizes, DTYPES, strict=True):
                assert torch.equal(total.end(), wanted(forest, dtype, size, 2 * step + n)), (step, n, dtype)
        share = 2 * sum(size * dtype.itemsize for size, dtype in zip(sizes, DTYPES, strict=True)) // world_size
        assert sent_directly() - sent == 2 * (world_size - 1) * share


def seen(rank: int, world_size: int, folder: Path) -> list[list[tuple[str, str, bool]]]:
    """Rank 1 comes late to both halves. Each time: the last two calls, as rank 0's box shows them while it waits."""
    ring = Guard.of_process().box.ring
    forest = forest_of([0, 1, 2], rank)
    one = DirectSums(forest, [2 * ALIGNED], [torch.float32], ["late"])
    found: list[list[tuple[str, str, bool]]] = []

    def while_it_waits(go: Path) -> None:
        while not found or found[-1][-1][2] or go.name != f"go-{len(found) - 1}":
            last = [(op.kind, op.shape, op.done) for _, op in ring() if op.name == "late"][-2:]
            if last and not last[-1][2]:
                found.append(last)
            time.sleep(0.01)
        go.touch()

    def comes_late(number: int, act: Callable[[], _T]) -> _T:
        go = folder / f"go-{number}"
        if rank == 0:
            looks = threading.Thread(target=while_it_waits, args=(go,), daemon=True)
            looks.start()
        else:
            while not go.exists():
                time.sleep(0.01)
        result = act()
        if rank == 0:
            looks.join()
        return result

    one.ask(None)
    if rank == 0:
        total = one.begin(torch.ones(2 * ALIGNED))
        comes_late(0, total.gather)
        flat = comes_late(1, total.end)
    else:
        comes_late(0, lambda: None)
        total = one.begin(torch.ones(2 * ALIGNED))
        comes_late(1, total.gather)
        flat = total.end()
    assert flat.tolist() == [2.0] * 2 * ALIGNED
    return found


def everything(rank: int, world_size: int, folder: Path) -> object:
    bits(rank, world_size)
    if world_size > 2:
        return None
    found = seen(rank, world_size, folder)
    group = dist.group.WORLD
    assert group is not None
    here = weakref.ref(group)
    del group
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert here() is None  # else its connections would outlive it, and nobody would see its end
    return found


@pytest.mark.ranks
def test_two_ranks_come_to_the_bits_of_the_tree_and_the_hang_guard_sees_who_has_not_come(tmp_path: Path) -> None:
    of_0, _ = run_ranks(everything, 2, tmp_path, tmp_path)
    shape = f"[{2 * ALIGNED}]"
    begun, gathers = ("reduce_scatter", shape, True), ("all_gather", shape)
    assert of_0 == [[begun, (*gathers, False)], [(*gathers, True), (*gathers, False)]]


@pytest.mark.ranks
def test_three_ranks_come_to_the_bits_of_a_tree_of_more_leaves(tmp_path: Path) -> None:
    run_ranks(everything, 3, tmp_path, tmp_path)


def leaves(rank: int, world_size: int) -> None:
    one = DirectSums(forest_of([0, 1, 2], rank), [2 * ALIGNED], [torch.float32], ["left"])
    one.ask(None)
    if rank == 1:
        raise ValueError("gone before it has come")
    one.begin(torch.ones(2 * ALIGNED)).end()


@pytest.mark.ranks
def test_who_waits_for_a_rank_that_has_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="gone before it has come"):
        run_ranks(leaves, 2, tmp_path)


def test_a_ring_is_left_alone_where_it_may_add_and_many_ranks_are_not_written_to_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    for ranks in range(1, MOST_RANKS + 3):
        forest = forest_of([*range(ranks + 1)], 0)
        assert goes_direct(forest, CPU, None, in_order=True) == (2 <= ranks <= MOST_RANKS)
        assert goes_direct(forest, CPU, None, in_order=False) == (ranks == 2)
    assert not goes_direct(forest_of([0, 3, 6], 0), CPU, None, in_order=True)  # two subtrees each
    two = forest_of([0, 1, 2], 0)
    assert not goes_direct(two, torch.device("cuda"), None, in_order=True)
    monkeypatch.setattr(dist, "get_backend", lambda group: "mpi")  # whose messages wait for each other
    assert not goes_direct(two, CPU, None, in_order=True)
