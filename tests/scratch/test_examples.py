"""Each file of the textbook runs as it says it does, and prints its own numbers."""

from __future__ import annotations

import pytest
from tests import warm

NAMES = ("sampler", "replicate", "reduce", "batchnorm", "tree", "norm", "scatter", "zero", "tensor", "pipeline")
ALONE = "\n".join(
    ["import warnings; warnings.simplefilter('error')", f"from paceline.scratch import {', '.join(NAMES)}"]
    + [f"print('#'); {name}._main()" for name in NAMES]
)
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")


def printed(*arguments: str) -> str:
    done = warm.run(arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
def test_in_a_world_of_one() -> None:
    output = printed("-c", ALONE)  # all in one process
    lines = (
        "  rank 3: [9, 0, 1]", "after scatter     rank 0: [0.0, 1.0]", "world size       rank 0: [1.0, 2.0, 3.0]",
        "mean 2, unbiased variance 1", "in the tree's order:    0.75", "3 holders of 1, 10, 5 blocks find",
        "rank 0 keeps      [0.0, 1.0]", "optimizer   rank 0: 2049",
        "by less than 1e-12: True", "by less than 1e-12: True",
    )  # fmt: skip
    for line, page in zip(lines, output.split("#\n")[1:], strict=True):
        assert line in page


@pytest.mark.ranks
def test_reduction_under_torchrun() -> None:
    output = printed("-m", *TORCHRUN, "paceline.scratch.reduce")
    assert "rank 0: [1.0, 2.0, 3.0]   rank 1: [2.0, 3.0, 4.0]\n" in output
    assert "rank 0: [3.0, 5.0, 7.0]   rank 1: [3.0, 5.0, 7.0]\n" in output
    assert output.count("rank 0: [1.5, 2.5, 3.5]   rank 1: [1.5, 2.5, 3.5]\n") == 4  # by hand and by both ways
