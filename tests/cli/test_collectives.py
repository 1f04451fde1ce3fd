"""`paceline launch --collectives shared`: DDP of an unchanged script, with the hang guard."""

from __future__ import annotations

import pytest

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


@pytest.mark.ranks
def test_an_unchanged_script_shares_memory_and_a_missing_rank_is_named(paceline, tmp_path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = paceline("launch", "--collectives", "shared", "--nproc", 2, "--stall-after", 2, "--", "script.py")
    said = ended.stderr
    assert ended.returncode == 3, said
    assert said.count("DDP's gradients go through shared memory (2 ranks)") == 1, said
    assert said.count("DDP's gradients do not go through shared memory: there are sparse gradients") == 1, said
    line = SCRIPT[: SCRIPT.index("# HERE")].count("\n") + 1
    assert "GUILTY: rank 1" in said and "rank 1 did not enter all_reduce #13 'gradients' [20] float32" in said, said
    assert f"rank 0 waits in it, called from script.py:{line} in <module>" in said, said
    assert "unblocked by the hang guard" in said, said
