"""`paceline launch SCRIPT ARGS`: starts any script that torchrun could, unchanged, on one node or on many.

With --check, it shortens the epochs of the script, then prints the mistakes that the script makes.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from paceline.cli import jobs, make_parser
from paceline.cli.options import HELP_OPTIONS, check_positive, resolve_auto_nproc, resolve_threads_per_rank, usable_gpus
from paceline.cli.torchrun import LaunchArguments, read_arguments
from paceline.config.choices import untested_torch_notices
from paceline.config.settings import ClusterConfig, load
from paceline.errors import ExitCode, UsageError
from paceline.lab.check.report import collect_findings, count_mistakes, render_report
from paceline.launch.plan import plan_local
from paceline.launch.supervise import run
from paceline.protocol.control import BOOTSTRAP, CHECK_OPTION
from paceline.protocol.facts import MAX_STEPS, RECORDED_EPOCHS, SHORTENED_EPOCH_BATCHES, ScriptFacts, facts_file_name
from paceline.protocol.job import HangTimeout, JobSpec
from paceline.rank.bootstrap import worker_command
from paceline.rank.environment import has_launcher_variables
from paceline.runs import reading, writing
from paceline.runs.attempt import read_notices
from paceline.runs.console import print_to_stderr, remove_control_characters
from paceline.runs.folder import CONFIG, create_attempt_dir, new_run_dir_path

FINDINGS_NAME = "check.json"
MAX_FACTS_BYTES = 64 << 20


@dataclass(frozen=True)
class ScriptConfig:
    """Options."""

    nproc: int | Literal["auto", "cpu", "gpu"] = 1
    """worker processes on each node. auto: one per GPU, or per core; cpu, gpu: per core, per GPU"""
    show: Literal["all", "rank 0"] = "all"
    """ranks whose output is shown here; each rank also has a log file"""
    run_dir: Path | None = None
    """folder for logs (default: runs/<script>-<time>)"""
    trust: bool = False
    """use a folder that another user owns or could have written"""
    threads_per_rank: int | None = None
    """OMP_NUM_THREADS of each rank (default: yours if set, otherwise cores / ranks)"""
    collectives: Literal["torch", "shared"] = "torch"
    """shared: DDP on CPU ranks of one node reduces gradients in shared memory, with the same bits"""
    port: int = 0
    """port on which the ranks meet; 0: a free port"""
    max_restarts: int = 0
    """restarts after a worker was killed or lost; the script must load its own state"""
    grace_period: float = 30.0
    """seconds from a requested stop to a kill"""
    hang_timeout: str = "auto"
    """seconds without progress on any rank after which the run ends with a report of the rank at fault. auto: adapts to
    the pace of the run; off: no guard"""
    stdin: str = "all"
    """rank that reads standard input. all: as under torchrun; from a terminal, the rank that reads first"""
    on_drift: Literal["stop", "warn"] = "stop"
    """if replicas drift apart, gradients are not finite or the order of collectives differs: end the run with its exit
    code, or warn"""
    check: bool = False
    """run a few dozen steps, then report errors of the script and how to fix them"""


@dataclass(frozen=True)
class ScriptLaunchConfig:
    """Start any script that torchrun could, on one node or on many. Options of torchrun work too."""

    script: ScriptConfig = field(default_factory=ScriptConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


NPROC_OPTION_NAMES = ("--nproc", "--nproc-per-node", "--nproc_per_node")
"""options that were probably meant for paceline launch if it has not received the number of processes"""


def main(arguments: Sequence[str]) -> int:
    typed = read_arguments(arguments, os.environ, takes_value_by_option())
    by_torchrun = typed.script_words and typed.need_torchrun
    ours = typed.paceline_options if by_torchrun else typed.paceline_arguments
    options: ScriptLaunchConfig = make_parser("launch").parse(ours)
    script = typed.script
    _check_script(options.script)
    if by_torchrun:
        return _exec_torchrun(typed, dry_run=options.cluster.dry_run)
    if has_launcher_variables(os.environ):  # otherwise each rank of a run would start a run
        rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        raise UsageError(code="launch-within-launcher", rank=rank, world_size=world_size)
    for line in untested_torch_notices():
        print_to_stderr(line)
    if typed.ignored_options_text:
        print_to_stderr(f"ignored: {typed.ignored_options_text}")
    misplaced = [name for word in script[1:] if (name := word.partition("=")[0]) in NPROC_OPTION_NAMES]
    if misplaced and "--nproc" not in typed.paceline_values and "--nproc-per-node" not in typed.torchrun:
        print_to_stderr(f"the script receives {', '.join(misplaced)}. Put options of paceline launch before the script")
    job = _script_job(options, script)
    job = replace(job, rdzv_id=typed.torchrun.get("--rdzv-id") or "", role=typed.torchrun.get("--role") or job.role)
    if BOOTSTRAP not in job.argv and not job.hang_timeout.off:
        print_to_stderr(
            f"{script[0]} is not a Python script: the hang guard cannot watch it. To use the guard, pass the .py file"
        )
    _check_collectives(options, job)
    jobs.check_balance_option(job)
    cluster, run_dir, log_dir = options.cluster, options.script.run_dir, typed.torchrun.get("--log-dir")
    if run_dir is None and log_dir is not None:
        run_dir = new_run_dir_path(job.name, Path(log_dir))
    if options.script.check:
        job = add_script_check_to_job(job, cluster, script)
    if cluster.dry_run:
        return jobs.show_plan(cluster, jobs.make_dry_run_job(job, run_dir, job.name))
    is_local, code = cluster.on == "local" and not cluster.detach, ExitCode.DONE
    resume = run_dir_holds_session(job, run_dir, trust=options.script.trust)
    with jobs.locked_run_dir(run_dir, job.name, trust=options.script.trust, resume=resume) as (run_dir, lock):
        job = replace(job, run_dir=str(run_dir))
        if is_local:
            job = replace(job, attempt_dir=str(create_attempt_dir(run_dir)[1]))
            code = run(plan_local(job), keep_open=[lock])
            if options.script.check:
                code = report_findings(job, code)
        else:
            # with the lock held: a refused start must not look like the active run
            job = jobs.with_submit_dir(job)
    if not is_local:
        code = jobs.start(cluster, job)  # node 0's agent takes the lock
    print_to_stderr(f"run folder {run_dir}")
    return code


def run_dir_holds_session(job: JobSpec, run_dir: Path | None, *, trust: bool) -> bool:
    """Whether the folder holds the run of a session in this script. A session with resume=True resumes that run.

    A session without resume=True raises an error. Under --check no session resumes its run.
    """
    if run_dir is None or BOOTSTRAP not in job.argv:
        return False
    config = reading.real_path(run_dir) / CONFIG
    if not os.path.lexists(config):
        return False
    script, *arguments = job.argv[job.argv.index(BOOTSTRAP) + 1 :]
    names = {f"{arguments[0].rpartition('.')[2]}.py", "__main__.py"} if script == "-m" else {Path(script).name}
    return load(config, must_own=not trust).task in names  # the task of a session is the name of its file


def takes_value_by_option() -> dict[str, bool]:
    """The options of `paceline launch`, and whether each takes a value."""
    takes_value = {name: not option.is_flag for option in make_parser("launch").options() for name in option.names}
    return takes_value | dict.fromkeys(HELP_OPTIONS, False)


def _exec_torchrun(typed: LaunchArguments, *, dry_run: bool) -> int:
    """Replace this process by torchrun, if its options start several nodes: our agents would have no common secret."""
    command, env = typed.torchrun_command(sys.executable)
    if "--no-python" not in typed.torchrun:
        worker_command(typed.script)  # raises an error for a wrong script
    shown = shlex.join(("torchrun", *command[4:]))
    if not dry_run:
        print_to_stderr(f"torchrun starts this command, with paceline's guard around the script: {shown}")
        os.execve(command[0], command, {**os.environ, **env})
    print(shown)
    return ExitCode.DONE


def _check_script(script: ScriptConfig) -> None:
    check_positive(script, "nproc", "threads_per_rank")
    if not 0 <= script.port <= 65535:
        raise UsageError(code="port-out-of-range", value=script.port)
    if script.max_restarts < 0:
        raise UsageError(code="negative", setting="max_restarts", value=script.max_restarts)
    if not script.grace_period > 0:
        raise UsageError(code="not-positive", setting="grace_period", value=script.grace_period)


def _check_collectives(options: ScriptLaunchConfig, job: JobSpec) -> None:
    impossible = {
        f"ranks share memory only on one node, but the job has {job.nodes} nodes": job.nodes > 1,
        "torchrun does not support it; use --agent paceline": options.cluster.on == "print" and job.torchrun,
        f"{job.argv[0]} is not a Python script; pass the .py file": BOOTSTRAP not in job.argv,
    }
    if options.script.collectives == "shared" and (why := [reason for reason, true in impossible.items() if true]):
        raise UsageError(code="collectives-not-shared", why="; ".join(why))


def _stdin_rank(text: str, job: JobSpec) -> int:
    """The rank that reads standard input; -1: all."""
    if text == "all":
        return -1
    if not text.isdecimal() or int(text) >= job.nproc * job.nodes:
        raise UsageError(code="stdin-not-a-rank", last=job.nproc * job.nodes - 1, value=text)
    if job.nodes > 1 or job.hosts or job.detached:
        raise UsageError(code="stdin-elsewhere", value=text)
    return int(text)


def _script_job(options: ScriptLaunchConfig, command: Sequence[str]) -> JobSpec:
    script, cluster = options.script, options.cluster
    nproc = script.nproc
    if isinstance(nproc, str):
        if cluster.on != "local":
            raise UsageError(code="nproc-of-this-machine", value=nproc, launcher=cluster.on)
        if nproc == "gpu" and usable_gpus("auto") == 0:
            raise UsageError(code="no-gpu-to-count")
        nproc = resolve_auto_nproc("cpu" if nproc == "cpu" else "auto")
    placed = jobs.make_job_spec(cluster, nproc)
    return replace(
        placed, argv=worker_command(command, placed.python),
        threads=resolve_threads_per_rank(script.threads_per_rank), port=script.port, max_restarts=script.max_restarts,
        grace_period_seconds=script.grace_period, hang_timeout=HangTimeout.parse(script.hang_timeout),
        collectives=script.collectives, on_drift=script.on_drift,
        name=Path(command[1] if command[0] == "-m" and len(command) > 1 else command[0]).stem, plain_store=True,
        stdin_rank=_stdin_rank(script.stdin, placed), show=script.show,
    )  # fmt: skip


def add_script_check_to_job(job: JobSpec, cluster: ClusterConfig, script: Sequence[str]) -> JobSpec:
    refused = {
        f"--on {cluster.on}": cluster.on != "local",
        "--detach": cluster.detach,
        "--dry-run": cluster.dry_run,
        "--max-restarts": job.max_restarts > 0,
    }
    if conflicts := [option for option, is_given in refused.items() if is_given]:
        raise UsageError(code="check-option", options=" and ".join(conflicts))
    if BOOTSTRAP not in job.argv:
        raise UsageError(code="check-not-python", value=script[0])
    if job.nproc < 2:
        raise UsageError(code="check-of-one-rank")
    print_to_stderr(
        f"--check shortens the epochs of {job.name} ({RECORDED_EPOCHS} of {SHORTENED_EPOCH_BATCHES}-"
        f"{2 * SHORTENED_EPOCH_BATCHES - 1} batches, then 1 batch each; in a session {MAX_STEPS} steps) and changes "
        "nothing else. The script's usual output files will be overwritten"
    )
    # The report includes drift. If drift ended the run, the check would miss later mistakes
    at = job.argv.index(BOOTSTRAP) + 1
    return replace(job, on_drift="warn", argv=(*job.argv[:at], CHECK_OPTION, *job.argv[at:]))


def report_findings(job: JobSpec, code: int) -> int:
    """Print and write the findings. Returns the exit code of the script, or 1 instead of 0 if there are mistakes."""
    ranks: list[ScriptFacts] = []
    attempt_dir = Path(job.attempt_dir)
    for rank in range(job.nproc):
        try:
            ranks.append(
                reading.read_json(attempt_dir / facts_file_name(rank), ScriptFacts, limit_bytes=MAX_FACTS_BYTES)
            )
        except OSError as error:
            print_to_stderr(f"rank {rank} has recorded nothing: {error}")
    if len(ranks) < job.nproc or not any(facts.steps or facts.loaders for facts in ranks):
        print_to_stderr("--check found no training: no step of a torch optimizer, no DataLoader")
        return code or ExitCode.FAILED
    findings = collect_findings(ranks, [*read_notices(attempt_dir)])
    with suppress(OSError):  # with a full disk, print the report anyway
        writing.replace_file(attempt_dir / FINDINGS_NAME, msgspec.json.encode(findings))
    print(remove_control_characters(render_report(job.name, ranks, findings, code)), flush=True)
    if code:
        print_to_stderr(f"the script ended with exit code {code}: later parts of it were not checked")
    return code or (ExitCode.FAILED if count_mistakes(findings) else ExitCode.DONE)
