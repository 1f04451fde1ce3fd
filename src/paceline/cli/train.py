"""`paceline train`: checks the settings as far as possible without torch, then trains here or starts the workers.

A worker runs the same command: if the variables of a launcher are set (torchrun's, or those of paceline's agent), the
process is a rank.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec.structs import replace as replace_fields

from paceline.checkpoint.manager import Checkpoints
from paceline.cli import jobs, make_parser, options
from paceline.config import settings as configuration
from paceline.config import strategies
from paceline.config.choices import torch_unsupported_reason, untested_torch_notices
from paceline.config.definition import check_definition_changes, make_run_definition, parse_allowed_changes
from paceline.config.mesh import resolve_mesh
from paceline.config.settings import ClusterConfig, TrainConfig, check_values, resolve_batch_sizes, resolve_strategy
from paceline.errors import ExitCode, UsageError, format_option
from paceline.host.gpus import count_gpus
from paceline.launch.plan import plan_local
from paceline.launch.slurm.queue import current_allocation
from paceline.launch.supervise import run
from paceline.protocol.balance import parse_balance
from paceline.protocol.control import PRELOAD, WorkerSpec
from paceline.protocol.job import HangTimeout, JobSpec
from paceline.rank.environment import check_rank_counts, has_launcher_variables, read_rank_variables
from paceline.rank.imports import TRAINING_MODULES, import_without_gc
from paceline.runs import folder as run_folder
from paceline.runs.checkpoint_format import DamagedCheckpoint
from paceline.runs.console import print_to_stderr
from paceline.runs.events import Step, read_events
from paceline.runs.reading import real_path
from paceline.runs.summary import Summary, read_summary, write_summary
from paceline.runs.trackers import parse_report_to
from paceline.tasks.registry import check_optimizer_reference, check_task_without_import, is_session_script
from paceline.tasks.settings import complete_task_args, settings_help


def main(arguments: Sequence[str]) -> int:
    config = parse(arguments)
    if os.environ.get("RANK", "0") == "0" and WorkerSpec.from_environment() is None:
        for line in untested_torch_notices():
            print_to_stderr(line)
    windows = resolve_hang_windows(config)
    if has_launcher_variables(os.environ):
        if config.cluster.balance is not None and WorkerSpec.from_environment() is None:
            raise UsageError(code="balance-without-agent", value=config.cluster.balance)
        return _train_here(config)[1]
    nproc = config.launch.nproc if isinstance(config.launch.nproc, int) else None
    cluster = config.cluster
    if cluster.on == "slurm" and config.launch.device == "cuda" and cluster.gpus_per_node is None:
        cluster = replace(cluster, gpus_per_node=nproc or 1)
    job = replace_fields(jobs.make_job_spec(cluster, nproc), hang_timeout=windows)
    if cluster.on != "local":
        return _train_elsewhere(config, job)
    gpus = options.usable_gpus(config.launch.device)
    nproc = options.resolve_auto_nproc(config.launch.device) if config.launch.nproc == "auto" else nproc
    given = [name for name, default in vars(ClusterConfig()).items() if getattr(config.cluster, name) != default]
    if nproc is None and given:
        raise UsageError(code="option-needs-nproc", setting=given[0])
    check_training(config, nproc or 1, config.launch.min_nproc or nproc or 1)
    jobs.check_balance_option(job if nproc is None else replace_fields(job, nproc=nproc))
    options.check_enough_gpus(f"--nproc {nproc or 1}", nproc or 1, gpus, config.launch.backend)
    config, job = replace(config, launch=replace(config.launch, nproc=nproc)), replace_fields(job, nproc=nproc or 1)
    if (
        nproc is None
        and (gpus or 0) > 1
        and not (config.strategy and strategies.STRATEGY_INFO[config.strategy].splits_over_gpus)
    ):
        print_to_stderr(f"training on 1 of {gpus} GPUs. To use all of them, add --nproc auto")
    if config.cluster.dry_run:
        return _show_plan(config, job)
    if config.cluster.detach:
        return _train_elsewhere(config, job)
    train = _train_here if nproc is None else partial(_launch, job)
    run_dir, code = train(config)
    if code != ExitCode.SAVED or config.checkpoint.rehearse_preemption is None:
        return code
    print("rehearsal: the run has saved and stopped, and now resumes", file=sys.stderr)
    again = replace(config.checkpoint, resume="auto", restart=False, rehearse_preemption=None)
    return train(replace(config, checkpoint=again, run=replace(config.run, run_dir=run_dir)))[1]


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The settings: the options, otherwise `--config FILE`, otherwise the defaults."""
    line = make_parser("train")
    values = line.values(arguments)
    help_option, path = values.pop("help", None), values.pop("config", None)
    resumed_file = None
    if not path and values.get("checkpoint.resume") == "auto" and (folder := values.get("run.run_dir")) is not None:
        settings_file = real_path(folder) / run_folder.CONFIG  # CONFIG itself must not be a link
        resumed_file = settings_file if os.path.lexists(settings_file) else None
    path = real_path(path) if path else resumed_file
    default = configuration.load(path, must_own=not values.get("run.trust", False)) if path else TrainConfig()
    if resumed_file and default.task and is_session_script(default.task):
        raise UsageError(code="resume-of-session", run_dir=resumed_file.parent, script=default.task)
    # several processes resume with their default strategy
    if resumed_file and default.strategy == strategies.SINGLE_PROCESS_STRATEGY:
        default = replace(default, strategy=None)
    if resumed_file and values.get("data.micro_batch"):  # the size that was found is restored later
        default = replace(default, data=replace(default.data, accumulation=None))
    config = options.build_settings(TrainConfig, values, default)
    if config.task is None and config.checkpoint.resume == "auto" and config.run.run_dir and not help_option:
        raise UsageError(code="resume-of-nothing", run_dir=config.run.run_dir)
    if help_option:
        line.print_help(help_option, path.name if path else "", default)
        if ":" in (config.task or ""):
            print(settings_help(str(config.task)))
        raise SystemExit(0)
    try:
        check_values(config)
    except UsageError as error:
        typed_names = {dest.rpartition(".")[2] for dest in values}
        in_file = configuration.format_toml_setting if path else format_option
        error.render_option = lambda name, value: (format_option if name in typed_names else in_file)(name, value)
        error.prefix = f"{path}: " if path and error.wrong_setting_name not in typed_names else ""
        raise
    return config


def check_training(config: TrainConfig, nproc: int, min_nproc: int, fixed_nodes: int = 0) -> None:
    """Check the settings against each other, this machine and an earlier run, before any process starts.

    `nproc` is the number of all processes. The run may continue with as few as `min_nproc`, but needs `fixed_nodes`.
    """
    mesh = resolve_mesh(config.launch.mesh, nproc)
    shape = resolve_batch_sizes(config.data, mesh.replicas)
    check_task_without_import(config.task, configuration.task_options(config))
    check_optimizer_reference(config.optimizer.optimizer)
    _check_checkpoints(config, nproc)
    parse_report_to(config.run.report_to)
    is_new_run = config.checkpoint.resume == "no" or config.checkpoint.restart
    if is_new_run and (path := config.model.init_from) is not None:
        if not path.exists():
            raise UsageError(code="init-from-not-found", path=path)
        if path.is_dir():
            run_folder.check_usable_as_run_dir(real_path(path), trust=config.run.trust)
    if config.strategy in strategies.EXACT_STRATEGIES and config.model.batchnorm == "sync":
        raise UsageError(code="exact-with-sync-batchnorm", strategy=config.strategy)
    if config.strategy and strategies.STRATEGY_INFO[config.strategy].single_process and mesh.replicas > 1:
        allowed = [*strategies.MULTI_PROCESS_STRATEGIES]
        raise UsageError(code="strategy-of-one-process", value=config.strategy, processes=nproc, allowed=allowed)
    if config.strategy and config.cluster.on == "local" and (why := torch_unsupported_reason(config.strategy)):
        raise UsageError(code="torch-too-old", why=why)
    if config.cluster.balance is not None:
        _check_balance(config, nproc, min_nproc)
    strategies.check_can_audit(
        config.guard.audit_every, config.guard.on_audit, resolve_strategy(config, nproc), nproc,
        has_agent=True, fixed_nodes=fixed_nodes,
    )  # fmt: skip
    if mesh.replicas > shape.virtual_ranks:
        processes = f"{nproc} processes" if mesh.replicas == nproc else f"--mesh {mesh}: {mesh.replicas} along data"
        raise UsageError(code="processes-without-work", who=processes, virtual_ranks=shape.virtual_ranks)


def _check_balance(config: TrainConfig, nproc: int, min_nproc: int) -> None:
    balance, launch = config.cluster.balance, config.launch
    if resolve_mesh(launch.mesh, nproc).replicas < nproc:
        raise UsageError(code="balance-with-mesh", value=balance)
    if launch.min_nproc is not None and parse_balance(balance):
        raise UsageError(code="balance-of-changing-ranks", value=balance, setting="--min-nproc")
    virtual_ranks = config.data.virtual_ranks or nproc
    strategies.check_can_balance(balance, resolve_strategy(config, nproc), virtual_ranks, min_nproc)
    alone = {
        "--local-steps": config.network.local_steps is not None,
        "--compress": config.network.compress is not None,
        "--batchnorm sync": config.model.batchnorm == "sync",
    }
    if conflicts := [setting for setting, is_set in alone.items() if is_set]:
        raise UsageError(code="balance-changes-result", value=balance, setting=conflicts[0])


def resolve_hang_windows(config: TrainConfig) -> HangTimeout:
    """The windows of --hang-timeout. Raises UsageError if the value is invalid, or no agent can detect a hang."""
    windows = HangTimeout.parse(config.guard.hang_timeout)
    starts_agent = config.launch.nproc is not None or config.cluster.on != "local"
    if windows.seconds is not None and not starts_agent and WorkerSpec.from_environment() is None:
        raise UsageError(code="hang-timeout-without-agent", value=config.guard.hang_timeout)
    return windows


def _check_checkpoints(config: TrainConfig, nproc: int) -> None:
    c, launch = config.checkpoint, config.launch
    allowed = parse_allowed_changes(c.allow_change)
    if c.resume == "auto" and config.run.run_dir is None:
        raise UsageError(code="resume-without-run-dir")
    if c.resume == "no" and (c.restart or allowed):
        raise UsageError(code="option-needs-resume", setting="--restart" if c.restart else "--allow-change")
    if launch.min_nproc is not None and launch.min_nproc > nproc:
        raise UsageError(code="min-nproc-too-large", value=launch.min_nproc, nproc=nproc)
    if (launch.max_restarts or launch.min_nproc) and launch.nproc is None:
        raise UsageError(code="restarts-need-nproc")
    if c.resume == "no" or c.restart:
        return
    assert config.run.run_dir is not None
    run_dir = real_path(config.run.run_dir)
    run_folder.check_usable_as_run_dir(run_dir, trust=config.run.trust)
    checkpoints = Checkpoints(run_dir / run_folder.CHECKPOINTS, trust=config.run.trust)
    if not checkpoints.entries():
        run_folder.check_not_finished(run_dir)
    for _, path in checkpoints.entries():  # use the newest one with a readable manifest; the workers check its bytes
        with suppress(DamagedCheckpoint):
            saved = checkpoints.check(path, files=()).definition
            definition = make_run_definition(configuration.resolve_defaults(config, nproc))
            definition |= complete_task_args(str(config.task), configuration.task_options(config))
            check_definition_changes(saved, definition, allowed, str(path))
            return


def _train_here(config: TrainConfig) -> tuple[Path, int]:
    """Train as a rank: of a launcher's world, or as a single process. Returns the run folder and the exit code."""
    env = os.environ
    nproc = config.launch.nproc
    if WorkerSpec.from_environment() is None:  # no checks under our agent: after a restart there may be fewer ranks
        if config.cluster.on != "local" or config.cluster.dry_run:
            raise UsageError(
                code="train-within-launcher", launcher=config.cluster.on, rank=env.get("RANK"),
                world_size=env.get("WORLD_SIZE"),
            )  # fmt: skip
        if config.cluster.nodes and isinstance(nproc, int):
            check_rank_counts(env, int(config.cluster.nodes.rpartition(":")[2]), nproc)
        local_size = env.get("LOCAL_WORLD_SIZE", "1")
        if str(nproc) not in ("None", "auto", local_size):
            raise UsageError(code="nproc-within-launcher", value=nproc, local_size=local_size)
        read_rank_variables(env)
    import_without_gc(TRAINING_MODULES)  # the first import of torch
    from paceline.train.run import train

    return train(config)


def _train_elsewhere(config: TrainConfig, job: JobSpec) -> int:
    """Train on other nodes, or detached. The workers check the settings that depend on their node."""
    on, node_sizes = config.cluster.on, jobs.nproc_by_node(job)
    size, smallest_size = sum(node_sizes), sum(sorted(node_sizes)[: job.min_nodes])
    if config.launch.nproc == "auto":
        raise UsageError(code="train-nproc-of-this-machine", launcher=on)
    if config.checkpoint.rehearse_preemption is not None:
        raise UsageError(code="rehearsal-elsewhere")
    if config.launch.min_nproc is not None and on != "local":
        raise UsageError(code="min-nproc-elsewhere")
    config = replace(config, launch=replace(config.launch, nproc=job.nproc))
    check_training(config, size, smallest_size, job.fixed_nodes)
    jobs.check_balance_option(job)
    if job.min_nodes < job.nodes and config.checkpoint.checkpoint_every is None:
        raise UsageError(code="nodes-without-checkpoints", value=config.cluster.nodes)
    return _show_plan(config, job) if config.cluster.dry_run else _hand_over(config, job, size)


def _locked(config: TrainConfig) -> AbstractContextManager[tuple[Path, int]]:
    c, run = config.checkpoint, config.run
    return jobs.locked_run_dir(
        run.run_dir, str(config.task), trust=run.trust, resume=c.resume == "auto", restart=c.restart
    )


def _record(config: TrainConfig, run_dir: Path) -> None:
    """Write the settings that repeat the run, unless an earlier attempt has written them."""
    if not (run_dir / run_folder.CONFIG).exists():
        run_folder.write_settings(run_dir, configuration.config_to_toml(configuration.drop_start_only_settings(config)))


def _launch(job: JobSpec, config: TrainConfig) -> tuple[Path, int]:
    with _locked(config) as (run_dir, lock):
        config = configuration.resolve_defaults(replace(config, run=replace(config.run, run_dir=run_dir)), job.nproc)
        attempt, attempt_dir = run_folder.create_attempt_dir(run_dir)
        run_folder.write_settings(attempt_dir, configuration.config_to_toml(config))
        _record(config, run_dir)
        job = make_training_job(config, replace_fields(job, run_dir=str(run_dir), attempt_dir=str(attempt_dir)))
        code = run(plan_local(job), keep_open=[lock])
    if code == ExitCode.USAGE and attempt > 1:
        return run_dir, code  # keep the summary of the earlier attempt
    if code not in (ExitCode.DONE, ExitCode.SAVED):
        _write_failed_summary(run_dir, config, job.nproc, code)
        print_to_stderr(f"run folder {run_dir}")
    return run_dir, code


def _show_plan(config: TrainConfig, job: JobSpec) -> int:
    job = jobs.make_dry_run_job(job, config.run.run_dir, str(config.task))
    if config.cluster.on == "local":
        job = replace_fields(job, attempt_dir=f"{job.run_dir}/attempt-1")
    return jobs.show_plan(config.cluster, make_training_job(config, job))


def _hand_over(config: TrainConfig, job: JobSpec, size: int) -> int:
    cluster, on = config.cluster, config.cluster.on
    with _locked(config) as (run_dir, _):  # once the job runs, the agent of node 0 holds the lock
        # if Slurm or the user starts this job again, it resumes
        again = replace(config.checkpoint, resume="auto", restart=False)
        shape = None if any(host.slots for host in job.hosts) else cluster.nodes  # the ranks check their number with it
        config = replace(
            config,
            run=replace(config.run, run_dir=run_dir),
            checkpoint=again if on in ("slurm", "print") else config.checkpoint,
            cluster=ClusterConfig(nodes=shape),
        )
        config = configuration.resolve_defaults(config, size)
        job = jobs.with_submit_dir(replace_fields(job, run_dir=str(run_dir)), configuration.config_to_toml(config))
        _record(config, run_dir)
    code = jobs.start(cluster, make_training_job(config, job))
    if on == "ssh" and not job.detached and code not in (ExitCode.DONE, ExitCode.SAVED, ExitCode.USAGE):
        _write_failed_summary(run_dir, config, size, code)
    is_here = not job.detached if on == "ssh" else on == "slurm" and current_allocation(os.environ) is not None
    # otherwise rank 0 has printed the folder
    if not (is_here or cluster.follow) or code not in (ExitCode.DONE, ExitCode.SAVED):
        print_to_stderr(f"run folder {run_dir}")
    return code


def make_training_job(config: TrainConfig, job: JobSpec) -> JobSpec:
    """The job of a training. Each worker runs `paceline train` with the settings in the folder of this start."""
    settings_file = Path(job.attempt_dir or job.submit_dir) / run_folder.CONFIG
    return replace_fields(
        job,
        # -P: the working folder may contain modules with the names of modules that paceline imports
        argv=(job.python, "-P", "-m", "paceline", "train", "--config", str(settings_file)),
        threads=options.resolve_threads_per_rank(config.launch.threads_per_rank),
        port=config.launch.port,
        max_restarts=config.launch.max_restarts,
        min_nproc=config.launch.min_nproc or 0,
        grace_period_seconds=config.launch.grace_period,
        name=Path(job.run_dir).name or str(config.task),
        preload=can_fork_workers_from_preloader(config, job),
    )


def can_fork_workers_from_preloader(config: TrainConfig, job: JobSpec) -> bool:
    """Whether workers may be forked from a process that has imported torch.

    They are not forked if they use CUDA or a different Python. A single worker only gains a faster restart. On another
    machine, or for a later start, this requires --device cpu, since the device that `auto` selects there is unknown.
    """
    is_allowed = config.launch.preload == "auto" and os.environ.get(PRELOAD, "auto") != "off"
    is_same_python = job.python == sys.executable and config.launch.backend in ("auto", "gloo")
    is_faster = job.nproc > 1 or config.launch.max_restarts > 0 or job.elastic
    if not (is_allowed and is_same_python and is_faster) or config.launch.device not in ("auto", "cpu"):
        return False
    return config.launch.device == "cpu" or (job.attempt_dir != "" and count_gpus() == 0)


def _write_failed_summary(run_dir: Path, config: TrainConfig, size: int, code: int) -> None:
    try:
        write_summary(run_dir, make_failed_run_summary(run_dir, config, size, code))
    except OSError as error:  # for example, the full disk that ended the run
        print(f"cannot write summary.json: {error}", file=sys.stderr)


def make_failed_run_summary(run_dir: Path, config: TrainConfig, nproc: int, code: int) -> Summary:
    """The summary of a failed run. Its exit code is `code`, which replaces the code in a summary of the ranks."""
    written = read_summary(run_dir)
    if written is not None:
        return replace_fields(written, exit=code)
    steps: dict[int, int] = {}
    with suppress(OSError):
        events = read_events(run_dir / "events-0.jsonl")
        steps = {event.step: event.samples for event in events if isinstance(event, Step)}
    shape = resolve_batch_sizes(config.data, resolve_mesh(config.launch.mesh, nproc).replicas)
    return Summary(
        task=str(config.task), exit=code, strategy=resolve_strategy(config, nproc), world_size=nproc,
        virtual_ranks=shape.virtual_ranks, global_batch=shape.global_batch, steps=max(steps, default=0),
        samples_seen=sum(steps.values()),
    )  # fmt: skip
