"""From points measured on several numbers of ranks to efficiency, what is lost to which cause, and what is to come."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import msgspec

from paceline.bench.compare_report import Spread, spread
from paceline.bench.fit import HeldOut, Points, fit_model
from paceline.bench.model import Machine, Network
from paceline.bench.runs import At, Run, Runs, Spent
from paceline.bench.shares import Share, StepParts, backward_per_forward, lost_strong, lost_weak, take_apart

MACHINES = (2, 4, 8, 16, 64)  # for which a stated network is extrapolated to


class Lost(msgspec.Struct, frozen=True):
    """What so many ranks lose, weak or strong."""

    mode: str
    at: At
    samples_per_second: float
    step_seconds: float
    efficiency: Spread
    lost_seconds: float  # of each step
    shares: list[Share]
    slowest: int | None
    slow_phase: str
    crowd: float  # threads for each core, at least 1


class Ahead(msgspec.Struct, frozen=True):
    """A step that nobody has measured."""

    mode: str
    at: At
    where: str
    step_seconds: float
    efficiency: float


class Scaled(msgspec.Struct, frozen=True):
    """All that is printed or written."""

    what: str
    lost: list[Lost]
    held: list[HeldOut]
    ahead: list[Ahead]
    notes: list[str]


def parts_of(runs: Runs, alone: Runs) -> dict[At, StepParts]:
    """Each point taken apart: the run of its middle round. `alone` are runs without exchange, where there are any."""
    base = next((_middle(found) for at, found in sorted(runs.items()) if at.ranks == 1), None)
    parts: dict[At, StepParts] = {}
    for at, found in runs.items():
        without = _middle(alone[at]) if alone.get(at) else base
        parts[at] = take_apart(_middle(found), backward_per_forward(without) if without and at.ranks > 1 else None)
    return parts


def usual(runs: Runs) -> Runs:
    """The quicker half of each point's steps, of all rounds together, as one run.

    What the model is fitted to: what disturbs a step now and then is not the task's, and follows no law.
    """
    found: dict[At, Sequence[Run]] = {}
    for at, rounds in runs.items():
        steps = sorted((step for run in rounds for step in run.steps), key=_longest)
        found[at] = [replace(rounds[0], steps=steps[: math.ceil(len(steps) / 2)])]
    return found


def lost_of(runs: Runs, parts: Points, machine: Machine, mode: str, batch: int) -> list[Lost]:
    """What each number of ranks above 1 loses.

    Args:
        runs: all that was measured.
        parts: of it.
        machine: on which.
        mode: weak or strong.
        batch: of each rank (weak), or of all together (strong).
    """
    found: list[Lost] = []
    for ranks in sorted({at.ranks for at in runs}):
        at = At(ranks, batch if mode == "weak" else batch // ranks)
        base = At(1, batch)
        if ranks == 1 or at not in runs or base not in runs:
            continue
        work = 1 if mode == "weak" else ranks  # by how much less a rank has to do than one alone
        ratios = [a.step_seconds / work / b.step_seconds for a, b in zip(runs[base], runs[at], strict=True)]
        one, many = parts[base], parts[at]
        shares = lost_weak(one, many) if mode == "weak" else lost_strong(one, many, ranks, parts.get(At(1, at.batch)))
        found.append(
            Lost(
                mode,
                at,
                samples_per_second=_middle(runs[at]).samples / many.step,
                step_seconds=many.step,
                efficiency=spread(ratios),
                lost_seconds=many.step - one.step / work,
                shares=shares,
                slowest=many.slowest,
                slow_phase=many.slow_phase,
                crowd=machine.crowd(ranks),
            )
        )
    return found


def ahead_of(
    parts: Points, machine: Machine, weak: int | None, strong: int | None, network: Network | None
) -> list[Ahead]:
    """Twice the most ranks measured, on this machine; with a network, more machines like it."""
    model = fit_model(parts, machine)
    found: list[Ahead] = []

    def add(ranks: int, where: str, per_machine: int, over: Network | None) -> None:
        for mode, batch in (("weak", weak), ("strong", strong)):
            own = batch // (1 if mode == "weak" else ranks) if batch else 0
            if batch and own:
                seconds = model.step_on_many(ranks, own, per_machine, over) if over else model.step(ranks, own)
                ideal = model.step(1, batch) / (1 if mode == "weak" else ranks)
                found.append(Ahead(mode, At(ranks, own), where, seconds, ideal / seconds if seconds > 0 else 0.0))

    most = 2 * max(at.ranks for at in parts)
    add(most, "this machine", most, None)
    here = max((at.ranks for at in parts if machine.crowd(at.ranks) <= 1.0), default=1)
    for machines in MACHINES if network else ():
        where = f"{machines} machines like this one, {here} rank{'s' if here > 1 else ''} each"
        add(machines * here, where, here, network)
    return found


def _longest(step: Mapping[int, Spent]) -> float:
    return max(spent.seconds for spent in step.values())


def _middle(found: Sequence[Run]) -> Run:
    """The run of the round whose steps were of middle length."""
    middle = median([run.step_seconds for run in found])
    return min(found, key=lambda run: abs(run.step_seconds - middle))
