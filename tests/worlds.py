"""Worlds of several sizes, one after another, among the processes of one `run_ranks` call: a start costs seconds."""

from collections.abc import Generator, Iterable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline import World, process_group


@pytest.fixture(scope="module")
def world() -> Generator[World]:
    """A world of one for all tests of a module: gloo's listener, and what an optimizer imports, outlive a test."""
    with process_group(World.from_env({}, device="cpu")) as world:
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
        yield world


def world_of(rank: int, size: int) -> World:
    """A world of one host, on the CPU."""
    return World(rank, size, rank, size, torch.device("cpu"), "gloo")


def worlds(rank: int, sizes: Iterable[int], folder: str) -> Generator[int]:
    """Yield each of `sizes` in turn with a default group of the first so many ranks up; others leave it out.

    Rank 0 is in every world, so they come in order, and what one has written to disk is there for the next.

    Args:
        rank: of this process in the group that is up, if any; it is taken down.
        sizes: the same on every rank.
        folder: where the ranks meet; a new one for each call.
    """
    if dist.is_initialized():
        dist.barrier()  # here and below: a rank that leaves at once closes connections that others are still making
        dist.destroy_process_group()
    Path(folder).mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        if rank < size:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(f"{folder}/store-{number}", size),  # pyright: ignore[reportPrivateImportUsage]
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=30),
            )
            yield size
            dist.barrier()
            dist.destroy_process_group()
