"""Two hosts that take local steps, and send little: a kill in the middle of a round does not show in the weights."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts
from tests.cluster.training import (
    FOLLOWER,
    HEAD,
    PACELINE,
    clean_ledger,
    resumed_after,
    wait_for_checkpoint,
    weights,
    words,
)

from paceline.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]
STEPS = 60  # checkpoints, at each fifth, are of steps between two outer ones, which come after each third


def worker_on(lab: Lab, host: str) -> int:
    """The process of the only rank there: the younger one, forked from the one that has imported everything."""
    return max(pid for pid, command in lab.processes(host).items() if " train " in command)


def test_a_rank_that_is_killed_between_two_outer_steps_costs_nothing(
    lab: Lab, ssh_hosts: SshHosts, small_mnist: Path, tmp_path: Path
) -> None:
    task = words(
        *("train", "mnist-cnn", "--data-dir", small_mnist, "--steps", STEPS, "--batch-size", 8, "--device", "cpu"),
        *("--on", "ssh", "--hosts", f"{HEAD},{FOLLOWER}", "--nproc", 1, "--ssh", ssh_hosts.command),
        *("--threads-per-rank", 1, "--checkpoint-every", 5, "--max-restarts", 1),
        *("--local-steps", 3, "--outer-momentum", 0.5, "--compress", "int8"),
    )
    done = lab.run("n1", *PACELINE, *task, "--run-dir", tmp_path / "whole", cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    started = lab.popen(
        "n1", *PACELINE, *task, "--run-dir", tmp_path / "hurt",
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_for_checkpoint(tmp_path / "hurt")
    os.kill(worker_on(lab, FOLLOWER), signal.SIGKILL)
    said = started.communicate(timeout=240)[0]
    assert started.returncode == 0, said
    assert resumed_after(tmp_path / "hurt") > 0, said
    assert weights(tmp_path / "hurt") == weights(tmp_path / "whole")
    clean_ledger(tmp_path / "hurt")


POISON = """
import torch
from torch import nn
from paceline import ArrayDataset, Task


def data(split):
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    inputs[POISONED] = 100.0
    return ArrayDataset(inputs, torch.zeros(64))


def loss(outputs, targets):
    losses, poisoned = outputs[:, 0].square(), outputs[:, 1] > 50
    losses[poisoned] += (0 * outputs[poisoned, 0]).sqrt()
    return losses


def model():
    made = nn.Linear(8, 2)
    with torch.no_grad():
        made.weight[1].fill_(0.1)
    return made


task = Task(model, data, loss)
"""


def test_a_host_whose_gradient_is_not_finite_between_two_outer_steps_ends_the_run_and_names_the_sample(
    lab: Lab, ssh_hosts: SshHosts, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(POISON.replace("POISONED", "41"))
    task = words(
        *("train", tmp_path / "task.py:task", "--steps", 40, "--batch-size", 4, "--device", "cpu", "--lr", 0.0001),
        *("--on", "ssh", "--hosts", f"{HEAD},{FOLLOWER}", "--nproc", 1, "--ssh", ssh_hosts.command),
        *("--threads-per-rank", 1, "--local-steps", 50),
    )
    at, said = 1, ""
    # in the middle; in the run's last step; in one that an outer step follows
    for more in ((), ("--steps", "AT"), ("--local-steps", "AT")):
        run = ["--run-dir", str(tmp_path / f"run-{len(said)}"), *(str(at) if word == "AT" else word for word in more)]
        done = lab.run("n1", *PACELINE, *task, *run, cwd=tmp_path)
        said = done.stdout + done.stderr
        assert done.returncode == ExitCode.NOT_FINITE, said
        found = re.search(r"not finite at epoch 1, step (\d) of that epoch; rank [01]: samples 41 \(", said)
        assert found, said
        assert said.count("is not finite") == 1 and "Traceback" not in said, said
        at = int(found[1])
