"""How a session ends where a file of its own cannot be written: what was trained is not lost."""

import json
import re
from pathlib import Path

import pytest
from tests import warm
from tests.run_script import run_script

pytestmark = pytest.mark.sample(2)

LOOP = """
import errno, os
import torch, paceline
from paceline.train.records import RunRecorder

whole = RunRecorder.log_step

def full(self, record, *words, **more):
    if record.step == 3:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "events-0.jsonl")
    whole(self, record, *words, **more)

RunRecorder.log_step = full
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
    assert re.search(r"rank 0 .* step 3\b", done.stderr) and "events-0.jsonl" in done.stderr, done.stderr
    assert rescued.is_file() and str(rescued) in done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["exit"], summary["steps"]) == (1, 3) and "No space left" in summary["failure"]


def test_a_session_that_ends_well_says_in_its_summary_what_it_has_cost(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP.replace("record.step == 3", "False"))
    done = warm.run((tmp_path / "loop.py",), cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert done.returncode == 0, done.stderr
    assert summary["seconds"] > 0 and summary["peak_memory_bytes"] > 1 << 20 and 0 <= summary["data_share"] <= 1


EXITS = """
import sys, torch, paceline
s = paceline.session("run")
model, optimizer = s.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
for epoch in s.epochs(2):
    for x in s.loader(torch.arange(16.0).reshape(8, 2) / 16, global_batch=2):
        if s.step == 3 and s.rank == s.size - 1:
            sys.exit(int(sys.argv[1]))
        optimizer.zero_grad()
        s.backward(model(x).mean())
        optimizer.step()
"""


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "code"), [(1, 3), (2, 3)])
def test_a_rank_that_exits_in_a_loop_ends_at_once_with_its_code(tmp_path: Path, ranks: int, code: int) -> None:
    (tmp_path / "loop.py").write_text(EXITS)
    done = run_script(ranks, "loop.py", code, cwd=tmp_path, timeout=90.0)
    assert done.returncode == max(code, ranks - 1), done.stderr  # the other rank's exchange fails
    if ranks == 1:
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (summary["exit"], summary["steps"]) == (1, 3)


LOADED = """
import os, sys, time
import torch, paceline
from multiprocessing.process import BaseProcess
from torch.utils.data import DataLoader, Dataset, IterableDataset

how, pid, start, started, kept = sys.argv[1], os.getpid(), BaseProcess.start, [], []
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # so long torch waits for a busy process

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, number):
        if os.getpid() != pid and number == 5:  # the session itself looks at samples, too
            if how.startswith("an error in a process"):
                raise ValueError("of this sample")
            if how == "a busy process":
                time.sleep(1000)
        return torch.full((2,), float(number))

class Stream(IterableDataset):
    def __iter__(self):
        yield from map(Data().__getitem__, range(8))

def start_one(process):
    started.append(process)
    if len(started) == 2:
        kept.append(OSError("no second process"))  # with its traceback
        raise kept[0]
    start(process)

if how == "a process that cannot start":
    BaseProcess.start = start_one
with paceline.session() as s:
    model, optimizer = s.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    if how.endswith("of a stream"):
        loader = s.loader(Stream(), global_batch=2, num_workers=1)
    else:
        loader = s.loader(DataLoader(Data(), batch_size=2, num_workers=2))
    if how == "an iterator that is kept":
        with torch.no_grad():
            kept.append(iter(loader))
            next(kept[0])
    for x in loader:
        if how == "a busy process" and s.batch == 1:
            break
        optimizer.zero_grad()
        s.backward(model(x).mean())
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("an error in a process", 1, "ValueError: of this sample"),
        ("an error in a process of a stream", 1, "ValueError: of this sample"),
        ("a process that cannot start", 1, "OSError: no second process"),
        ("an iterator that is kept", 0, ""),
        ("a busy process", 0, ""),
    ],
)
def test_a_session_ends_with_its_loader_processes(how: str, code: int, told: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOADED)
    done = run_script(1, tmp_path / "loop.py", how, cwd=tmp_path)  # without an agent, which would kill what is left
    assert done.returncode == code and told in done.stderr, done.stderr
    assert "atexit" not in done.stderr and bool(told) == ("Traceback" in done.stderr)


@pytest.mark.ranks
def test_sessions_follow_each_other_in_one_process_without_an_agent(tmp_path: Path) -> None:
    """Rank 1 begins the next session while rank 0 still has the group, and so the store, of the one before."""
    done = run_script(2, Path(__file__).with_name("sequence.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^session (\d)$", done.stdout, re.MULTILINE) == ["0", "1", "2"]
