"""What one rank of a run has written down, in columns: little memory for many steps."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.observe.events import Anatomy, Counted, Ended, Event, RolledBack, Samples, Started, Step, Traced

PHASES = ("data", "forward", "backward", "sync", "optimizer")
MOST_OF_A_KIND, MOST_LISTED = 2000, 64


@dataclass
class StepColumns:
    """The steps of one rank, a column each, in the order in which they were written down."""

    step: array[int] = field(default_factory=lambda: array("q"))
    epoch: array[int] = field(default_factory=lambda: array("q"))
    samples: array[int] = field(default_factory=lambda: array("q"))  # of the global batch
    consumed: array[int] = field(default_factory=lambda: array("q"))  # by this rank
    ended: array[float] = field(default_factory=lambda: array("d"))  # unix time, on node 0's clock
    seconds: array[float] = field(default_factory=lambda: array("d"))
    loss: array[float] = field(default_factory=lambda: array("d"))
    follows: array[int] = field(default_factory=lambda: array("b"))  # 1: nothing was between it and the row before
    lr: array[float] = field(default_factory=lambda: array("d"))
    norm: array[float] = field(default_factory=lambda: array("d"))  # NaN: not known
    phases: tuple[array[float], ...] = field(default_factory=lambda: tuple(array("d") for _ in PHASES))

    def add(self, event: Step, *, follows: bool) -> None:
        """Append a row."""
        self.follows.append(follows)
        self.step.append(event.step)
        self.epoch.append(event.epoch)
        self.samples.append(event.samples)
        self.consumed.append(event.consumed)
        self.ended.append(event.unix_time)
        self.seconds.append(event.seconds)
        self.loss.append(event.loss if not event.skipped else float("nan"))
        self.lr.append(event.lr)
        self.norm.append(float("nan") if event.grad_norm is None else event.grad_norm)
        spent, (data, forward, backward, sync, optimizer) = event.phase_seconds.get, self.phases
        data.append(spent("data", event.data_seconds))  # no loop: there may be a million
        forward.append(spent("forward", 0.0))
        backward.append(spent("backward", 0.0))
        sync.append(spent("sync", 0.0))
        optimizer.append(spent("optimizer", 0.0))


@dataclass
class RankLog:
    """What one rank has written down, over all starts."""

    rank: int
    most_traced: int = MOST_OF_A_KIND
    started: list[Started] = field(default_factory=list[Started])
    steps: StepColumns = field(default_factory=StepColumns)
    rows: array[int] = field(default_factory=lambda: array("q"))
    """rows of `steps` that count: later starts have not repeated them"""
    thrown_away: int = 0
    idle_seconds: float = 0.0  # between starts
    share: tuple[int, int] | None = None  # the virtual ranks [a, b) that it computes
    samples: list[Samples] = field(default_factory=list[Samples])  # of the first step that lists them
    anatomy: Anatomy | None = None  # the newest
    traced: dict[int, Traced] = field(default_factory=dict[int, Traced])
    told: list[tuple[float, Event]] = field(default_factory=list[tuple[float, Event]])
    """evaluations, checkpoints, notices, steps left out, the end: when (as near as is known), and what"""

    _after_step = False

    def take(self, event: Event) -> None:
        """Take in the next record."""
        steps, follows = self.steps, self._after_step
        self._after_step = isinstance(event, Step) or (follows and isinstance(event, Traced | Anatomy | Counted))
        match event:
            case Step():
                steps.add(event, follows=follows and event.steps == 1)
                self._after_step = event.steps == 1
                self.rows.append(len(steps.step) - 1)
                self.share = event.share
            case Samples():
                if not self.samples or (self.samples[0].step == event.step and len(self.samples) < MOST_LISTED):
                    self.samples.append(event)
            case Traced():
                self.traced[event.step] = event
                if len(self.traced) > self.most_traced:
                    del self.traced[next(iter(self.traced))]
            case Anatomy():
                self.anatomy = event
            case Counted():
                pass
            case Started():
                if self.started:
                    self.idle_seconds += max(0.0, event.unix_time - self._last())
                del self.started[MOST_OF_A_KIND:]
                self.started.append(event)
                self._back_to(event.start_step)
            case RolledBack():
                self._back_to(event.to)
                self._tell(event)
            case _:
                self._tell(event)

    def _back_to(self, step: int) -> None:
        while self.rows and self.steps.step[self.rows[-1]] > step:
            self.rows.pop()
            self.thrown_away += 1

    def _tell(self, event: Event) -> None:
        own = event.unix_time if isinstance(event, Ended) else 0.0
        if len(self.told) < MOST_OF_A_KIND:
            self.told.append((own or self._last(), event))

    def _last(self) -> float:
        return max([*self.steps.ended[-1:], *(one.unix_time for one in self.started[-1:])], default=0.0)

    def of(self, kind: type[Event]) -> Iterator[tuple[float, Any]]:
        """Those records of `told` that are of a kind, with their times."""
        return ((at, event) for at, event in self.told if isinstance(event, kind))
