"""Begins to look at a script that nobody changed."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from paceline.contract.box import Box
from paceline.contract.marks import Names
from paceline.worker.guard import Guard
from paceline.worker.probes.calls import OrderMarks
from paceline.worker.probes.finite import Batches, Finite
from paceline.worker.probes.hooks import Events, Hooks
from paceline.worker.probes.replicas import Fingerprints
from paceline.worker.probes.steps import Counted, ScriptPhases, Stale, Swallowed


def look_on(guard: Guard) -> None:
    """See its steps from now on, or as soon as it imports torch. Never raises."""
    hooks, box = Hooks(guard.complain), guard.box
    if guard.on:
        steps, batches, names = ScriptPhases(box), Batches(), Names(box)
        judging = Finite(box, steps, batches), Swallowed(box, steps), Stale(box, steps)
        for part in (batches, *judging, steps, Joins(box), Fingerprints(box, names)):
            hooks.listen(part)
        guard.looks_on(hooks.install(), OrderMarks(box, names))
    else:
        guard.looks_on(hooks.listen(Counted(box)).install(), None)


class Joins(Events):
    """Sees whether ranks may rightly take different numbers of steps: torch's Join is entered."""

    def __init__(self, box: Box) -> None:
        self._box, self._sees = box, False

    def replica_made(self, ddp: Any) -> None:
        """From now on it may be."""
        if self._sees:
            return
        self._sees, box = True, self._box
        joins: Any = sys.modules["torch.distributed.algorithms.join"].Join
        enter = joins.__enter__

        @wraps(enter)
        def entered(join: Any) -> Any:
            box.put("uneven", 1)
            return enter(join)

        joins.__enter__ = entered
