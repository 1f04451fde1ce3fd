"""What the examples at the end of each textbook file share: join the world, and let rank 0 speak for all."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def joined_world() -> Generator[tuple[int, int]]:
    """Yield (rank, world size): torchrun's world where its variables are set, else a world of one.

    The group is torn down also after an error: a rank that dies with its connections open leaves the others waiting.
    """
    torch.set_num_threads(1)  # several ranks share this machine's cores
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    else:
        alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # needs no port and no file
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def of_all_ranks(tensor: Tensor) -> list[list[float]]:
    """`tensor` as every rank holds it, (n,) each, in rank order; a collective."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return [each.tolist() for each in gathered]


def say_once(text: str = "", end: str = "\n") -> None:
    """Print on rank 0 only: with torchrun every rank writes to the same screen."""
    if dist.get_rank() == 0:
        print(text, end=end, flush=True)
