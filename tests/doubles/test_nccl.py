"""The double behaves like NCCL, as the other tests assume."""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.doubles import nccl
from tests.run_ranks import run_ranks


@contextmanager
def group(rank: int, size: int, folder: str, **env: str) -> Generator[nccl.LikeNccl]:
    os.environ.update({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"} | env)
    dist.destroy_process_group()
    nccl.register()
    store = dist.FileStore(f"{folder}/nccl", size)
    dist.init_process_group(nccl.BACKEND, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    yield nccl.GROUPS[0]


def met(rank: int) -> None:
    """Return when both ranks are here. A rank that ends early would close connections that the other is opening."""
    here = torch.ones(1)
    dist.all_reduce(here)
    assert here.item() == 2, rank


def late(rank: int, size: int, folder: str) -> list[Any]:
    with group(rank, size, folder, DOUBLE_NCCL_DELAY="0.05"), torch.no_grad():
        tensor, lines = torch.full((3,), float(rank + 1)), []
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        with torch._C.DisableTorchFunction():
            lines.append(all(math.isnan(x) for x in memoryview(tensor.numpy())))  # the host has not waited
        lines += [work.is_completed(), tensor.tolist()]  # that does
        return [*lines, work.is_completed()]


def test_a_call_returns_at_once_and_a_host_read_waits(tmp_path: Path) -> None:
    assert run_ranks(late, 2, tmp_path, str(tmp_path)) == [[True, False, [3.0] * 3, True]] * 2


def everything(rank: int, size: int, folder: str) -> list[Any]:
    with group(rank, size, folder):
        mine = torch.tensor([rank, rank + 10.0])
        found: list[Any] = []
        dist.broadcast(told := mine.clone(), src=1)
        parts = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(parts, mine)
        whole = torch.zeros(2 * size)
        dist.all_gather_into_tensor(whole, mine)
        share = torch.zeros(1)
        dist.reduce_scatter_tensor(share, mine)
        swapped = torch.zeros(2)
        dist.all_to_all_single(swapped, mine)
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, f"rank {rank}")
        if rank:
            dist.send(mine, 0)
        else:
            dist.recv(got := torch.zeros(2), 1)
            found.append(got.tolist())
        dist.barrier()
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        ddp(mine).sum().backward()
        gradient: Any = ddp.module.weight.grad
        return [told.tolist(), parts[1].tolist(), whole.tolist(), share.item(), swapped.tolist(), objects,
                gradient.tolist(), *found]  # fmt: skip


def test_all_operations_give_what_gloo_gives(tmp_path: Path) -> None:
    first, second = run_ranks(everything, 2, tmp_path, str(tmp_path))
    common = [[1.0, 11.0], [1.0, 11.0], [0.0, 10.0, 1.0, 11.0]]
    assert first == [*common, 1.0, [0.0, 1.0], ["rank 0", "rank 1"], [[0.5, 10.5]], [1.0, 11.0]]
    assert second == [*common, 21.0, [10.0, 11.0], ["rank 0", "rank 1"], [[0.5, 10.5]]]


def disagreeing(rank: int, size: int, folder: str) -> list[Any]:
    with group(rank, size, folder) as one:
        tensor = torch.ones(2 + rank)
        work: Any = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.3)
        entries = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace(True, False, False))  # pyright: ignore
        shown = [(e["profiling_name"], e["retired"], e["input_sizes"]) for e in entries["entries"]]
        assert not pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, False)).get("entries")
        lines = [work.is_completed(), shown]
        one.abort()
        return lines


def test_ranks_that_disagree_wait_in_silence_and_the_recorder_shows_it(tmp_path: Path) -> None:
    found = run_ranks(disagreeing, 2, tmp_path, str(tmp_path))
    assert found == [[False, [("nccl:all_reduce", False, [[2 + rank]])]] for rank in (0, 1)]


def refused(rank: int, size: int, folder: str) -> list[str]:
    with group(rank, size, folder):
        met(rank)
        words: list[str] = []
        for call in (
            lambda: dist.monitored_barrier(),
            lambda: dist.all_reduce(torch.ones(2, 3).T),
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.BOR),
            lambda: dist.recv(torch.ones(1)),
        ):
            with pytest.raises((RuntimeError, ValueError)) as error:
                call()
            words.append(str(error.value).split(".")[0])
        return words


def test_habits_of_gloo_are_refused(tmp_path: Path) -> None:
    words = run_ranks(refused, 2, tmp_path, str(tmp_path))[0]
    assert "monitored_barrier" in words[0] and "contiguous" in words[1] and "bitwise" in words[2], words
    assert "any source" in words[3], words
