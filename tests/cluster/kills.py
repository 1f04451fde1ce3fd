"""One process of a run on two hosts is killed at any moment: what is left, who is named, and which code comes out?

The launcher runs on n1, node 0 on n2, node 1 on n3, over ssh as over Slurm.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.training import FOLLOWER, HEAD, PACELINE, Cluster, steps_done

GONE_SECONDS = 10.0  # the law: after that nothing of the run is on any host
PATIENCE_SECONDS = 45.0  # how long the soak waits to tell how late
APPEAR_SECONDS = 40.0  # for what is to be killed to be there
QUIET_SECONDS = 1.0  # a session that was just being opened may still start something
POLL_SECONDS = 0.02
SIGNALLED = {"Ctrl-C": signal.SIGINT}
WHATS = {
    "ssh": (
        *("launcher", "Ctrl-C", "rank", "agent on n2", "agent on n3"),
        *("ssh client of n2", "ssh client of n3", "sshd session on n2", "sshd session on n3"),
    ),
    "slurm": ("launcher", "Ctrl-C", "rank", "agent on n2", "agent on n3", "scancel"),
}


@dataclass(frozen=True)
class Kill:
    """What is killed, and when: after so many seconds, or so long after it has appeared, whichever is later."""

    on: str
    what: str
    after_seconds: float
    late_seconds: float
    rank: int = 0

    @classmethod
    def drawn(cls, dice: random.Random, on: str, what: str, longest_seconds: float) -> Kill:
        return cls(on, what, dice.uniform(0.1, longest_seconds), dice.uniform(0.0, 1.5), dice.randrange(4))

    @property
    def host(self) -> str:
        """Which host the first failure must be named with; empty where nothing failed."""
        if self.what == "rank":
            return HEAD if self.rank < 2 else FOLLOWER
        return self.what[-2:] if self.what[-2:] in (HEAD, FOLLOWER) else ""


@dataclass
class Outcome:
    code: int
    step: int  # how far the run was
    struck_seconds: float  # after the start
    gone_seconds: float  # until nothing was left on any host
    said: str
    survivors: list[str] = field(default_factory=list[str])  # after GONE_SECONDS
    job: str = ""  # Slurm's word for how it ended
    faults: list[str] = field(default_factory=list[str])


def kill_once(cluster: Cluster, kill: Kill, task: list[str], folder: Path) -> Outcome | None:
    """Start a run, kill, and look; None where the run ended before there was anything to kill."""
    folder.mkdir()
    run_dir, log = folder / "run", folder / "said.log"
    follow = ("--follow", "--cancel-on-interrupt") * (kill.on == "slurm")
    command = (*PACELINE, *task, *cluster.where(kill.on, "--nproc", 2, *follow, "--run-dir", run_dir))
    with log.open("wb") as output:
        launcher = cluster.slurm.popen(*command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    begun = time.monotonic()
    try:
        pids = _wait_for_target(cluster, kill, launcher, begun)
        if launcher.poll() is not None:
            return None
        step, struck = steps_done(run_dir), time.monotonic()
        _strike(cluster, kill, pids)
        if kill.on == "slurm" and kill.what == "launcher":  # the job does not need it
            launcher.wait()
            alive = _job(cluster) is not None
            _cancel_all(cluster)
            ended = time.monotonic()
        else:
            alive, ended = True, struck
        gone_seconds, survivors = _wait_until_gone(cluster, ended)
        code = launcher.wait(PATIENCE_SECONDS)
    finally:
        launcher.kill()
        launcher.wait()
        for pid in cluster.processes():
            _kill(pid)
    outcome = Outcome(
        code, step, round(struck - begun, 2), round(gone_seconds, 2), log.read_text(errors="replace"), survivors
    )
    if kill.on == "slurm":
        outcome.job = _ended_as(outcome.said, cluster)
        if not alive and step:
            outcome.faults.append("the job has ended with its launcher")
    outcome.faults += _faults(kill, outcome)
    return outcome


# ---- what is killed -----------------------------------------------------------------------------------------------


def targets(cluster: Cluster, kill: Kill, launcher: int) -> list[int]:
    """The pids of what is to be killed; none as long as it is not there. For `scancel`: any process of the job."""
    if kill.what in ("launcher", *SIGNALLED):
        return [launcher]
    if kill.what.startswith("ssh client"):
        return [pid for pid, said in cluster.lab.processes("n1").items() if f" -- {kill.host} " in said]
    if kill.what == "scancel":
        return list(cluster.lab.processes(HEAD))[:1]
    if kill.what == "rank":
        found = cluster.lab.processes(kill.host)
        return [pid for pid, said in found.items() if " train --config" in said and _rank(pid) == kill.rank]
    found = cluster.lab.processes(kill.host).items()
    # the agent is older than its cleanup process, which has the same words; srun's begin with srun
    agent = sorted(pid for pid, said in found if "paceline.launch.agent" in said and not said.startswith("srun"))[:1]
    return [_parent(pid) for pid in agent] if kill.what.startswith("sshd") else agent


def _wait_for_target(cluster: Cluster, kill: Kill, launcher: subprocess.Popen[bytes], begun: float) -> list[int]:
    while not (found := targets(cluster, kill, launcher.pid)):
        if launcher.poll() is not None:
            return []
        assert time.monotonic() < begun + APPEAR_SECONDS, f"there is never a {kill.what}"
        time.sleep(POLL_SECONDS)
    time.sleep(max(kill.late_seconds, begun + kill.after_seconds - time.monotonic()))
    return targets(cluster, kill, launcher.pid) or found


def _strike(cluster: Cluster, kill: Kill, pids: list[int]) -> None:
    if kill.what == "scancel":
        _cancel_all(cluster)
    for pid in pids if kill.what != "scancel" else ():
        _kill(pid, SIGNALLED.get(kill.what, signal.SIGKILL))


def _kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _rank(pid: int) -> int | None:
    try:
        found = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return None
    return int(found[1]) if found else None


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# ---- what came of it ----------------------------------------------------------------------------------------------


def _wait_until_gone(cluster: Cluster, since: float) -> tuple[float, list[str]]:
    survivors: list[str] = []
    seen = since  # when there was anything last
    while (now := time.monotonic()) < min(seen + QUIET_SECONDS, since + PATIENCE_SECONDS):
        if left := cluster.processes():
            seen = now
            if now > since + GONE_SECONDS and not survivors:
                survivors = list(left.values())
        time.sleep(POLL_SECONDS)
    return seen - since, survivors


def _job(cluster: Cluster) -> str | None:
    """The newest job's id, if it still waits or runs."""
    return next(iter(cluster.slurm.run("squeue", "-h", "-o", "%i").stdout.split()), None)


def _cancel_all(cluster: Cluster) -> None:
    cluster.slurm.run("scancel", "--user", "root")


def _ended_as(said: str, cluster: Cluster) -> str:
    found = re.search(r"submitted as Slurm job (\d+)", said)
    return cluster.slurm.state(found[1]) if found else "not submitted"


def _faults(kill: Kill, outcome: Outcome) -> list[str]:
    found: list[str] = []
    if outcome.survivors:
        found.append(f"{len(outcome.survivors)} processes left after {GONE_SECONDS:g} s")
    if kill.what == "rank" and not re.search(rf"rank {kill.rank} \({kill.host}, pid \d+\)", outcome.said):
        found.append(f"rank {kill.rank} ({kill.host}) is not named")
    elif kill.host and not re.search(rf"\({kill.host}[,)]|^  {kill.host}: ", outcome.said, re.MULTILINE):
        found.append(f"{kill.host} is not named")
    if outcome.code not in _codes(kill, outcome.step):
        found.append(f"exit code {outcome.code}, not one of {_codes(kill, outcome.step)}")
    return found


def _codes(kill: Kill, step: int) -> tuple[int, ...]:
    """Which exit codes docs/exit-codes.md allows; of a job in Slurm it is the job's."""
    if kill.what == "launcher":
        return (-signal.SIGKILL,)
    if kill.what == "rank":
        return (128 + signal.SIGKILL,)
    if kill.what in ("Ctrl-C", "scancel"):  # saved, or there was nothing to save yet; Slurm has no signal but SIGTERM
        ended_by = signal.SIGINT if kill.on == "ssh" else signal.SIGTERM
        return (75,) if step else (75, 128 + ended_by)
    if kill.on == "slurm":  # its agents are srun's own tasks
        return (1, 128 + signal.SIGKILL)
    return (1,) if step else (1, 2)  # 2: refused before the start, for the host could not be used
