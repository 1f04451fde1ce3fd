"""The test cluster: 4 hosts (`lab`), an sshd on each (`ssh_hosts`), a Slurm over them (`slurm`). Root only.

A test may do anything to the hosts: afterwards they are as before, and what it left running on them fails it.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.ssh import SshHosts
from tests.small_mnist import small_mnist as small_mnist

HINT = "as root, .ci/install installs it"
LAB_PROGRAMS = ("ip", "tc", "nft", "ping", "nsenter", "unshare", "setpriv", "setsid", "hostname")
SSH_PROGRAMS = ("ssh", "ssh-keygen", "/usr/sbin/sshd")
SLURM_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "sinfo")
SETTLE_SECONDS = 20.0  # what is just ending was not left behind


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # all that is collected, not only this folder's
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


def need(*programs: str) -> None:
    """Skip the test, with the remedy, where these programs or root's rights are missing."""
    if os.geteuid() != 0:
        pytest.skip("needs root: hosts are made of namespaces")
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: {HINT}")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    need(*LAB_PROGRAMS)
    made = Lab(tmp_path_factory.mktemp("lab"), 4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def ssh_hosts(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> SshHosts:
    need(*SSH_PROGRAMS)
    return SshHosts.start(lab, tmp_path_factory.mktemp("ssh"))


@pytest.fixture(scope="session")
def slurm(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    need(*SLURM_PROGRAMS)
    return Slurm.start(lab, tmp_path_factory.mktemp("slurm"))


@pytest.fixture(autouse=True)
def clean_hosts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a process on a host, and undo what it did to the hosts."""
    if "lab" not in request.fixturenames:
        yield
        return
    lab: Lab = request.getfixturevalue("lab")
    before = {pid for host in lab.hosts for pid in lab.processes(host)}
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := _left(lab, before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    lab.restore()
    if "slurm" in request.fixturenames:
        request.getfixturevalue("slurm").settle()
    if left:
        pytest.fail("this test leaves processes on hosts:\n  " + "\n  ".join(left.values()), pytrace=False)


def _left(lab: Lab, before: set[int]) -> dict[int, str]:
    found: dict[int, str] = {}
    for host in lab.hosts:
        found |= {pid: f"{host}: {words}" for pid, words in lab.processes(host).items() if pid not in before}
    return found
