"""One optimizer step of a task or a custom loop: micro-steps, one per micro-batch, then one update.

The gradient of the mean over the *global* batch is exact. Each micro-step back-propagates its part of the mean: its
weighted sum, divided by the weight of the global batch. Gradients are summed over micro-batches and ranks. 97 samples
on 3 ranks are portions of 33, 32 and 32; each gradient has the factor 1/97, not 1/(3*33) or 1/(3*32) as in a mean of
means. Hooks and autograd functions also see the gradients of a plain loop. If the weight is known only after backward,
the loss is divided by a power of two, and the sum of gradients by the rest.

A step on two ranks, with two micro-batches each. <=> is an exchange:

    rank 0                                                         rank 1
    _begin: save buffers, clear gradients                          the same
    _enter_batch: buffers and random stream of the virtual rank    the same
    forward, backward: adds to .grad                               the same, with other samples
    end_body, _enter_batch, forward
    backward: sends loss, weight, votes and a hash of calls    <=> the totals are added up meanwhile
      _propagate: sends each bucket of gradients once complete <=>
      _synchronise: reads the totals and compares the ranks        all ranks raise an error, or none
        sums the gradients over ranks, divides by the rest     <=>
        clips; skips or stops if a number is not finite            all ranks or none
    end_body
    enter_optimizer_phase, optimizer.step, end                     the same parameters
"""

import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from paceline.collectives.control import (
    Deferred,
    PinnedNumberBuffers,
    error_on_one_rank,
    is_async_device,
    make_world_gather,
    raise_on_all_ranks,
    read_all_deferred,
    resolve_deferred,
    set_found_inf,
    sum_over_ranks,
    to_device_async,
)
from paceline.collectives.torch_collectives import tag_collective
from paceline.compute.flops import FlopCounter
from paceline.data.loader import MicroBatch, PrefetchTrigger
from paceline.data.plan import MicroBatchPlan
from paceline.errors import UsageError
from paceline.protocol.evidence import Phase
from paceline.rank.guard import HangGuard
from paceline.rank.world import World
from paceline.seeding import SeededRngScope
from paceline.stepping import nonfinite
from paceline.stepping.hooks import (
    HiddenHooks,
    TensorHookTracker,
    describe_user_autograd_function,
    describe_user_backward_hook,
    restore_hooks,
)
from paceline.stepping.micro_step import (
    MeanDivisor,
    MicroStep,
    Reduction,
    WeightedLoss,
    find_mean_divisors,
    weigh_loss,
)
from paceline.stepping.order import CollectiveOrderCheck
from paceline.stepping.totals import (
    AwaitTotals,
    ControlFlags,
    DeferredTotals,
    StepResult,
    Totals,
    TotalsReducer,
    UnreadStep,
)
from paceline.stepping.trained_model import ModelInTraining
from paceline.strategies.optimizers import changes_nothing_if_skipped

if TYPE_CHECKING:
    from paceline.collectives.hosts import NodeTopology
    from paceline.stepping.audit import StepAuditor

LARGEST_SQUARED = 1e19  # above, the square of a float32 overflows: the host uses float64 then


class PreviousStepNotAppliedError(Exception):
    """The device has not applied the step before, which must be repeated. Nothing of the current step was applied."""


class Step:
    """The state of the current step.

    A loop body that computes after an optimizer step (a GAN's) needs the updated model, which only the last
    micro-batch can have. So each such part of the body, a phase, needs a pass over all micro-batches. In a step of a
    single micro-batch all phases count at once. A task's body has one phase.

        optimizer_d.zero_grad(); s.backward(loss_d); optimizer_d.step()      # pass 1: this counts, in all micro-batches
        optimizer_g.zero_grad(); s.backward(loss_g); optimizer_g.step()      # pass 2: this counts

    If `may_defer_read`, the host reads the loss and the finiteness of a step on a GPU during the next step: after the
    launch of its backward, before the launch of its update (see `UnreadStep`). The GPU then always has work. A step
    that is not finite changes nothing on the device. All ranks decide alike: see `TotalsReducer.defer`.
    """

    may_defer_read = False
    """whether the result of this step may be read in the next step"""
    is_repeated = False
    """whether this step was not finite before, so that it must not count if it is finite now"""
    unread: UnreadStep | None = None
    """this step after its last backward, if its result is not read; before that, the previous step"""
    flop_counter: FlopCounter | None = None
    """counts the operations of the first micro-batch that counts"""

    def __init__(
        self,
        world: World,
        virtual_ranks: int,
        enter: Callable[[Phase], object],
        *,
        votes: Callable[[], ControlFlags] = ControlFlags,
        order: CollectiveOrderCheck | None = None,
        ahead: PrefetchTrigger | None = None,
        may_skip: bool = False,
        way_out: str = "",
        exact: bool = False,
        max_norm: float | None = None,
        forward: nonfinite.LossSumFunction | None = None,
        audits: "StepAuditor | None" = None,
    ) -> None:
        """The caller adds the models to `parts`. `votes` to `may_skip` are for tasks.

        `way_out`: the option that skips steps, for errors. `exact`: the order of additions does not depend on the
        world size. `max_norm`: for clipping. `forward`: of the plain model, if there is only one.
        """
        self.parts: list[ModelInTraining] = []
        self.has_one_body = True
        """whether this rank computes the step in one micro-batch"""
        self._pass, self._num_passes = 0, 1  # the latter as far as known: the number of phases in a body
        self._phase_buffers: dict[tuple[int, int, int], list[Tensor]] = {}  # of a session
        self._is_entered = False  # whether a micro-batch has begun
        self._counting: AbstractContextManager[None] | None = None  # the operations of that micro-batch
        self._usual: tuple[int, tuple[int, ...]] | None = None  # `completed_calls` of micro-batches in the last step
        self.tensor_hooks: TensorHookTracker | None = None  # of a session
        self._value: Tensor | None = None  # the last loss, with its graph
        self._own_code, self._linear_checks = "", 0  # a custom autograd function in graphs of earlier losses
        self.micro_step: MicroStep | None = None
        self.checks_losses = False
        """whether to check in this step that losses are means over samples"""
        self.means: list[tuple[Sequence[MeanDivisor | None], float | Tensor]] = []
        """for each backward in such a step: what the means of its terms were divided by, and its weight"""
        self.stream = SeededRngScope(world.device)
        """of the current micro-batch"""
        self.keeps_stream = False
        """whether nothing draws random numbers before the next micro-batch, so the stream is not left in between"""
        self.in_backward = False
        self.in_step = False
        """whether a step has begun and not ended"""
        self.updating = False
        """whether an update has begun, so that parameters may be between two steps"""
        self._sums = TotalsReducer(world, virtual_ranks, votes, order, same_bits=exact and virtual_ranks > 1)
        self._world, self._is_single = world, world.size == virtual_ranks == 1
        self._enter, self._exact, self._way_out, self._may_skip = enter, exact, way_out, may_skip
        self._max_norm, self._forward, self.ahead = max_norm, forward, ahead or PrefetchTrigger()
        self.audits = audits
        self._on_device = is_async_device(world.device)  # whether the host would have to wait for numbers
        self._to_host = PinnedNumberBuffers(world.device)
        self._guard = HangGuard.of_process()

    def run_micro_batches(
        self, place: object, micro_batches: Sequence[MicroBatch], *, one_each: bool = False
    ) -> Generator[MicroBatch]:
        """Compute the global batch that `str(place)` names, except `end`. `one_each`: every rank has one micro-batch.

        Yields this rank's micro-batches, with dummy batches if a forward is a collective, each after its `enter`.
        """
        micro_batches = self._begin(place, micro_batches, one_each=one_each)
        while True:
            for batch in micro_batches:
                is_last = batch is micro_batches[-1]
                self._enter_batch(batch, is_last)
                rates = [] if is_last else self._rates()
                self.micro_step = MicroStep(batch, batch.work, is_last, rates, is_alone=self._sums.is_alone)
                self._sums.in_round = 0
                if self.flop_counter is not None and not self.flop_counter.samples and batch.work.is_counted:
                    self._counting = self.flop_counter.count_flops(len(batch.work.indices))
                    self._counting.__enter__()
                yield batch
                self.end_body()
            self._pass += 1
            if self.has_one_body or self._pass >= self._num_passes:
                break
        if self.audits is not None and self.audits.is_disputed:
            yield from self._judge(self.audits)

    def _begin(
        self, place: object, micro_batches: Sequence[MicroBatch], *, one_each: bool = False
    ) -> Sequence[MicroBatch]:
        in_lockstep, first = False, self.parts[0]
        for part in self.parts:
            in_lockstep = in_lockstep or part.replica.in_lockstep
        if self.audits is not None:
            micro_batches = self.audits.begin(first.replica, micro_batches)
        if in_lockstep:
            micro_batches = pad_micro_batches(micro_batches, self._world)
        self.has_one_body = len(micro_batches) == 1
        if not self.has_one_body:
            self._begin_passes()
        for part in self.parts:
            part.begin_step()
        alone = self._is_single and self.has_one_body
        self._where, self._result = place, self._sums.begin(place, one_each=one_each, alone=alone)
        # this host, if hosts step separately and a non-finite value ends the run: no other host is asked
        self._host = None if self._may_skip or first.scale else first.replica.local_step_node
        self._first: MicroStep | None = None
        self._summed_up: list[ModelInTraining] = []
        self.means, self._own_code, self.in_step = [], "", True
        return micro_batches

    def _enter_batch(self, batch: MicroBatch, is_last: bool) -> None:
        self._enter(Phase.FORWARD)
        self._is_entered = True
        self.stream.enter(batch.random_seed)
        for part in self.parts:
            if not is_last:
                part.begin_micro_batch()
            part.replica.enter(batch, is_last)

    def backward(
        self, loss: Tensor, weight: float | Tensor | None = None, reduction: Reduction = "mean", more: bool = False,
        only: Sequence[ModelInTraining] = (), retain_graph: bool = False,
    ) -> None:  # fmt: skip
        micro_step = self.micro_step
        if micro_step is None:
            raise UsageError(code="backward-outside-loop")
        micro_step.has_failed = True
        if self._host is not None:
            self._sums.read_awaited(self._enter, self._way_out)
        weighed = weigh_loss(loss, weight, reduction, micro_step)
        if micro_step.has_stepped:
            micro_step.phase, micro_step.has_stepped = micro_step.phase + 1, False
        if not self.has_one_body and micro_step.phase != self._pass:
            micro_step.weights.append(weighed.weight)
            micro_step.has_failed = False
            return
        last, self._value = micro_step.is_last and not more, loss
        if self.checks_losses and not self._sums.is_alone:
            is_only_mean = reduction == "mean" and not micro_step.weights and loss.numel() == 1
            means = find_mean_divisors(loss, micro_step, weight) if is_only_mean else [None]
            self.means.append((means, weighed.weight))
        # a mean; or the (B,) of a task, which was checked to have one value per sample
        plain = weight is None and reduction == "mean" and loss.ndim <= int(self._forward is not None)
        # a host that steps separately does not wait for weights of other hosts
        may_wait = self._host is None
        scale, has_gradient = self._sums.add_loss(
            loss, weighed, reduction, micro_step, plain=plain, is_last=last, may_wait=may_wait
        )
        finish = self._sums.start() if last else None  # travels during backward
        totals = None
        if scale is None:
            assert finish is not None
            totals = finish()
            self._sums.scale = scale = torch.as_tensor(totals.total_weight, dtype=torch.float64)
        if not last and (self._sums.is_guess or micro_step.batch.samples is not None):  # the last is checked below
            self._own_code = self._own_code or describe_user_autograd_function(weighed.value)
        wanted = [part for part in self.parts if part in only] if only else self.parts
        is_watched = len(self.parts) > 1 or bool(micro_step.stepped_optimizers)
        for part in self.parts:
            part.before_backward(part in wanted, is_watched)
        factor = weighed.factor / scale if has_gradient and weighed.value.requires_grad else None
        self._enter(Phase.BACKWARD)
        self._propagate(wanted, weighed, factor, micro_step.work, more=more, last=last, retain_graph=retain_graph)
        if self.flop_counter is not None and self.flop_counter.is_active:
            self.flop_counter.mark_backward_end()
        for part in self.parts:
            if part not in wanted:
                part.discard_backward()
        if finish is None:
            self._put_aside(wanted, micro_step)
        else:
            self._enter(Phase.SYNC)
            self._synchronise(wanted, finish if totals is None else lambda: totals)
            if not self._sums.was_scaled:
                self._check_no_custom_gradient_code(weighed.value)
        micro_step.has_failed = False

    def _propagate(
        self, wanted: Sequence[ModelInTraining], weighed: WeightedLoss, factor: float | Tensor | None,
        work: MicroBatchPlan, *, more: bool, last: bool, retain_graph: bool,
    ) -> None:  # fmt: skip
        """Back-propagate the loss times `factor`, without the user's hooks. None: it has no gradient."""
        self.in_backward = True
        hidden_hooks: HiddenHooks = []
        begun_parts: list[ModelInTraining] = []
        try:
            for part in self.parts:
                if part.may_have_hooks:
                    hidden_hooks += part.hide_hooks(alone=self._sums.is_alone, counted=work.is_counted)
            if more and hidden_hooks:
                raise UsageError(code="more-with-hook")
            for part in wanted:
                # with several models it is not known which of them this backward reaches: no early exchange
                part.replica.begin_backward(work, last and len(self.parts) == 1)
                begun_parts.append(part)
            if self.audits is not None:
                self.audits.begin_backward(work, weighed.value, weighed.factor)
            if factor is None:
                self._backward_nothing(retain_graph)
            else:
                self.parts[0].backward(weighed.value, factor=factor, retain_graph=retain_graph)
        except BaseException as error:
            for part in reversed(begun_parts):
                part.replica.end_backward(error)
            raise
        else:
            for part in reversed(begun_parts):
                part.replica.end_backward()
        finally:
            self.in_backward = False
            if self.audits is not None:
                self.audits.end_backward()
            for part in self.parts:
                part.last_gradient.clear()
            if hidden_hooks:
                restore_hooks(hidden_hooks)

    def _put_aside(self, wanted: Sequence[ModelInTraining], micro_step: MicroStep) -> None:
        for part in wanted:
            if (
                (reached := part.has_received_gradients)
                and not self.has_one_body
                and part.has_optimizer_among(micro_step.stepped_optimizers)
            ):
                raise UsageError(code="backward-after-step", number=part.number + 1)
            part.set_gradients_aside(reached)

    def _synchronise(self, wanted: Sequence[ModelInTraining], finish: AwaitTotals) -> None:
        """Sum the gradients of all models that the backward has reached over ranks (a collective).

        The host waits for a GPU once, at the end. On the CPU errors are found before the exchange.
        """
        totals, host, loss = None, self._host, 0.0
        if host is not None and self._sums.samples_if_weight:  # does not wait for other hosts
            self._sums.awaited, rest = finish, 1.0  # each sample weighs 1
        else:
            totals = finish()
            if isinstance(totals, Totals):
                loss, rest = self._sums.read_totals(totals), self._sums.rest
            else:
                rest = self._sums.remaining_divisor(totals)
        reached = self._models_reached_on_any_rank(wanted) if len(self.parts) > 1 else wanted  # one always is
        if self._exact or not self.has_one_body:
            self._check_summed_once(reached)
        self._summed_up += reached
        to_judge: list[ModelInTraining] = []
        records_gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # cheaper than a context
        try:
            for part in reached:
                if part.sync_gradients(rest, agreed=host is None) is not True or self._max_norm is not None:
                    to_judge.append(part)
            if self.audits is not None and self.audits.is_running and not self.audits.compare(str(self._where)):
                self._result.skip_cause = nonfinite.NonFiniteCause("an audit has found different numbers")
                for part in reached:
                    part.record_grad_versions()
                return
            if self._sums.without_gradient and not any(part.has_gradients for part in self.parts):
                raise UsageError(code="batch-without-gradient", place=str(self._where))
            if self._on_device:
                loss, finite = self._read_from_device(to_judge, loss, totals)
            else:
                finite = math.isfinite(loss)
                for part in to_judge if finite else ():
                    finite = finite and resolve_deferred(part.clip_and_check_finite(self._max_norm))
                    self._result.grad_norm = part.norm
            for part in reached if finite else ():
                part.run_hooks(after_accumulation=True)
        finally:
            torch.set_grad_enabled(records_gradients)
        if not finite:
            self._guard.check_not_released()
            in_loss, self._result.grad_norm = not math.isfinite(loss), None
            self._result.skip_cause = self._find_nonfinite_cause(reached, None if in_loss else host, in_loss=in_loss)
            for part in reached:
                part.record_grad_versions()

    def _read_from_device(
        self, to_judge: Sequence[ModelInTraining], loss: float, totals: Totals | DeferredTotals | None
    ) -> tuple[float, bool]:
        """The loss, and whether it and the gradients of `to_judge` are finite (a collective if they are sharded).

        Raises:
            PreviousStepNotAppliedError: the previous step must be repeated.
        """
        if self.unread is not None and not self.unread.read():  # the device still has this step to compute
            raise PreviousStepNotAppliedError
        self.unread = None
        if self.may_defer_read and isinstance(totals, DeferredTotals):
            self.unread = self._clip_and_check_on_device(totals)
        unread = self.unread
        checks = [part.clip_and_check_finite(self._max_norm) for part in to_judge] if unread is None else []
        pending = [value for value in (totals, *checks) if isinstance(value, Deferred)]
        self.ahead.start_batches()  # the device has work now
        if unread is not None:
            return loss, True
        numbers_by_id = {id(value): numbers for value, numbers in zip(pending, read_all_deferred(pending), strict=True)}
        if isinstance(totals, DeferredTotals):
            loss = self._sums.read_totals(totals.compute(numbers_by_id[id(totals)]))
        finite = math.isfinite(loss)
        for part, check in zip(to_judge, checks, strict=True):
            if finite:
                finite = check.compute(numbers_by_id[id(check)]) if isinstance(check, Deferred) else check
                self._result.grad_norm = part.norm
        if self.is_repeated:  # if the numbers fit into float32, a device or memory has failed
            largest = max(abs(loss) * self._result.total_weight, self._result.grad_norm or 0.0)
            finite = finite and largest > LARGEST_SQUARED
        return loss, finite

    def _clip_and_check_on_device(self, totals: DeferredTotals) -> UnreadStep | None:
        """Clip and check the gradients without the host; None if the host must read the results before the update."""
        (part,) = self.parts
        can_skip = all(map(changes_nothing_if_skipped, part.replica.optimizers))
        if (deferred := self._sums.defer(totals) if can_skip else None) is None:
            return None
        read_totals, others = deferred
        found_inf, *norm = part.clip_and_check_on_device(self._max_norm)
        numbers = torch.cat([totals.numbers, *norm, *others]) if norm or others else totals.numbers
        set_found_inf(numbers.float(), found_inf)
        wait = self._to_host.start_to_host(torch.cat([numbers, found_inf]))
        norm_at = len(totals.numbers) if norm else None
        self._result.unread = unread = UnreadStep(self._result, found_inf.view(()), wait, read_totals, norm_at)
        return unread

    def end_body(self) -> None:
        """The loop body has ended. Raises UsageError if it differs from the other bodies of the step."""
        micro_step = self.micro_step
        assert micro_step is not None
        if not micro_step.is_last:
            for part in self.parts:
                part.check_between_micro_batches()
        self.micro_step = None
        self._leave_batch()
        if not micro_step.weights:
            raise UsageError(code="no-backward")
        if (first := self._first) is not None and micro_step.completed_calls != first.completed_calls:
            calls, other = first.completed_calls_text, micro_step.completed_calls_text
            raise UsageError(code="bodies-differ", first=calls, other=other)
        if not micro_step.is_last and micro_step.learning_rates != self._rates():
            raise UsageError(code="learning-rate-in-step")
        self._first = self._first or micro_step
        self._num_passes = self._first.phase + 1

    def _leave_batch(self, error: BaseException | None = None) -> None:
        if not self._is_entered:
            return
        self._is_entered, late = False, None
        if self._counting is not None:
            counting, self._counting = self._counting, None
            counting.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        for part in reversed(self.parts):
            try:
                part.replica.leave(error)
            except BaseException as caught:  # the other models must be left as well
                error = late = caught
        if error is not None or not self.keeps_stream:
            self.stream.leave()
        if late is not None:
            raise late

    @property
    def is_skipped(self) -> bool:
        return self._result.skip_cause is not None

    def enter_optimizer_phase(self) -> None:
        """Begin the update. Raises StallError if the guard has unblocked this rank: then the sums are not valid."""
        self._guard.check_not_released()
        self._enter(Phase.OPTIMIZER)
        self.updating = True

    def end(self) -> StepResult:
        if self._host is not None:
            self._sums.read_awaited(self._enter, self._way_out)
        if self._first is not None:
            self._usual = len(self._first.weights), tuple(self._first.stepped_optimizers)
        self._first, self._sums.seen, self._value = None, [], None  # releases the batches
        if self._result.skip_cause is not None:
            for part in self.parts:
                part.replica.restore_buffers()
        elif self.parts[0].scale is not None:
            self.parts[0].scale.count_good_step()
        self.updating = self.in_step = False
        return self._result

    # not in the usual step

    def abort_step(self) -> None:
        self.micro_step, self.in_step, self.unread = None, False, None
        self._leave_batch(sys.exc_info()[1])
        for part in self.parts:
            part.abort_step()

    def run_trial(self, batch: MicroBatch) -> Generator[MicroBatch]:
        """Yield a dummy batch for a trial forward and backward. Nothing is summed over ranks, and no state changes."""
        for part in self.parts:
            part.begin_step()
        self.has_one_body, self._own_code, self._host = False, "", None
        self._begin_passes()
        self._sums.begin("a trial")
        try:
            self._enter_batch(batch, is_last=False)
            self.micro_step = MicroStep(batch, batch.work, is_last=False, learning_rates=[])
            yield batch
        finally:
            self.abort_step()
            self.stream.leave()
            self._value = None

    def _judge(self, audits: "StepAuditor") -> Generator[MicroBatch]:
        """Compute a disputed micro-batch on all ranks, save the state before the step, and raise an error."""
        for part in self.parts:
            part.abort_step()
        self._begin_passes()
        if (
            batch := audits.load_repeated_batch()
        ) is not None:  # in the proof each rank repeats its own, and one may have none
            self._enter_batch(batch, False)
            self.micro_step = MicroStep(batch, batch.work, False, self._rates())
            yield batch
            self.end_body()
        error = audits.judge(str(self._where))
        for part in self.parts:
            part.abort_step()
        audits.save()
        raise error

    def _find_nonfinite_cause(
        self, reached: Sequence[ModelInTraining], host: "NodeTopology | None", *, in_loss: bool
    ) -> nonfinite.NonFiniteCause:
        """Find the cause (a collective, of this `host` unless all ranks know; none if it is the loss scale)."""
        scale = self.parts[0].scale
        if not in_loss and scale is not None and (message := scale.halve_after_overflow(str(self._where))):
            return nonfinite.NonFiniteCause(message, is_loss_scale_overflow=True)
        if self._forward is not None:  # nothing follows in this body
            self._leave_batch()
            for part in self.parts:
                part.replica.restore_buffers()
        where = str(self._where)
        seen, gather = self._sums.seen, make_world_gather(self._world) if host is None else host.gather
        cause = nonfinite.find_nonfinite_loss_cause(seen, where, gather) if in_loss or host is not None else None
        if cause is None or not (in_loss or cause.samples):
            replicas, tick = {part.prefix: part.replica for part in reached}, partial(self._enter, Phase.BACKWARD)
            cause = nonfinite.find_nonfinite_gradient_cause(replicas, seen, self._forward, where, tick, gather)
        if not self._may_skip:
            raise error_on_one_rank(nonfinite.nonfinite_error(cause, self._way_out), self._world, by=cause.first_rank)
        return cause

    def _backward_nothing(self, retain_graph: bool) -> None:
        """The backward of a loss without gradients: it is constant or has weight 0."""
        replicas = [part.replica for part in self.parts]
        if len(replicas) == 1 and not replicas[0].in_lockstep and replicas[0].module is not replicas[0].model:
            # the DDP module waits for a gradient of each parameter
            zeros = [p.sum().double() * 0 for p in replicas[0].model.parameters() if p.requires_grad]
            self.parts[0].backward(torch.stack(zeros).sum(), retain_graph=retain_graph)
            return
        if any(replica.in_lockstep or replica.module is not replica.model for replica in replicas):
            raise UsageError(code="loss-without-gradient")
        self._sums.without_gradient = True

    def _check_no_custom_gradient_code(self, loss: Tensor) -> None:
        """Raise UsageError for custom code in the gradient path: the weight was not known in backward."""
        models = [part.replica.model for part in self.parts]
        changed = "" if self.tensor_hooks is None else self.tensor_hooks.changed
        self._linear_checks += 1
        # a rank whose loss is constant has no such code in its graph, and would update
        early = self._linear_checks <= 2 and self._host is None
        with raise_on_all_ranks(self._world) if early else nullcontext():
            found = describe_user_backward_hook(models) or self._own_code or describe_user_autograd_function(loss)
            if found or changed:
                raise UsageError(code="hook-before-weight", what=found or changed)

    def _check_summed_once(self, reached: Sequence[ModelInTraining]) -> None:
        if any(part in self._summed_up for part in reached):
            raise UsageError(code="two-backwards")

    def _models_reached_on_any_rank(self, wanted: Sequence[ModelInTraining]) -> Sequence[ModelInTraining]:
        """The models that the backward has reached on any rank; closes the others (a collective)."""
        flags = to_device_async([float(part.has_received_gradients) for part in wanted], self._world.device)
        ranks = sum_over_ranks(flags, "models reached by a backward").tolist()
        for part, count in zip(wanted, ranks, strict=True):
            if not count:
                part.set_gradients_aside(reached=False)
        return [part for part, count in zip(wanted, ranks, strict=True) if count]

    def _begin_passes(self) -> None:
        self._pass, self._phase_buffers = 0, {}

    def _rates(self) -> list[float]:
        return [rate for part in self.parts for rate in part.learning_rates()]


def pad_micro_batches(microbatches: Sequence[MicroBatch], world: World) -> Sequence[MicroBatch]:
    """This rank's micro-batches, then dummy batches: the same number on every rank (a collective)."""
    max_count = to_device_async([len(microbatches)], world.device)
    dist.all_reduce(tag_collective(max_count, "number of micro-batches"), op=dist.ReduceOp.MAX)
    first, missing = microbatches[0], int(max_count) - len(microbatches)
    # separate objects: the step recognizes its last one by identity
    return [*microbatches, *(replace(first, work=replace(first.work, is_counted=False)) for _ in range(missing))]
