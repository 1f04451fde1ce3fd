"""The workers of one node, from the first start to the last end: started, observed, asked to stop, swept away."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from paceline.agent.generation import Generation
from paceline.agent.janitor import tell_janitor
from paceline.agent.start import Inherited, Store
from paceline.contract.failure import GOOD_ENDS
from paceline.contract.node_plan import NodePlan
from paceline.guard.collect import Watched
from paceline.guard.deaths import Observation
from paceline.guard.pulse import Pulse


class Node:
    """What an agent does with its own workers. Never waits for them: its owner does, and looks again."""

    def __init__(self, plan: NodePlan, inherited: Inherited) -> None:
        self.left: Sequence[int] = ()  # what not even SIGKILL has ended
        self.stopping = False
        self._generation: Generation | None = None
        self._inherited = inherited
        self._deadline_seconds = math.inf
        self._grace_seconds = plan.grace_seconds

    def start(self, plan: NodePlan, number: int) -> int:
        """Start generation `number` as `plan` says; the port of the store, on node 0.

        Raises:
            UsageError: when the port is taken.
            OSError: when the command or a log file cannot be opened.
        """
        if self._generation is not None:
            self._generation.close()
        if self._inherited.janitor >= 0:
            tell_janitor(self._inherited.janitor, plan.attempt_dir)
        self._generation = Generation(plan, number, self._inherited)
        self.stopping, self.left, self._deadline_seconds = False, (), math.inf
        store = Store.make(plan)
        try:
            self._generation.start(store)
            return store.port_number(plan)
        finally:
            store.close()

    @property
    def number(self) -> int:
        """The generation's; -1 before the first."""
        return self._generation.number if self._generation else -1

    def observe(self) -> list[Observation]:
        """What can be known of each worker now."""
        return self._generation.observe() if self._generation else []

    def step_reached(self) -> int:
        """Steps done by the rank that has come furthest."""
        return self._generation.step_reached() if self._generation else 0

    def oom_kills(self) -> int:
        """How many processes the kernel has killed for memory since this generation's start."""
        return self._generation.oom_kills() if self._generation else 0

    def pulses(self) -> list[Pulse]:
        """How the workers that run get on; to be asked every second."""
        return self._generation.pulses() if self._generation else []

    def watched(self) -> list[Watched]:
        """All workers, as far as they are known without asking them."""
        return self._generation.watched() if self._generation else []

    def release(self, ranks: Sequence[int], word: bytes) -> None:
        """Have those of `ranks` that are ours leave the collective in which they wait, with this word."""
        if self._generation is not None:
            self._generation.release(ranks, word)

    def stop(self, grace_seconds: float) -> None:
        """Ask the workers to end within this time; said again, it can only become less.

        Without any grace they are not asked: for then they would begin to save, and be killed in the middle of it.
        """
        if not self.stopping and grace_seconds and self._generation is not None:
            self._generation.ask_to_stop()
        self.stopping = True
        self._deadline_seconds = min(self._deadline_seconds, time.monotonic() + grace_seconds)

    @property
    def seconds_left(self) -> float:
        """Until whoever still runs is to be killed; 0 when nobody does, or the time is over."""
        codes = self._generation.codes() if self._generation else []
        if None not in codes:
            return 0.0
        if not {*codes} <= {None, *GOOD_ENDS}:  # there is nothing left to save together
            self.stop(self._grace_seconds)
        return max(0.0, self._deadline_seconds - time.monotonic())

    def sweep(self) -> None:
        """End all workers and all they have started, at once."""
        self.stopping = True
        if self._generation is not None:
            self.left = self._generation.sweep()
