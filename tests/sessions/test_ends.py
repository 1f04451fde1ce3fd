"""How a session ends where a file of its own cannot be written: what was trained is not lost."""

from __future__ import annotations

import json
from pathlib import Path

from tests import warm

LOOP = """
import errno, os
import torch, paceline
from paceline.train.records import Records

whole = Records.stepped

def full(self, record, *words, **more):
    if record.step == 3:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "events-0.jsonl")
    whole(self, record, *words, **more)

Records.stepped = full
with paceline.session("run") as s:
    model, optimizer = s.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    for x in s.loader(torch.arange(16.0).reshape(8, 2) / 16, global_batch=2):
        optimizer.zero_grad()
        s.backward(model(x).mean())
        optimizer.step()
"""


def test_a_full_disk_rescues_the_weights_and_says_where_and_the_summary_says_how_far_it_came(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = warm.run((tmp_path / "loop.py",), cwd=tmp_path)
    rescued = tmp_path / "run" / "run-rescued.safetensors"
    assert done.returncode == 1 and "No space left" in done.stderr, done.stdout + done.stderr
    assert "rank 0 cannot go on after step 3: [Errno 28] No space left on device: 'events-0.jsonl'" in done.stderr
    assert f"the weights were rescued to {rescued}" in done.stderr
    assert rescued.is_file()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["exit"], summary["steps"]) == (1, 3) and "No space left" in summary["failure"]


def test_a_session_that_ends_well_says_in_its_summary_what_it_has_cost(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP.replace("record.step == 3", "False"))
    done = warm.run((tmp_path / "loop.py",), cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert done.returncode == 0, done.stderr
    assert summary["seconds"] > 0 and summary["peak_memory_bytes"] > 1 << 20 and 0 <= summary["data_share"] <= 1
