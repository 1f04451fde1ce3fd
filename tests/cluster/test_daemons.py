"""Do sshd and Slurm run on the test cluster's hosts as they do on real ones?"""

from __future__ import annotations

import time

from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.ssh import SshHosts


def test_variables_do_not_travel_by_ssh(lab: Lab, ssh_hosts: SshHosts) -> None:
    command = (*ssh_hosts.command.split(), "-o", "SendEnv=COLOUR", "n2", "env")
    assert "COLOUR" not in lab.run("n1", *command, env={"COLOUR": "red"}).stdout


def test_a_task_leaves_nothing_behind(lab: Lab, slurm: Slurm) -> None:
    slurm.run("srun", "-N1", "sh", "-c", "(setsid sleep 62.5 >/dev/null 2>&1 &)")
    deadline = time.monotonic() + 5
    while lab.processes("n1") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lab.processes("n1") == {}


def test_settle_cancels_what_is_left(slurm: Slurm) -> None:
    jobs = [
        slurm.run("sbatch", "--parsable", "--output=/dev/null", "-N4", "--wrap=sleep 63").stdout.strip() for _ in "ab"
    ]
    assert [slurm.state(job) in ("PENDING", "RUNNING") for job in jobs] == [True, True]
    slurm.settle()
    assert [slurm.state(job) for job in jobs] == ["CANCELLED", "CANCELLED"]


def test_a_node_that_boots_again_takes_jobs(lab: Lab, slurm: Slurm) -> None:
    lab.kill("n2")
    lab.boot("n2")
    assert slurm.run("srun", "--nodelist=n2", "hostname", timeout=90).stdout == "n2\n"
