"""`paceline runs`: lists the runs of a folder, the newest first, and what each of them has reached."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from paceline.cli.commands import command_line
from paceline.cli.finding import RUNS, holds_run
from paceline.cli.flags import print_json
from paceline.cli.run_state import MOST_CHARS, run_state
from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.report.watch_lines import STATE_STYLES
from paceline.runs.console import clock, one_line, table_console
from paceline.runs.owners import note_strangers
from paceline.runs.reading import folders, is_folder, real_path
from paceline.runs.summary import RunState, scores_line

TITLES = ("run", "task", "strategy", "ranks", "step", "epochs", "reached", "last written", "state")
WIDEST = 60  # characters of a cell


@dataclass(frozen=True)
class RunsConfig:
    """List the runs of a folder with state, progress and results, the newest first."""

    folder: Path = RUNS
    """folder that contains the run folders"""
    json: bool = False
    """print JSON: for each run the output of `paceline status --json`"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline runs ARGUMENTS`."""
    config: RunsConfig = command_line("runs").parse(arguments)
    found = runs_in(real_path(config.folder))
    if config.json:
        print_json(found)
    elif found:
        _print(found)
    else:
        print(f"no runs in {config.folder}", file=sys.stderr)
    return ExitCode.DONE


def runs_in(folder: Path) -> list[RunState]:
    """The runs whose folders are in `folder`, the newest first; no host and no scheduler is asked about them.

    Raises:
        UsageError: if there is no such folder, or it is itself a run's.
    """
    if not is_folder(folder):
        raise UsageError(code="no-folder-of-runs", folder=folder)
    if holds_run(folder):
        raise UsageError(code="run-not-folder-of-runs", folder=folder)
    found = [run for name in folders(folder) if (run := _found(folder / name)) is not None]
    return sorted(found, key=lambda run: (-run.unix_time, run.run_dir))


def _found(run_dir: Path) -> RunState | None:
    """The run in a folder, also where it cannot be read; None if it holds none."""
    try:
        if not holds_run(run_dir):
            return None
        note_strangers(run_dir)
        return run_state(run_dir)
    except (PacelineError, OSError) as error:
        return RunState(run_dir=str(run_dir), state="unknown", words=str(error)[:MOST_CHARS])


def _print(found: Sequence[RunState]) -> None:
    rows = [_cells(run) for run in found]
    widths = [max(map(cell_len, column)) for column in zip(TITLES, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(set_cell_size(cell, width) for cell, width in zip(cells, widths, strict=True) if width)

    table = Text(line(TITLES), "bold")
    for run, row in zip(found, rows, strict=True):
        table.append(f"\n{line(row)}", f"not bold {STATE_STYLES.get(run.state, '')}")
        if run.words and run.state not in ("done", "saved"):
            table.append(f"\n  {one_line(run.words, MOST_CHARS)}", "not bold dim")
    table_console().print(table, no_wrap=True, overflow="ellipsis")


def _cells(run: RunState) -> tuple[str, ...]:
    total = f" of {run.total_steps:,}" if run.total_steps and run.total_steps != run.step else ""
    when = clock(run.unix_time, "%Y-%m-%d %H:%M")
    cells = (
        run.name, Path(run.task).name, run.strategy, str(run.world_size or ""),
        "" if run.step is None else f"{run.step:,}{total}", f"{run.epochs:.3g}" if run.epochs else "",
        scores_line(run.metrics), when, run.state,
    )  # fmt: skip
    return tuple(one_line(cell, WIDEST) for cell in cells)
