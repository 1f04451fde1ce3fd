"""The output of the ranks of a start: merged by time, with equal lines of several ranks combined."""

import heapq
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.launch.output import last_lines_range, read_lines
from paceline.runs.attempt import LogTimeIndex
from paceline.runs.reading import numbered_files

SAME_LINE_SECONDS = 0.9  # an agent reads the logs of all its ranks every second
MAX_MERGED_LINES = 20_000  # lines
MAX_SHOWN_BYTES = 64 << 20  # maximum part of a log that is shown, except for a search
_LOG = re.compile(r"rank-([0-9]{1,9})\.log")


class RankLine(NamedTuple):
    unix_time: float  # 0: unknown
    rank: int
    text: str


class MergedLine(NamedTuple):
    unix_time: float
    ranks: list[int]
    text: str


@dataclass(frozen=True)
class LineFilter:
    last: int = 0
    since: float | None = None
    pattern: re.Pattern[str] | None = None


def rank_log_files(attempt: Path) -> dict[int, Path]:
    return numbered_files(attempt, _LOG)


def merge_equal_lines(lines: Sequence[RankLine]) -> Iterator[MergedLine]:
    """Merge lines of about the same time. Equal lines of several ranks become one line.

    The lines of a rank keep their order. A common line comes after the different lines that precede it: if each rank
    prints its loss and then "step 5", the losses are shown one after the other, and then one "step 5".
    """
    queues: dict[int, deque[RankLine]] = {}
    remaining: dict[str, Counter[int]] = {}  # by text, the number of remaining lines of each rank
    for line in lines:
        queues.setdefault(line.rank, deque()).append(line)
        remaining.setdefault(line.text, Counter())[line.rank] += 1

    def pop(rank: int) -> RankLine:
        line = queues[rank].popleft()
        ranks = remaining[line.text]
        ranks[rank] -= 1
        if not ranks[rank]:
            del ranks[rank]
        return line

    advanced = sorted(queues)
    blocked: dict[str, list[int]] = {}  # by text, the ranks whose next line has this text, which others print as well
    while advanced or blocked:
        for rank in advanced:
            while queues[rank] and len(remaining[queues[rank][0].text]) == 1:
                line = pop(rank)
                yield MergedLine(line.unix_time, [rank], line.text)
            if queues[rank]:
                blocked.setdefault(queues[rank][0].text, []).append(rank)
        if not blocked:
            return
        # the line for which the fewest ranks are missing
        missing = {text: len(remaining[text]) - len(ranks) for text, ranks in blocked.items()}
        advanced = sorted(blocked.pop(min(blocked, key=lambda text: (missing[text], min(blocked[text])))))
        common = [pop(rank) for rank in advanced]
        yield MergedLine(common[0].unix_time, advanced, common[0].text)


def merge_line_stream(lines: Iterable[RankLine]) -> Iterator[MergedLine]:
    """Merge lines that are sorted by time. Equal lines of several ranks become one line."""
    batch: list[RankLine] = []
    for line in lines:
        if batch and (line.unix_time >= batch[0].unix_time + SAME_LINE_SECONDS or len(batch) == MAX_MERGED_LINES):
            yield from merge_equal_lines(batch)
            batch = []
        batch.append(line)
    yield from merge_equal_lines(batch)


class RankLogs:
    """The current logs of some ranks. `ends` has their sizes, which are the offsets for following them."""

    def __init__(self, logs: dict[int, Path]) -> None:
        self.logs = logs
        self.ends = {rank: path.stat().st_size for rank, path in logs.items()}
        self.without_times = [rank for rank, path in logs.items() if open_log_time_index(path) is None]

    def lines(self, wanted: LineFilter) -> Iterator[MergedLine]:
        """The lines to show, merged by time. If times are missing, one rank after the other."""
        streams = [self._lines_of(rank, wanted) for rank in self.logs]
        merged = merge_line_stream(heapq.merge(*streams, key=lambda line: (line.unix_time, line.rank)))
        return iter(deque(merged, wanted.last)) if wanted.last else merged

    def truncated_ranks(self, wanted: LineFilter) -> Sequence[int]:
        if wanted.last or wanted.pattern is not None or wanted.since is not None:
            return []
        return [rank for rank, end in self.ends.items() if end > MAX_SHOWN_BYTES]

    def _lines_of(self, rank: int, wanted: LineFilter) -> Iterator[RankLine]:
        path, end = self.logs[rank], self.ends[rank]
        times = open_log_time_index(path) if not self.without_times or wanted.since is not None else None
        start = 0
        if times is not None and wanted.since is not None:
            start = times.offset(wanted.since)
        elif wanted.last and wanted.pattern is None:
            start, _ = last_lines_range(path, wanted.last)
        elif wanted.pattern is None:
            start = max(0, end - MAX_SHOWN_BYTES)
        newest = 0.0
        for line in read_lines(path, start, end):
            if wanted.pattern is not None and wanted.pattern.search(line.text) is None:
                continue
            if len(self.logs) > 1 and not line.text.strip():  # empty lines are useless in a merged log
                continue
            if times is not None and not self.without_times:  # a clock that was set back does not change the order
                newest = max(newest, times.time_at(line.end_offset))
            yield RankLine(newest, rank, line.text)


def open_log_time_index(log: Path) -> LogTimeIndex | None:
    try:
        return LogTimeIndex(log)
    except OSError:
        return None
