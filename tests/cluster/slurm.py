"""What is a small Slurm? slurmctld on n1, slurmd and munged on every host of a lab; n3 and n4 have two fake GPUs."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import cgroups
from tests.cluster.lab import Lab

CPUS, GPUS = 2, 2  # of each host, each GPU host
GPU_HOSTS = ("n3", "n4")
NVIDIA = 195  # the driver's major device number; there is no driver here, so nothing answers
ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "SIGNALING")

CONFIG = """
ClusterName=lab
SlurmctldHost=n1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=200000,batch_sched_delay=0
KillWait=5
MessageTimeout=10
SlurmctldTimeout=30
SlurmdTimeout=20
InactiveLimit=0
MinJobAge=600
Waittime=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MailProg=/bin/true
EnforcePartLimits=ALL
GresTypes=gpu
"""
NODE = (
    "NodeName={host} CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=4000{gres} State=UNKNOWN"
)
PARTITION = "PartitionName={name} Nodes={nodes} MaxTime=60 DefaultTime=10 State=UP {more}"


@dataclass(frozen=True)
class Slurm:
    """A running Slurm. Commands run on n1. Partitions: main (default), high (preempts main), gpu (n3 and n4)."""

    lab: Lab
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *argv: object, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on n1 (see Lab.run)."""
        return self.lab.run("n1", *argv, env={**self.environment, **(env or {})}, **options)

    def popen(self, *argv: object, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on n1 (see Lab.popen)."""
        return self.lab.popen("n1", *argv, env={**self.environment, **(env or {})}, **options)

    def show(self, job: str | int) -> dict[str, str]:
        """All that `scontrol show job` says of a job: {"JobState": "RUNNING", "Restarts": "0", ...}."""
        done = self.run("scontrol", "--oneliner", "show", "job", job)
        if done.returncode:
            raise LookupError(f"job {job}: {done.stderr.strip()}")
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def state(self, job: str | int) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, ..."""
        return self.show(job)["JobState"]

    def wait(self, job: str | int, timeout: float = 180) -> str:
        """The job's final state. Polls: `sbatch --wait` is seconds late."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) in ALIVE:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is still {state} after {timeout} s: {self.show(job)}")
            time.sleep(0.2)
        return state

    def settle(self, timeout: float = 120) -> None:
        """Cancel all jobs and wait until all hosts are idle."""
        hosts, deadline = sorted(self.lab.hosts), time.monotonic() + timeout
        while True:
            done = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T")
            if (
                sorted(done.stdout.splitlines()) == [f"{host} idle" for host in hosts]
                and not self.run("squeue", "-h").stdout
            ):
                return
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-1500:] for path in (self.folder / "log").glob("slurm*.log"))
                raise TimeoutError(f"Slurm's hosts are not idle after {timeout} s:\n{done.stdout}{done.stderr}\n{logs}")
            self.run("scancel", "--user", "root")
            time.sleep(0.1)

    @classmethod
    def start(cls, lab: Lab, folder: Path) -> Slurm:
        """Start it on a lab's hosts, and again on a host that boots; returns when all are idle."""
        folder.chmod(0o755)
        for name in ("state", "log", "dev"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        _configure(lab, folder)
        made = cls(lab, folder)
        for host in lab.hosts:
            made._start_daemons(host)
        lab.boot_hooks.append(made._start_daemons)
        made.settle()
        return made

    def _start_daemons(self, host: str) -> None:
        start, log, config = self.lab.start_daemon, self.folder / "log", self.folder / "slurm.conf"
        files = ("--socket=/run/munge.sock", "--pid-file=/run/munged.pid", "--seed-file=/run/munged.seed")
        own = (f"--key-file={self.folder}/munge.key", f"--log-file={log}/munged-{host}.log", "--num-threads=1")
        start(host, "munged", "--force", *files, *own)
        start(host, "mkdir", "/run/slurmd")
        if host == "n1":
            start(host, "slurmctld", "-f", config, env=self.environment)
        start(host, "slurmd", "-f", config, "-N", host, env=self.environment)


def _configure(lab: Lab, folder: Path) -> None:
    gpus = [host for host in lab.hosts if host in GPU_HOSTS]
    lines = [CONFIG.format(folder=folder, proctrack="cgroup" if "freezer" in cgroups.controllers() else "pgid")]
    for host in lab.hosts:
        lines.append(NODE.format(host=host, cpus=CPUS, gres=f" Gres=gpu:{GPUS}" if host in gpus else ""))
    everywhere = ",".join(lab.hosts)
    main, high = "Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10", "PriorityTier=10 PreemptMode=OFF"
    lines.append(PARTITION.format(name="main", nodes=everywhere, more=main))
    lines.append(PARTITION.format(name="high", nodes=everywhere, more=high))
    if gpus:
        lines.append(PARTITION.format(name="gpu", nodes=",".join(gpus), more=main.replace("YES", "NO")))
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    for number in range(GPUS):
        os.mknod(folder / "dev" / f"nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(NVIDIA, number))
    devices = f"{folder}/dev/nvidia[0-{GPUS - 1}]"
    (folder / "gres.conf").write_text("".join(f"NodeName={host} Name=gpu File={devices}\n" for host in gpus))
