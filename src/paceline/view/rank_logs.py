"""What the ranks of a start have printed, as one: merged by time, and the same line of several ranks shown once."""

import heapq
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.disk.reading import names
from paceline.launch.tail import lines_of, start_of_last
from paceline.observe.log_times import LogTimes

FOLD_SECONDS = 2.0  # the agents of two hosts look at their logs once a second each
MAX_WAITING = 2000  # lines that may still be said by others
MAX_ALL_BYTES = 64 << 20  # what is shown of a log at most, unless it is searched
LOG = re.compile(r"rank-([0-9]{1,9})\.log")


class Said(NamedTuple):
    """A line of one rank."""

    unix_time: float  # 0: nobody knows
    rank: int
    text: str


@dataclass
class Together:
    """A line of one rank or several."""

    unix_time: float
    ranks: list[int]
    text: str
    number: int  # counts up


@dataclass(frozen=True)
class Wanted:
    """Which lines are asked for; `last` of each rank, or 0: all."""

    last: int = 0
    since: float | None = None
    pattern: re.Pattern[str] | None = None


def rank_logs(attempt: Path) -> dict[int, Path]:
    """The logs of a start, by rank.

    Raises:
        OSError: the folder cannot be read.
    """
    matches = (LOG.fullmatch(name) for name in names(attempt))
    return dict(sorted((int(match[1]), attempt / match[0]) for match in matches if match))


class Folding:
    """Puts the same line of several ranks together; what one rank says stays in its order."""

    def __init__(self) -> None:
        self._waiting: deque[Together] = deque()
        self._by_text: dict[str, Together] = {}  # the newest of each that waits
        self._last: dict[int, int] = {}  # of each rank: the number of its last line
        self._number = 0

    def add(self, said: Said) -> None:
        """One more line of a rank."""
        same = self._by_text.get(said.text)
        if same is not None and same.number > self._last.get(said.rank, -1):
            same.ranks.append(said.rank)
        else:
            same = Together(said.unix_time, [said.rank], said.text, self._number)
            self._number += 1
            self._waiting.append(same)
            self._by_text[said.text] = same
        self._last[said.rank] = same.number

    def ready(self, until: float) -> Iterator[Together]:
        """The lines that were first said before `until`, or for which there is no room."""
        while self._waiting and (self._waiting[0].unix_time < until or len(self._waiting) > MAX_WAITING):
            first = self._waiting.popleft()
            if self._by_text[first.text] is first:
                del self._by_text[first.text]
            first.ranks.sort()
            yield first


def folded(said: Iterable[Said]) -> Iterator[Together]:
    """Lines in the order of time, the same ones of several ranks together."""
    folding = Folding()
    for line in said:
        yield from folding.ready(line.unix_time - FOLD_SECONDS)
        folding.add(line)
    yield from folding.ready(float("inf"))


class RankLogs:
    """The logs of some ranks as they are now. `ends` is how far each goes: from there on they can be followed."""

    def __init__(self, logs: dict[int, Path]) -> None:
        self.logs = logs
        self.ends = {rank: path.stat().st_size for rank, path in logs.items()}
        self.without_times = [rank for rank, path in logs.items() if _times(path) is None]

    def lines(self, wanted: Wanted) -> Iterator[Together]:
        """What is wanted of them, merged; without times, one rank after the other.

        Raises:
            OSError: if one of them cannot be read.
        """
        with_times = not self.without_times
        streams = [self._of(rank, wanted, with_times=with_times) for rank in self.logs]
        found = folded(heapq.merge(*streams, key=lambda said: (said.unix_time, said.rank)))
        return iter(deque(found, wanted.last)) if wanted.last else found

    def cut(self, wanted: Wanted) -> Sequence[int]:
        """The ranks of whose logs only the end is shown."""
        if wanted.last or wanted.pattern is not None or wanted.since is not None:
            return []
        return [rank for rank, end in self.ends.items() if end > MAX_ALL_BYTES]

    def _of(self, rank: int, wanted: Wanted, *, with_times: bool) -> Iterator[Said]:
        path, end = self.logs[rank], self.ends[rank]
        times = _times(path) if with_times or wanted.since is not None else None
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
            if len(self.logs) > 1 and not line.text.strip():  # among others an empty line separates nothing
                continue
            if times is not None and with_times:  # a clock that was set back does not change a rank's order
                newest = max(newest, times.at(line.end))
            yield Said(newest, rank, line.text)


def _times(log: Path) -> LogTimes | None:
    try:
        return LogTimes(log)
    except FileNotFoundError:
        return None
