"""How are contenders compared? All stand at the gate; laps go round, A B C, B C A, ..., and count if it was quiet.

Before anything is timed all take the same first steps without dropout, and must come to the same loss: a benchmark
that compares different work is a defect. Who differs does not take part.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from race.quiet import FOREIGN_SHARE, wait_until_idle
from race.starter import Contender, Lane, Lap, LostError, Popen, popen_here

FIRST_STEPS = 3  # of the ResNet: later it has made a difference in the last bit into one of percents
LOSS_TOLERANCE = 1e-3  # relative
ROUGH_TOLERANCE = 5e-2  # of who calculates in a shorter format
LAP_SECONDS = 1.5
SHORTEST_SECONDS = 0.3
FEWEST_STEPS = 3


@dataclass(frozen=True)
class Pace:
    """How many rounds, of how many steps (None: as many as the base takes in 1.5 s), and how long to wait for quiet."""

    rounds: int
    steps: int | None = None
    patience_seconds: float = 20.0


@dataclass
class Outcome:
    """What the contenders of one work did. `laps`: one for each round; None where it was not quiet."""

    steps: int = 0
    """of a lap; more of what would be over in no time"""
    laps: dict[str, list[Lap | None]] = field(default_factory=dict[str, "list[Lap | None]"])
    losses: dict[str, float] = field(default_factory=dict[str, float])
    """after the first steps; those without one do not train the same"""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """who, and why"""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    threads: dict[str, int] = field(default_factory=dict[str, int])
    """of each rank"""

    @property
    def faults(self) -> list[str]:
        """What must not be: somebody did not run, or computed something else."""
        return [f"{name}: {why}" for name, why in self.left_out.items()]


def race(contenders: Sequence[Contender], pace: Pace, popen: Popen = popen_here) -> Outcome:
    """Bring all to the gate, and let them take turns. The first one is the base."""
    outcome = Outcome()
    with TemporaryDirectory(prefix="race-") as folder, ExitStack() as stack:
        lanes: dict[str, Lane] = {}
        for number, contender in enumerate(contenders):
            lane = Lane(contender, Path(folder) / str(number), popen)
            stack.callback(lane.close)
            try:  # one after the other: a dozen that import torch at once are slower than that
                lane.ready()
                first = lane.lap(FIRST_STEPS, dropout=False)
            except LostError as lost:
                outcome.left_out[contender.name] = str(lost)
                continue
            lanes[contender.name] = lane
            outcome.versions |= lane.versions
            outcome.threads[contender.name] = lane.threads
            outcome.losses[contender.name] = first.loss
        _compare_losses([lane.contender for lane in lanes.values()], outcome)
        racing = [lane for name, lane in lanes.items() if name not in outcome.left_out]
        if racing:
            _rounds(racing, pace, outcome)
    return outcome


def _compare_losses(contenders: Sequence[Contender], outcome: Outcome) -> None:
    """Against the base's, of all who train the same work on as many ranks."""
    base = contenders[0] if contenders else None
    if base is None or base.name in outcome.left_out:
        return
    for one in contenders[1:]:
        own, right = outcome.losses[one.name], outcome.losses[base.name]
        if one.samples != base.samples or not one.compared:
            del outcome.losses[one.name]
            continue
        tolerance = LOSS_TOLERANCE if one.exact else ROUGH_TOLERANCE
        if not abs(own - right) <= tolerance * abs(right):
            outcome.left_out[one.name] = f"loss {own} after {FIRST_STEPS} steps, {base.name}'s is {right}"


def _rounds(lanes: Sequence[Lane], pace: Pace, outcome: Outcome) -> None:
    warm = [lane.lap(FEWEST_STEPS) for lane in lanes]
    outcome.steps = pace.steps or max(FEWEST_STEPS, round(1000 * LAP_SECONDS / warm[0].ms))
    outcome.laps = {lane.contender.name: [] for lane in lanes}
    # copies are over too soon to be timed by the clock that counts processors' time in hundredths of a second
    steps = [pace.steps or max(outcome.steps, round(1000 * SHORTEST_SECONDS / lap.ms)) for lap in warm]
    turns = list(zip(lanes, steps, strict=True))
    for number in range(pace.rounds):
        first = number % len(lanes)
        for lane, count in [*turns[first:], *turns[:first]]:
            if pace.patience_seconds:
                wait_until_idle(pace.patience_seconds)
            lap = lane.lap(count)
            quiet = lap.foreign <= FOREIGN_SHARE or not pace.patience_seconds
            outcome.laps[lane.contender.name].append(lap if quiet else None)
        kept = sum(laps[-1] is not None for laps in outcome.laps.values())
        print(f"round {number + 1} of {pace.rounds}: {kept} of {len(lanes)} laps were quiet", file=sys.stderr)
