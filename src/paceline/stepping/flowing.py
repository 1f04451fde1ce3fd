"""One optimizer step through a pipeline: micro-batches follow each other, each forward here and, later, backward."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from paceline.collectives.buckets import trainable
from paceline.collectives.control import Pending, Totals
from paceline.data.loader import MicroBatch
from paceline.protocol.evidence import Phase
from paceline.stepping.bodies import Body, weighted
from paceline.stepping.steps import Steps
from paceline.strategies.buffers import uncounted

LossOf = Callable[[Any, Any], tuple[Tensor, Tensor | None]]
"""(what the model gives, targets) -> losses and their weights"""


class FlowingSteps(Steps):
    """Steps of the one model in `parts`, whose replica is a stage; each needs its begin_update and end as ever.

    Losses and their weights are the last stage's; the others add nothing to the totals, and hear them like all ranks.
    """

    def flow(
        self, where: str, bodies: Sequence[MicroBatch], compute: Callable[[MicroBatch], Any], loss_of: LossOf
    ) -> None:
        """A global batch in `bodies`, the same on all stages, but for its `end`.

        `compute` calls the model.
        """
        (part,) = self.parts
        model, line = part.replica.model, part.replica.pipeline
        assert line is not None
        part.begin()
        self._where, self.in_step = where, True
        self._begin_sums()
        line.enter = self._enter
        self._sums.guess(bodies[0].work.global_samples)  # the same on all stages: only the last one has losses
        runs: dict[int, Any] = {}
        losses: dict[int, Tensor] = {}
        totals: Callable[[], Pending[Totals]] | None = None
        for forward, number in line.actions(len(bodies)):
            batch, is_last = bodies[number], number == len(bodies) - 1
            if forward:
                self._enter(Phase.FORWARD)
                with part.replica.body(batch, is_last):
                    runs[number] = line.stage.forward(partial(compute, batch))
                    if line.is_last:
                        losses[number] = self._counted(batch, is_last, *loss_of(runs[number].result, batch.targets))
            else:
                if is_last:  # all forwards are over
                    totals = self._sums.start()
                self._enter(Phase.BACKWARD)
                for_nothing = nullcontext() if batch.work.counted else uncounted(model, trainable(model))
                propagate = partial(part.backward, losses.pop(number)) if line.is_last else None
                with for_nothing, part.replica.backward(batch.work, is_last):
                    line.backward(runs.pop(number), propagate)
        self._enter(Phase.SYNC)
        line.settle()
        line.enter = None
        self._synchronise([part], totals or self._sums.start())

    def _counted(self, batch: MicroBatch, is_last: bool, losses: Tensor, weights: Tensor | None) -> Tensor:
        body = Body(batch, is_last, [])
        self._sums.in_round = 0
        weighed = weighted(losses, weights, "mean", body)
        self._sums.count(losses, weighed, "mean", body, plain=False)
        return weighed.value / self._sums.guess()
