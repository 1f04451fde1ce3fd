"""Who keeps a run on several hosts from going on? Two hosts that cannot reach each other."""

import subprocess
import time
from pathlib import Path

import pytest
from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts
from tests.cluster.training import PACELINE, words

from paceline.errors import ExitCode
from paceline.guard.report import DiagnosisRecord, read_diagnosis
from paceline.protocol.evidence import DiagnosisKind

SCRIPT = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
from paceline.protocol.control import WorkerSpec
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(WorkerSpec.from_environment().attempt_dir)
for step in range(2000):
    if step == 20:
        (folder / f"running-{rank}").touch()
        FAULT
    dist.all_reduce(torch.ones(1000))
    time.sleep(0.05)
"""


def launched(lab: Lab, ssh_hosts: SshHosts, folder: Path, hosts: str, fault: str) -> subprocess.Popen[str]:
    script = folder / "job.py"
    script.write_text(SCRIPT.replace("FAULT", fault))
    where = words("--on", "ssh", "--hosts", hosts, "--ssh", ssh_hosts.command, "--run-dir", folder / "run")
    command = words(*PACELINE, "launch", *where, "--hang-timeout", 4, "--", script)
    return lab.popen("n1", *command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(launcher: subprocess.Popen[str], folder: Path) -> tuple[str, DiagnosisRecord]:
    said = launcher.communicate(timeout=240)[0]
    assert launcher.returncode == ExitCode.STALLED, said
    return said, read_diagnosis(folder / "run" / "attempt-1" / "diagnosis-1")


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_two_hosts_that_no_longer_reach_each_other_are_named(lab: Lab, ssh_hosts: SshHosts, tmp_path: Path) -> None:
    """Both still reach node 0: no agent is lost, and every rank waits in the same collective."""
    launcher = launched(lab, ssh_hosts, tmp_path, "n2,n3,n4", "pass")
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("run/attempt-1/running-*"))) < 3:
        assert time.monotonic() < deadline and launcher.poll() is None, launcher.communicate()
        time.sleep(0.1)
    lab.deny("n4", from_="n3")
    said, told = ended(launcher, tmp_path)
    assert told.diagnosis.kind is DiagnosisKind.NETWORK, said
    assert "n3 cannot reach n4" in said and "n2 cannot" not in said
