"""The starts of a run: what each rank wrote down in each of them, and which steps count.

A run may be killed, resumed (a new attempt) and restarted (a new generation), each time on another number of ranks.
Each start begins after the step of its checkpoint; later steps of earlier starts are thrown away:

    attempt 1, 2 ranks: begins after step 0, logs steps 1 to 9: 1 to 6 count, 7 to 9 are thrown away
    attempt 2, 3 ranks: begins after step 6, logs steps 7 to 20: all count
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from paceline.runs.events import Ended, RolledBack, Samples, Started, Step, UnloggedStep, event_files, read_events


@dataclass(frozen=True)
class Log:
    """What one rank wrote down in one start."""

    started: Started
    steps: dict[int, list[Step]] = field(default_factory=dict[int, list[Step]])  # by their last step, see Step.steps
    samples: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # step -> indices, if recorded
    ended: list[int] = field(default_factory=list[int])
    undone: list[int] = field(default_factory=list[int])  # steps that were taken back
    vouched: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """step -> ranks that took part in it, and did not live to write it down: see events.UnloggedStep"""

    def roll_back(self, to: int) -> None:
        """Forget the steps after `to`, which were taken back: they are taken once more."""
        for step in [step for step in self.steps if step > to]:
            self.undone.extend(covered(self.steps.pop(step)[0]))
            self.samples.pop(step, None)

    @property
    def reached(self) -> int:
        """The last step that is written down whole: a rank may be killed between a step and its samples."""
        last = max(self.steps, default=self.started.start_step)
        if self.ended:
            return max(last, *self.ended)
        if self.samples and last in self.steps and len(self.samples.get(last, ())) < self.steps[last][0].consumed:
            return last - 1
        return last


@dataclass(frozen=True)
class RunStart:
    """All ranks' logs of one (attempt, generation), in the order of ranks; at least one."""

    logs: list[Log]

    @property
    def first(self) -> Started:
        """How the lowest rank describes this start; the others should agree."""
        return self.logs[0].started

    @property
    def name(self) -> str:
        """For sentences."""
        generation = f", generation {self.first.generation}" if self.first.generation else ""
        return f"attempt {self.first.attempt}{generation}"

    def steps(self) -> list[int]:
        """All steps that any rank wrote down, ascending."""
        records = (record for log in self.logs for found in log.steps.values() for record in found)
        return sorted({step for record in records for step in covered(record)})

    def unwritten(self) -> dict[int, list[Log]]:
        """By step the logs of ranks that have not written it down, and another vouches for."""
        found: dict[int, list[Log]] = {}
        for step in sorted({step for log in self.logs for step in log.vouched}):
            named = {rank for log in self.logs for rank in log.vouched.get(step, ())}
            absent = [
                log for log in self.logs
                if log.started.rank in named and log.started.start_step < step and max(log.steps, default=0) < step
            ]  # fmt: skip
            if absent:
                found[step] = absent
        return found

    def spans(self, counts: range) -> Iterator[range]:
        """All of `counts` in pieces: no record stands for steps of two of them. Most pieces are single steps."""
        records = (record for log in self.logs for found in log.steps.values() for record in found)
        several = deque(sorted((covered(record)[0], record.step) for record in records if record.steps > 1))
        begin = counts.start
        while begin < counts.stop:
            while several and several[0][1] < begin:
                several.popleft()
            end = begin
            while several and several[0][0] <= end:  # another rank's may overlap
                end = max(end, several.popleft()[1])
            end = min(end, counts.stop - 1)
            yield range(begin, end + 1)
            begin = end + 1


def covered(record: Step) -> range:
    """The steps that a record stands for."""
    return range(record.step - record.steps + 1, record.step + 1)


def read_starts(run_dir: Path) -> list[RunStart]:
    """All starts of the run, in their order; none if no rank ever began."""
    logs: list[Log] = []
    for path in event_files(run_dir).values():
        log = None
        for event in read_events(path):
            if isinstance(event, Started):
                logs.append(log := Log(event))
            elif log is None:
                continue  # belongs to no start, and so is missing where it counts
            elif isinstance(event, Step):
                log.steps.setdefault(event.step, []).append(event)
            elif isinstance(event, RolledBack):
                log.roll_back(event.to)
            elif isinstance(event, Samples):
                log.samples.setdefault(event.step, []).extend(event.indices)
            elif isinstance(event, UnloggedStep):
                log.vouched[event.step] = event.ranks
            elif isinstance(event, Ended):
                log.ended.append(event.step)
    logs.sort(key=lambda log: (_order(log), log.started.rank))
    return [RunStart(list(group)) for _, group in groupby(logs, _order)]


def _order(log: Log) -> tuple[int, int]:
    return log.started.attempt, log.started.generation


def counting(starts: Sequence[RunStart]) -> list[range]:
    """Of each start the steps that count: those that no later start repeats. Together they have no gap.

    The last start counts as far as all its ranks have come: nothing can have been saved of a step that a rank did not
    live to write down.
    """
    end = max(starts[-1].first.start_step, min(log.reached for log in starts[-1].logs))
    ranges: list[range] = []
    for start in reversed(starts):
        begin = start.first.start_step
        ranges.append(range(begin + 1, max(begin, end) + 1))
        end = min(begin, end)
    return ranges[::-1]


def left_out(starts: Sequence[RunStart], ranges: Sequence[range]) -> list[int]:
    """The steps that count, and have changed nothing."""
    logs = ((log, counts) for start, counts in zip(starts, ranges, strict=True) for log in start.logs)
    return sorted({s for log, counts in logs for s, lines in log.steps.items() if s in counts and lines[0].skipped})
