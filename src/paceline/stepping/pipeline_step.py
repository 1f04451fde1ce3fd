"""One optimizer step through a pipeline: micro-batches follow each other, each forward here and, later, backward."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from paceline.collectives.buckets import trainable_parameters
from paceline.data.loader import MicroBatch
from paceline.protocol.evidence import Phase
from paceline.stepping.micro_step import MicroStep, make_weighted_loss
from paceline.stepping.step import Step
from paceline.stepping.totals import AwaitTotals
from paceline.strategies.buffers import ignore_batch

LossFunction = Callable[[Any, Any], tuple[Tensor, Tensor | None]]
"""(what the model gives, targets) -> losses and their weights"""


class PipelineStep(Step):
    """Steps of the one model in `parts`, whose replica is a stage; each needs its begin_update and end as ever.

    Losses and their weights are the last stage's; the others add nothing to the totals, and hear them like all ranks.
    """

    def run_pipeline(
        self, where: str, micro_batches: Sequence[MicroBatch], compute: Callable[[MicroBatch], Any],
        loss_of: LossFunction,
    ) -> None:  # fmt: skip
        """Compute a global batch, with the same micro-batches on all stages, except its `end`.

        `compute` calls the model.
        """
        (part,) = self.parts
        model, line = part.replica.model, part.replica.pipeline
        assert line is not None
        self._begin(where, micro_batches)
        line.enter = self._enter
        # the same on all stages: only the last one has losses
        divisor = self._sums.guess_loss_divisor(micro_batches[0].work.global_samples)
        runs: dict[int, Any] = {}
        losses: dict[int, Tensor] = {}
        totals: AwaitTotals | None = None
        for forward, number in line.actions(len(micro_batches)):
            batch, is_last = micro_batches[number], number == len(micro_batches) - 1
            if forward:
                self._enter_batch(batch, is_last)
                runs[number] = line.stage.forward(partial(compute, batch))
                if line.is_last:
                    loss = self._counted(batch, is_last, *loss_of(runs[number].result, batch.targets))
                    losses[number] = loss / divisor
                self._leave_batch()
            else:
                if is_last:  # all forwards are over
                    totals = self._sums.start()
                self._enter(Phase.BACKWARD)
                for_nothing = (
                    nullcontext() if batch.work.is_counted else ignore_batch(model, trainable_parameters(model))
                )
                propagate = partial(part.backward, losses.pop(number)) if line.is_last else None
                part.replica.begin_backward(batch.work, is_last)
                try:
                    with for_nothing:
                        line.backward(runs.pop(number), propagate)
                except BaseException as error:
                    part.replica.end_backward(error)
                    raise
                part.replica.end_backward()
        self._enter(Phase.SYNC)
        line.wait_for_sends()
        line.enter = None
        self._synchronise([part], totals or self._sums.start())

    def _counted(self, batch: MicroBatch, is_last: bool, losses: Tensor, weights: Tensor | None) -> Tensor:
        micro_step = MicroStep(batch, batch.work, is_last, [])
        self._sums.in_round = 0
        weighed = make_weighted_loss(losses, weights, "mean", micro_step)
        self._sums.add_loss(losses, weighed, "mean", micro_step, plain=False)
        return weighed.value
