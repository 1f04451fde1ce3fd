"""What is a training on the test cluster, and how is it seen how far it is and whether it was right?"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.ssh import SshHosts
from tests.launch.launch_harness import wait_until

PACELINE = (sys.executable, "-m", "paceline")
SCRIPT = Path(__file__).parents[2] / "examples" / "existing_ddp.py"
MNIST = SCRIPT.parents[1] / "src" / "paceline" / "data" / "mnist"
EXACT = ("--strategy", "exact", "--virtual-ranks", 4, "--device", "cpu")
HEAD, FOLLOWER = "n2", "n3"  # of all two-node runs here; n1 is where people type


@dataclass(frozen=True)
class Cluster:
    """Hosts with both ways to them."""

    lab: Lab
    ssh: SshHosts
    slurm: Slurm

    def where(self, on: str, *more: object) -> list[str]:
        """The words that put a run on n2 and n3."""
        ways = {
            "ssh": ("--hosts", f"{HEAD},{FOLLOWER}", "--ssh", self.ssh.command),
            "slurm": ("--nodes", 2, "--time", 10, "--sbatch", "exclude=n1"),
            "print": ("--hosts", f"{HEAD},{FOLLOWER}"),
        }
        return words("--on", on, *ways[on], *more)

    def processes(self) -> dict[int, str]:
        """What runs on any host, besides daemons: {pid on the machine: host and command line}."""
        return {
            pid: f"{host}: {said}" for host in self.lab.hosts for pid, said in self.lab.processes(host).items()
        }  # fmt: skip


def words(*values: object) -> list[str]:
    return [str(value) for value in values]


def weights(run_dir: Path) -> str:
    """The digest of a run that has ended well."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exit"] == 0, summary
    return summary["weights_sha256"]


def trained_here(task: list[str], run_dir: Path, timeout: float = 360) -> str:
    """The weights that one process on this machine comes to."""
    done = warm.run(["-m", "paceline", *task, *words("--nproc", 1, "--run-dir", run_dir)], timeout=timeout)
    assert done.returncode == 0, done.stderr
    return weights(run_dir)


def clean_ledger(run_dir: Path) -> None:
    done = warm.run(["-m", "paceline", "ledger", str(run_dir)])
    assert done.returncode == 0, done.stdout + done.stderr


def resumed_here(run_dir: Path, timeout: float = 360) -> str:
    """Go on with a run on one process here, to its end: its weights."""
    command = ["-m", "paceline", *words("train", "--resume", "auto", "--run-dir", run_dir, "--nproc", 1)]
    done = warm.run(command, timeout=timeout, cwd=run_dir.parent)
    assert done.returncode == 0, done.stderr
    return weights(run_dir)


def events(run_dir: Path) -> Iterator[dict[str, object]]:
    """What rank 0 has written down so far, of all attempts."""
    path = run_dir / "events-0.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.endswith("}"):  # the last one may be half written
            yield json.loads(line)


def resumed_after(run_dir: Path) -> int:
    """The step after which the last start has resumed; 0: it has not."""
    return [int(str(event.get("start_step", 0))) for event in events(run_dir) if event.get("kind") == "started"][-1]


def steps_done(run_dir: Path) -> int:
    """The highest step that rank 0 has logged."""
    return max((int(str(event.get("step", 0))) for event in events(run_dir)), default=0)


def wait_for_step(run_dir: Path, step: int, timeout: float = 180) -> None:
    wait_until(lambda: steps_done(run_dir) >= step, f"step {step}", timeout)


def wait_for_checkpoint(run_dir: Path, timeout: float = 180) -> None:
    def is_saved() -> bool:
        return any(event["kind"] == "checkpointed" and not event["failure"] for event in events(run_dir))

    wait_until(is_saved, "a checkpoint", timeout)


def submit(slurm: Slurm, task: list[str], run_dir: Path, *options: object) -> str:
    """Hand a run on two nodes to Slurm: the job's id."""
    where = words("--on", "slurm", "--nodes", 2, "--nproc", 2, "--time", 10, "--run-dir", run_dir, *options)
    done = slurm.run(*PACELINE, *task, *where, cwd=run_dir.parent)
    assert done.returncode == 0, done.stderr
    return json.loads((run_dir / "submit-1" / "submitted.json").read_text())["slurm_job"]


def type_everywhere(lab: Lab, printed: str, folder: Path, timeout: float = 180) -> str:
    """Type each line that `--on print` printed on its host, n2 and n3; all that they say."""
    typed = [line for line in printed.splitlines() if line and not line.startswith("#")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [
        lab.popen(host, "bash", "-c", line, cwd=folder, **pipes)
        for host, line in zip((HEAD, FOLLOWER), typed, strict=True)
    ]
    said = [node.communicate(timeout=timeout)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    return "".join(said)
