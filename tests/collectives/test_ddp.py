"""DDP with gradients in shared memory has the bits of DDP. If that is impossible, DDP does not change."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.collectives import ddp_ranks
from tests.run_ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives import ddp as sharing


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_whatever_a_script_does_with_ddp_the_bits_are_ddps(tmp_path: Path, world_size: int) -> None:
    assert run_ranks(ddp_ranks.all_ways, world_size, tmp_path) == [[]] * world_size


def left_as_they_are(rank: int, world_size: int) -> tuple[dict[str, str], int, int]:
    """For each case: the notice, and the all-reduces of DDP without and with shared memory."""
    every, said = dist.new_group(), list[str]()
    sharing._notify = said.append
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, ddp_ranks.fp16_compress_hook)
    asked: dict[str, tuple[DistributedDataParallel, dict[str, Any]]] = {
        "group": (DistributedDataParallel(nn.Linear(2, 2), process_group=every), {}),
        "init": (DistributedDataParallel(nn.Linear(2, 2), init_sync=False), {"in_step": False}),
        "sparse": (DistributedDataParallel(nn.Embedding(4, 2, sparse=True)), {}),
        "complex": (DistributedDataParallel(nn.Linear(2, 2, dtype=torch.complex64)), {}),
        "skip": (DistributedDataParallel(nn.Linear(2, 2), skip_all_reduce_unused_params=True), {}),
        "hook": (hooked, {}),
        "views": (DistributedDataParallel(nn.Linear(2, 2), gradient_as_bucket_view=True), {}),
    }
    for ddp, words in asked.values():
        sharing.register_shared_memory_hook(ddp, **words)
    kinds = dict(zip(asked, said, strict=True))
    shared = DistributedDataParallel(nn.Linear(2, 2))
    sharing.register_shared_memory_hook(shared)
    group = dist.group.WORLD
    assert group is not None
    counts = Counter[str]()
    for name, ddp in (("plain", asked["views"][0]), ("shared", shared)):
        before = group._get_sequence_number_for_group()
        ddp(torch.ones(1, 2)).sum().backward()
        counts[name] = group._get_sequence_number_for_group() - before
    return kinds, counts["plain"], counts["shared"]


@pytest.mark.ranks
def test_where_it_cannot_be_the_reason_is_said_and_ddp_is_left_alone(tmp_path: Path) -> None:
    for kinds, plain, shared in run_ranks(left_as_they_are, 3, tmp_path):
        wanted = {
            "group": "not that of all ranks", "init": "init_sync=False", "sparse": "sparse", "complex": "real numbers",
            "skip": "skip_all_reduce_unused_params", "hook": "registered a communication hook",
            "views": "gradient_as_bucket_view or batched_grad_copy is set, and 3 is not a power of two",
        }  # fmt: skip
        assert {name: words for name, words in wanted.items() if words not in kinds[name]} == {}
        assert plain > 0 and shared == 0
