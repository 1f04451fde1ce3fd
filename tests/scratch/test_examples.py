"""Each file of the textbook runs as it says it does, and prints its own numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALONE = "from paceline.scratch import batchnorm, reduce, replicate, sampler\n" + "\n".join(
    f"{name}._main()" for name in ("sampler", "replicate", "reduce", "batchnorm")
)
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")


def printed(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=50, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
def test_in_a_world_of_one() -> None:
    output = printed("-W", "error", "-c", ALONE)  # the four in one process: importing torch is what takes time
    for line in ("  rank 3: [9, 0, 1]", "after scatter     rank 0: [0.0, 1.0]", "mean 2, unbiased variance 1"):
        assert line in output


@pytest.mark.ranks
def test_reduction_under_torchrun() -> None:
    output = printed("-m", *TORCHRUN, "paceline.scratch.reduce")
    assert "rank 0: [1.0, 2.0, 3.0]   rank 1: [2.0, 3.0, 4.0]\n" in output
    assert "rank 0: [3.0, 5.0, 7.0]   rank 1: [3.0, 5.0, 7.0]\n" in output
    assert output.count("rank 0: [1.5, 2.5, 3.5]   rank 1: [1.5, 2.5, 3.5]\n") == 4  # by hand and by all three ways
