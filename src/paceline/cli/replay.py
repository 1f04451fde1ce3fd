"""`paceline replay` repeats one step of a run on one process; `paceline diff` shows where two runs diverge."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import msgspec

import paceline
from paceline.cli import make_parser
from paceline.cli.options import check_out_file, check_positive, write_json
from paceline.cli.run_state import find_run
from paceline.config import settings as configuration
from paceline.config.definition import make_run_definition
from paceline.config.strategies import EXACT_STRATEGIES
from paceline.errors import ExitCode, PacelineError, UsageError, first_few
from paceline.lab import replay as reports
from paceline.lab.replay import RecordRequest, ReplayRequest, ReplaySource, RunDifference, StepRecording
from paceline.rank.environment import read_rank_variables
from paceline.runs.events import Step
from paceline.runs.folder import CONFIG
from paceline.runs.owners import check_owned_by_us
from paceline.runs.reading import is_file, read_json_if_readable
from paceline.runs.summary import read_summary
from paceline.tasks.registry import check_optimizer_reference, check_task_without_import, is_session_script

Device = Literal["auto", "cpu", "cuda", "xpu"]
RECORDING, TENSOR = "recording.json", "tensor.pt"


@dataclass(frozen=True)
class ReplayConfig:
    """Repeat one step of a run on one process, and show the loss of each sample and the gradients of each layer.

    It begins at the nearest checkpoint and does not change the run folder. Exit code 1 if the result differs from the
    logged one by more than expected. For a session, name the script; its arguments follow --.
    """

    run: str
    """run folder, or the beginning of its name under runs/"""
    script: Path | None = None
    """the script of a session"""
    step: int = field(kw_only=True)
    """the step to repeat, from 1"""
    without: tuple[str, ...] = ()
    """indices in the dataset of samples to leave out of the step. Repeatable"""
    find_nonfinite: bool = False
    """name the first module with an output or a gradient that is NaN or infinite"""
    pdb: bool = False
    """stop in the debugger before each forward of the step, with batch, model and optimizer"""
    check: bool = False
    """also repeat the steps up to the next checkpoint, and compare every tensor with it"""
    top: int = 10
    """number of samples to list"""
    device: Device | None = None
    """device (default: as in the run)"""
    json: Path | None = None
    """also write the result to this file"""
    trust: bool = False
    """use a run folder that another user owns or could have written"""


def main(arguments: Sequence[str]) -> int:
    separator = [*arguments, "--"].index("--")
    config: ReplayConfig = make_parser("replay").parse(arguments[:separator])
    check_positive(config, "step", "top")
    check_out_file("--json", config.json)
    rank, size, *_ = read_rank_variables(os.environ)
    if size > 1:
        raise UsageError(code="launch-within-launcher", rank=rank, world_size=size)
    request = ReplayRequest(config.step, _indices(config.without), config.find_nonfinite, config.pdb, config.check)
    if request.check and request.without:
        raise UsageError(code="replay-check-without")
    run = open_replay_source(
        config.run, config.step, device=config.device, eager=config.find_nonfinite, trust=config.trust
    )
    check_replayed_script(run, config.script, arguments[separator + 1 :])

    from paceline.rank.imports import TRAINING_MODULES, import_without_gc

    import_without_gc(TRAINING_MODULES)  # the first import of torch
    from paceline.lab.ranks.replay import ReplayObserver, replay_session, replay_task

    try:
        watch = ReplayObserver(request, run)
        if config.script is None:
            result = replay_task(watch)
        else:
            result = replay_session(watch, config.script, arguments[separator + 1 :])
    except BdbQuit:  # the user has ended the debugger
        return ExitCode.DONE
    if config.json:
        write_json(config.json, result)
    reports.print_replay(result, config.top, find_nonfinite=config.find_nonfinite)
    return ExitCode.DONE if result.agrees else ExitCode.FAILED


def _indices(texts: Sequence[str]) -> frozenset[int]:
    parts = [part for text in texts for part in text.split(",")]
    if wrong := [part for part in parts if not part.strip().isdecimal()]:
        raise UsageError(code="replay-index", value=wrong[0])
    return frozenset(map(int, parts))


def open_replay_source(run: str, step: int, *, device: Device | None, eager: bool, trust: bool) -> ReplaySource:
    """Find a run, with its settings for one process and its log of a step. `eager`: without compiled code."""
    run_dir = find_run(run)
    if not trust:
        check_owned_by_us(run_dir)
    summary = read_summary(run_dir)
    logged = reports.read_logged_step(run_dir, step, ended=summary is not None and summary.exit == ExitCode.DONE)
    environment: dict[str, Any] = read_json_if_readable(run_dir / "environment.json", dict[str, Any]) or {}
    paths = (run_dir / f"attempt-{logged.attempt}" / CONFIG, run_dir / CONFIG)
    path = next((path for path in paths if is_file(path)), paths[-1])
    trained = configuration.drop_start_only_settings(configuration.load(path, must_own=not trust))
    if trained.network != configuration.SlowNetworkConfig():
        raise UsageError(code="replay-slow-network")
    launch, compute = trained.launch, trained.compute
    threads = launch.threads_per_rank or environment.get("threads_per_rank")
    launch = configuration.LaunchConfig(device=device or launch.device, threads_per_rank=threads, mesh=launch.mesh)
    if eager:  # hooks of modules do not run in compiled code
        compute = replace(compute, compile=False, cuda_graphs=False)
    trained = replace(trained, launch=launch, compute=replace(compute, peak_tflops=0.0))
    configuration.check_values(replace(trained, launch=replace(launch, mesh=None)))
    return ReplaySource(run_dir, trained, logged, environment, trust)


def check_replayed_script(run: ReplaySource, script: Path | None, arguments: Sequence[str]) -> None:
    task = str(run.config.task)
    if not is_session_script(task):
        if script is not None or arguments:
            raise UsageError(code="replay-script-of-task", task=task)
        check_task_without_import(task, configuration.task_options(run.config))
        check_optimizer_reference(run.config.optimizer.optimizer)
        return
    if script is None:
        raise UsageError(code="replay-needs-script", script=task, run_dir=run.run_dir)
    if not script.is_file():
        raise UsageError(code="script-not-found", value=str(script), folder=str(Path.cwd()), hint="")
    if script.name != task:
        raise UsageError(code="replay-other-script", value=script.name, script=task, run_dir=run.run_dir)


@dataclass(frozen=True)
class DiffConfig:
    """Show the first difference of two runs: settings, environment, step and tensor.

    Both runs are repeated at this step on one process, from their checkpoints. Their folders do not change. Exit code 1
    if they differ. For sessions, name the script; the arguments of A follow --, and those of B a second --.
    """

    run: str
    """run folder, or the beginning of its name under runs/"""
    other: str = ""
    """the run to compare with"""
    script: Path | None = None
    """the script of both sessions"""
    script_b: Path | None = None
    """the script of B, if it is another file"""
    against_python: Path | None = None
    """instead of a second run: the Python or the virtual environment under which to repeat the steps"""
    step: int | None = None
    """with --against-python: the first step to repeat (default: 1)"""
    steps: int = 20
    """with --against-python: the number of steps"""
    device: Device | None = None
    """device (default: as in the runs)"""
    json: Path | None = None
    """also write the result to this file"""
    trust: bool = False
    """use run folders that another user owns or could have written"""


@dataclass(frozen=True)
class ComparedRun:
    label: str
    run: ReplaySource
    request: RecordRequest
    log: Mapping[int, Step]
    python: str = ""  # the other Python; empty: this one


def diff(arguments: Sequence[str]) -> int:
    ours, *of_scripts = _split(arguments)
    config: DiffConfig = make_parser("diff").parse(ours)
    check_positive(config, "step", "steps")
    check_out_file("--json", config.json)
    if config.against_python and config.other.endswith(".py") and config.script is None:
        config = replace(config, other="", script=Path(config.other))
    if bool(config.other) == bool(config.against_python) or (config.step and config.other):
        raise UsageError(code="diff-two-runs")
    sides, step = _sides(config, of_scripts)

    from paceline.rank.imports import TRAINING_MODULES, import_without_gc

    import_without_gc(TRAINING_MODULES)  # the first import of torch; the children are forks
    from paceline.lab.ranks.replay import read_run_definition

    tables = [{**make_run_definition(side.run.config), **read_run_definition(side.run)} for side in sides]
    result = RunDifference(reports.differing_settings(*tables), step)
    if step is not None:
        _repeat_and_compare(result, sides)
    elif len(weights := {(s.steps, s.weights_sha256) for side in sides if (s := read_summary(side.run.run_dir))}) == 2:
        (steps_a, weights_a), (steps_b, weights_b) = weights
        result.only_weights = steps_a == steps_b and None not in (weights_a, weights_b)
    if config.json:
        write_json(config.json, result)
    reports.print_run_difference(result, (sides[0].label, sides[1].label))
    return ExitCode.DONE if result.loss_step is None and not result.only_weights else ExitCode.FAILED


def _split(arguments: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--" and len(parts) < 3:
            parts.append([])
        else:
            parts[-1].append(argument)
    return parts


def _sides(config: DiffConfig, arguments: Sequence[list[str]]) -> tuple[tuple[ComparedRun, ComparedRun], int | None]:
    """Both sides, and the first step with a different result, or the last one to repeat with --against-python."""
    python = _python(config.against_python) if config.against_python else ""
    script = config.script
    dirs = [find_run(name) for name in (config.run, config.other or config.run)]
    logs = [reports.read_steps(run_dir) for run_dir in dirs]
    step = reports.first_different_step(*logs)
    first, last = max(1, (step or 2) - 1), step or 1
    if python:
        first = config.step or 1
        step = last = min(first + config.steps - 1, max(logs[0]))
    sides: list[ComparedRun] = []
    for number, (run_dir, log) in enumerate(zip(dirs, logs, strict=True)):
        of_b = number == 1 and not python
        run = open_replay_source(str(run_dir), first, device=config.device, eager=True, trust=config.trust)
        its_script = config.script_b if of_b and config.script_b else script
        script_args = tuple(arguments[min(number * (not python), len(arguments) - 1)] if arguments else ())
        check_replayed_script(run, its_script, script_args)
        if run.config.strategy not in EXACT_STRATEGIES:
            allowed = ", ".join(EXACT_STRATEGIES)
            raise UsageError(code="diff-not-exact", run_dir=run_dir, strategy=run.config.strategy, allowed=allowed)
        request = RecordRequest(
            str(run_dir), first, last, str(its_script or ""), script_args, config.device, config.trust
        )
        label = f"{run_dir} under {python}" if python and number else str(run_dir)
        sides.append(ComparedRun(label, run, request, log, python if number else ""))
    return (sides[0], sides[1]), step


def _python(path: Path) -> str:
    python = path / "bin" / "python" if path.is_dir() else path
    if not os.access(python, os.X_OK) or python.is_dir():
        raise UsageError(code="diff-no-python", value=path)
    return str(python)


def _repeat_and_compare(result: RunDifference, sides: tuple[ComparedRun, ComparedRun]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, label) for label in "ab"]
        for folder in folders:
            folder.mkdir()
        a, b = (_record(side, folder) for side, folder in zip(sides, folders, strict=True))
        if sides[1].python:
            result.settings = reports.differing_settings({"hardware": a.hardware}, {"hardware": b.hardware})
            result.loss_step = next((n for n, loss in a.losses.items() if b.losses.get(n) != loss), None)
            if result.loss_step is None:
                return
            result.losses = a.losses[result.loss_step], b.losses.get(result.loss_step)
        elif result.loss_step is not None:
            logged = [side.log[result.loss_step].loss for side in sides]
            result.losses = logged[0], logged[1]
            result.not_reproduced = [x for x, s, r in zip("AB", sides, (a, b), strict=True) if not _repeats(s, r)]
        before = [{r.name for r in x.records if r.kind == "state before"} for x in (a, b)]
        if odd := sorted(name for name in before[0] ^ before[1] if name.startswith("model/")):
            raise UsageError(code="diff-other-models", names=first_few([n.removeprefix("model/") for n in odd], 5))
        if (positions := reports.first_difference(a.records, b.records)) is not None:
            records = [r.records[n] if n >= 0 else None for r, n in zip((a, b), positions, strict=True)]
            result.first = records[0] or records[1]
            result.only_in = "" if all(records) else "A" if records[0] else "B"
            if not result.only_in:
                _measure_difference(result, sides, folders, positions, a)
        result.cause = reports.probable_cause(result.first, result.settings, result.not_reproduced)


def _repeats(side: ComparedRun, recording: StepRecording) -> bool:
    known = {n: side.log[n] for n in recording.losses if n in side.log and side.log[n].steps == 1}
    return all(recording.losses[n] == step.loss for n, step in known.items() if not step.skipped)


def _measure_difference(
    result: RunDifference,
    sides: Sequence[ComparedRun],
    folders: Sequence[Path],
    positions: Sequence[int],
    a: StepRecording,
) -> None:
    """Repeat the steps again, to fetch the tensor that differs."""
    from paceline.lab.ranks.diff import set_tensor_difference

    first = result.first
    assert first is not None
    for side, folder, position in zip(sides, folders, positions, strict=True):
        _record(side, folder, fetch=position)
    place = (first.step, first.place[:2])
    batches = (r.samples for r in a.records if r.kind == "samples" and (r.step, r.place[:2]) == place)
    set_tensor_difference(result, [folder / TENSOR for folder in folders], next(batches, ()))


def _record(side: ComparedRun, folder: Path, *, fetch: int | None = None) -> StepRecording:
    """Repeat the steps of a side in a child process."""
    request = msgspec.structs.replace(side.request, fetch=fetch)
    (folder / RECORDING).unlink(missing_ok=True)
    if side.python:
        # our paceline, so that only the environment differs
        env = {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])}
        code = "from paceline.cli.replay import record_in_this_process; record_in_this_process()"
        command = [side.python, "-c", code, str(folder)]
        subprocess.run(command, input=msgspec.json.encode(request), env=env, stdout=sys.stderr, check=False)
    else:
        child = get_context("fork").Process(target=record_in_this_process, args=(folder, request))
        child.start()
        child.join()
    try:
        recording = msgspec.json.decode((folder / RECORDING).read_bytes(), type=StepRecording)
    except FileNotFoundError:
        recording = StepRecording(error="its process has ended with the error above")
    if recording.error:
        raise UsageError(code="diff-not-repeated", run=side.label, reason=recording.error)
    return recording


def record_in_this_process(folder: Path | None = None, request: RecordRequest | None = None) -> None:
    if folder is None or request is None:
        folder, request = Path(sys.argv[1]), msgspec.json.decode(sys.stdin.buffer.read(), type=RecordRequest)
    sys.stdout.flush()
    os.dup2(2, 1)  # what a script prints is no result
    from paceline.lab.ranks.diff import record_steps

    try:
        run = open_replay_source(request.run, request.first, device=request.device, eager=True, trust=request.trust)
        recording = record_steps(run, request, folder)
    except PacelineError as error:
        recording = StepRecording(error=str(error))
    (folder / RECORDING).write_bytes(msgspec.json.encode(recording))
