"""The ranks that only wait are freed: each gets an exception out of its collective, and time to save what it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.agent.crew import Crew
from paceline.agent.guarding import Stall
from paceline.agent.node import Node
from paceline.guard.deaths import Observation

REACTION_SECONDS = 5.0  # who has not moved so long after it was freed is stuck elsewhere
LOOK_SECONDS = 0.1


def free(
    stall: Stall,
    node: Node,
    crew: Crew,
    *,
    wait: Callable[[float], None],
    observe: Callable[[], Sequence[Observation]],
    ordered: Callable[[], bool],
    grace_seconds: float,
) -> None:
    """Free them and wait until they have ended, have shown that they never will, or `grace_seconds` are over."""
    node.release(stall.freed, stall.word.encode())
    crew.release(stall.freed, stall.word)
    began = time.monotonic()
    while (waited_seconds := time.monotonic() - began) < grace_seconds and not ordered():
        running = {o.rank for o in observe() if o.code is None and not o.lost} & {*stall.freed}
        if not running:
            return
        pulses = [*node.pulses(), *(pulse for member in crew.here for pulse in member.pulses)]
        moves = any(pulse.rank in running and pulse.still_seconds < waited_seconds for pulse in pulses)
        if waited_seconds > REACTION_SECONDS and not moves:
            return
        wait(LOOK_SECONDS)
