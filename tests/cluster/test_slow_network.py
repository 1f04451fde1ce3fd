"""Two hosts that take local steps, and send little: a kill in the middle of a round does not show in the weights."""

import os
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
from tests.run_script import run_script
from tests.strategies.test_slow import EACH_A_HOST, POISON, check_poisoned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]
STEPS = 60  # checkpoints, at each fifth, are of steps between two outer ones, which come after each third


def worker_on(lab: Lab, host: str) -> int:
    """The process of the only rank there: the younger one, forked from the one that has imported everything."""
    return max(pid for pid, command in lab.processes(host).items() if " train " in command)


def test_a_rank_that_is_killed_between_two_outer_steps_costs_nothing(
    lab: Lab, ssh_hosts: SshHosts, small_mnist: Path, tmp_path: Path
) -> None:
    (tmp_path / "here.py").write_text(f"{EACH_A_HOST}from paceline.tasks.mnist import cnn\n")
    how = words(
        *("--data-dir", small_mnist, "--steps", STEPS, "--batch-size", 8, "--device", "cpu", "--threads-per-rank", 1),
        *("--local-steps", 3, "--outer-momentum", 0.5, "--compress", "int8", "--run-dir"),
    )
    whole = run_script(2, "-m", "paceline", "train", "here.py:cnn", *how, tmp_path / "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr + whole.stdout
    task = words(
        *("train", "mnist-cnn", *how, tmp_path / "hurt", "--checkpoint-every", 5, "--max-restarts", 1),
        *("--on", "ssh", "--hosts", f"{HEAD},{FOLLOWER}", "--nproc", 1, "--ssh", ssh_hosts.command),
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = lab.popen("n1", *PACELINE, *task, cwd=tmp_path, **pipes)
    wait_for_checkpoint(tmp_path / "hurt")
    os.kill(worker_on(lab, FOLLOWER), signal.SIGKILL)
    said = started.communicate(timeout=240)[0]
    assert started.returncode == 0, said
    assert resumed_after(tmp_path / "hurt") > 0, said
    assert weights(tmp_path / "hurt") == weights(tmp_path / "whole")
    clean_ledger(tmp_path / "hurt")


def test_a_host_whose_gradient_is_not_finite_between_two_outer_steps_ends_the_run_and_names_the_sample(
    lab: Lab, ssh_hosts: SshHosts, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(POISON)
    task = words(
        *("train", tmp_path / "task.py:task", "--steps", 40, "--batch-size", 4, "--device", "cpu", "--lr", 0.0001),
        *("--on", "ssh", "--hosts", f"{HEAD},{FOLLOWER}", "--nproc", 1, "--ssh", ssh_hosts.command),
        *("--threads-per-rank", 1, "--local-steps", 50),
    )
    done = lab.run("n1", *PACELINE, *task, "--run-dir", tmp_path / "run", cwd=tmp_path)
    check_poisoned(done)
    assert "Traceback" not in done.stdout + done.stderr
