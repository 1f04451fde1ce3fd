"""The optimizer steps of a task, and the loop over them. `stepping.step.Step` has the rest of a step.

The loop yields after each step, so that its caller can log, evaluate, save or stop.
"""

import math
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from msgspec.structs import replace
from torch import Tensor

from paceline.collectives.buckets import trainable_parameters
from paceline.collectives.control import raise_on_all_ranks
from paceline.compute.memory import is_out_of_memory
from paceline.data.loader import MicroBatch, PrefetchTrigger
from paceline.errors import PacelineError, StallError, UsageError
from paceline.nested import batch_size, tensors
from paceline.protocol.evidence import Phase
from paceline.protocol.status_page import StatusPage
from paceline.rank.guard import HangGuard
from paceline.stepping.audit import StepAuditor
from paceline.stepping.micro_step import MicroStep, upcast_to_float32, weigh_loss
from paceline.stepping.nonfinite import select_samples
from paceline.stepping.order import CollectiveOrderCheck
from paceline.stepping.step import PreviousStepNotAppliedError, Step
from paceline.stepping.totals import AwaitTotals, ControlFlags, StepResult
from paceline.stepping.trained_model import LossScale, ModelInTraining
from paceline.strategies.base import Strategy
from paceline.strategies.buffers import ignore_dummy_batch
from paceline.tasks.task import Loss, call_model
from paceline.train.memory import has_no_collectives, out_of_memory_error
from paceline.train.optimizer import LRSchedule
from paceline.train.step_record import PhaseClock, PhaseEvents, StepRecord

if TYPE_CHECKING:
    from paceline.parallel.pipeline import Pipeline


def ignore_phase(phase: Phase) -> None:
    """Do nothing."""


class StepOptions(TypedDict, total=False):
    max_norm: float | None
    """The maximum global norm of the gradients; larger gradients are scaled down."""
    votes: Callable[[], ControlFlags]
    """Returns this rank's votes. It is called once per step. The votes need no additional message."""
    enter: Callable[[Phase], object]
    """Is called at the start of each phase."""
    order: CollectiveOrderCheck | None
    """Compares the collectives that the ranks have called."""
    ahead: PrefetchTrigger
    """Loads the batches of the next step. It starts when a GPU is busy with the current step."""
    may_skip: bool
    """If the loss or a gradient is not finite, skip the step on all ranks instead of raising an error. Parameters and
    buffers then stay unchanged."""
    audits: StepAuditor | None
    """Let a second rank repeat some micro-batches."""


class TaskSteps(Step):
    """The steps of a task, through a pipeline if its replica is a stage."""

    unread_record: StepRecord | None = None
    """of the previous step, if its result is not read"""

    def __init__(
        self, replica: Strategy, loss: Loss, *, scale: LossScale | None = None, one_each: bool = False,
        **options: Unpack[StepOptions],
    ) -> None:  # fmt: skip
        """`loss` returns one value per sample, or (values, weights). `scale`: the loss scale for fp16, which skips
        overflows.

        `one_each`: each rank computes each step in one micro-batch, so the weights are known before backward.
        """

        def forward(inputs: Any, targets: Any) -> Tensor:
            return weighted_loss_sum(loss, call_model(replica.model, inputs), targets)

        options.setdefault("enter", ignore_phase)
        super().__init__(
            replica.world, replica.virtual_ranks, way_out="--not-finite skip",
            # no single stage can recompute one sample to find the cause of a NaN
            forward=forward if replica.pipeline is None else None, **options,
        )  # fmt: skip
        self.parts.append(ModelInTraining(replica, scale=scale))
        self._replica, self._loss, self._one_each = replica, loss, one_each
        self._writes: bool | None = None  # whether a forward has written into its batch or a parameter; None: not known

    def take_step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        """Take one step on this rank's micro-batches of a global batch; at least one, in the order of the loader.

        Raises:
            TrainingError: if the global loss or a gradient is not finite, the weights are all zero, or the ranks have
                called different collectives. Only the first affected rank raises it, with ranks and samples;
                ReportedByPeer on the others. Parameters and buffers keep their values from before the step, except
                with `--local-steps`, which checks only the gradients before the update.
        """
        self.compute_gradients(microbatches)
        return self.update()

    def compute_gradients(self, microbatches: Sequence[MicroBatch], *, defer_read: bool | None = None) -> bool:
        """All of `take_step` before the update. `defer_read`: the result may be read in the next step.

        Returns whether the step is computed. False: the previous step has changed nothing. Repeat it, and this one.
        """
        replica, work = self._replica, microbatches[0].work
        before = None if defer_read is None else self._versions(microbatches)
        if defer_read is not None:
            self._sums.refusal = float(self._writes is not False or not self.parts[0].can_skip_on_device())
        self.may_defer_read = bool(defer_read)
        where = f"epoch {work.epoch + 1}, step {work.step + 1} of that epoch"
        try:
            if replica.pipeline is not None:
                self._run_pipeline(where, microbatches, replica.pipeline)
            else:
                for batch in self.run_micro_batches(where, microbatches, one_each=self._one_each):
                    self._compute(batch)
            return True
        except BaseException as error:
            self.abort_step()
            if isinstance(error, PreviousStepNotAppliedError):
                return False
            if is_out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # they hold tensors
                raise self._explain_out_of_memory(where, microbatches[0]) from error
            raise
        finally:
            if before is not None:
                self._writes = bool(self._writes) or self._versions(microbatches) != before

    def update(self) -> StepResult:
        """Update with the gradients of `compute`. `complete` completes a result that is `unread`."""
        if not self.is_skipped:
            self.enter_optimizer_phase()
            if self.unread is None:
                self._replica.optimizer.step()
            else:
                self._replica.step_unless(self.unread.found_inf)
        return self.end()

    def complete(self, schedule: LRSchedule, *, failed: bool = False) -> Generator[StepRecord]:
        """Yield the record of the `unread` step, if any, with its result. Repeat it if the device has not applied it.

        Call it before the next update. The next step must be computed again if this one was repeated. `failed`: after
        an error. Other ranks do not take part then: if the device has not applied the step, it has no record.
        """
        record, self.unread_record = self.unread_record, None
        if record is None:
            return
        world, unread = self._replica.world, record.result.unread
        alone = failed and world.size > 1
        try:
            is_applied = unread is None or unread.read(alone=alone)
        except StallError:
            self._replica.undo_buffers()
            raise
        except BaseException:
            self._enter(Phase.OPTIMIZER)  # a reader of the phase must not take the state for that before the step
            raise
        if not is_applied:
            self._replica.undo_buffers()
            if alone:
                return
            with raise_on_all_ranks(world, prepares=False):
                if self._writes:
                    raise UsageError(code="written-in-forward", step=record.step)
            schedule.set_lr(self._replica.optimizer, record.step - 1)
            self.is_repeated, self.unread = math.isfinite(self._sums.refusals), None
            record = replace(record, result=self.take_step(record.microbatches))
            self.is_repeated = False
        yield record

    def _versions(self, microbatches: Sequence[MicroBatch]) -> list[int]:
        batches = tensors([(batch.inputs, batch.targets) for batch in microbatches])
        return [t.is_inference() or t._version for t in chain(self._replica.parameters, batches)]  # pyright: ignore[reportPrivateUsage]

    def _compute(self, batch: MicroBatch) -> None:
        outputs = call_model(self._replica.model, batch.inputs, self._replica.module)
        self.backward(*compute_losses_and_weights(self._loss, outputs, batch.targets))

    def _run_pipeline(self, where: str, micro_batches: Sequence[MicroBatch], line: "Pipeline") -> None:
        """Compute a global batch, with the same micro-batches on all stages, except its `end`.

        Only the last stage has losses and weights. The others add nothing to the totals, and receive them as all ranks.
        """
        part, model = self.parts[0], self._replica.model
        self._begin(where, micro_batches)
        line.enter = self._enter
        divisor = self._sums.guess_loss_divisor(micro_batches[0].work.global_samples)  # the same on all stages
        runs: dict[int, Any] = {}
        losses: dict[int, Tensor] = {}
        totals: AwaitTotals | None = None
        for forward, number in line.actions(len(micro_batches)):
            batch, is_last = micro_batches[number], number == len(micro_batches) - 1
            if forward:
                self._enter_batch(batch, is_last)
                runs[number] = line.stage.forward(partial(call_model, model, batch.inputs))
                if line.is_last:
                    losses[number] = self._add_stage_loss(batch, is_last, runs[number].result) / divisor
                self._leave_batch()
                continue
            if is_last:  # all forwards are over
                totals = self._sums.start()
            self._enter(Phase.BACKWARD)
            propagate = partial(part.backward, losses.pop(number)) if line.is_last else None
            part.replica.begin_backward(batch.work, is_last)
            try:
                with nullcontext() if batch.work.is_counted else ignore_dummy_batch(model, trainable_parameters(model)):
                    line.backward(runs.pop(number), propagate)
            except BaseException as error:
                part.replica.end_backward(error)
                raise
            part.replica.end_backward()
        self._enter(Phase.SYNC)
        line.wait_for_sends()
        line.enter = None
        self._synchronise([part], totals or self._sums.start())

    def _add_stage_loss(self, batch: MicroBatch, is_last: bool, outputs: Any) -> Tensor:
        micro_step = MicroStep(batch, batch.work, is_last, [])
        losses, weights = compute_losses_and_weights(self._loss, outputs, batch.targets)
        self._sums.in_round = 0
        weighed = weigh_loss(losses, weights, "mean", micro_step)
        self._sums.add_loss(losses, weighed, "mean", micro_step, plain=False)
        return weighed.value

    def try_batch(self, batch: MicroBatch) -> None:
        """Compute the forward and backward of a dummy batch. No state changes."""
        for trial_batch in self.run_trial(batch):
            self._compute(trial_batch)
        self._replica.model.zero_grad(set_to_none=True)

    def _explain_out_of_memory(self, where: str, batch: MicroBatch) -> PacelineError:
        replica, samples = self._replica, len(batch.work.indices)

        def compute(size: int) -> None:
            inputs, targets = (select_samples(part, [*range(size)], samples) for part in (batch.inputs, batch.targets))
            work = replace(batch.work, is_counted=False, indices=batch.work.indices[:size])
            self.try_batch(replace(batch, inputs=inputs, targets=targets, work=work))

        trial = compute if has_no_collectives(replica) else None
        return out_of_memory_error([replica], replica.world, where, samples, trial)


def train_step(
    replica: Strategy, microbatches: Sequence[MicroBatch], loss: Loss, **options: Unpack[StepOptions]
) -> StepResult:
    """Take one step on this rank's micro-batches of a global batch: forward, backward, update (a collective).

    It does not change the learning rate or the mode of the model: call `model.train()` first. `fit` does both.

    Args:
        replica: the model with its strategy.
        microbatches: at least one, in the order of `load_steps`.
        loss: (outputs, targets) -> one value per sample, (B, ...), or (values, weights) of equal shapes.
        options: fields of StepOptions. `max_norm`: the maximum global norm of the gradients (default: they are not
            clipped). `may_skip`: if the loss or a gradient is not finite, skip the step on all ranks (default: raise).

    Returns:
        The result over all ranks: the mean loss (`loss`), the sum of the weights (`total_weight`), and with `max_norm`
        the norm of the gradients before clipping (`grad_norm`).

    Raises:
        UsageError: the loss does not return one value per sample, or its weights have another shape.
        TrainingError: the global loss or a gradient is not finite (without `may_skip`), the weights are all zero, or
            the ranks have called different collectives. Only the first affected rank raises it, ReportedByPeer on the
            others. Parameters and buffers keep their values from before the step, except with local steps, which
            check only the gradients before the update.
    """
    return TaskSteps(replica, loss, **options).take_step(microbatches)


def fit(
    replica: Strategy, steps: Iterable[list[MicroBatch]], loss: Loss, schedule: LRSchedule, *, start: int = 0,
    page: StatusPage | None = None, on_device: PhaseEvents | None = None, scale: LossScale | None = None,
    one_each: bool = False, may_defer_read: Callable[[int], bool] | None = None, **options: Unpack[StepOptions],
) -> Generator[StepRecord]:  # fmt: skip
    """Train on `steps` and yield a record after each step.

    Args:
        replica: the model with its strategy.
        steps: for each step, the micro-batches of this rank.
        loss: returns one value per sample, or (values, weights).
        schedule: sets the learning rate before each step.
        start: the number of the first step, from 0.
        page: has the phases of this rank. Default: that of the process.
        on_device: device events of the phases; see PhaseClock.
        may_defer_read: whether a step, from 1, may be `unread` after its update. Its record then follows the backward
            of the next step: parameters are those after the step, but buffers and gradients are not. None: no step.
            The first step is never unread, and no step after a forward that writes into its batch or a parameter.
            It must return the same on all ranks.
        scale: the loss scale for fp16. None: losses are not scaled.
        one_each: whether each rank computes each step in one micro-batch. The weights are then known before backward.
        options: fields of StepOptions, as in `train_step`.

    Yields:
        The record of each step: its number from 1, its result over all ranks, the learning rate and the micro-batches.

    Raises:
        UsageError, TrainingError: as `train_step`.
    """
    replica.model.train()
    page = page or HangGuard.of_process().page
    clock = PhaseClock(page, on_device, options.setdefault("enter", page.enter))
    step = TaskSteps(replica, loss, scale=scale, one_each=one_each, **options)
    clock.start()
    try:
        for number, microbatches in enumerate(steps, start):
            lr = schedule.set_lr(replica.optimizer, number)
            defer_read = None if may_defer_read is None else may_defer_read(number + 1)
            is_computed = step.compute_gradients(microbatches, defer_read=defer_read)
            yield from step.complete(schedule)
            if not is_computed:
                schedule.set_lr(replica.optimizer, number)
                step.compute_gradients(microbatches, defer_read=defer_read)
            result = step.update()
            record = StepRecord(number + 1, result, lr, microbatches, clock.take(), clock.starts)
            if result.unread is None:
                yield record
            else:
                step.unread_record = record
            clock.start()  # the time of the caller does not count for the next step
    except Exception:
        yield from step.complete(schedule, failed=True)  # the state is that after its update
        raise
    else:
        yield from step.complete(schedule)
    finally:
        if step.in_step and not step.updating:  # computed, but not updated
            step.abort_step()


def compute_losses_and_weights(loss: Loss, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
    """Call `loss` and check its result: losses (B, ...), and weights of the same shape or None for all ones.

    Both are converted to float32 if their precision is lower.
    """
    result = loss(outputs, targets)
    losses, weights = result if isinstance(result, tuple) else (result, None)
    batch = batch_size(targets)
    if losses.ndim == 0 or (batch is not None and len(losses) != batch):
        raise UsageError(code="loss-of-batch", shape=tuple(losses.shape), samples=batch or "several")
    if weights is not None and weights.shape != losses.shape:
        raise UsageError(code="loss-weights-shape", shape=tuple(losses.shape), weights=tuple(weights.shape))
    return upcast_to_float32(losses), None if weights is None else upcast_to_float32(weights)


def weighted_loss_sum(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    losses, weights = compute_losses_and_weights(loss, outputs, targets)
    return losses.sum() if weights is None else (losses * weights).sum()
