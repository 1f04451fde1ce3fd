"""Whole runs in which something is not finite, or a rank stands still: none ends with other weights than it should."""

import json
import re
import subprocess
from typing import Any

import pytest
from tests import warm
from tests.ended import digest, start_steps

from paceline.runs.events import Notice, RolledBack, Skipped, Step, read_events

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(450)]

TASK = """
import os, time
import torch
from torch import nn
from torch.utils.data import Dataset
from paceline import Task

class Data(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        if index == 29 and os.path.exists("hang"):
            time.sleep(1000)  # FAULT
        x = torch.randn(4, generator=torch.Generator().manual_seed(index)) * (index != 7)
        return x, x.sum()

def model():
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))

def loss(outputs, targets):
    return (outputs[:, 0] - targets).square()

def rooted(outputs, targets):  # sample 7 is zeros: there the root is finite, and its slope is not
    return outputs[:, 0].abs().sqrt() + loss(outputs, targets)

good = Task(model, lambda split: Data(), loss)
bad = Task(model, lambda split: Data(), rooted)
"""
COMMON = ("--virtual-ranks", 2, "--global-batch", 12, "--strategy", "exact", "--epochs", 2)


@pytest.fixture
def train(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)

    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        here = arguments[0] == "train" and "--nproc" not in arguments  # it trains in this very process
        return warm.run(["-m", "paceline", *arguments], torch=here, cwd=tmp_path, timeout=180)

    return run


@pytest.mark.slow
def test_skip_and_rollback_give_the_same_weights_at_every_world_size(train, tmp_path):
    runs = {
        "alone": ("skip",),
        "two": ("skip", "--nproc", 2),
        "back": ("rollback", "--nproc", 2, "--checkpoint-every", 2),
        "snapshot": ("rollback", "--nproc", 2, "--max-restarts", 1, "--snapshot-every", 1),
    }
    for name, policy in runs.items():
        ended = train("train", "mine.py:bad", *COMMON, "--run-dir", name, "--not-finite", *policy)
        assert ended.returncode == 0, ended.stderr
        notes = [e.text for e in read_events(tmp_path / name / "events-0.jsonl") if isinstance(e, Notice)]
        assert any(note.startswith("step 3 ") and "samples 7 " in note for note in notes)
    assert len({digest(tmp_path / name) for name in runs}) == 1
    for name in ("two", "back"):
        for rank in range(2):
            told = [*read_events(tmp_path / name / f"events-{rank}.jsonl")]
            assert {e.step: e.samples for e in told if isinstance(e, Skipped)} == {3: [7], 9: [7]}
            assert {e.step for e in told if isinstance(e, Step) and e.skipped} == {3, 9}
            gone_back = [(e.step, e.to) for e in told if isinstance(e, RolledBack)]
            assert gone_back == ([(3, 2), (9, 8)] if name == "back" else [])
        ledger = train("ledger", name, "--json", "used.json")
        assert ledger.returncode == 0, ledger.stdout
        assert json.loads((tmp_path / "used.json").read_text())["left_out"] == [3, 9]


def test_stop_is_the_default_and_rollback_leaves_out_what_there_is_nothing_to_go_back_from(train, tmp_path):
    ended = train("train", "mine.py:bad", "--nproc", 2, *COMMON)
    assert ended.returncode == 5 and "[not-finite]" in ended.stderr and "samples 7 " in ended.stderr
    ended = train("train", "mine.py:bad", *COMMON, "--not-finite", "rollback")
    assert ended.returncode == 0
    assert "--not-finite rollback" in ended.stdout and "step 3 " in ended.stdout


@pytest.mark.slow
def test_what_a_freed_rank_saves_goes_on_to_the_very_same_weights(train, tmp_path):
    undisturbed = train("train", "mine.py:good", *COMMON, "--run-dir", "whole")
    assert undisturbed.returncode == 0, undisturbed.stderr
    (tmp_path / "hang").touch()
    stalled = train("train", "mine.py:good", "--nproc", 2, *COMMON, "--hang-timeout", 3, "--run-dir", "run")
    assert stalled.returncode == 3, stalled.stderr
    saver = 1 - int(stalled.stderr.partition("CAUSE: rank ")[2][0])
    (path,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert re.search(f"rank {saver}: .* {int(path.name[5:])} .*{path}", stalled.stdout + stalled.stderr)
    (tmp_path / "hang").unlink()
    resumed = train("train", "--resume", "auto", "--run-dir", "run")
    assert resumed.returncode == 0, resumed.stderr
    assert start_steps(tmp_path / "run")[-1] == int(path.name[5:])
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")
    assert train("ledger", "run").returncode == 0
