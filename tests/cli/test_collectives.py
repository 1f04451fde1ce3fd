"""`paceline launch --collectives shared`: DDP of an unchanged script, with the hang guard."""

from pathlib import Path

import pytest

from paceline.guard.report import read_diagnosis

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


@pytest.mark.slow
@pytest.mark.ranks
def test_an_unchanged_script_shares_memory_and_a_missing_rank_is_named(paceline, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ("--collectives", "shared", "--nproc", 2, "--hang-timeout", 2, "--run-dir", "run")
    ended = paceline("launch", *options, "--", "script.py")
    output = ended.stderr
    assert ended.returncode == 3, output
    assert output.count("shared memory (2 ranks)") == output.count("sparse gradients") == 1, output
    line = SCRIPT[: SCRIPT.index("# HERE")].count("\n") + 1
    diagnosis = read_diagnosis(tmp_path / "run" / "attempt-1" / "diagnosis-1").diagnosis
    assert diagnosis.causes == (1,) and diagnosis.op is not None
    op = diagnosis.op
    assert (op.kind, op.seq, op.name, op.shape, op.dtype) == ("all_reduce", 13, "gradients", "[20]", "float32")
    assert op.site.startswith(f"script.py:{line} ")
    assert "hang guard" in (tmp_path / "run" / "attempt-1" / "rank-0.log").read_text()  # it was unblocked
