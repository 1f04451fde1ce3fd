"""--balance in real runs: ranks compute different numbers of virtual ranks, and the bits stay the same."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from tests import warm
from tests.errors import ended_with, raises

from paceline.errors import ExitCode
from paceline.rank.world import World
from paceline.runs.events import Step, read_events
from paceline.runs.summary import read_summary
from paceline.sessions.arguments import SessionConfig
from paceline.sessions.lifecycle import check_balance

TASK = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline import Task

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        if self.training:
            time.sleep(SECONDS if os.environ["RANK"] == "1" else 0.01)
        return self.linear(x)

def data(split):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(480, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())

task = Task(make_model=Slow, make_dataset=data, loss=lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"))
"""
SESSION = """
import os, sys, time, torch, paceline
from torch import nn

s = paceline.session("run", virtual_ranks=6, strategy="exact", RESUME)
model, optimizer = s.prepare(nn.Linear(8, 4), lambda p: torch.optim.SGD(p, lr=0.1))
x = torch.randn(360, 8, generator=torch.Generator().manual_seed(0))
for epoch in s.epochs(2):
    for batch in s.loader(x, batch_size=2):
        time.sleep(0.2 * s.rank)
        s.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def train(
    folder: Path, *flags: str, seconds: float = 0.01, nproc: int = 2, task: str = TASK
) -> CompletedProcess[str]:  # fmt: skip
    (folder / "mine.py").write_text(task.replace("SECONDS", str(seconds)))
    words = (
        "-m",
        "paceline",
        "train",
        "mine.py:task",
        "--nproc",
        str(nproc),
        "--run-dir",
        "run",
        "--global-batch",
        "12",
        *flags,
    )
    return warm.run(words, cwd=folder)


def shares(run: Path, nproc: int = 2) -> list[list[int]]:
    """The numbers of virtual ranks of all ranks, each time that they change."""
    steps = [[e for e in read_events(run / f"events-{rank}.jsonl") if isinstance(e, Step)] for rank in range(nproc)]
    counts = [[e.share[1] - e.share[0] for e in pair if e.share] for pair in zip(*steps, strict=True)]
    return [numbers for numbers, before in zip(counts, [[], *counts], strict=False) if numbers != before]


def test_a_ratio_changes_the_shares_and_not_the_bits(tmp_path: Path) -> None:
    digests: set[str] = set()
    for flags, expected in (((), [3, 3]), (("--balance", "2:1"), [4, 2])):
        folder = tmp_path / str(len(flags))
        folder.mkdir()
        done = train(folder, "--strategy", "exact", "--virtual-ranks", "6", "--steps", "5", *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        assert shares(folder / "run") == [expected]
        digests.add(str(read_summary(folder / "run").weights_sha256))
    assert len(digests) == 1


def assert_rank_1_gets_fewer(run: Path) -> None:
    """A busy machine slows rank 0 too, so the numbers are not exact."""
    first, *_, last = shares(run)
    assert first == [3, 3] and last[1] < 3


@pytest.mark.slow
def test_auto_restarts_a_task_with_better_shares(tmp_path: Path) -> None:
    common = ("--strategy", "zero", "--virtual-ranks", "6", "--epochs", "2")
    done = train(tmp_path, *common, "--balance", "auto", seconds=0.1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_rank_1_gets_fewer(tmp_path / "run")
    (plain := tmp_path / "plain").mkdir()
    assert train(plain, *common).returncode == 0
    assert read_summary(tmp_path / "run").weights_sha256 == read_summary(plain / "run").weights_sha256


FAST_WITHOUT_MEMORY = (
    TASK.replace('"1" else', '"2" else')
    .replace(
        "        if self.training:\n",
        """        if self.training:
            if os.environ["RANK"] == "0":
                memory.free_memory = lambda: 0
""",
    )
    .replace("from paceline import Task", "from paceline import Task\nfrom paceline.compute import memory")
)


@pytest.mark.slow
def test_a_fast_rank_with_little_memory_gets_fewer_than_another_fast_one(tmp_path: Path) -> None:
    common = ("--strategy", "exact", "--virtual-ranks", "12", "--epochs", "2")
    options: dict[str, Any] = {"nproc": 3, "task": FAST_WITHOUT_MEMORY, "seconds": 0.06}
    done = train(tmp_path, *common, "--balance", "auto", **options)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_, last = shares(tmp_path / "run", 3)
    assert first == [4, 4, 4] and last[0] <= 4 < last[1] and last[2] < 4
    (plain := tmp_path / "plain").mkdir()
    assert train(plain, *common, **options).returncode == 0
    assert read_summary(tmp_path / "run").weights_sha256 == read_summary(plain / "run").weights_sha256


@pytest.mark.slow
def test_auto_restarts_a_session(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SESSION.replace("RESUME", "resume=True"))
    done = warm.run(("-m", "paceline", "launch", "--nproc", "2", "--balance", "auto", "loop.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_rank_1_gets_fewer(tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--balance", "3"), "balance-invalid"),
        (("--balance", "3:1:1", "--virtual-ranks", "6"), "balance-count"),
        (("--balance", "3:1"), "balance-needs-virtual-ranks"),
        (("--balance", "auto", "--virtual-ranks", "6", "--strategy", "ddp"), "balance-strategy"),
        (("--balance", "auto", "--virtual-ranks", "6", "--strategy", "fsdp"), "balance-strategy"),
        (("--balance", "auto", "--virtual-ranks", "6", "--mesh", "tensor=2"), "balance-with-mesh"),
        (("--balance", "3:1", "--virtual-ranks", "6", "--min-nproc", "1"), "balance-of-changing-ranks"),
        (("--balance", "3:1:1", "--virtual-ranks", "6", "--dry-run"), "balance-count"),
        (("--balance", "auto", "--virtual-ranks", "6", "--hang-timeout", "off"), "balance-without-guard"),
        (("--balance", "auto", "--virtual-ranks", "6", "--local-steps", "4"), "balance-changes-result"),
        (("--balance", "auto", "--virtual-ranks", "6", "--batchnorm", "sync"), "balance-changes-result"),
        (("--balance", "2:1", "--virtual-ranks", "6", "--compress", "int8"), "balance-changes-result"),
    ],
)
def test_what_cannot_be_balanced_is_an_error_before_any_process_starts(
    tmp_path: Path, flags: tuple[str, ...], code: str
) -> None:
    ended_with(train(tmp_path, *flags), code)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--on", "ssh", "--hosts", "a,b", "--nodes", "1:2", "--virtual-ranks", "4", "--checkpoint-every", "9"),
        ("--min-nproc", "1", "--max-restarts", "1", "--virtual-ranks", "2"),
    ],
)
def test_fewer_ranks_than_virtual_ranks_may_be_left_later(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = train(tmp_path, *flags, "--balance", "auto", "--dry-run")
    assert done.returncode == 0, done.stderr
    ended_with(
        train(tmp_path, "--nproc", "2", "--virtual-ranks", "2", "--balance", "auto"), "balance-needs-virtual-ranks"
    )


def test_one_process_without_an_agent_cannot_be_balanced(tmp_path: Path) -> None:
    words = ("-m", "paceline", "train", "mnist-cnn", "--virtual-ranks", "6", "--balance", "auto", "--run-dir", "run")
    ended_with(warm.run(words, cwd=tmp_path), "option-needs-nproc")


def test_a_session_that_cannot_be_balanced_says_so(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SESSION.replace("RESUME", ""))
    done = warm.run(("-m", "paceline", "launch", "--nproc", "2", "--balance", "auto", "loop.py"), cwd=tmp_path)
    ended_with(done, "balance-needs-resume")
    assert "--balance auto" in done.stderr  # an option of the command, not an argument of the session


def test_a_session_is_measured_on_the_cpu_only_and_keeps_its_result() -> None:
    values: dict[str, Any] = dict.fromkeys(SessionConfig.__annotations__)
    values["strategy"] = "bucketed"
    config = SessionConfig(**values)
    resumes = replace(config, run_dir="run", resume=True)
    on_cpu, on_gpu = (World(0, 2, 0, 2, torch.device(kind), "gloo") for kind in ("cpu", "cuda"))
    check_balance("auto", resumes, 6, on_cpu)
    check_balance("2:1", config, 6, on_gpu)
    with raises("balance-of-device", device="cuda"):
        check_balance("auto", resumes, 6, on_gpu)
    for changed in (replace(config, local_steps=4), replace(config, compress="int8")):
        with raises("balance-changes-result", setting="balance"):
            check_balance("2:1", changed, 6, on_cpu)


def test_nodes_may_join_until_each_rank_has_one_virtual_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = dict.fromkeys(SessionConfig.__annotations__)
    values |= {"strategy": "bucketed", "run_dir": "run", "resume": True}
    config, world = SessionConfig(**values), World(0, 4, 0, 1, torch.device("cpu"), "gloo")
    with raises("balance-needs-virtual-ranks", virtual_ranks=4):
        check_balance("auto", config, 4, world)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    check_balance("auto", config, 4, world)


@pytest.mark.slow
def test_a_stop_while_the_ranks_start_again_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK.replace("SECONDS", "0.1"))
    words = [sys.executable, "-m", "paceline", "train", "mine.py:task", "--nproc", "2", "--balance", "auto"]
    words += ["--virtual-ranks", "6", "--global-batch", "12", "--run-dir", "run"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        said = next(line for line in launcher.stderr if line.startswith("continuing"))
        launcher.terminate()
        said += launcher.stderr.read()
    assert launcher.returncode == ExitCode.SAVED, said
    assert [*(tmp_path / "run" / "checkpoints").iterdir()]
