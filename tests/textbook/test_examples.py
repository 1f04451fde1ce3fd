"""Each file of the textbook runs as it says it does, and prints its own numbers."""

import ast
import sys
from pathlib import Path

import pytest
from tests import warm

TEXTBOOK = Path(__file__).parents[2] / "examples" / "textbook"
NAMES = ("sampler", "replicate", "reduce", "batchnorm", "tree", "norm", "scatter", "zero", "tensor", "pipeline")
ALONE = "\n".join(
    ["import sys, warnings; warnings.simplefilter('error')", f"sys.path.insert(0, {str(TEXTBOOK)!r})"]
    + [f"import {name}" for name in NAMES]
    + [f"print('#'); {name}._main()" for name in NAMES]
)
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


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


@pytest.mark.slow
@pytest.mark.ranks
def test_reduction_under_torchrun() -> None:
    output = printed("-m", *TORCHRUN, str(TEXTBOOK / "reduce.py"))
    assert "rank 0: [1.0, 2.0, 3.0]   rank 1: [2.0, 3.0, 4.0]\n" in output
    assert "rank 0: [3.0, 5.0, 7.0]   rank 1: [3.0, 5.0, 7.0]\n" in output
    assert output.count("rank 0: [1.5, 2.5, 3.5]   rank 1: [1.5, 2.5, 3.5]\n") == 4  # by hand and by both ways


def test_the_textbook_needs_torch_and_nothing_else() -> None:
    for path in TEXTBOOK.glob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        imported = {name.partition(".")[0] for name in names}
        assert imported <= {"torch", *NAMES, "demo", *sys.stdlib_module_names}, path.name
