"""The plan for a Slurm cluster: the batch script that a careful person would have written. queue.py submits it.

The script starts one agent on each node with srun. It is for reading, and for using by hand: `sbatch` it again and the
run goes on; `bash` it inside an allocation (salloc) and the run uses that.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.launch.job import Command, Job, Plan
from paceline.launch.node_plans import node_plan
from paceline.launch.slurm.script import PLAN, SCRIPT, batch_script, check_option, check_text

SIGNAL_SECONDS = 60  # Slurm may send the signal before the time limit so much too early
LONGEST_WARNING_SECONDS = 65535  # of sbatch --signal


def slurm(job: Job) -> Plan:
    """The plan for a Slurm cluster: a batch script, and the agents' plan.

    Raises:
        UsageError: if the job's settings contradict each other, or cannot be written into a batch script.
    """
    _check(job)
    # the script loads and activates before it starts the agents; Slurm says which node an agent is on
    node = node_plan(msgspec.structs.replace(job, modules=(), activate=""), node=-1, nproc=job.nproc, head=())
    plan = msgspec.json.format(msgspec.json.encode(node), indent=2).decode() + "\n"
    command = Command("sbatch", ("sbatch", "--parsable", f"{job.submit_dir}/{SCRIPT}"))
    return Plan(submit=command, files={SCRIPT: batch_script(job), PLAN: plan})


def _check(job: Job) -> None:
    """Refuse what contradicts itself, before it waits in a queue."""
    asked = job.slurm
    if job.min_nodes < job.nodes:
        raise UsageError(
            f"--nodes {job.min_nodes}:{job.nodes}: when a node is lost, Slurm puts the whole run into the queue again, "
            f"and it goes on from its newest checkpoint. Use --nodes {job.nodes}"
        )
    if asked.gpus_per_node and asked.gpus_per_node != job.nproc:
        raise UsageError(
            f"--gpus-per-node {asked.gpus_per_node} and --nproc {job.nproc}: one worker uses one GPU. Give them the "
            "same number"
        )
    if asked.minutes is not None and asked.minutes < 1:
        raise UsageError(f"--time must be at least 1 (minutes), got {asked.minutes}")
    if not 0 <= asked.save_seconds <= LONGEST_WARNING_SECONDS:
        raise UsageError(f"--save-before must be 0..{LONGEST_WARNING_SECONDS} (seconds), got {asked.save_seconds}")
    if asked.minutes and asked.save_seconds and asked.minutes * 60 <= asked.save_seconds + SIGNAL_SECONDS:
        raise UsageError(
            f"--time {asked.minutes} and --save-before {asked.save_seconds}: Slurm may warn {SIGNAL_SECONDS} s early, "
            f"and nothing is left of {asked.minutes * 60} s. Ask for more time, or save later (0: never)"
        )
    for option in asked.options:
        check_option(option)
    texts = {"working folder": job.cwd, "run folder": str(job.submit_dir), "--partition": asked.partition}
    texts |= {"--python": job.python, "--activate": job.activate, "--module": "".join(job.modules)}
    for name, text in texts.items():
        check_text(name, text)
    if re.search(r"[\s()]", Path(job.python).name):
        raise UsageError(
            f"--python {job.python}: Slurm cannot signal a program with spaces or parentheses in its file's name, and "
            "the run could not save in time. Name another, e.g. a link"
        )
    if "\\" in str(job.submit_dir):
        raise UsageError(f"the run folder {job.submit_dir}: Slurm takes no backslash in the name of an output file")
