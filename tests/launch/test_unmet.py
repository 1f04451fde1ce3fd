"""Ranks in different collectives are named within seconds; those that only wait for long are left alone."""

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests import warm
from tests.run_script import run_script

from paceline.errors import ExitCode
from paceline.guard.report import read_diagnosis
from paceline.protocol.evidence import DiagnosisKind

pytestmark = pytest.mark.sample(4)

MOST_SECONDS = 15.0
LATE_SECONDS = 20.0
HEAD = """
import time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
import paceline

torch.manual_seed(0)
torch.set_num_threads(1)
s = paceline.session(**SETTINGS)
model = nn.Linear(4, 1)
model, optimizer = s.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = s.loader(DataLoader(torch.randn(24, 4), batch_size=6))

def train(stops=lambda batch: False):
    for batch, x in enumerate(loader):
        if stops(batch):
            break
        s.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()

def total(number):
    return s.sum(number)
"""
LEAVES_EPOCHS = """
for epoch in s.epochs(3):
    if s.rank == 0 and epoch == 1:
        break
    train()
"""
LEAVES_BATCHES = """
for epoch in s.epochs(3):
    train(lambda batch: s.rank == 1 and epoch == 1 and batch == 2)
    with torch.no_grad():
        found = [float(model(x).sum()) for x in loader]
"""
ONE_EVALUATES_LAST = """
for epoch in s.epochs(3):
    train()
    if s.rank == 0 and epoch == 1:
        break
    print("TOTAL", total(1.0 + epoch))
print("TOTAL", total(100.0))
"""
A_SUM_TOO_MUCH = """
for epoch in s.epochs(3):
    train()
    if s.rank == 1 and epoch == 1:
        print("TOTAL", s.sum(100.0))
    print("TOTAL", s.sum(1.0 + epoch))
"""
A_GATHER_TOO_MUCH = """
for epoch in s.epochs(3):
    train()
    if s.rank == 1 and epoch == 1:
        print("TOTAL", s.gather(torch.full((2,), 100.0)).sum().item() / 4)
    print("TOTAL", s.gather(torch.full((2,), 1.0 + epoch)).sum().item() / 2)
"""
OF_A_BRANCH = """
for epoch in s.epochs(2):
    train()
    if s.rank == 0:
        print("TOTAL", s.sum(2.0 + epoch))
    else:
        print("TOTAL", s.sum(epoch))
"""
LATE = f"""
first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
for epoch in s.epochs(1):
    train()
    if s.rank == 1:
        time.sleep({LATE_SECONDS})
    if s.rank < 2:
        dist.all_reduce(torch.ones(4), group=first)
    if s.rank > 0:
        dist.barrier(group=second)
    if s.rank == 1:
        time.sleep(3.0)
    print("TOTAL", s.sum(1.0))
"""
EXPERTS = """
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        expert = self.one if s.rank == 0 or calls < USUAL else self.other
        return expert(self.first(x))

model, optimizer = s.prepare(Mixed(), lambda p: torch.optim.SGD(p, lr=0.1))
calls = 0
for x in loader:
    s.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
    calls += 1
print("TOTAL", 0.0)
"""


def launched(folder: Path, loop: str, *flags: str, nproc: int = 2, **settings: object) -> CompletedProcess[str]:
    (folder / "loop.py").write_text(HEAD.replace("SETTINGS", repr(settings)) + loop)
    words = ("-m", "paceline", "launch", "--nproc", str(nproc), "--run-dir", "run", *flags, "--", "loop.py")
    return warm.run(words, cwd=folder, ranks=True)


@pytest.mark.parametrize(
    ("loop", "kind", "called"),
    [
        (LEAVES_EPOCHS + "s.sum(1.0)", DiagnosisKind.MISMATCH, ["numbers of the loop", "messages of draw_epoch_plan"]),
        (LEAVES_BATCHES, DiagnosisKind.MISMATCH, ["totals of the step", "messages of draw_epoch_plan"]),
        (
            LEAVES_EPOCHS + "with s.evaluating(): pass",
            DiagnosisKind.DEADLOCK,
            ["messages of draw_epoch_plan", "of group 0"],
        ),
    ],
    ids=["left the epochs for a sum", "left the batches for an evaluation", "left the epochs for whole models"],
)
def test_ranks_in_different_collectives_are_named_within_seconds(
    tmp_path: Path, loop: str, kind: DiagnosisKind, called: list[str]
) -> None:
    done = launched(tmp_path, loop)
    told = read_diagnosis(tmp_path / "run" / "attempt-1" / "diagnosis-1")
    assert (done.returncode, told.diagnosis.kind, told.diagnosis.tie) == (ExitCode.MISMATCH, kind, ((0,), (1,)))
    assert told.waited_seconds < MOST_SECONDS
    assert all(any(words in line for line in told.diagnosis.sentences) for words in called), told.diagnosis.sentences
    assert all("loop.py:" in line for line in told.diagnosis.sentences)


def test_ranks_in_different_gathers_of_words_say_so_themselves(tmp_path: Path) -> None:
    done = launched(tmp_path, LEAVES_EPOCHS + "s.weights(model)")
    assert done.returncode == ExitCode.MISMATCH, done.stderr
    assert " check_replicas" in done.stderr and " draw_epoch_plan" in done.stderr
    assert not [*(tmp_path / "run").glob("attempt-1/diagnosis-*")]


@pytest.mark.slow
def test_a_late_rank_and_ranks_in_different_subgroups_are_left_alone(tmp_path: Path) -> None:
    done = launched(tmp_path, LATE, nproc=3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TOTAL 3.0") == 3
    assert not [*(tmp_path / "run").glob("attempt-1/diagnosis-*")]


@pytest.mark.slow
def test_the_guard_that_is_off_ends_nobody(tmp_path: Path) -> None:
    done = launched(tmp_path, LEAVES_EPOCHS + "s.sum(1.0)", "--hang-timeout", "off", timeout=8.0)
    assert done.returncode != 0
    assert not [*(tmp_path / "run").glob("attempt-1/diagnosis-*")]


@pytest.mark.parametrize("env", [{}, {"PACELINE_SHARED_MEMORY": "off"}], ids=["memory", "gloo"])
@pytest.mark.parametrize(
    "loop",
    [ONE_EVALUATES_LAST, A_SUM_TOO_MUCH, A_GATHER_TOO_MUCH],
    ids=["other place by a function", "a sum too much", "a gather too much"],
)
def test_numbers_from_different_places_are_never_added_up(tmp_path: Path, loop: str, env: dict[str, str]) -> None:
    (tmp_path / "loop.py").write_text(HEAD.replace("SETTINGS", "{}") + loop)
    done = run_script(2, "loop.py", cwd=tmp_path, env=env)
    assert done.returncode == ExitCode.MISMATCH, done.stderr
    assert {*re.findall(r"TOTAL (\S+)", done.stdout)} == {"2.0"}  # of the first epoch


def test_a_branch_for_each_rank_is_no_mismatch(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(HEAD.replace("SETTINGS", "{}") + OF_A_BRANCH)
    done = run_script(2, "loop.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"TOTAL (\S+)", done.stdout)) == ["2.0", "2.0", "4.0", "4.0"]


@pytest.mark.parametrize("usual", [0, 2], ids=["from the start", "later"])
def test_ranks_that_call_different_blocks_of_a_cut_model_are_told_which(tmp_path: Path, usual: int) -> None:
    done = launched(tmp_path, EXPERTS.replace("USUAL", str(usual)), strategy="fsdp")
    assert done.returncode == ExitCode.MISMATCH, done.stderr
    assert "TOTAL" not in done.stdout
    assert re.search(r"block o(ne|ther)", done.stderr)
