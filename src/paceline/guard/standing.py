"""Does a run really stand still, where nothing of it has moved for long? Pure: looked at closer before it is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.contract.evidence import Evidence, Phase, Verdict, VerdictKind
from paceline.contract.places import imports_torch
from paceline.contract.windows import LEARNED, Stage, Windows
from paceline.guard.pace import Alarm, RankPace
from paceline.guard.pulse import Pulse

CLOCKS_SECONDS = 1.5  # what two looks at a rank may differ by where it has not moved
BUSY_CPU_SECONDS = 0.5  # in a second
IDLE_CPU_SECONDS = 0.05  # in a second; a rank that imports or compiles uses more
WAITING_PLACES = ("torch/distributed/", "paceline/sums/", "paceline/worker/meeting.py")
GUILTY_WAIT_TOO = (VerdictKind.MISMATCH, VerdictKind.DEADLOCK, VerdictKind.NETWORK, VerdictKind.UNKNOWN)


def paces(pulses: Sequence[Pulse], world_size: int) -> list[RankPace]:
    """How the ranks get on. Scripts, and ranks that have not met yet, may wait where no box shows it.

    A script of which no rank has called any collective still begins, whatever it is that it does.
    """
    met = any(pulse.met for pulse in pulses)
    return [_perhaps_waiting(pulse, met) if world_size > 1 else pulse.pace for pulse in pulses]


def _perhaps_waiting(pulse: Pulse, met: bool) -> RankPace:
    if pulse.phase not in (Phase.USER, Phase.INIT):
        return pulse.pace
    return dataclasses.replace(pulse.pace, waiting=True, phase=pulse.phase if met else Phase.INIT)


def stands_still(evidence: Sequence[Evidence], alarm: Alarm, windows: Windows) -> bool:
    """Whether nobody has moved since the alarm, and somebody waits: a script may also be busy for long by itself."""
    running = [one for one in evidence if one.code is None and not one.lost]
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
    return not imports_torch(main) and any(frame.file.startswith(WAITING_PLACES) for frame in main)


def to_free(verdict: Verdict, evidence: Sequence[Evidence]) -> tuple[int, ...]:
    """The ranks that shall get an exception out of their collective: those that have only waited."""
    kept = () if verdict.kind in GUILTY_WAIT_TOO else verdict.guilty
    return tuple(one.rank for one in evidence if one.code is None and not one.lost and one.rank not in kept)
