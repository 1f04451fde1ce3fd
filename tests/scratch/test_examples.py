"""Each file of the textbook runs as it says it does, and prints its own numbers."""

from __future__ import annotations

import pytest
from tests import warm

FILES = ("sampler", "replicate", "reduce", "batchnorm")
ALONE = "\n".join(
    ["import warnings; warnings.simplefilter('error')", f"from paceline.scratch import {', '.join(FILES)}"]
    + [f"{name}._main()" for name in FILES]
)
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")


def printed(*arguments: str) -> str:
    done = warm.run(arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
def test_in_a_world_of_one() -> None:
    output = printed("-c", ALONE)
    for line in ("  rank 3: [9, 0, 1]", "after scatter     rank 0: [0.0, 1.0]", "mean 2, unbiased variance 1"):
        assert line in output


@pytest.mark.ranks
def test_reduction_under_torchrun() -> None:
    output = printed("-m", *TORCHRUN, "paceline.scratch.reduce")
    assert "rank 0: [1.0, 2.0, 3.0]   rank 1: [2.0, 3.0, 4.0]\n" in output
    assert "rank 0: [3.0, 5.0, 7.0]   rank 1: [3.0, 5.0, 7.0]\n" in output
    assert output.count("rank 0: [1.5, 2.5, 3.5]   rank 1: [1.5, 2.5, 3.5]\n") == 4  # by hand and by all three ways
