"""Two hosts of two ranks: memory on each, gloo between them. Each gradient is sent once, and the weights are right."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts
from tests.cluster.training import EXACT, FOLLOWER, HEAD, PACELINE, trained_here, weights, words

from paceline.tasks.mnist import CNN

STEPS = 8
GRADIENT_BYTES = 4 * sum(parameter.numel() for parameter in CNN().parameters())
SAID = "gradients are added up in shared memory on each of 2 hosts (2 ranks each), and over gloo between hosts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]


@pytest.fixture(scope="module")
def task(small_mnist: Path) -> list[str]:
    shape = ("--steps", STEPS, "--batch-size", 16, "--device", "cpu", "--threads-per-rank", 1)
    return words("train", "mnist-cnn", "--data-dir", small_mnist, *shape)


@pytest.fixture(scope="module")
def expected(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that one process on this machine comes to."""
    return trained_here([*task, *words(*EXACT)], tmp_path_factory.mktemp("expected") / "run", 60)


def sent_bytes(lab: Lab, host: str) -> int:
    return int(lab.run(host, "cat", "/sys/class/net/eth0/statistics/tx_bytes").stdout)


@pytest.mark.parametrize("how", [EXACT, pytest.param((), marks=pytest.mark.soak)], ids=["exact", "default"])
def test_two_hosts_of_two_ranks_send_gradients_once_and_come_to_the_weights_of_one_process(
    lab: Lab, ssh_hosts: SshHosts, task: list[str], expected: str, tmp_path: Path, how: tuple[object, ...]
) -> None:
    """The default promises no bits; but of 2 x 2 ranks it has the same tree."""
    run_dir, before = tmp_path / "run", sent_bytes(lab, FOLLOWER)
    where = words("--on", "ssh", "--hosts", f"{HEAD},{FOLLOWER}", "--nproc", 2, "--ssh", ssh_hosts.command)
    done = lab.run("n1", *PACELINE, *task, *words(*how, "--run-dir", run_dir), *where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert (done.stderr + done.stdout).count(SAID) == 1, done.stderr + done.stdout
    assert weights(run_dir) == expected
    sent = sent_bytes(lab, FOLLOWER) - before
    # besides: headers, totals, words, and what the launcher says; 1.5 times as much in a ring of all four ranks
    assert STEPS * GRADIENT_BYTES < sent < 1.3 * STEPS * GRADIENT_BYTES
