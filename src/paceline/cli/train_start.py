"""Starts a training whose settings have been checked: under an agent here, or through a launcher elsewhere."""

import os
import sys
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as replace_fields

from paceline.cli.elsewhere import planned_job, show, start, taken_run_dir, with_submit_dir
from paceline.cli.flags import threads_of
from paceline.config import settings as configuration
from paceline.config.mesh import mesh_of
from paceline.config.settings import ClusterConfig, TrainConfig, batch_shape, default_strategy
from paceline.contract.job import JobSpec
from paceline.contract.variables import PRELOAD
from paceline.errors import ExitCode
from paceline.host.gpus import count_gpus
from paceline.launch.plan import local
from paceline.launch.slurm.fits import in_allocation
from paceline.launch.supervise import run
from paceline.observe.events import Step, read_events
from paceline.observe.folder import CONFIG, create_attempt_dir, write_settings
from paceline.observe.summary import Summary, read_summary, write_summary
from paceline.observe.terminal import say


def _taken(config: TrainConfig) -> AbstractContextManager[tuple[Path, int]]:
    c, run = config.checkpoint, config.run
    return taken_run_dir(run.run_dir, str(config.task), trust=run.trust, resume=c.resume == "auto", fresh=c.fresh)


def _record(config: TrainConfig, run_dir: Path) -> None:
    """Write down the settings that repeat the run, where no earlier start has."""
    if not (run_dir / CONFIG).exists():
        write_settings(run_dir, configuration.dump(configuration.repeatable(config)))


def launch(where: JobSpec, config: TrainConfig) -> tuple[Path, int]:
    """Make the run folder and start `--nproc` workers under an agent; return the folder and the exit code."""
    with _taken(config) as (run_dir, lock):
        config = configuration.with_defaults(replace(config, run=replace(config.run, run_dir=run_dir)), where.nproc)
        attempt, attempt_dir = create_attempt_dir(run_dir)
        write_settings(attempt_dir, configuration.dump(config))
        _record(config, run_dir)
        job = training_job(config, replace_fields(where, run_dir=str(run_dir), attempt_dir=str(attempt_dir)))
        code = run(local(job), keep_open=[lock])
    if code == ExitCode.USAGE and attempt > 1:
        return run_dir, code  # refused: nothing is written over
    if code not in (ExitCode.DONE, ExitCode.SAVED):
        write_failed_summary(run_dir, config, where.nproc, code)
        say(f"run folder {run_dir}")
    return run_dir, code


def show_plan(config: TrainConfig, where: JobSpec) -> int:
    """`--dry-run`, with the names that the folders of this run would have."""
    job = planned_job(where, config.run.run_dir, str(config.task))
    if config.cluster.on == "local":
        job = replace_fields(job, attempt_dir=f"{job.run_dir}/attempt-1")
    return show(config.cluster, training_job(config, job))


def launch_elsewhere(config: TrainConfig, where: JobSpec, world_size: int) -> int:
    """Make the run folder and hand the job over; the exit code."""
    cluster, on = config.cluster, config.cluster.on
    with _taken(config) as (run_dir, _):  # from the start on node 0's agent holds it
        # a run that Slurm, or a person, starts again goes on where it was
        again = replace(config.checkpoint, resume="auto", fresh=False)
        shape = None if any(host.slots for host in where.hosts) else cluster.nodes  # what ranks compare theirs with
        config = replace(
            config,
            run=replace(config.run, run_dir=run_dir),
            checkpoint=again if on in ("slurm", "print") else config.checkpoint,
            cluster=ClusterConfig(nodes=shape),
        )
        config = configuration.with_defaults(config, world_size)
        job = with_submit_dir(replace_fields(where, run_dir=str(run_dir)), configuration.dump(config))
        _record(config, run_dir)
    code = start(cluster, training_job(config, job))
    if on == "ssh" and not job.detached and code not in (ExitCode.DONE, ExitCode.SAVED, ExitCode.USAGE):
        write_failed_summary(run_dir, config, world_size, code)
    followed = (on == "ssh" and not job.detached) or cluster.follow or (on == "slurm" and in_allocation(os.environ))
    if not followed or code not in (ExitCode.DONE, ExitCode.SAVED):  # else rank 0 has said so
        say(f"run folder {run_dir}")
    return code


def training_job(config: TrainConfig, where: JobSpec) -> JobSpec:
    """The workers of a training: each runs this very command, with the settings in the folder of this start."""
    settings = Path(where.attempt_dir or where.submit_dir) / CONFIG
    return replace_fields(
        where,
        # -P: what lies in the working folder is not ours to import
        argv=(where.python, "-P", "-m", "paceline", "train", "--config", str(settings)),
        threads=threads_of(config.launch.threads_per_rank),
        port=config.launch.port,
        max_restarts=config.launch.max_restarts,
        min_nproc=config.launch.min_nproc or 0,
        stop_grace_seconds=config.launch.stop_grace,
        name=Path(where.run_dir).name or str(config.task),
        preload=may_preload(config, where),
    )


def may_preload(config: TrainConfig, where: JobSpec) -> bool:
    """Whether workers may be forked from a process that has imported torch: never beside CUDA, or into another Python.

    One worker alone gains nothing by it but a faster restart. On another machine, or later, only where the CPU is asked
    for: what `auto` will find there is not known here.
    """
    asked = config.launch.preload == "auto" and os.environ.get(PRELOAD, "auto") != "off"
    ours = where.python == sys.executable and config.launch.backend in ("auto", "gloo")
    pays = where.nproc > 1 or config.launch.max_restarts > 0 or where.elastic
    if not (asked and ours and pays) or config.launch.device not in ("auto", "cpu"):
        return False
    return config.launch.device == "cpu" or (where.attempt_dir != "" and count_gpus() == 0)


def write_failed_summary(run_dir: Path, config: TrainConfig, world_size: int, code: int) -> None:
    """Leave a summary of a run that has failed, if the disk allows."""
    try:
        write_summary(run_dir, failed_summary(run_dir, config, world_size, code))
    except OSError as error:  # the very disk, perhaps, that ended the run
        print(f"summary.json cannot be written: {error}", file=sys.stderr)


def failed_summary(run_dir: Path, config: TrainConfig, nproc: int, code: int) -> Summary:
    """What is known of a run that ended with `code`, which counts more than what its ranks believed."""
    written = read_summary(run_dir)
    if written is not None:
        return replace_fields(written, exit=code)
    events = run_dir / "events-0.jsonl"
    steps: dict[int, int] = {}
    with suppress(OSError):
        steps = {event.step: event.samples for event in read_events(events) if isinstance(event, Step)}
    shape = batch_shape(config.data, mesh_of(config.launch.mesh, nproc).replicas)
    return Summary(
        task=str(config.task),
        exit=code,
        strategy=default_strategy(config, nproc),
        world_size=nproc,
        virtual_ranks=shape.virtual_ranks,
        global_batch=shape.global_batch,
        steps=max(steps, default=0),
        samples_seen=sum(steps.values()),
    )
