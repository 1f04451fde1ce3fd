"""From points measured on several numbers of ranks to efficiency, what is lost to which cause, and what is to come."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import msgspec

from paceline.bench.compare_report import Spread, spread
from paceline.bench.model import Machine, Model, Point, fit, hold_out
from paceline.bench.network import Network
from paceline.bench.shares import (
    Parts,
    Share,
    backward_per_forward,
    lost_strong,
    lost_weak,
    take_apart,
)
from paceline.bench.steps import Run, Spent


class At(msgspec.Struct, frozen=True):
    """So many ranks with so many samples each in a step."""

    ranks: int
    batch: int


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


class Held(msgspec.Struct, frozen=True):
    """A measured step, predicted from those on other numbers of ranks."""

    at: At
    measured_seconds: float
    predicted_seconds: float
    error: float


class Scaled(msgspec.Struct, frozen=True):
    """All that is printed or written."""

    what: str
    lost: list[Lost]
    held: list[Held]
    ahead: list[Ahead]
    notes: list[str]


Runs = Mapping[At, Sequence[Run]]
"""by round; of all points the same rounds"""


def parts_of(runs: Runs, alone: Mapping[At, Sequence[Run]]) -> dict[At, Parts]:
    """Each point taken apart: the run of its middle round. `alone` are runs without exchange, where there are any."""
    base = next((_middle(found) for at, found in sorted(runs.items(), key=_order) if at.ranks == 1), None)
    parts: dict[At, Parts] = {}
    for at, found in runs.items():
        without = _middle(alone[at]) if alone.get(at) else base
        parts[at] = take_apart(_middle(found), backward_per_forward(without) if without and at.ranks > 1 else None)
    return parts


def usual(runs: Runs) -> dict[At, Sequence[Run]]:
    """The quicker half of each point's steps, of all rounds together, as one run.

    What the model is fitted to: what disturbs a step now and then is not the task's, and follows no law.
    """
    found: dict[At, Sequence[Run]] = {}
    for at, rounds in runs.items():
        steps = sorted((step for run in rounds for step in run.steps), key=_longest)
        found[at] = [replace(rounds[0], steps=steps[: math.ceil(len(steps) / 2)])]
    return found


def lost_of(runs: Runs, parts: Mapping[At, Parts], machine: Machine, mode: str, batch: int) -> list[Lost]:
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
        rate = _middle(runs[at]).samples / many.step
        lost = many.step - one.step / work
        found.append(
            Lost(
                mode, at, rate, many.step, spread(ratios), lost, shares, many.slowest, many.slow_phase,
                machine.crowd(ranks),
            )
        )  # fmt: skip
    return found


def points_of(parts: Mapping[At, Parts]) -> list[Point]:
    """What the model is fitted to."""
    return [Point(at.ranks, at.batch, one) for at, one in sorted(parts.items(), key=_order)]


def held_of(parts: Mapping[At, Parts], machine: Machine) -> list[Held]:
    """How well the model would have predicted each number of ranks that was measured, without it."""
    return [
        Held(At(h.point.ranks, h.point.batch), h.point.parts.step, h.predicted, h.error)
        for h in hold_out(points_of(parts), machine)
    ]


def ahead_of(
    parts: Mapping[At, Parts], machine: Machine, weak: int | None, strong: int | None, network: Network | None
) -> list[Ahead]:
    """Twice the most ranks measured, on this machine; with a network, more machines like it."""
    model = fit(points_of(parts), machine)
    most = max(at.ranks for at in parts)
    found = [
        one for mode, batch in (("weak", weak), ("strong", strong)) if batch
        for one in [_ahead(model, mode, 2 * most, batch, model.step, "this machine")] if one is not None
    ]  # fmt: skip
    if network is None:
        return found
    here = max((at.ranks for at in parts if machine.crowd(at.ranks) <= 1.0), default=1)

    def on_many(ranks: int, batch: int) -> float:
        return model.step_on_many(ranks, batch, here, network)

    for machines in (2, 4, 8, 16, 64):
        where = f"{machines} machines like this one, {here} rank{'s' if here > 1 else ''} each"
        for mode, batch in (("weak", weak), ("strong", strong)):
            one = _ahead(model, mode, machines * here, batch, on_many, where) if batch else None
            found += [] if one is None else [one]
    return found


def _ahead(
    model: Model, mode: str, ranks: int, batch: int, step: Callable[[int, int], float], where: str
) -> Ahead | None:
    own = batch if mode == "weak" else batch // ranks
    if own < 1:
        return None
    seconds = step(ranks, own)
    ideal = model.step(1, batch) / (1 if mode == "weak" else ranks)
    return Ahead(mode, At(ranks, own), where, seconds, ideal / seconds if seconds > 0 else 0.0)


def _longest(step: Mapping[int, Spent]) -> float:
    return max(spent.seconds for spent in step.values())


def _middle(found: Sequence[Run]) -> Run:
    """The run of the round whose steps were of middle length."""
    middle = median([run.step_seconds for run in found])
    return min(found, key=lambda run: abs(run.step_seconds - middle))


def _order(item: tuple[At, object]) -> tuple[int, int]:
    return item[0].ranks, item[0].batch
