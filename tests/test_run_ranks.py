"""The helper of all `ranks` tests: the first failing rank's traceback, nothing left running."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.run_ranks import RankFailedError, run_ranks

pytestmark = pytest.mark.ranks


def one_fails(rank: int, world_size: int, folder: str) -> None:
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        raise ZeroDivisionError("planted")
    dist.barrier()  # fails too, as a victim: rank 1 is gone


def never_ends(rank: int, world_size: int, folder: str) -> None:
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(1000)


def test_a_failing_rank_is_named_with_its_traceback_and_the_rest_ends(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 of 2 failed.*one_fails.*ZeroDivisionError: planted"):
        run_ranks(one_fails, 2, tmp_path, str(tmp_path))
    _assert_gone(tmp_path)


def test_a_rank_that_never_ends_is_killed(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)\[0\] still ran at the time limit"):
        run_ranks(never_ends, 1, tmp_path, str(tmp_path), timeout=5)
    _assert_gone(tmp_path)  # conftest's leak fixture looks, too


def _assert_gone(folder: Path) -> None:
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
