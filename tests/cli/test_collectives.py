"""`paceline launch --collectives shared`: refused where it can do nothing; else a script's DDP, guarded as ever."""

from __future__ import annotations

import pytest
from tests.cli.test_bad_input import WITHOUT_TORCH

pytestmark = pytest.mark.sample(2)

SCRIPT = """
import sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
sparse = [DistributedDataParallel(nn.Embedding(4, 2, sparse=True)) for _ in range(2)]
model = DistributedDataParallel(nn.Linear(4, 4))
for step in range(20):
    loss = model(torch.ones(2, 4)).sum()
    if step == 12 and dist.get_rank() == 1:
        time.sleep(600)
    loss.backward()  # HERE
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--collectives shard -- script.py", "unknown choice 'shard'"),
        ("--collectives shared --nodes 2 --on print -- script.py", "here are 2 nodes"),
        ("--collectives shared --nodes 1 --on print -- script.py", "--agent paceline does"),
        ("--collectives shared -- echo", "echo runs as it is; name the .py file itself. Choose from: torch, shared"),
    ],
)
def test_what_it_cannot_do_is_told_before_anything_is_started(paceline, tmp_path, arguments: str, words: str) -> None:
    (tmp_path / "script.py").write_text("")
    ended = paceline("launch", *arguments.split(), command=("-c", WITHOUT_TORCH))
    said = " ".join((ended.stdout + ended.stderr).replace("│", " ").split())
    assert ended.returncode == 2 and words in said, said
    assert not (tmp_path / "runs").exists()


@pytest.mark.ranks
def test_a_script_that_nobody_changed_shares_memory_and_who_does_not_come_is_named(paceline, tmp_path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = paceline("launch", "--collectives", "shared", "--nproc", 2, "--stall-after", 2, "--", "script.py")
    said = ended.stderr
    assert ended.returncode == 3, said
    assert said.count("DDP's gradients go through shared memory (2 ranks)") == 1, said
    assert said.count("DDP's gradients do not go through shared memory: there are sparse gradients") == 1, said
    line = SCRIPT[: SCRIPT.index("# HERE")].count("\n") + 1
    assert "GUILTY: rank 1" in said and "rank 1 did not enter all_reduce #13 'gradients' [20] float32" in said, said
    assert f"rank 0 waits in it, called from script.py:{line} in <module>" in said, said
    assert "freed by the hang guard" in said, said
