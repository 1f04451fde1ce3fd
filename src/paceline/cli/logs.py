"""`paceline logs` shows the output of a run's workers; `paceline analyze` prints throughput and loss of any log."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from paceline.cli import make_parser
from paceline.cli.options import print_json
from paceline.cli.run_state import OptionalRunFlags, find_run, read_run_status, resolve_run_access
from paceline.errors import ExitCode, UsageError, plural
from paceline.guard.sentences import format_ranks
from paceline.launch.output import LogFollower
from paceline.launch.plan import read_last_submission
from paceline.report.logs import (
    MAX_SHOWN_BYTES,
    LineFilter,
    MergedLine,
    RankLine,
    RankLogs,
    merge_equal_lines,
    rank_log_files,
)
from paceline.runs.console import format_timestamp, join_ranges, remove_control_characters, sparkline
from paceline.runs.folder import attempt_dirs
from paceline.runs.owners import warn_if_shared
from paceline.runs.reading import is_file, is_folder, real_path
from paceline.runs.summary import LIVE_STATES

if TYPE_CHECKING:
    from paceline.report.log_analysis import LogAnalysis

POLL_SECONDS = 0.5
END_CHECK_SECONDS = 5.0  # between checks whether the run has ended
MERGE_WAIT_SECONDS = 0.6  # with --follow: how long a line waits for the same line of other ranks
LAST_LINES = 40
AGE_PATTERN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|min|m|h|d)")
UNITS = {"s": "seconds", "min": "minutes", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True)
class LogsConfig(OptionalRunFlags):
    """Show the output of a run's ranks, ordered by time; equal lines of several ranks appear once.

    For a job that is queued or failed before its start, the output of the Slurm job is shown.
    """

    rank: str = "all"
    """ranks to show: all, a rank, or several (0,2,5-7)"""
    grep: str | None = None
    """show only lines that match this regular expression (Python syntax)"""
    since: str | None = None
    """show only newer lines: 10m, 2h (ago), 13:05, 2026-01-31, 2026-01-31T13:05"""
    attempt: int | None = None
    """attempt to show (default: the last)"""
    follow: bool = False
    """continue until the run ends, over restarts; Ctrl-C stops following, not the run"""
    lines: int | None = None
    """number of lines from the end; 0: all (default: 40, with --grep or --since all)"""
    times: bool = False
    """begin each line with its time"""


@dataclass(frozen=True)
class AnalyzeConfig:
    """Print throughput and loss from the log of any training, or from a run."""

    logs: tuple[str, ...]
    """log files (torch's examples, progress bars, Hugging Face's Trainer, `loss=0.1`), or runs"""
    json: bool = False
    """print a JSON list with an entry per log"""


def main(arguments: Sequence[str]) -> int:
    config: LogsConfig = make_parser("logs").parse(arguments)
    viewer = _LogViewer(config, _ranks(config.rank), _line_filter(config))
    try:
        viewer.print_all()
        if config.follow:
            viewer.follow()
    except KeyboardInterrupt:
        if not config.follow:
            raise
        print("no longer following; the run continues", file=sys.stderr)
    return ExitCode.DONE


def _line_filter(config: LogsConfig) -> LineFilter:
    if config.follow and config.attempt is not None:
        raise UsageError(code="follow-with-attempt")
    if config.lines is not None and config.lines < 0:
        raise UsageError(code="lines-negative", value=config.lines)
    pattern = None
    if config.grep is not None:
        try:
            pattern = re.compile(config.grep)
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(code="grep-invalid", value=config.grep, reason=str(error)) from None
    since = _since(config.since, time.time()) if config.since is not None else None
    last = LAST_LINES if pattern is None and since is None else 0
    return LineFilter(last if config.lines is None else config.lines, since, pattern)


def _ranks(text: str) -> tuple[range, ...]:
    """The ranks in --rank; empty: all."""
    if text == "all":
        return ()
    ranks: list[range] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(code="logs-rank", value=text)
        ranks.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(ranks)


def _since(text: str, now: float) -> float:
    with suppress(ValueError, OverflowError, OSError):
        if (ago := AGE_PATTERN.fullmatch(text)) is not None:
            return now - timedelta(**{UNITS[ago[2]]: float(ago[1])}).total_seconds()
        if re.fullmatch(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?", text):
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") > 1 else "%H:%M").time()
            today = datetime.combine(datetime.fromtimestamp(now).date(), clock)
            return (today if today.timestamp() <= now else today - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    raise UsageError(code="since-not-a-time", value=text)


class _LogViewer:
    def __init__(self, config: LogsConfig, ranks: tuple[range, ...], lines: LineFilter) -> None:
        self._config, self._ranks, self._filter = config, ranks, lines
        self._run_dir, self._access = resolve_run_access(config)
        paths = self._paths()
        if not paths and not config.follow:
            raise self._no_output()
        self._logs = RankLogs(paths)
        if self._logs.without_times and lines.since is not None:
            raise UsageError(code="since-unknown-times", ranks=format_ranks(self._logs.without_times))

    def _paths(self) -> dict[int, Path]:
        """The log of each selected rank. Without an attempt: the output of the Slurm job, as rank 0's."""
        folders, attempt = attempt_dirs(self._run_dir), self._config.attempt
        folder = folders.get(max(folders, default=0) if attempt is None else attempt)
        submit_dir, submission = read_last_submission(self._run_dir)
        paths: dict[int, Path] = {}
        if folder is not None:
            paths = rank_log_files(folder)
        elif submission is not None and submission.slurm_job and attempt is None:
            paths = {0: submit_dir / f"slurm-{submission.slurm_job}.out"}
        selected = [rank for rank in paths if not self._ranks or any(rank in ranks for ranks in self._ranks)]
        return {rank: paths[rank] for rank in selected if is_file(paths[rank])}

    def _no_output(self) -> UsageError:
        folders, attempt = attempt_dirs(self._run_dir), self._config.attempt
        if attempt is not None and attempt not in folders:
            return UsageError(code="no-such-attempt", value=attempt, allowed=[*map(str, folders)] or ["(none yet)"])
        if not folders:
            return UsageError(code="not-started", run_dir=self._run_dir)
        folder = folders[attempt or max(folders)]
        allowed = join_ranges(map(str, rank_log_files(folder))) or "(none)"
        rank_name = "any rank" if self._config.rank == "all" else f"rank {self._config.rank}"
        return UsageError(code="no-output", value=rank_name, folder=folder, allowed=allowed)

    def print_all(self) -> None:
        logs, missing = self._logs.logs, self._logs.without_times
        if len(logs) > 1 and missing:
            ranks = "these ranks" if len(missing) == len(logs) else format_ranks(missing)
            reason = f"the lines of {ranks} have no timestamps (an older paceline wrote them)"
            print(f"{reason}: they are shown in the order of the ranks, not of time", file=sys.stderr)
        if truncated := self._logs.truncated_ranks(self._filter):
            logs_text = f"{plural(len(truncated), 'log')} of {format_ranks(truncated)}"
            print(f"showing only the last {MAX_SHOWN_BYTES:,} bytes of the {logs_text}", file=sys.stderr)
        self._print(self._logs.lines(self._filter), prefixed=len(logs) > 1)

    def _print(self, lines: Iterable[MergedLine], *, prefixed: bool) -> None:
        for line in lines:
            timestamp = f"{format_timestamp(line.unix_time) or '-':19} " if self._config.times else ""
            prefix = f"[{join_ranges(map(str, line.ranks), ',')}] " if prefixed else ""
            sys.stdout.write(f"{timestamp}{prefix}{line.text}\n")
        sys.stdout.flush()

    def follow(self) -> None:
        tails = {rank: LogFollower(path, self._logs.ends[rank]) for rank, path in self._logs.logs.items()}
        pattern, waiting, last_check = self._filter.pattern, list[RankLine](), 0.0

        def show(*, to_the_end: bool = False) -> None:
            for rank, tail in tails.items():
                for text in tail.read(to_the_end=to_the_end).splitlines():
                    if (pattern is None or pattern.search(text)) and (text.strip() or len(tails) == 1):
                        waiting.append(RankLine(time.time(), rank, text))
            due = waiting and time.time() >= waiting[0].unix_time + MERGE_WAIT_SECONDS
            if due or to_the_end or len(tails) == 1:
                self._print(merge_equal_lines(waiting), prefixed=len(tails) > 1)
                waiting.clear()

        while True:
            ended = False
            if time.monotonic() > last_check + END_CHECK_SECONDS:
                ended = read_run_status(self._run_dir, self._access).state not in LIVE_STATES
                last_check = time.monotonic()
            newest = self._paths()
            if {path.parent for path in newest.values()} - {tail.path.parent for tail in tails.values()}:  # new attempt
                show(to_the_end=True)
                tails.clear()
            tails |= {rank: LogFollower(path) for rank, path in newest.items() if rank not in tails}
            show(to_the_end=ended)
            if ended:
                return
            time.sleep(POLL_SECONDS)


def analyze(arguments: Sequence[str]) -> int:
    config: AnalyzeConfig = make_parser("analyze").parse(arguments)
    if not config.logs:
        raise UsageError(code="no-log-named")
    analyses = [analyze_log_or_run(log) for log in config.logs]
    if config.json:
        print_json(analyses)
    else:
        print("\n\n".join(remove_control_characters(_analysis_page(analysis)) for analysis in analyses))
    return ExitCode.DONE


def analyze_log_or_run(asked: str) -> LogAnalysis:
    from paceline.report.log_analysis import EXAMPLES, LogAnalyzer

    analyzer = LogAnalyzer(asked)
    try:
        if os.path.lexists(asked) and not is_folder(Path(asked)):
            analyzer.add_log(real_path(Path(asked)))
        else:
            run_dir = find_run(asked)
            warn_if_shared(run_dir)
            analyzer.add_run(run_dir)
    except OSError as error:
        raise UsageError(code="log-unreadable", asked=asked, strerror=error.strerror) from None
    analysis = analyzer.result
    if not analysis.values:
        expected = "\n  ".join(EXAMPLES.values())
        excerpt = f": {plural(analysis.lines, 'line')}, the first {analysis.first_line!r}" if analysis.lines else ""
        raise UsageError(code="no-known-line", asked=asked, seen=excerpt, expected=expected)
    return analysis


def _analysis_page(analysis: LogAnalysis) -> str:
    formats = ", ".join(f"{name} {count:,}" for name, count in analysis.formats.items())
    lines = [f"{analysis.name}: {plural(analysis.lines, 'line')} ({formats}); {plural(len(analysis.ranks), 'rank')}"]
    if not any(name.endswith(("/s", "(counted)")) for name in analysis.values):
        lines.append("no throughput: no line has samples/s. `paceline launch` records a timestamp for each line")
    lines += [f"{rank and f'rank {rank}: '}{plural(count, 'loss', 'losses')} not finite"
              for rank, count in analysis.not_finite.items()]  # fmt: skip
    for name, values in analysis.values.items():
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        spread = f"median {median(finite):.4g}, lowest {min(finite):.4g}, highest {max(finite):.4g}"
        lines.append(
            f"{name:13} first {values[0]:.4g}, last {values[-1]:.4g}, {spread}; {plural(len(values), 'value')}"
        )
        lines.append(f"{'':13} {sparkline(values[:: max(1, len(values) // 60)], 60)}")
    return "\n".join(lines)
