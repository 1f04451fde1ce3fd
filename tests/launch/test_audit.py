"""Audits in real runs: a run stops or continues without the rank that computes wrongly, with the right result."""

from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
from tests import warm
from tests.ended import digest, start_steps
from tests.errors import codes, ended_with
from tests.run_script import run_script

from paceline.launch.agent.coordinator import Coordinator
from paceline.protocol.control import WorkerSpec
from paceline.protocol.job import NodePlan
from paceline.rank import world
from paceline.rank.world import World
from paceline.train.wording import describe_audits

MODEL = """
import os, torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head, self.calls = nn.Linear(8, 8), nn.Linear(8, 1), 0

    def forward(self, x):
        out = self.first(x).tanh()
        self.calls += self.training
        if self.training and self.calls > RIGHT and os.environ["RANK"] == "1" and os.environ["WORLD_SIZE"] == "3":
            out = out * (1 + 2**-20)  # from step 8 on, in which an audit is of this rank
        return self.head(F.dropout(out, 0.1, self.training))[:, 0]

x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
""".replace("RIGHT", str(3 + 6 * 2))
TASK = f"""{MODEL}
from paceline import ArrayDataset, Task
task = Task(Net, lambda split: ArrayDataset(x, x.sum(1)), lambda o, t: (o - t).square())
"""
SESSION = f"""{MODEL}
import sys, paceline
from torch.utils.data import TensorDataset

audits = dict(audit_every=1, on_audit=sys.argv[1]) if len(sys.argv) > 1 else {{}}
with paceline.session("run", strategy="zero", virtual_ranks=6, seed=0, resume=True, **audits) as s:
    model, optimizer, scheduler = s.prepare(
        Net(), lambda p: torch.optim.AdamW(p, lr=0.01), lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.9)
    )
    loader = s.loader(TensorDataset(x, x.sum(1)), global_batch=24)
    for epoch in s.epochs(3):
        samples = 0
        for a, b in loader:
            optimizer.zero_grad()
            s.backward(F.mse_loss(model(a), b))
            optimizer.step()
            scheduler.step()
            samples += s.samples
        assert s.sum(samples) in (96, 24)  # 24: the epoch began in step 8
"""
REFUSED = {  # the data, or what stands before it
    "audit-of-stream": ("TensorDataset(x, x.sum(1))", "type('Stream', (torch.utils.data.IterableDataset,), "
                        "{'__iter__': lambda self: zip(x, x.sum(1))})()"),
    "audit-with-worker-init": ("TensorDataset(x, x.sum(1)), global_batch=24", "torch.utils.data.DataLoader("
                               "TensorDataset(x, x.sum(1)), batch_size=24, num_workers=1, worker_init_fn=print)"),
    "audit-of-several-models": ("loader = s.loader", "s.prepare(Net(), torch.optim.SGD); loader = s.loader"),
}  # fmt: skip
TRAIN = (
    "-m",
    "paceline",
    "train",
    "mine.py:task",
    "--strategy",
    "exact",
    "--virtual-ranks",
    "6",
    "--global-batch",
    "24",
)
RUN = (*TRAIN, "--run-dir", "run", "--steps", "12", "--device", "cpu")
EXCLUDE = ("--nproc", "1", "--audit-every", "5", "--on-audit", "exclude")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "healthy").mkdir()
    for here in (tmp_path, tmp_path / "healthy"):
        (here / "mine.py").write_text(TASK)
        (here / "loop.py").write_text(SESSION)
    return tmp_path


def healthy(folder: Path, *words: str) -> str:
    """The digest of the run on two ranks, without audits."""
    done = run_script(2, *words, cwd=folder / "healthy")
    assert done.returncode == 0, done.stdout + done.stderr
    return digest(folder / "healthy" / "run")


def found(done: CompletedProcess[str]) -> None:
    assert codes(done.stderr)[:1] == ["audit-wrong-numbers"], done.stdout + done.stderr
    assert "rank 1 (" in done.stderr


@pytest.mark.ranks
def test_a_task_saves_the_state_before_the_step_and_resumes_elsewhere_with_the_same_bits(folder: Path) -> None:
    done = run_script(3, *RUN, "--audit-every", "1", cwd=folder)
    assert done.returncode == 6
    found(done)
    assert "audit every step" in done.stdout
    done = run_script(2, *RUN, "--audit-every", "2", "--resume", "auto", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert start_steps(folder / "run") == [0, 7]
    assert digest(folder / "run") == healthy(folder, *RUN)


@pytest.mark.ranks
def test_a_session_does_the_same_and_keeps_its_schedule(folder: Path) -> None:
    done = run_script(3, "loop.py", "stop", cwd=folder)
    assert done.returncode == 6
    found(done)
    done = run_script(2, "loop.py", "stop", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert start_steps(folder / "run") == [0, 7]
    assert digest(folder / "run") == healthy(folder, "loop.py")


@pytest.mark.ranks
def test_a_run_continues_without_the_rank(folder: Path) -> None:
    done = warm.run((*RUN, "--audit-every", "1", "--on-audit", "exclude", "--nproc", "3"), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found(done)
    assert start_steps(folder / "run") == [0, 7]
    assert digest(folder / "run") == healthy(folder, *RUN)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_session_continues_without_the_rank(folder: Path) -> None:
    done = warm.run(("-m", "paceline", "launch", "--nproc", "3", "loop.py", "exclude"), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found(done)
    assert start_steps(folder / "run") == [0, 7]
    assert digest(folder / "run") == healthy(folder, "loop.py")


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--nproc", "2", "--audit-every", "0"), "not-positive"),
        (("--nproc", "2", "--audit-every", "5", "--strategy", "ddp"), "audit-strategy"),
        (("--audit-every", "5"), "audit-needs-ranks"),
        (("--nproc", "2", "--on-audit", "exclude"), "on-audit-alone"),
        ((*EXCLUDE, "--on", "ssh", "--hosts", "a,b"), "exclude-from-fixed-nodes"),
        ((*EXCLUDE, "--on", "slurm", "--nodes", "2"), "exclude-from-fixed-nodes"),
    ],
)
def test_what_cannot_be_audited_is_an_error_before_any_process_starts(
    folder: Path, flags: tuple[str, ...], code: str
) -> None:
    ended_with(warm.run((*RUN, *flags), cwd=folder), code)
    assert not (folder / "run").exists()


@pytest.mark.ranks
def test_what_only_the_ranks_know_is_an_error_before_the_first_step(folder: Path) -> None:
    ended_with(run_script(2, *RUN, "--audit-every", "5", "--on-audit", "exclude", cwd=folder), "audit-without-agent")
    (folder / "new.py").write_text(SESSION.replace("resume=True", "resume=False"))
    assert {*codes(run_script(2, "new.py", "exclude", cwd=folder).stderr)} == {"audit-needs-resume"}
    for code, (before, after) in REFUSED.items():
        (folder / "refused.py").write_text(SESSION.replace(before, after))
        ended_with(run_script(2, "refused.py", "stop", cwd=folder), code)


COUNTED = {
    "a number": ("samples += s.samples", "samples += 1"),
    "a scheduler": ("scheduler.step()", "scheduler.step(); other.step()"),
    "a loss": ("samples += s.samples", "samples += float(b.sum())"),
    "an average": ("scheduler.step()", "scheduler.step(); average.update_parameters(model)"),
}


@pytest.mark.ranks
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", COUNTED)
def test_a_loop_that_counts_the_repeated_body_is_an_error_in_the_first_step(folder: Path, name: str) -> None:
    objects = """
    other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(nn.Linear(1, 1).parameters()), total_iters=1)
    average = torch.optim.swa_utils.AveragedModel(Net())
    loader = s.loader("""
    script = SESSION.replace(*COUNTED[name]).replace("\n    loader = s.loader(", objects)
    (folder / "counts.py").write_text(script)
    ended_with(run_script(2, "counts.py", "stop", cwd=folder), "audit-counted")


SET = """import time
            kept = dict(loss=float(b.sum()), rate=optimizer.param_groups[0]["lr"], size=len(a), at=time.perf_counter())
            last, best, at, rate, seen = kept["loss"], min(best, kept["loss"]), kept["at"], kept["rate"], a.sum()
            average, took = 0.9 * average + 0.1 * last, kept["at"] - at
            samples += s.samples"""


@pytest.mark.ranks
def test_a_loop_that_keeps_losses_rates_and_times_of_the_last_body_is_right(folder: Path) -> None:
    before = "samples, last, best, at, rate, average, took, seen = 0, 0.0, 1e9, 0.0, 0.0, 0.0, 0.0, torch.zeros(())"
    text = SESSION.replace(
        "        samples = 0\n", f"        {before}\n        kept = dict(loss=0.0, rate=0.0, size=0, at=0.0)\n"
    )
    (folder / "sets.py").write_text(text.replace("samples += s.samples", SET))
    done = run_script(2, "sets.py", "stop", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ranks
def test_audits_work_with_two_loaders_of_which_one_searches_its_micro_batch(folder: Path) -> None:
    (folder / "two.py").write_text(
        SESSION.replace("for a, b in loader:", "for a, b in (loader, again)[epoch % 2]:").replace(
            "    for epoch",
            "    again = s.loader(TensorDataset(x, x.sum(1)), global_batch=24, micro_batch='auto')\n    for epoch",
        )
    )
    done = run_script(2, "two.py", "stop", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_exclusions_leave_out_devices_and_end_at_the_least_number_of_ranks() -> None:
    agent: Any = SimpleNamespace(plan=NodePlan(("x",), nproc=4, min_nproc=2))
    for named, devices in ((1, (0, 2, 3)), (2, (0, 2))):
        decision = Coordinator._without_rank(agent, SimpleNamespace(plan=agent.plan), named)  # pyright: ignore
        assert decision == len(devices) and agent.plan.devices == devices
    assert isinstance(Coordinator._without_rank(agent, SimpleNamespace(plan=agent.plan), 0), str)  # pyright: ignore


def test_a_run_with_the_least_number_of_nodes_warns_that_it_cannot_exclude_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSpec, "_here", WorkerSpec(agent_pid=1, min_nodes=2))
    four = World(0, 4, 0, 1, world.torch.device("cpu"), "gloo")
    for nodes, on_audit, is_warned in (("2", "exclude", True), ("3", "exclude", False), ("2", "stop", False)):
        monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
        lines = describe_audits(5, on_audit, four)
        assert lines[0] == "audit every 5 steps"
        assert [line.startswith("WARNING") and "--nodes 2:MAX" in line for line in lines[1:]] == [True] * is_warned
    monkeypatch.setattr(WorkerSpec, "_here", WorkerSpec(agent_pid=1))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")  # node 0 can lose ranks
    assert len(describe_audits(5, "exclude", four)) == 1


def test_the_device_of_an_excluded_rank_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(world, "resolve_device", lambda _, index, *__: taken.append(index) or world.torch.device("cpu"))
    env = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    for devices in ((), (0, 2)):
        monkeypatch.setattr(WorkerSpec, "_here", WorkerSpec(agent_pid=1, devices=devices))
        World.from_env(env, device="cpu")
    assert taken == [1, 2]
