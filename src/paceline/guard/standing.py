"""Decides whether a run really stands still, once nothing of it has moved for long. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from paceline.contract.evidence import Evidence, Phase, Sample, Verdict, VerdictKind
from paceline.contract.places import Activity, activity_of, imports_torch
from paceline.contract.windows import LEARNED, Stage, Windows
from paceline.guard.pace import Alarm

CLOCKS_SECONDS = 1.5  # what two looks at a rank may differ by where it has not moved
BUSY_CPU_SECONDS = 0.5  # in a second
IDLE_CPU_SECONDS = 0.05  # in a second; a rank that imports or compiles uses more
GUILTY_WAIT_TOO = (VerdictKind.MISMATCH, VerdictKind.DEADLOCK, VerdictKind.NETWORK, VerdictKind.UNKNOWN)


def perhaps_waiting(samples: Sequence[Sample], world_size: int) -> list[Sample]:
    """The same, but scripts, and ranks that have not met yet, may wait where no box shows it: they are said to.

    A script of which no rank has called any collective still begins, whatever it is that it does.
    """
    met = any(one.met for one in samples)
    return [
        replace(one, waiting=True, phase=one.phase if met else Phase.INIT)
        if world_size > 1 and one.phase in (Phase.USER, Phase.INIT)
        else one
        for one in samples
    ]


def stands_still(evidence: Sequence[Evidence], alarm: Alarm, windows: Windows) -> bool:
    """Whether nobody has moved since the alarm, and somebody waits: a script may also be busy for long by itself."""
    running = [one for one in evidence if one.runs]
    if not running or min(one.still_seconds for one in running) < alarm.still_seconds - CLOCKS_SECONDS:
        return False
    if not any(waits(one) for one in running):
        return False
    # what a script does for long it may have meant: rank 0 evaluates, and the others wait in a barrier
    busy = any(one.phase is Phase.USER and not waits(one) and one.cpu_seconds > BUSY_CPU_SECONDS for one in running)
    if windows.seconds is None and busy and alarm.still_seconds < LEARNED[Stage.USER][1]:
        return False
    # before its first collective a rank may still import torch, from a slow disk, on a busy machine
    late = [one for one in running if not one.ops and not waits(one)]
    idle = all(one.cpu_seconds < IDLE_CPU_SECONDS and one.state not in ("R", "D") for one in late)
    return idle or alarm.still_seconds >= windows.of(Stage.LONG)


def waits(one: Evidence) -> bool:
    """Whether a rank waits for others, or for its data."""
    if one.phase in (Phase.SYNC, Phase.DATA) or any(not op.done for op in one.ops):
        return True
    main = one.stacks[0].frames if one.stacks else ()
    waiting = any(activity_of(frame.file) in (Activity.WAITS, Activity.MEETS) for frame in main)
    return waiting and not imports_torch(main)


def to_free(verdict: Verdict, evidence: Sequence[Evidence]) -> tuple[int, ...]:
    """The ranks that shall get an exception out of their collective: those that have only waited."""
    kept = () if verdict.kind in GUILTY_WAIT_TOO else verdict.guilty
    return tuple(one.rank for one in evidence if one.runs and one.rank not in kept)
