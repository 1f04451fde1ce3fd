"""One optimizer step of a task, whose loss is computed here; what makes it a step is `stepping`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

from torch import Tensor

from paceline.data.loader import MicroBatch, Prefetch
from paceline.errors import UsageError
from paceline.nested import batch_size
from paceline.protocol.evidence import Phase
from paceline.stepping.micro_step import upcast
from paceline.stepping.order import CallOrder
from paceline.stepping.pipeline_step import PipelineStep
from paceline.stepping.step import Step
from paceline.stepping.totals import StepResult, Votes
from paceline.stepping.trained_model import LossScale, TrainedModel
from paceline.strategies.base import Strategy
from paceline.tasks.task import Loss, call


def ignore(phase: Phase) -> None:
    """Do nothing."""


class StepOptions(TypedDict, total=False):
    """What may be said of a step."""

    max_norm: float | None
    """clip the global gradient norm to this"""
    votes: Callable[[], Votes]
    """asked once in the step for what ranks have to agree on between two; costs no message of its own"""
    enter: Callable[[Phase], object]
    """told what begins"""
    order: CallOrder | None
    """compares which collectives the ranks have called"""
    ahead: Prefetch
    """told when a GPU is busy with the step, so that the next one's batches can be loaded"""
    may_leave_out: bool
    """where the loss or a gradient is not finite, leave parameters and buffers as they are, on all ranks, and return,
    instead of raising"""


class TaskSteps:
    """The steps of a task, one after the other."""

    def __init__(
        self, replica: Strategy, loss: Loss, *, scale: LossScale | None = None, one_each: bool = False,
        **options: Unpack[StepOptions],
    ) -> None:  # fmt: skip
        """`replica` is from a strategy; `loss` gives one value per sample, or (values, weights).

        With `one_each` every rank computes each step in one micro-batch, so weights are known before backward. With a
        `scale` of losses, for fp16, a step whose gradients overflow is left out in any case.
        """

        def weighted_sum(inputs: Any, targets: Any) -> Tensor:
            losses, weights = weighted_losses(loss, call(replica.model, inputs), targets)
            return losses.sum() if weights is None else (losses * weights).sum()

        self._replica, self._loss = replica, loss
        options.setdefault("enter", ignore)
        self._one_each = one_each
        way_out, self._scale = "--not-finite skip", scale
        if replica.pipeline is None:
            self._steps = Step(replica.world, replica.virtual_ranks, forward=weighted_sum, way_out=way_out, **options)
        else:  # no stage could compute a sample again alone
            self._steps = PipelineStep(replica.world, replica.virtual_ranks, way_out=way_out, **options)
        self._steps.parts.append(TrainedModel(replica, scale=scale))

    def take(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        """Take one step on this rank's micro-batches of a global batch, at least one, as the loader gives them.

        Raises:
            UsageError: if the loss does not give one value per sample, or the batches are for more virtual ranks than
                the replica.
            TrainingError: if the global loss or a gradient is not finite (on the first rank that made it so, naming
                ranks and samples), the weights are all zero, or the ranks have called different collectives;
                ReportedByPeer on the others. Parameters and buffers are still those before the step, but where hosts
                step by themselves (`--local-steps`): there only gradients are looked at before the update.
        """
        steps, replica, work = self._steps, self._replica, microbatches[0].work
        where = f"epoch {work.epoch + 1}, step {work.step + 1} of that epoch"
        try:
            if isinstance(steps, PipelineStep):
                losses = partial(weighted_losses, self._loss)
                steps.flow(where, microbatches, lambda batch: call(replica.model, batch.inputs), losses)
            else:
                for batch in steps.through(where, microbatches, one_each=self._one_each):
                    outputs = call(replica.model, batch.inputs, replica.module)
                    steps.backward(*weighted_losses(self._loss, outputs, batch.targets))
        except BaseException:
            steps.give_up()
            raise
        if not steps.is_left_out:
            steps.begin_update()
            replica.optimizer.step()
            if self._scale is not None:
                self._scale.good()
        return steps.end()


def train_step(
    replica: Strategy, microbatches: Sequence[MicroBatch], loss: Loss, **options: Unpack[StepOptions]
) -> StepResult:
    """Take one step on this rank's micro-batches of a global batch; `options` and errors are those of TaskSteps."""
    return TaskSteps(replica, loss, **options).take(microbatches)


def weighted_losses(loss: Loss, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
    """Call `loss` and check what it gives: losses (B, ...) and weights of the same shape, or None for all ones.

    In float32 at least.

    Raises:
        UsageError: if there is not one loss per sample, or losses and weights differ in shape.
    """
    result = loss(outputs, targets)
    losses, weights = result if isinstance(result, tuple) else (result, None)
    batch = batch_size(targets)
    if losses.ndim == 0 or (batch is not None and len(losses) != batch):
        raise UsageError(code="loss-of-batch", shape=tuple(losses.shape), samples=batch or "several")
    if weights is not None and weights.shape != losses.shape:
        raise UsageError(code="loss-weights-shape", shape=tuple(losses.shape), weights=tuple(weights.shape))
    return upcast(losses), None if weights is None else upcast(weights)
