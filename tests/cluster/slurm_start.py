"""Start a stub's job as `paceline train --on slurm` does: slurm_start.py RUN SECONDS CODE [here|follow] [options].

Runs on a host of the test cluster. Prints the job's id, or with `follow` its states and output.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.launch.plan import SubmitRecord, make_submit_dir, write_plan_files, write_submit_record
from paceline.launch.slurm.plan import plan_slurm
from paceline.launch.slurm.queue import (
    check_job_fits_allocation,
    check_job_fits_partitions,
    current_allocation,
    follow_job,
    run_in_allocation,
    submit,
)
from paceline.protocol.job import AllocationRequest, JobSpec

STUB = Path(__file__).with_name("slurm_stub.py")


def main(run: str, seconds: str, code: str, how: str = "", nodes: str = "2", **asked: Any) -> int:
    submit_dir = make_submit_dir(Path(run))
    python = Path(run) / "python"  # without a space: this Slurm does not find the tasks to signal by such a name
    if not python.exists():
        python.write_text(f"#!{sys.executable}\n{STUB.read_text()}")
        python.chmod(0o755)
    job = JobSpec(
        argv=(seconds, code), nproc=2, run_id="5f", threads=0, nodes=int(nodes), min_nodes=int(nodes),
        python=str(python), run_dir=run, submit_dir=str(submit_dir), cwd=run, slurm=AllocationRequest(**asked),
    )  # fmt: skip
    held = current_allocation(os.environ)
    if held is not None:
        check_job_fits_allocation(held, job)
    plan = plan_slurm(job)
    write_plan_files(submit_dir, plan.files)
    if held is not None:
        return run_in_allocation(submit_dir / "job.sbatch")
    check_job_fits_partitions(job, os.environ)
    job_id = submit(plan, os.environ)
    write_submit_record(submit_dir, SubmitRecord(on="slurm", started_at=time.time(), nodes=2, slurm_job=job_id))
    if not how:
        print(job_id)
        return 0
    os.dup2(1, 2)  # a test reads states and output from one pipe
    return follow_job(job_id, submit_dir / f"slurm-{job_id}.out", cancel_on_interrupt=how == "cancel")


if __name__ == "__main__":
    options = dict(word.split("=", 1) for word in sys.argv[4:])
    numbers = ("minutes", "gpus_per_node", "cpus_per_rank", "save_seconds")
    values: dict[str, Any] = {name: int(text) if name in numbers else text for name, text in options.items()}
    if "options" in values:
        values["options"] = (values["options"],)
    try:
        sys.exit(main(*sys.argv[1:4], **values))
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
