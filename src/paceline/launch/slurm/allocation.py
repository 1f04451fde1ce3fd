"""Inside an allocation of Slurm: whether the job fits into it, and its batch script run right here."""

from __future__ import annotations

import ctypes
import re
import select
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.contract.orders import STOP_SIGNALS, read_inbox, signal_inbox
from paceline.errors import UsageError
from paceline.host.procfs import PR_SET_PDEATHSIG
from paceline.launch.job import Job

POLL_SECONDS = 1.0  # the end of the script wakes us earlier
INTERACTIVE_STEP = "4294967290"  # the shell that salloc starts on a node, at some sites: not a step of srun


class Granted(NamedTuple):
    """An allocation that we are in; 0: not known."""

    job_id: str
    nodes: int
    cpus: int  # of each node, of the poorest one
    gpus: int  # of each node
    partition: str


def in_allocation(env: Mapping[str, str]) -> Granted | None:
    """The allocation that this shell or batch script has; None outside, and for a task of srun, which is a worker."""
    job_id = env.get("SLURM_JOB_ID")
    if not job_id or env.get("SLURM_STEP_ID", INTERACTIVE_STEP) != INTERACTIVE_STEP:
        return None
    cpus = [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", env.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    gpus = re.findall(r"(\d+)(?:\([^)]*\))?(?:,|$)", env.get("SLURM_GPUS_PER_NODE", ""))
    gpus = gpus or [env.get("SLURM_GPUS_ON_NODE", "0")]
    return Granted(
        job_id,
        nodes=_number(env.get("SLURM_JOB_NUM_NODES", "")),
        cpus=min(cpus, default=0),
        gpus=sum(map(_number, gpus)),
        partition=env.get("SLURM_JOB_PARTITION", ""),
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def check_allocation(held: Granted, job: Job) -> None:
    """Refuse a job of another shape than the allocation's.

    Raises:
        UsageError: what was asked, what is held, and what to do.
    """
    asked, where = job.slurm, f"this shell is inside the allocation of Slurm job {held.job_id}"
    if held.nodes and job.nodes != held.nodes:
        raise UsageError(f"--nodes {job.nodes}: {where}, which has {held.nodes}. Use --nodes {held.nodes}, or leave it")
    if held.cpus and job.nproc * asked.cpus_per_rank > held.cpus:
        raise UsageError(
            f"--nproc {job.nproc} x --cpus-per-rank {asked.cpus_per_rank} needs {job.nproc * asked.cpus_per_rank} CPUs "
            f"on each node: {where}, which has {held.cpus} on each. Use fewer, or leave it"
        )
    if asked.gpus_per_node > held.gpus:
        raise UsageError(
            f"--gpus-per-node {asked.gpus_per_node}: {where}, which has {held.gpus} GPUs on each node. Use fewer, or "
            "leave it"
        )
    if asked.partition and held.partition and asked.partition != held.partition:
        raise UsageError(f"--partition {asked.partition}: {where}, in partition {held.partition}. Leave it out")
    given = [name for name, value in (("--time", asked.minutes), ("--sbatch", asked.options)) if value]
    if given:
        raise UsageError(f"{' and '.join(given)}: {where}, where nothing is submitted. Leave out {' and '.join(given)}")


def run_here(script: Path) -> int:
    """Run a batch script inside the allocation, to its end; its exit code. Main thread only.

    Any stop signal lets the run save its state and end; a second one ends it without.
    """
    with signal_inbox((*STOP_SIGNALS, signal.SIGCHLD)) as inbox:
        process = subprocess.Popen(
            ("bash", str(script)),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # or the terminal's Ctrl-C would reach srun as well, which ends without saving
            preexec_fn=_stop_with_parent,
        )
        try:
            while (code := process.poll()) is None:
                select.select([inbox], [], [], POLL_SECONDS)
                for _ in read_inbox(inbox):
                    process.send_signal(signal.SIGUSR2)  # the script passes it on, and does not queue again
        finally:
            process.kill()
            process.wait()
    return 128 - code if code < 0 else code


def _stop_with_parent() -> None:
    """If we are killed, the kernel signals the script to stop the run in good order."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)
