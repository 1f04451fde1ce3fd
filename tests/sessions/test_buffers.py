"""A session's buffers and complex tensors are those of the plain loop, also when it is resumed on other ranks."""

from pathlib import Path

import pytest
import torch
from tests.ended import digest, start_steps
from tests.errors import ended_with
from tests.run_script import run_script

from paceline.cli.checkpoint import export
from paceline.runs.folder import WEIGHTS
from paceline.train.weights import read_weight_file

pytestmark = pytest.mark.sample(3)

SCRIPT = Path(__file__).with_name("buffers.py")
BUFFERS = {"seen", "steps", "codes", "total", "top", "mean", "layer.weight", "layer.bias"}


@pytest.mark.parametrize("complex_too", [False, True])
def test_they_are_those_of_the_plain_loop_after_a_resume_on_other_ranks(tmp_path: Path, complex_too: bool) -> None:
    kind = ["complex"] * complex_too
    digests: list[str | None] = []
    for first, then in ((2, 1), (1, 2)):
        run = tmp_path / f"{first}"
        failed = run_script(first, SCRIPT, run, *kind, 7, cwd=tmp_path)
        assert failed.returncode == 1 and "mine" in failed.stderr
        done = run_script(then, SCRIPT, run, *kind, cwd=tmp_path)
        assert done.returncode == 0 and start_steps(run)[-1] > 0, done.stdout + done.stderr
        right = {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" right")}
        assert right == BUFFERS | {"w"} if complex_too else BUFFERS, done.stdout
        digests.append(digest(run))
        weights = read_weight_file(run / WEIGHTS, require_trusted_owner=True)
        assert weights.keys() == right and int(weights["seen"]) == 96 and int(weights["steps"]) == 12
        assert weights["mean"].dtype == torch.complex128
        # what is exported from the last checkpoint is the same
        assert export([str(run), "-o", str(tmp_path / f"{first}.pt")]) == 0
        exported = torch.load(tmp_path / f"{first}.pt", weights_only=True)
        assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert digests[0] == digests[1]


def test_a_buffer_that_nobody_knows_how_to_combine_ends_the_run_in_its_first_step(tmp_path: Path) -> None:
    failed = run_script(2, SCRIPT, tmp_path / "run", "undeclared", cwd=tmp_path)
    ended_with(failed, "buffer-not-merged")
    assert '{"sum": "sum"}' in failed.stderr
