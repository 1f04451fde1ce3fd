"""Whatever is killed, at whatever moment: nothing is left anywhere, and who failed is named. A sample of the soak."""

import random
from pathlib import Path

import pytest
from tests.cluster.kills import Kill, Outcome, kill_once
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.soak_cases import at_once
from tests.cluster.ssh import SshHosts
from tests.cluster.training import EXACT, Cluster, trained_here, words

SEED = 4
LONGEST_SECONDS = 6.0  # the run starts meanwhile; later moments are the soak's


@pytest.fixture
def cluster(lab: Lab, ssh_hosts: SshHosts, slurm: Slurm) -> Cluster:
    return Cluster(lab, ssh_hosts, slurm)


@pytest.fixture
def endless(small_mnist: Path) -> list[str]:
    return words("train", "mnist-cnn", "--data-dir", small_mnist, "--steps", 9999, "--batch-size", 4, *EXACT)


def killed(cluster: Cluster, on: str, what: str, task: list[str], folder: Path) -> Outcome:
    kill = Kill.drawn(random.Random(f"{SEED} {on} {what}"), on, what, LONGEST_SECONDS)
    outcome = kill_once(cluster, kill, task, folder / "kill")
    assert outcome is not None  # None: the run ended before the kill
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "what"),
    [
        ("ssh", "launcher"),
        pytest.param("ssh", "sshd session on n3", marks=pytest.mark.soak),
        ("ssh", "agent on n2"),
        pytest.param("slurm", "rank", marks=pytest.mark.soak),
        ("slurm", "scancel"),
    ],
)
def test_a_kill_at_a_random_moment_leaves_nothing_and_is_told_right(
    cluster: Cluster, endless: list[str], tmp_path: Path, on: str, what: str
) -> None:
    outcome = killed(cluster, on, what, endless, tmp_path)
    assert not outcome.faults, outcome


@pytest.mark.slow
def test_two_jobs_that_ask_for_one_port_at_once_are_both_right_or_one_is_refused(
    cluster: Cluster, small_mnist: Path, tmp_path: Path
) -> None:
    task = words("train", "mnist-cnn", "--data-dir", small_mnist, "--steps", 4, "--batch-size", 16, *EXACT)
    expected = trained_here(task, tmp_path / "expected")
    result = at_once(cluster, task, expected, tmp_path, port=29555)
    assert not result.faults, result.told
