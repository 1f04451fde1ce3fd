"""What did the ranks do in each step? Reads a run's events: seconds by phase, for every step and rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.disk.reading import real_path
from paceline.errors import UsageError
from paceline.observe.events import Event, Started, Step, event_files, read_events

PHASES = ("data", "forward", "backward", "sync", "optimizer")


@dataclass(frozen=True)
class Spent:
    """One rank's seconds in one step."""

    data: float
    forward: float
    backward: float
    sync: float
    optimizer: float
    seconds: float
    """of the whole step, and what was between it and the one before"""
    between: float = 0.0
    """what the loop around the step did"""


@dataclass(frozen=True)
class Run:
    """The steps that all ranks have written down, the warm-up left out."""

    steps: Sequence[Mapping[int, Spent]]
    """each by rank"""
    samples: float
    """in a step of the global batch, on average"""
    hosts: Mapping[int, str]

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return len(self.hosts)

    @property
    def step_seconds(self) -> float:
        """The mean over steps and ranks."""
        return sum(spent.seconds for step in self.steps for spent in step.values()) / (
            len(self.steps) * self.world_size
        )


def read_run(folder: Path, *, skip: int) -> Run:
    """The run in `folder`, without its first `skip` steps.

    Raises:
        UsageError: if there are no events, a rank's are missing, or too few or too old to be taken apart.
    """
    folder = real_path(folder)
    started: dict[int, Started] = {}
    steps: dict[int, dict[int, Spent]] = {}
    samples: dict[int, int] = {}
    for rank, path in event_files(folder).items():
        before: Event | None = None
        for event in read_events(path):
            if isinstance(event, Started):
                started[rank] = event
                steps[rank] = {}  # an earlier start's steps had other companions
            elif isinstance(event, Step):
                steps.setdefault(rank, {})[event.step] = _spent(event, before)
                samples[event.step] = event.samples
            before = event
    size = max((one.world_size for one in started.values()), default=0)
    missing = sorted({*range(size)} - {*started})
    if not started or missing:
        what = f"the events of rank {missing[0]} of {size} are missing" if missing else "there are no events of a run"
        raise UsageError(f"{folder}: {what}. Name the folder of a run (runs/...)")
    ranks = range(size)
    common = sorted(set[int].intersection(*({*steps[rank]} for rank in ranks)))[skip:]
    if len(common) < 2:
        raise UsageError(f"{folder}: fewer than {skip + 2} steps; the first {skip} are warm-up. Train longer")
    if not all(steps[rank][number].forward for rank in ranks for number in common):
        raise UsageError(f"{folder} was written by an older paceline: its steps do not tell their phases. Train anew")
    return Run(
        steps=[{rank: steps[rank][number] for rank in ranks} for number in common],
        samples=sum(samples[number] for number in common) / len(common),
        hosts={rank: started[rank].host for rank in ranks},
    )


def _spent(step: Step, before: Event | None) -> Spent:
    """From the end of one synchronisation to that of the next, for there all ranks meet.

    So the optimizer is that of the step before: who is late in it keeps the others waiting in this step. Only where
    `before`, the event before, is a step, what lies between belongs to training.
    """
    phases = {name: step.phase_seconds.get(name, 0.0) for name in PHASES}
    if not isinstance(before, Step):
        return Spent(**phases, seconds=step.seconds)
    between = max(0.0, step.unix_time - before.unix_time - step.seconds)  # a clock may be set back
    earlier = before.phase_seconds.get("optimizer", 0.0)
    seconds = step.seconds + between + earlier - phases["optimizer"]
    return Spent(**{**phases, "optimizer": earlier}, seconds=seconds, between=between)
