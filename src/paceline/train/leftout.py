"""What follows when a step was not finite and has changed nothing? The run goes on, goes back, or ends."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from paceline.errors import ExitCode, TrainingError
from paceline.sums import told_once
from paceline.train.nonfinite import NotFinite
from paceline.worker.world import World

Policy = Literal["stop", "skip", "rollback"]
MOST, OF_STEPS = 10, 200  # one bad sample may come once in an epoch; more is a training that has broken down


def too_many(left_out: Collection[int], step: int) -> bool:
    """Whether more than MOST of the last OF_STEPS steps up to `step` were left out."""
    return sum(step - OF_STEPS < one <= step for one in left_out) > MOST


class LeftOut:
    """The steps that have changed nothing; the same on all ranks, for all find the same."""

    def __init__(self, policy: Policy, world: World, say: Callable[[str], None]) -> None:
        self._policy, self._world, self._say = policy, world, say
        self._steps: set[int] = set()

    def goes_back(self, step: int, found: NotFinite) -> bool:
        """Note that `step` was left out, and why; returns whether to go on from an older state.

        That happens once for a step: parameters or memory may have been damaged before. If it is again not finite
        when it comes again, it is left out for good.

        Raises:
            TrainingError: with NOT_FINITE, if there were too many; ToldElsewhere on all ranks but one.
        """
        again = step in self._steps
        self._steps.add(step)
        if too_many(self._steps, step):
            words = (
                f"more than {MOST} of the last {OF_STEPS} steps were not finite; the last one: {found.words}. The "
                "parameters are those before it. Likely: a learning rate too high, or bad values in the data."
            )
            raise told_once(TrainingError(words, ExitCode.NOT_FINITE), self._world, by=found.told_by)
        back = self._policy == "rollback" and not again
        self._say(f"step {step}: {found.words}" if back else f"step {step} is left out: {found.words}")
        return back
