"""What the ranks of a start have printed, as one: merged by time, and the same line of several ranks shown once."""

import heapq
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.disk.reading import names
from paceline.launch.output import lines_of, start_of_last
from paceline.observe.log_times import LogTimes

FOLD_SECONDS = 0.9  # an agent looks at the logs of all its ranks at once, every second
MAX_WAITING = 20_000  # lines that may still be said by others
MAX_ALL_BYTES = 64 << 20  # what is shown of a log at most, unless it is searched
LOG = re.compile(r"rank-([0-9]{1,9})\.log")


class RankLine(NamedTuple):
    """A line of one rank."""

    unix_time: float  # 0: nobody knows
    rank: int
    text: str


class Together(NamedTuple):
    """A line of one rank or several."""

    unix_time: float
    ranks: list[int]
    text: str


@dataclass(frozen=True)
class LinesWanted:
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


def put_together(lines: Sequence[RankLine]) -> Iterator[Together]:
    """Lines of about the same time: each rank's in their order, the same ones of several ranks as one.

    A rank's own lines come before the next one that others say as well: ranks that say "step 5" after a loss of their
    own each are shown as the losses, one after the other, and one "step 5".
    """
    queues: dict[int, deque[RankLine]] = {}
    left: dict[str, Counter[int]] = {}  # how often each rank will still say a text
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

    moved, at = sorted(queues), dict[str, list[int]]()  # at: which ranks stand at a line that others say, too
    while moved or at:
        for rank in moved:
            while queues[rank] and len(left[queues[rank][0].text]) == 1:
                said = taken(rank)
                yield Together(said.unix_time, [rank], said.text)
            if queues[rank]:
                at.setdefault(queues[rank][0].text, []).append(rank)
        if not at:
            return
        # the line for which the fewest ranks are still to come
        moved = sorted(at.pop(min(at, key=lambda text: (len(left[text]) - len(at[text]), min(at[text])))))
        several = [taken(rank) for rank in moved]
        yield Together(several[0].unix_time, moved, several[0].text)


def folded(lines: Iterable[RankLine]) -> Iterator[Together]:
    """Lines in the order of time, the same ones of several ranks together."""
    batch: list[RankLine] = []
    for said in lines:
        if batch and (said.unix_time >= batch[0].unix_time + FOLD_SECONDS or len(batch) == MAX_WAITING):
            yield from put_together(batch)
            batch = []
        batch.append(said)
    yield from put_together(batch)


class RankLogs:
    """The logs of some ranks as they are now. `ends` is how far each goes: from there on they can be followed."""

    def __init__(self, logs: dict[int, Path]) -> None:
        self.logs = logs
        self.ends = {rank: path.stat().st_size for rank, path in logs.items()}
        self.without_times = [rank for rank, path in logs.items() if log_times(path) is None]

    def lines(self, wanted: LinesWanted) -> Iterator[Together]:
        """What is wanted of them, merged; without times, one rank after the other.

        Raises:
            OSError: if one of them cannot be read.
        """
        streams = [self._of(rank, wanted) for rank in self.logs]
        found = folded(heapq.merge(*streams, key=lambda said: (said.unix_time, said.rank)))
        return iter(deque(found, wanted.last)) if wanted.last else found

    def cut(self, wanted: LinesWanted) -> Sequence[int]:
        """The ranks of whose logs only the end is shown."""
        if wanted.last or wanted.pattern is not None or wanted.since is not None:
            return []
        return [rank for rank, end in self.ends.items() if end > MAX_ALL_BYTES]

    def _of(self, rank: int, wanted: LinesWanted) -> Iterator[RankLine]:
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
            if len(self.logs) > 1 and not line.text.strip():  # among others an empty line separates nothing
                continue
            if times is not None and not self.without_times:  # a clock that was set back changes no rank's order
                newest = max(newest, times.at(line.end))
            yield RankLine(newest, rank, line.text)


def log_times(log: Path) -> LogTimes | None:
    """The times of a log's lines; None if there are none, or they cannot be read."""
    try:
        return LogTimes(log)
    except OSError:
        return None
