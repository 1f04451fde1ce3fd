"""`paceline logs RUN`: shows what a run's workers have printed."""

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from paceline.cli.finding import Means, RunFlags, attempts, existing_run
from paceline.cli.run_state import LIVE, standing
from paceline.disk.reading import is_file, names
from paceline.errors import ExitCode, UsageError
from paceline.launch.submission import last_submission
from paceline.launch.tail import MAX_ALL_BYTES, Tail, all_lines, last_lines

POLL_SECONDS = 0.5
LOOK_SECONDS = 5.0  # between two looks whether the run still runs


@dataclass(frozen=True)
class LogsConfig(RunFlags):
    """Show the output of a run's workers; of a job that waits or failed early, its output in Slurm."""

    rank: int = 0
    """whose output"""
    attempt: int | None = None
    """in which start of the run (default: the last)"""
    follow: bool = False
    """continue until the run ends, over all its starts; Ctrl-C stops following, not the run"""
    lines: int = 40
    """how many of the last lines; 0: all"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline logs ARGUMENTS`."""
    config = tyro.cli(LogsConfig, prog="paceline logs", args=arguments)
    run_dir, means = existing_run(config)
    if config.lines < 0 or config.rank < 0:
        raise UsageError(f"--lines and --rank must be 0 or more, got {config.lines} and {config.rank}")
    if config.follow and config.attempt is not None:
        raise UsageError("--follow shows the last start as it goes on: leave out --attempt")
    path = _log(run_dir, config.rank, config.attempt)
    if path is None and not config.follow:
        raise UsageError(_nothing(run_dir, config))
    end = 0 if path is None else _print_log(path, config.lines)
    if config.follow:
        try:
            _follow(run_dir, means, config.rank, path, end)
        except KeyboardInterrupt:
            print("no longer following; the run is left alone", file=sys.stderr)
    return ExitCode.DONE


def _print_log(path: Path, lines: int) -> int:
    """Print the last lines, or with 0 all; how many bytes the file had."""
    if lines:
        text, end = last_lines(path, lines)
        sys.stdout.write(text)
    else:
        end = path.stat().st_size
        if end > MAX_ALL_BYTES:
            print(f"of {end:,} bytes the last {MAX_ALL_BYTES:,}:", file=sys.stderr)
        sys.stdout.writelines(all_lines(path))
    sys.stdout.flush()
    return end


def _log(run_dir: Path, rank: int, attempt: int | None) -> Path | None:
    """A worker's log; of rank 0 of a run that has no start yet, the job's own output."""
    folders = attempts(run_dir)[-1:] if attempt is None else [run_dir / f"attempt-{attempt}"]
    last = last_submission(run_dir)
    if folders:
        path = folders[0] / f"rank-{rank}.log"
    elif rank == 0 and last is not None and last[1].slurm_job:
        path = last[0] / f"slurm-{last[1].slurm_job}.out"
    else:
        return None
    return path if is_file(path) else None


def _nothing(run_dir: Path, config: LogsConfig) -> str:
    numbers = [path.name.removeprefix("attempt-") for path in attempts(run_dir)]
    if config.attempt is not None and str(config.attempt) not in numbers:
        return f"the run has no start {config.attempt}. Choose from: {', '.join(numbers) or '(none yet)'}"
    if not numbers:
        return f"{run_dir} has not been started yet: see paceline status {run_dir}"
    folder = run_dir / f"attempt-{config.attempt or numbers[-1]}"
    matches = (re.fullmatch(r"rank-([0-9]{1,9})\.log", name) for name in names(folder))
    ranks = sorted(int(match[1]) for match in matches if match)
    return (
        f"there is no output of rank {config.rank} in {folder}. Choose from: {', '.join(map(str, ranks)) or '(none)'}"
    )


def _follow(run_dir: Path, means: Means, rank: int, path: Path | None, offset_bytes: int) -> None:
    """Print new output until the run has ended."""
    tail = Tail(path, offset_bytes) if path is not None else None
    looked = 0.0
    while True:
        ended = False
        if time.monotonic() > looked + LOOK_SECONDS:
            ended = standing(run_dir, means).state not in LIVE
            looked = time.monotonic()
        newest = _log(run_dir, rank, None)
        if newest is not None and (tail is None or tail.path != newest):
            _show(tail, to_the_end=True)
            tail = Tail(newest)
        _show(tail, to_the_end=ended)
        if ended:
            return
        time.sleep(POLL_SECONDS)


def _show(tail: Tail | None, *, to_the_end: bool) -> None:
    if tail is not None and (text := tail.read(to_the_end=to_the_end)):
        sys.stdout.write(text)
        sys.stdout.flush()
