"""The double behaves like NCCL in what other tests cannot see: a call returns before its buffer is written."""

import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

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
