"""`paceline status` shows the progress or the outcome of a run; `paceline runs` lists the runs of a folder."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cli import make_parser, run_state
from paceline.cli.options import print_json
from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.report.outcome import find_bottleneck
from paceline.report.run import read_run
from paceline.runs.console import format_timestamp, remove_control_characters, shorten, table_console
from paceline.runs.events import event_files
from paceline.runs.folder import ADAPTER, AVERAGE_WEIGHTS, BEST_WEIGHTS, WEIGHTS
from paceline.runs.owners import warn_if_shared
from paceline.runs.reading import is_folder, list_folders, real_path
from paceline.runs.summary import LIVE_STATES, StatusReport, format_metrics
from paceline.runs.utilization import speed_texts

MAX_EVENT_BYTES = 64 << 20  # largest size of event files that are read for a status: this takes a second or two
TITLES = ("run", "state", "task", "strategy", "ranks", "step", "epochs", "reached", "last written")
MAX_CELL_CHARACTERS = 60  # characters of a cell


@dataclass(frozen=True)
class StatusConfig(run_state.OptionalRunFlags):
    """Show the state of a run: queued, running at a step, or its outcome. Exit code 0 for any state."""

    json: bool = False
    """print JSON"""


@dataclass(frozen=True)
class RunsConfig:
    """List the runs of a folder with state, progress and results, the newest first."""

    folder: Path = run_state.RUNS
    """folder that contains the run folders"""
    json: bool = False
    """print JSON: for each run the output of `paceline status --json`"""


def main(arguments: Sequence[str]) -> int:
    config: StatusConfig = make_parser("status").parse(arguments)
    state = run_state.run_state(*run_state.resolve_run_access(config))
    if config.json:
        print_json(state)
    else:
        lines = [(name, remove_control_characters(text)[: run_state.MOST_CHARS]) for name, text in _lines(state)]
        print("\n".join(f"{name:10}{text}" for name, text in lines))
    return ExitCode.DONE


def _lines(state: StatusReport) -> Iterator[tuple[str, str]]:
    yield "run", state.run_dir
    yield "state", state.state + (f": {state.words}" if state.words else "")
    if state.step is not None:
        total = f" of {state.total_steps}" if state.total_steps else ""
        rate = f", {state.samples_per_second:,.0f} samples/s" if state.samples_per_second else ""
        yield "step", f"{state.step}{total}{rate}"
    if use := speed_texts(state):
        yield "use", ", ".join(use)
    job = f", job {state.slurm_job}" if state.slurm_job else ""
    yield "where", f"{state.on}{job}" + (f", on {', '.join(state.hosts)}" if state.hosts else "")
    if state.nodes:
        yield "nodes", state.nodes
    yield "attempts", str(state.attempts)
    if state.metrics:
        yield "metrics", format_metrics(state.metrics)
    yield from (("finding", finding) for finding in state.found)
    yield "saved", _saved(state)
    if state.state not in LIVE_STATES and (spent := _main_time_loss(Path(state.run_dir))):
        yield "time", spent
    if hint := _hint(state):
        yield "next", hint


def _saved(state: StatusReport) -> str:
    folder = Path(state.run_dir)
    weights = [name for name in (WEIGHTS, ADAPTER, BEST_WEIGHTS, AVERAGE_WEIGHTS) if os.path.lexists(folder / name)]
    steps = [] if state.checkpoint_step is None else [f"checkpoint of step {state.checkpoint_step}"]
    by_script = "by the script" if state.state == "saved" else "nothing"
    otherwise = "nothing yet" if state.state in LIVE_STATES else by_script
    return ", ".join([*weights, *steps]) or otherwise


def _main_time_loss(run_dir: Path) -> str:
    """The main cause of lost time, in a sentence; empty if there is none, or the event files are too large."""
    with suppress(PacelineError, OSError):
        files = event_files(run_dir).values()
        if files and sum(path.lstat().st_size for path in files) <= MAX_EVENT_BYTES:
            return find_bottleneck(read_run(run_dir)).summary
    return ""


def _hint(state: StatusReport) -> str:
    run = shlex.quote(state.run_dir)
    match state.state:
        case "queued" | "running":
            return f"paceline logs {run} --follow, or paceline cancel {run}"
        case "saved" | "lost" | "failed" | "cancelled":
            otherwise = "the same command" if state.state == "saved" else ""
            command = run_state.resume_command(Path(state.run_dir)) or otherwise
            return f"paceline logs {run}{f'; to resume: {command}' if command else ''}"
        case "done":
            return f"paceline report {run}"
        case _:
            return ""


def list_runs(arguments: Sequence[str]) -> int:
    config: RunsConfig = make_parser("runs").parse(arguments)
    folder = real_path(config.folder)
    if not is_folder(folder):
        raise UsageError(code="no-folder-of-runs", folder=folder)
    if run_state.is_run_folder(folder):
        raise UsageError(code="run-not-folder-of-runs", folder=folder)
    states = [state for name in list_folders(folder) if (state := _state(folder / name)) is not None]
    states.sort(key=lambda state: (-state.unix_time, state.run_dir))
    if config.json:
        print_json(states)
    elif states:
        _print(states)
    else:
        print(f"no runs in {config.folder}", file=sys.stderr)
    return ExitCode.DONE


def _state(run_dir: Path) -> StatusReport | None:
    """The state of the run in a folder, `unknown` if it cannot be read; None if the folder holds no run."""
    try:
        if not run_state.is_run_folder(run_dir):
            return None
        warn_if_shared(run_dir)
        return run_state.run_state(run_dir)
    except (PacelineError, OSError) as error:
        return StatusReport(run_dir=str(run_dir), state="unknown", words=str(error)[: run_state.MOST_CHARS])


def _print(states: Sequence[StatusReport]) -> None:
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    from paceline.report.watch_lines import STATE_STYLES

    rows = [[shorten(cell, MAX_CELL_CHARACTERS) for cell in _cells(state)] for state in states]
    widths = [max(map(cell_len, column)) for column in zip(TITLES, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(set_cell_size(cell, width) for cell, width in zip(cells, widths, strict=True) if width)

    table = Text(line(TITLES), "bold")
    for state, row in zip(states, rows, strict=True):
        table.append(f"\n{line(row)}", f"not bold {STATE_STYLES.get(state.state, '')}")
        if state.words and state.state not in ("done", "saved"):
            table.append(f"\n  {shorten(state.words, run_state.MOST_CHARS)}", "not bold dim")
    table_console().print(table, no_wrap=True, overflow="ellipsis")


def _cells(state: StatusReport) -> tuple[str, ...]:
    total = f" of {state.total_steps:,}" if state.total_steps and state.total_steps != state.step else ""
    when = format_timestamp(state.unix_time, "%Y-%m-%d %H:%M")
    return (
        state.name, state.state, Path(state.task).name, state.strategy, str(state.world_size or ""),
        "" if state.step is None else f"{state.step:,}{total}", f"{state.epochs:.3g}" if state.epochs else "",
        format_metrics(state.metrics), when,
    )  # fmt: skip
