"""The output of the ranks of a start: merged by time, with equal lines of several ranks shown once."""

import heapq
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.launch.output import lines_of, start_of_last
from paceline.runs.attempt import LogTimes
from paceline.runs.reading import numbered_files

FOLD_SECONDS = 0.9  # an agent looks at the logs of all its ranks at once, every second
MAX_WAITING = 20_000  # lines that other ranks may still print
MAX_ALL_BYTES = 64 << 20  # the largest part of a log that is shown, unless it is searched
_LOG = re.compile(r"rank-([0-9]{1,9})\.log")


class RankLine(NamedTuple):
    """A line of one rank."""

    unix_time: float  # 0: unknown
    rank: int
    text: str


class MergedLine(NamedTuple):
    """A line of one rank or several."""

    unix_time: float
    ranks: list[int]
    text: str


@dataclass(frozen=True)
class LineFilter:
    """The lines to show: the `last` ones (0: all), since a time, that match a pattern."""

    last: int = 0
    since: float | None = None
    pattern: re.Pattern[str] | None = None


def rank_logs(attempt: Path) -> dict[int, Path]:
    """The logs of a start, by rank.

    Raises:
        OSError: the folder cannot be read.
    """
    return numbered_files(attempt, _LOG)


def merge_lines(lines: Sequence[RankLine]) -> Iterator[MergedLine]:
    """Lines of about the same time: each rank's in their order, equal lines of several ranks as one.

    Lines of one rank come before the next line that others print as well: if each rank prints its loss and then
    "step 5", the losses are shown one after the other, and then one "step 5".
    """
    queues: dict[int, deque[RankLine]] = {}
    left: dict[str, Counter[int]] = {}  # how often each rank will still print a text
    for said in lines:
        queues.setdefault(said.rank, deque()).append(said)
        left.setdefault(said.text, Counter())[said.rank] += 1

    def taken(rank: int) -> RankLine:
        said = queues[rank].popleft()
        ranks = left[said.text]
        ranks[rank] -= 1
        if not ranks[rank]:
            del ranks[rank]
        return said

    moved, at = (
        sorted(queues),
        dict[str, list[int]](),
    )  # at: the ranks whose next line has this text, which others print as well
    while moved or at:
        for rank in moved:
            while queues[rank] and len(left[queues[rank][0].text]) == 1:
                said = taken(rank)
                yield MergedLine(said.unix_time, [rank], said.text)
            if queues[rank]:
                at.setdefault(queues[rank][0].text, []).append(rank)
        if not at:
            return
        # the line for which the fewest ranks are missing
        moved = sorted(at.pop(min(at, key=lambda text: (len(left[text]) - len(at[text]), min(at[text])))))
        several = [taken(rank) for rank in moved]
        yield MergedLine(several[0].unix_time, moved, several[0].text)


def fold_lines(lines: Iterable[RankLine]) -> Iterator[MergedLine]:
    """Lines in the order of time, equal lines of several ranks as one."""
    batch: list[RankLine] = []
    for said in lines:
        if batch and (said.unix_time >= batch[0].unix_time + FOLD_SECONDS or len(batch) == MAX_WAITING):
            yield from merge_lines(batch)
            batch = []
        batch.append(said)
    yield from merge_lines(batch)


class RankLogs:
    """The logs of some ranks at this moment. `ends` has their sizes, from which on they can be followed."""

    def __init__(self, logs: dict[int, Path]) -> None:
        self.logs = logs
        self.ends = {rank: path.stat().st_size for rank, path in logs.items()}
        self.without_times = [rank for rank, path in logs.items() if log_times(path) is None]

    def lines(self, wanted: LineFilter) -> Iterator[MergedLine]:
        """The lines to show, merged by time; if times are missing, one rank after the other.

        Raises:
            OSError: a log cannot be read.
        """
        streams = [self._of(rank, wanted) for rank in self.logs]
        found = fold_lines(heapq.merge(*streams, key=lambda said: (said.unix_time, said.rank)))
        return iter(deque(found, wanted.last)) if wanted.last else found

    def cut(self, wanted: LineFilter) -> Sequence[int]:
        """The ranks whose logs are shown only from a later point."""
        if wanted.last or wanted.pattern is not None or wanted.since is not None:
            return []
        return [rank for rank, end in self.ends.items() if end > MAX_ALL_BYTES]

    def _of(self, rank: int, wanted: LineFilter) -> Iterator[RankLine]:
        path, end = self.logs[rank], self.ends[rank]
        times = log_times(path) if not self.without_times or wanted.since is not None else None
        start = 0
        if times is not None and wanted.since is not None:
            start = times.offset(wanted.since)
        elif wanted.last and wanted.pattern is None:
            start, _ = start_of_last(path, wanted.last)
        elif wanted.pattern is None:
            start = max(0, end - MAX_ALL_BYTES)
        newest = 0.0
        for line in lines_of(path, start, end):
            if wanted.pattern is not None and wanted.pattern.search(line.text) is None:
                continue
            if len(self.logs) > 1 and not line.text.strip():  # empty lines separate nothing in a merged log
                continue
            if times is not None and not self.without_times:  # a clock that was set back does not change the order
                newest = max(newest, times.at(line.end))
            yield RankLine(newest, rank, line.text)


def log_times(log: Path) -> LogTimes | None:
    """The times of a log's lines; None if they are missing or cannot be read."""
    try:
        return LogTimes(log)
    except OSError:
        return None
