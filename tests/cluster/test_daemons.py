"""Do sshd and Slurm run on the test cluster's hosts as they do on real ones?"""

import time
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.ssh import SshHosts

pytestmark = pytest.mark.sample(2)


def test_variables_do_not_travel_by_ssh(lab: Lab, ssh_hosts: SshHosts) -> None:
    command = (*ssh_hosts.command.split(), "-o", "SendEnv=COLOUR", "n2", "env")
    assert "COLOUR" not in lab.run("n1", *command, env={"COLOUR": "red"}).stdout


def test_a_batch_job_runs_two_tasks_and_its_end_is_told(slurm: Slurm, tmp_path: Path) -> None:
    submit = ("sbatch", "--parsable", "-N2", "--ntasks-per-node=1", f"--output={tmp_path}/out")
    script = "srun sh -c 'echo $SLURM_PROCID $SLURMD_NODENAME $(hostname)'"
    job = slurm.run(*submit, f"--wrap={script}").stdout.strip()
    assert slurm.wait(job) == "COMPLETED"
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["0 n1 n1", "1 n2 n2"]
    failing = slurm.run(*submit, "--wrap=exit 5").stdout.strip()
    assert slurm.wait(failing) == "FAILED"
    assert slurm.show(failing)["ExitCode"] == "5:0"
    with pytest.raises(LookupError, match="Invalid job id"):
        slurm.state(999)


def test_a_job_gets_the_gpus_that_it_asks_for(slurm: Slurm) -> None:
    done = slurm.run("srun", "--gpus-per-node=1", "sh", "-c", "echo $(hostname) $CUDA_VISIBLE_DEVICES")
    assert done.stdout == "n3 0\n", done.stderr


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
