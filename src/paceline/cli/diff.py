"""`paceline diff`: shows the first difference of two runs, or of a run and its repetition under a different Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import msgspec

import paceline
from paceline.cli import command_line
from paceline.cli.options import check_out_file, check_positive, write_json
from paceline.cli.replay import Device, check_code, open_run
from paceline.cli.run_state import find_run
from paceline.config.definition import settings
from paceline.config.strategies import EXACT_STRATEGIES
from paceline.errors import ExitCode, PacelineError, UsageError, first_few
from paceline.lab.diff import (
    Difference,
    Recording,
    Request,
    differing,
    first_difference,
    first_different_step,
    print_difference,
    probable_cause,
    read_steps,
)
from paceline.lab.replay import Source
from paceline.runs.events import Step
from paceline.runs.summary import read_summary

RECORDING, TENSOR = "recording.json", "tensor.pt"


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
class Side:
    label: str
    run: Source
    request: Request
    log: Mapping[int, Step]
    python: str = ""  # the other Python; empty: this one


def main(arguments: Sequence[str]) -> int:
    ours, *of_scripts = _split(arguments)
    config: DiffConfig = command_line("diff").parse(ours)
    check_positive(config, "step", "steps")
    check_out_file("--json", config.json)
    if config.against_python and config.other.endswith(".py") and config.script is None:
        config = replace(config, other="", script=Path(config.other))
    if bool(config.other) == bool(config.against_python) or (config.step and config.other):
        raise UsageError(code="diff-two-runs")
    sides, step = _sides(config, of_scripts)

    from paceline.rank.imports import TRAINING_MODULES, import_without_gc

    import_without_gc(TRAINING_MODULES)  # the first import of torch; the children are forks
    tables = [{**settings(side.run.config), **side.run.definition()} for side in sides]
    result = Difference(differing(*tables), step)
    if step is not None:
        _compare(result, sides)
    elif len(weights := {(s.steps, s.weights_sha256) for side in sides if (s := read_summary(side.run.run_dir))}) == 2:
        (steps_a, weights_a), (steps_b, weights_b) = weights
        result.only_weights = steps_a == steps_b and None not in (weights_a, weights_b)
    if config.json:
        write_json(config.json, result)
    print_difference(result, (sides[0].label, sides[1].label))
    return ExitCode.DONE if result.loss_step is None and not result.only_weights else ExitCode.FAILED


def _split(arguments: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--" and len(parts) < 3:
            parts.append([])
        else:
            parts[-1].append(argument)
    return parts


def _sides(config: DiffConfig, arguments: Sequence[list[str]]) -> tuple[tuple[Side, Side], int | None]:
    """Both sides, and the first step with a different result, or the last one to repeat with --against-python."""
    python = _python(config.against_python) if config.against_python else ""
    script = config.script
    dirs = [find_run(name) for name in (config.run, config.other or config.run)]
    logs = [read_steps(run_dir) for run_dir in dirs]
    step = first_different_step(*logs)
    first, last = max(1, (step or 2) - 1), step or 1
    if python:
        first = config.step or 1
        step = last = min(first + config.steps - 1, max(logs[0]))
    sides: list[Side] = []
    for number, (run_dir, log) in enumerate(zip(dirs, logs, strict=True)):
        of_b = number == 1 and not python
        run = open_run(str(run_dir), first, device=config.device, eager=True, trust=config.trust)
        its_script = config.script_b if of_b and config.script_b else script
        words = tuple(arguments[min(number * (not python), len(arguments) - 1)] if arguments else ())
        check_code(run, its_script, words)
        if run.config.strategy not in EXACT_STRATEGIES:
            allowed = ", ".join(EXACT_STRATEGIES)
            raise UsageError(code="diff-not-exact", run_dir=run_dir, strategy=run.config.strategy, allowed=allowed)
        request = Request(str(run_dir), first, last, str(its_script or ""), words, config.device, config.trust)
        label = f"{run_dir} under {python}" if python and number else str(run_dir)
        sides.append(Side(label, run, request, log, python if number else ""))
    return (sides[0], sides[1]), step


def _python(path: Path) -> str:
    python = path / "bin" / "python" if path.is_dir() else path
    if not os.access(python, os.X_OK) or python.is_dir():
        raise UsageError(code="diff-no-python", value=path)
    return str(python)


def _compare(result: Difference, sides: tuple[Side, Side]) -> None:
    """Repeat the steps of both sides, and set the first difference."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, label) for label in "ab"]
        for folder in folders:
            folder.mkdir()
        a, b = (_record(side, folder) for side, folder in zip(sides, folders, strict=True))
        if sides[1].python:
            result.settings = differing({"hardware": a.hardware}, {"hardware": b.hardware})
            result.loss_step = next((n for n, loss in a.losses.items() if b.losses.get(n) != loss), None)
            if result.loss_step is None:
                return
            result.losses = a.losses[result.loss_step], b.losses.get(result.loss_step)
        elif result.loss_step is not None:
            logged = [side.log[result.loss_step].loss for side in sides]
            result.losses = logged[0], logged[1]
            result.not_reproduced = [x for x, s, r in zip("AB", sides, (a, b), strict=True) if not _repeats(s, r)]
        _check_models(a, b)
        if (positions := first_difference(a.records, b.records)) is not None:
            records = [r.records[n] if n >= 0 else None for r, n in zip((a, b), positions, strict=True)]
            result.first = records[0] or records[1]
            result.only_in = "" if all(records) else "A" if records[0] else "B"
            if not result.only_in:
                _measure(result, sides, folders, positions, a)
        result.cause = probable_cause(result.first, result.settings, result.not_reproduced)


def _repeats(side: Side, recording: Recording) -> bool:
    """Whether a replay has the logged losses."""
    known = {n: side.log[n] for n in recording.losses if n in side.log and side.log[n].steps == 1}
    return all(recording.losses[n] == step.loss for n, step in known.items() if not step.skipped)


def _check_models(a: Recording, b: Recording) -> None:
    names = [{r.name for r in x.records if r.kind == "state before" and r.name.startswith("model/")} for x in (a, b)]
    if odd := sorted(names[0] ^ names[1]):
        raise UsageError(code="diff-other-models", names=first_few([n.removeprefix("model/") for n in odd], 5))


def _measure(
    result: Difference, sides: Sequence[Side], folders: Sequence[Path], positions: Sequence[int], a: Recording
) -> None:
    """Repeat the steps again, to fetch the tensor that differs."""
    from paceline.lab.ranks.diff import measure

    first = result.first
    assert first is not None
    for side, folder, position in zip(sides, folders, positions, strict=True):
        _record(side, folder, fetch=position)
    place = (first.step, first.place[:2])
    batches = (r.samples for r in a.records if r.kind == "samples" and (r.step, r.place[:2]) == place)
    measure(result, [folder / TENSOR for folder in folders], next(batches, ()))


def _record(side: Side, folder: Path, *, fetch: int | None = None) -> Recording:
    """Repeat the steps of a side in a child process."""
    request = msgspec.structs.replace(side.request, fetch=fetch)
    (folder / RECORDING).unlink(missing_ok=True)
    if side.python:
        # our paceline, so that only the environment differs
        env = {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])}
        code = "from paceline.cli.diff import record_here; record_here()"
        words = [side.python, "-c", code, str(folder)]
        subprocess.run(words, input=msgspec.json.encode(request), env=env, stdout=sys.stderr, check=False)
    else:
        child = get_context("fork").Process(target=record_here, args=(folder, request))
        child.start()
        child.join()
    try:
        recording = msgspec.json.decode((folder / RECORDING).read_bytes(), type=Recording)
    except FileNotFoundError:
        recording = Recording(error="its process has ended with the error above")
    if recording.error:
        raise UsageError(code="diff-not-repeated", run=side.label, reason=recording.error)
    return recording


def record_here(folder: Path | None = None, request: Request | None = None) -> None:
    """Repeat the steps of a request in this process, and write the recording into `folder`."""
    if folder is None or request is None:
        folder, request = Path(sys.argv[1]), msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    sys.stdout.flush()
    os.dup2(2, 1)  # what a script prints is no result
    from paceline.lab.ranks.diff import record

    try:
        run = open_run(request.run, request.first, device=request.device, eager=True, trust=request.trust)
        recording = record(run, request, folder)
    except PacelineError as error:
        recording = Recording(error=str(error))
    (folder / RECORDING).write_bytes(msgspec.json.encode(recording))
