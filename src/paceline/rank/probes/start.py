"""Begins to look at a script that nobody changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from paceline.protocol.marks import Names
from paceline.protocol.status_page import StatusPage
from paceline.rank.guard import Guard
from paceline.rank.ledger import OrderMarks
from paceline.rank.probes.finite import Batches, Finite
from paceline.rank.probes.hooks import Events, Hooks
from paceline.rank.probes.joint import Joint
from paceline.rank.probes.replicas import Fingerprints
from paceline.rank.probes.steps import Counted, ScriptPhases, Stale, Swallowed
from paceline.rank.unseen import unseen


def look_on(guard: Guard, *also: Events) -> Callable[[], None]:
    """See its steps from now on, or as soon as it imports torch; `also` listen, too. Never raises.

    What is returned must be called when the script has ended with exit code 0.
    """
    box, names, marker, failed = guard.box, Names(guard.box), None, None
    joint = Joint(lambda: box.get("ops"))
    listeners: list[Events] = [joint, Counted(box, joint)]
    if guard.on:
        steps, batches, marker = ScriptPhases(box, joint), Batches(), OrderMarks(box, names)
        swallowed = Swallowed(box, steps)
        failed = partial(swallowed.raised, "collective")
        judging = Finite(box, steps, batches), swallowed, Stale(box, steps, joint)
        listeners = [joint, batches, *judging, steps, Joins(box), Fingerprints(box, names, joint)]
    hooks = Hooks(guard.complain).listen(*listeners, *also).install()
    guard.looks_on(lambda: hooks.dismiss(*listeners), marker, failed)
    return hooks.end


class Joins(Events):
    """Sees whether ranks may rightly take different numbers of steps: torch's Join is entered."""

    def __init__(self, box: StatusPage) -> None:
        self._box, self._sees = box, False

    def replica_made(self, ddp: Any) -> None:
        if self._sees:
            return
        self._sees, box = True, self._box
        joins: Any = sys.modules["torch.distributed.algorithms.join"].Join
        enter = joins.__enter__

        @unseen
        @wraps(enter)
        def entered(join: Any) -> Any:
            box.put("uneven", 1)
            return enter(join)

        joins.__enter__ = entered
