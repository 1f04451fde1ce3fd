"""`paceline logs RUN`: shows what a run's workers have printed."""

import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from paceline.cli.commands import command_line
from paceline.cli.finding import Means, NewestRunFlags, existing_run
from paceline.cli.run_state import standing
from paceline.errors import ExitCode, UsageError, plural
from paceline.guard.sentences import named
from paceline.launch.output import Tail
from paceline.launch.plan import last_submission
from paceline.report.logs import MAX_ALL_BYTES, LineFilter, MergedLine, RankLine, RankLogs, merge_lines, rank_logs
from paceline.runs.console import clock, in_runs
from paceline.runs.folder import numbered_attempts
from paceline.runs.reading import is_file
from paceline.runs.summary import LIVE

POLL_SECONDS = 0.5
LOOK_SECONDS = 5.0  # between two looks whether the run still runs
OTHERS_SECONDS = 0.6  # how long a line that is followed waits for the same one of other ranks
LAST_LINES = 40
AGO = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|min|m|h|d)")
UNITS = {"s": "seconds", "min": "minutes", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True)
class LogsConfig(NewestRunFlags):
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
class _Asked:
    """The flags, understood."""

    ranks: tuple[range, ...]  # empty: all
    wanted: LineFilter
    attempt: int | None
    times: bool

    def has(self, rank: int) -> bool:
        return not self.ranks or any(rank in several for several in self.ranks)


def main(arguments: Sequence[str]) -> int:
    """Run `paceline logs ARGUMENTS`."""
    config: LogsConfig = command_line("logs").parse(arguments)
    asked = _understood(config)
    run_dir, means = existing_run(config)
    logs = _logs(run_dir, asked)
    if not logs and not config.follow:
        raise _nothing(run_dir, config, asked)
    found = RankLogs(logs)
    if found.without_times and asked.wanted.since is not None:
        raise UsageError(code="since-unknown-times", ranks=named(found.without_times))
    try:
        _print_all(found, asked)
        if config.follow:
            _follow(run_dir, means, asked, found)
    except KeyboardInterrupt:
        if not config.follow:
            raise
        print("no longer following; the run is left alone", file=sys.stderr)
    return ExitCode.DONE


def _understood(config: LogsConfig) -> _Asked:
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
    wanted = LineFilter(last if config.lines is None else config.lines, since, pattern)
    return _Asked(_ranks(config.rank), wanted, config.attempt, config.times)


def _ranks(text: str) -> tuple[range, ...]:
    if text == "all":
        return ()
    found: list[range] = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", word)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(code="logs-rank", value=text)
        found.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(found)


def _since(text: str, now: float) -> float:
    with suppress(ValueError, OverflowError, OSError):
        if (ago := AGO.fullmatch(text)) is not None:
            return now - timedelta(**{UNITS[ago[2]]: float(ago[1])}).total_seconds()
        if re.fullmatch(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?", text):
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") > 1 else "%H:%M").time()
            today = datetime.combine(datetime.fromtimestamp(now).date(), clock)
            return (today if today.timestamp() <= now else today - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    raise UsageError(code="since-not-a-time", value=text)


def _logs(run_dir: Path, asked: _Asked) -> dict[int, Path]:
    """The logs that are asked for; of a run that has no start yet, the job's own output, as rank 0's."""
    folders = numbered_attempts(run_dir)
    folder = folders.get(max(folders, default=0) if asked.attempt is None else asked.attempt)
    submit_dir, submission = last_submission(run_dir)
    if folder is not None:
        found = rank_logs(folder)
    elif submission is not None and submission.slurm_job and asked.attempt is None:
        found = {0: submit_dir / f"slurm-{submission.slurm_job}.out"}
    else:
        found = {}
    return {rank: path for rank, path in found.items() if asked.has(rank) and is_file(path)}


def _nothing(run_dir: Path, config: LogsConfig, asked: _Asked) -> UsageError:
    folders = numbered_attempts(run_dir)
    if asked.attempt is not None and asked.attempt not in folders:
        return UsageError(code="no-such-attempt", value=asked.attempt, allowed=[*map(str, folders)] or ["(none yet)"])
    if not folders:
        return UsageError(code="not-started", run_dir=run_dir)
    folder = folders[asked.attempt or max(folders)]
    there = in_runs(map(str, rank_logs(folder))) or "(none)"
    whose = "any rank" if config.rank == "all" else f"rank {config.rank}"
    return UsageError(code="no-output", value=whose, folder=folder, allowed=there)


def _print_all(found: RankLogs, asked: _Asked) -> None:
    missing = found.without_times
    if len(found.logs) > 1 and missing:
        whose = "these ranks" if len(missing) == len(found.logs) else named(missing)
        print(
            f"when {whose} wrote {'its' if len(missing) == 1 else 'their'} lines is not known (an older paceline ran "
            "it): they are in the order of the ranks, not of time",
            file=sys.stderr,
        )
    if cut := found.cut(asked.wanted):
        print(
            f"of the {plural(len(cut), 'log')} of {named(cut)} only the last {MAX_ALL_BYTES:,} bytes are shown",
            file=sys.stderr,
        )
    _print(found.lines(asked.wanted), asked, prefixed=len(found.logs) > 1)


def _print(lines: Iterable[MergedLine], asked: _Asked, *, prefixed: bool) -> None:
    for line in lines:
        when = f"{clock(line.unix_time) or '-':19} " if asked.times else ""
        who = f"[{in_runs(map(str, line.ranks), ',')}] " if prefixed else ""
        sys.stdout.write(f"{when}{who}{line.text}\n")
    sys.stdout.flush()


def _follow(run_dir: Path, means: Means, asked: _Asked, found: RankLogs) -> None:
    tails = {rank: Tail(path, found.ends[rank]) for rank, path in found.logs.items()}
    waiting, looked = list[RankLine](), 0.0

    def show(*, to_the_end: bool = False) -> None:
        for rank, tail in tails.items():
            for text in tail.read(to_the_end=to_the_end).splitlines():
                wanted = asked.wanted.pattern is None or asked.wanted.pattern.search(text)
                if wanted and (text.strip() or len(tails) == 1):
                    waiting.append(RankLine(time.time(), rank, text))
        due = waiting and time.time() >= waiting[0].unix_time + OTHERS_SECONDS
        if due or to_the_end or len(tails) == 1:
            _print(merge_lines(waiting), asked, prefixed=len(tails) > 1)
            waiting.clear()

    while True:
        ended = False
        if time.monotonic() > looked + LOOK_SECONDS:
            ended = standing(run_dir, means).state not in LIVE
            looked = time.monotonic()
        newest = _logs(run_dir, asked)
        if {path.parent for path in newest.values()} - {tail.path.parent for tail in tails.values()}:  # another start
            show(to_the_end=True)
            tails.clear()
        tails |= {rank: Tail(path) for rank, path in newest.items() if rank not in tails}
        show(to_the_end=ended)
        if ended:
            return
        time.sleep(POLL_SECONDS)
