"""Two hosts that take local steps, and send little: a kill in the middle of a round does not show in the weights."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts
from tests.cluster.training import FOLLOWER, HEAD, PACELINE, clean_ledger, wait_for_step, weights, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]
STEPS, KILL_AFTER = 60, 10  # checkpoints are of steps between two outer ones, which come after each third


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
    wait_for_step(tmp_path / "hurt", KILL_AFTER)
    os.kill(worker_on(lab, FOLLOWER), signal.SIGKILL)
    said = started.communicate(timeout=80)[0]
    assert started.returncode == 0, said
    assert "goes on after step" in said, said
    assert weights(tmp_path / "hurt") == weights(tmp_path / "whole")
    clean_ledger(tmp_path / "hurt")
