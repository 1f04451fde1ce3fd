"""Reads what the ranks of a run did in each step: seconds by phase, for every step and rank, from the run's events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.runs.events import Event, MemoryBreakdown, Started, Step, Traced, event_files, read_events
from paceline.runs.folder import WEIGHTS
from paceline.runs.reading import is_file, real_path

PHASES = ("data", "forward", "backward", "sync", "optimizer")


@dataclass(frozen=True)
class Spent:
    """One rank's seconds in one step."""

    data: float
    forward: float
    backward: float
    sync: float
    optimizer: float
    seconds: float  # of the whole step, and what was between it and the one before
    between: float = 0.0  # what the loop around the step did


@dataclass(frozen=True)
class Run:
    """The steps that all ranks have written down, the warm-up left out."""

    steps: Sequence[Mapping[int, Spent]]  # each by rank
    samples: float  # in a step of the global batch, on average
    hosts: Mapping[int, str]
    on_cpus: bool = True

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return len(self.hosts)

    @property
    def step_seconds(self) -> float:
        """The mean over steps and ranks."""
        total = sum(spent.seconds for step in self.steps for spent in step.values())
        return total / (len(self.steps) * self.world_size)


class At(msgspec.Struct, frozen=True, order=True):
    """So many ranks with so many samples each in a step."""

    ranks: int
    batch: int


Runs = Mapping[At, Sequence[Run]]  # by round; of all points the same rounds


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
            elif isinstance(event, Step) and event.steps == 1:  # nobody can take several apart
                steps.setdefault(rank, {})[event.step] = _spent(event, before)
                samples[event.step] = event.samples
            if not isinstance(event, Traced | MemoryBreakdown):
                before = event
    size = max((one.world_size for one in started.values()), default=0)
    missing = sorted({*range(size)} - {*started})
    if not started or missing:
        what = f"the events of rank {missing[0]} of {size} are missing" if missing else "there are no events of a run"
        raise UsageError(code="no-run-to-compare", folder=folder, what=what)
    ranks = range(size)
    common = sorted(set[int].intersection(*({*steps[rank]} for rank in ranks)))[skip:]
    if len(common) < 2:
        raise UsageError(code="run-too-short", folder=folder, least=skip + 2, skip=skip)
    if not all(steps[rank][number].forward for rank in ranks for number in common):
        raise UsageError(code="run-without-phases", folder=folder)
    return Run(
        steps=[{rank: steps[rank][number] for rank in ranks} for number in common],
        samples=sum(samples[number] for number in common) / len(common),
        hosts={rank: started[rank].host for rank in ranks},
        on_cpus=any(started[rank].device == "cpu" for rank in ranks),
    )


def _spent(step: Step, before: Event | None) -> Spent:
    phases = {name: step.phase_seconds.get(name, 0.0) for name in PHASES}
    if not isinstance(before, Step) or before.steps > 1:
        return Spent(**phases, seconds=step.seconds)
    between = step.unix_time - before.unix_time - step.seconds
    return between_meetings(phases, step.seconds, between, before.phase_seconds.get("optimizer", 0.0))


def between_meetings(phases: Mapping[str, float], seconds: float, between: float, earlier: float) -> Spent:
    """A step from the end of one synchronisation to that of the next, for there all ranks meet.

    So the optimizer is that of the step before, `earlier`: a rank late in it keeps the others waiting in this step.
    `between` are the seconds between the two steps: they belong to training where nothing else was done.
    """
    between = max(0.0, between)  # a clock may be set back
    seconds += between + earlier - phases["optimizer"]
    return Spent(**{**phases, "optimizer": earlier}, seconds=seconds, between=between)


def read_runs(folders: Sequence[Path], *, skip: int) -> Runs:
    """The runs in these folders, by ranks and samples of each; several of one kind are its rounds.

    Raises:
        UsageError: if none of them is of one rank, or none of several, or a folder cannot be read.
    """
    found: dict[At, list[Run]] = {}
    for folder in folders:
        run = read_run(folder, skip=skip)
        found.setdefault(At(run.world_size, round(run.samples / run.world_size)), []).append(run)
    sizes = sorted({at.ranks for at in found})
    if len(sizes) < 2 or sizes[0] != 1:
        raise UsageError(
            code="runs-without-one-rank", sizes=", ".join(map(str, sizes)), plural="s" if sizes[-1] > 1 else ""
        )
    rounds = min(len(runs) for runs in found.values())
    return {at: runs[:rounds] for at, runs in found.items()}


def comparable(runs: Runs) -> tuple[int | None, int | None]:
    """(samples of each rank, of all together) for which one rank can be compared with others; None where it cannot."""
    alone, others = [at.batch for at in runs if at.ranks == 1], [at for at in runs if at.ranks > 1]
    weak = [batch for batch in alone if any(at.batch == batch for at in others)]
    strong = [batch for batch in alone if any(at.ranks * at.batch == batch for at in others)]
    if not weak and not strong:
        told = ", ".join(f"{at.ranks} x {at.batch}" for at in sorted(runs))
        raise UsageError(code="runs-do-not-match", told=told)
    return max(weak, default=None), max(strong, default=None)


def over_network(runs: Runs) -> bool:
    """Whether ranks of any of these runs were on several hosts."""
    return any(len({*run.hosts.values()}) > 1 for found in runs.values() for run in found)


def weight_bytes(folders: Sequence[Path]) -> int:
    """About what ranks exchange in a step: the size of the weights that were saved."""
    return max((path.stat().st_size for folder in folders if is_file(path := folder / WEIGHTS)), default=0)
