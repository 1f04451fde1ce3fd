"""A script under watchover on two real hosts, started by srun, mpirun and torchrun: who is named, what is left.

The whole catalogue is `make soak-watchover`; here are a hang across hosts, ranks that have not met, and a killed srun.
"""

import shutil
import signal
import time
from pathlib import Path

import pytest
from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.fault import Fate
from tests.cluster.conftest import HINT
from tests.cluster.fault_hosts import Hosts
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.ssh import SshHosts
from tests.cluster.watched import OURS, run_watched


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("sleeps", "srun"),
        pytest.param("never-reaches-init", "torchrun on two hosts", marks=pytest.mark.slow),
        pytest.param("exits-early", "mpirun", marks=pytest.mark.slow),
    ],
)
def test_the_right_rank_is_named_across_hosts_and_the_job_ends(
    lab: Lab, ssh_hosts: SshHosts, slurm: Slurm, tmp_path: Path, name: str, way: str
) -> None:
    if way == "mpirun" and shutil.which(way) is None:
        pytest.skip(f"needs mpirun: {HINT}")
    score = run_watched(FAULTS[name], way, Hosts(lab, ssh_hosts), slurm, tmp_path / "run")
    assert score.right_rank and score.right_line is not False and score.right_end, score
    assert score.code not in (0, None) and not score.processes_left, score


@pytest.mark.slow
def test_a_run_that_goes_well_is_silent_and_a_cancelled_one_leaves_nothing(
    lab: Lab, ssh_hosts: SshHosts, slurm: Slurm, tmp_path: Path
) -> None:
    score = run_watched(FAULTS["nothing"], "srun", Hosts(lab, ssh_hosts), slurm, tmp_path / "run", hang_timeout="30")
    assert score.end is Fate.QUIET and score.code == 0 and not score.words.strip(), score
    script, ready = tmp_path / "waits.py", tmp_path / "ready"
    script.write_text(f"import pathlib, time\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(600)\n")
    step = slurm.popen("srun", "-N2", "-n2", *OURS, "watchover", script)
    while not ready.exists():
        time.sleep(0.05)
    step.send_signal(signal.SIGKILL)  # the fixture sees what is left, after slurmctld has noticed
    step.wait()
    slurm.settle()
