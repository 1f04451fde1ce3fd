"""One optimizer step, for tasks and for loops of the user's own: bodies, one for each micro-batch, then one update.

The gradient of the mean over the *global* batch is exact: each body back-propagates its share of that mean, its
weighted sum divided by the weight of the global batch, and gradients are summed over micro-batches and ranks. A mean of
means would weigh the samples of a smaller share more. In numbers: 97 samples on 3 ranks are shares of 33, 32 and 32;
every sample's gradient enters with 1/97, not with 1/(3*33) or 1/(3*32). Gradients inside backward, which hooks and
autograd functions see, are those of a plain loop on one process, too. If the weight becomes known after backward only,
a power of two stands in for it there, and what is left is divided off the sum.
"""

import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial

from torch import Tensor

from paceline.collectives.control import Pending, Totals, by_all, by_host, costs, read_at_once, together, told_once
from paceline.collectives.hosts import Hosts
from paceline.compute.flops import FlopCount
from paceline.contract.evidence import Phase
from paceline.data.ahead import Prefetch
from paceline.data.loader import MicroBatch
from paceline.errors import UsageError
from paceline.seeding import Streams
from paceline.stepping import nonfinite
from paceline.stepping.bodies import Body, Reduction, Weighed, check_alike, sum_of_nothing, targets_of, weighted
from paceline.stepping.hooks import HiddenHooks, TensorHooks, leaves_of, own_functions, own_hooks
from paceline.stepping.lockstep import as_many_as_any
from paceline.stepping.order import CallOrder
from paceline.stepping.phases import Phases
from paceline.stepping.summing import StepResult, Sums
from paceline.stepping.trainee import Trainee, check_summed_once, reached_anywhere
from paceline.stepping.votes import Votes
from paceline.worker.guard import Guard
from paceline.worker.world import World


class Steps:
    """The state of the step that is under way."""

    flops: FlopCount | None = None
    """counts the operations of the first body that counts"""

    def __init__(
        self,
        world: World,
        virtual_ranks: int,
        enter: Callable[[Phase], object],
        *,
        votes: Callable[[], Votes] = Votes,
        order: CallOrder | None = None,
        ahead: Prefetch | None = None,
        may_leave_out: bool = False,
        way_out: str = "",
        exact: bool = False,
        max_norm: float | None = None,
        forward: nonfinite.Forward | None = None,
    ) -> None:
        """For the models that are put into `parts`; `votes` to `may_leave_out` are those of a task's steps.

        `way_out` is what leaves such steps out, in words; `exact`: gradients are added up in one order at every world
        size; `max_norm`: they are clipped at once; `forward`: of the one plain model, where it is known.
        """
        self.parts: list[Trainee] = []
        self.phases = Phases(self.parts)
        self._around = ExitStack()
        self._usual: tuple[int, tuple[int, ...]] | None = None  # what the bodies of the step before have done
        self._weight = 0.0  # of the step before
        self.tensor_hooks: TensorHooks | None = None  # of a session
        self._value: Tensor | None = None  # the last loss, of which the graph is known
        self._own_code, self._linear_checks = "", 0  # an own autograd function in the graphs of a step's earlier losses
        self.body: Body | None = None
        self.targets: list[tuple[Tensor | None, float | Tensor]] = []
        """of each backward in the step: the targets over which its loss is a mean, and its weight"""
        self.outside: Streams | None = None
        """the random streams outside the body at hand"""
        self.in_backward = False
        self.in_step = False
        """whether a step has begun that is not over"""
        self.updating = False
        """whether parameters may be halfway between two steps"""
        self._world, self._virtual_ranks, self._enter, self._exact = world, virtual_ranks, enter, exact
        self._votes, self._order, self._way_out, self._may_leave_out = votes, order, way_out, may_leave_out
        self._max_norm, self._forward, self.ahead = max_norm, forward, ahead or Prefetch()

    def through(self, where: str, bodies: Sequence[MicroBatch], *, one_each: bool = False) -> Generator[MicroBatch]:
        """A global batch in `bodies` of this rank, but for its `end`; `one_each`: every rank has one of it.

        Yields the micro-batches, with stand-ins where a forward is a collective, while the body of each is entered.
        """
        for part in self.parts:
            part.begin()
        if any(part.replica.in_lockstep for part in self.parts):
            bodies = as_many_as_any(bodies, self._world)
        self._where, self.in_step, again, self._own_code = where, True, True, ""
        self.targets = []
        self.phases.begin(len(bodies))
        self._begin_sums(one_each, alone=len(bodies) == 1)
        while again:
            for batch in bodies:
                is_last, self._around = batch is bodies[-1], ExitStack()
                self._enter(Phase.FORWARD)
                outside = [self._around.enter_context(part.replica.body(batch, is_last)) for part in self.parts]
                self.outside = outside[0]
                self.body = Body(batch, is_last, [] if is_last else self._rates(), is_alone=self._sums.is_alone)
                self._sums.in_round = 0
                if self.flops is not None and not self.flops.samples and batch.work.counted:
                    self._around.enter_context(self.flops.of(len(batch.work.indices)))
                yield batch
                self.leave()
            again = self.phases.again()

    def _begin_sums(self, one_each: bool = False, *, alone: bool = False) -> None:
        self._sums = Sums(
            self._world, self._virtual_ranks, self._where, self._votes, self._order,
            one_each=one_each, alone=alone and self._world.size == self._virtual_ranks == 1, guess=self._weight,
            same_bits=self._exact and self._virtual_ranks > 1,
        )  # fmt: skip
        # this host, if it steps by itself, and what is not finite ends the run: no other is asked then
        self._host = None if self._may_leave_out or self.parts[0].scale else self.parts[0].replica.host
        self._first: Body | None = None
        self._summed_up, self._result = list[Trainee](), self._sums.result

    def leave(self) -> None:
        """The body has ended. Raises UsageError if it did not do what the other bodies of the step did."""
        body = self.body
        assert body is not None
        if not body.is_last:
            for part in self.parts:
                part.check_between()
        self.body = None
        self._around.close()
        check_alike(body, self._first, [] if body.is_last else self._rates())
        self._first = self._first or body
        self.phases.number = self._first.phase + 1

    @property
    def is_left_out(self) -> bool:
        """Whether the parameters stay as they are."""
        return self._result.left_out is not None

    def begin_update(self) -> None:
        """Parameters change now. Raises StallError if the guard has freed this rank: then the sums are none."""
        Guard.of_process().check_freed()
        self._enter(Phase.OPTIMIZER)
        self.updating = True

    def end(self) -> StepResult:
        """All bodies have run."""
        self._sums.await_totals(self._enter, self._way_out)
        self._usual, self._weight = self._first.done if self._first else None, self._result.weight
        self._first, self._sums.seen, self._value = None, [], None  # lets go of the batches
        if self.is_left_out:
            for part in self.parts:
                part.replica.put_back_buffers()
        self.updating = self.in_step = False
        return self._result

    def give_up(self) -> None:
        """The step ends in its middle, by an error perhaps: gradients and buffers are again what they were before."""
        self.body, self.in_step = None, False
        self._around.__exit__(*sys.exc_info())
        for part in self.parts:
            part.give_up()

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        reduction: Reduction = "mean",
        more: bool = False,
        only: Sequence[Trainee] = (),
        retain_graph: bool = False,
    ) -> None:
        """See `Session.backward`."""
        body = self.body
        if body is None:
            raise UsageError(code="backward-outside-loop")
        body.has_failed = True
        self._sums.await_totals(self._enter, self._way_out)
        weighed = weighted(loss, weight, reduction, body)
        if body.has_stepped:
            body.phase, body.has_stepped = body.phase + 1, False
        if not self.phases.counts(body):
            body.weights.append(weighed.weight)
            body.has_failed = False
            return
        last, self._value = body.is_last and not more, loss
        self.targets.append((targets_of(loss) if reduction == "mean" and not body.weights else None, weighed.weight))
        # a mean; or a task's (B,), which was checked to be one for each sample
        plain = weight is None and reduction == "mean" and loss.ndim <= int(self._forward is not None)
        self._sums.count(loss, weighed, reduction, body, plain=plain)
        # a host that steps by itself waits for no other's weights
        scale = self._sums.scale_of(weighed, waits=last and self._host is None)
        finish = self._sums.start() if last else None  # travels during backward
        totals = None
        if scale is None:
            assert finish is not None
            totals = finish()
            scale = self._sums.exact_scale(totals.numbers)
        if not last and (self._sums.is_guess or body.batch.samples is not None):  # the last: see `_check_linear`
            self._own_code = self._own_code or own_functions(weighed.value)
        wanted = [part for part in self.parts if not only or part in only]
        watched = len(self.parts) > 1 or bool(body.stepped)
        for part in self.parts:
            part.open(part in wanted, watched)
        self._enter(Phase.BACKWARD)
        self.in_backward = True
        hidden: list[HiddenHooks] = []
        try:
            hidden += [part.hide_hooks(alone=self._sums.is_alone) for part in self.parts]
            if more and any(hidden):
                raise UsageError(code="more-with-hook")
            with ExitStack() as stack:
                for part in wanted:
                    # with several models nobody knows yet whom this backward reaches: nothing leaves early
                    stack.enter_context(part.replica.backward(body.work, last and len(self.parts) == 1))
                if self._is_nothing_under_ddp(weighed):
                    self.parts[0].backward(sum_of_nothing(self.parts[0].replica.model), retain_graph=retain_graph)
                elif self._contributes(weighed):
                    factor = weighed.factor / scale
                    scaled = weighed.value if isinstance(factor, float) and factor == 1.0 else weighed.value * factor
                    self.parts[0].backward(scaled, retain_graph=retain_graph)
        finally:
            self.in_backward = False
            for part, hooks in zip(self.parts, hidden, strict=False):  # fewer if one of them has raised
                part.show_hooks(hooks)
        if self.flops is not None and self.flops.is_active:
            self.flops.mark()
        for part in self.parts:
            if part not in wanted:
                part.drop()
        if finish is None:
            self._put_aside(wanted, body)
        else:
            self._enter(Phase.SYNC)
            self._synchronise(wanted, (lambda: totals) if totals else finish)
            if not self._sums.was_scaled:
                self._linear_checks += 1
                # a rank whose loss is constant has no such code in its graph, and would update its parameters
                early = self._linear_checks <= 2 and self._host is None
                with together(self._world) if early else nullcontext():
                    self._check_linear(weighed.value)
        body.has_failed = False

    def _check_linear(self, loss: Tensor) -> None:
        """Raise UsageError for own code in the gradient path: the global batch's weight was not known in backward."""
        models = [part.replica.model for part in self.parts]
        changed = "" if self.tensor_hooks is None else self.tensor_hooks.changed
        found = own_hooks(models) or self._own_code or own_functions(loss) or changed
        if found:
            raise UsageError(code="hook-before-weight", what=found)

    def _is_nothing_under_ddp(self, weighed: Weighed) -> bool:
        """Whether a loss has no gradient, and the module waits for one of each parameter."""
        alone = len(self.parts) == 1 and not self.parts[0].replica.in_lockstep
        waits = alone and self.parts[0].replica.module is not self.parts[0].replica.model
        return waits and (weighed.is_nothing or not weighed.value.requires_grad)

    def _contributes(self, weighed: Weighed) -> bool:
        """Whether a loss has gradients: it has none if it is constant or has no weight.

        Raises:
            UsageError: if it has none here, and the strategy needs a backward of every rank.
        """
        if weighed.value.requires_grad and not weighed.is_nothing:
            return True
        if any(part.replica.in_lockstep or part.replica.module is not part.replica.model for part in self.parts):
            raise UsageError(code="loss-without-gradient")
        self._sums.without_gradient = True
        return False

    def foreign_leaves(self) -> list[Tensor]:
        """Tensors that the last loss depends on, and that are parameters of no model here."""
        own = {id(p) for part in self.parts for p in part.replica.model.parameters()}
        return [] if self._value is None else [leaf for leaf in leaves_of(self._value) if id(leaf) not in own]

    def _rates(self) -> list[float]:
        return [rate for part in self.parts for rate in part.rates()]

    def _put_aside(self, wanted: Sequence[Trainee], body: Body) -> None:
        for part in wanted:
            if (reached := part.reached) and not self.phases.alone and part.has_stepped(body.stepped):
                raise UsageError(code="backward-after-step", number=part.number + 1)
            part.close(reached)

    def _synchronise(self, wanted: Sequence[Trainee], finish: Callable[[], Pending[Totals]]) -> None:
        """Gradients of all models that the backward has reached become the global batch's (a collective).

        The host waits for a GPU once, at the end. On the CPU what is wrong is found before gradients travel.
        """
        late, totals, host, loss = costs(self._world.device), None, self._host, 0.0
        if host is not None and self._sums.samples:  # no other host is waited for
            rest = self._sums.put_off(finish)
        else:
            totals = finish()
            told = None if late else totals.now()
            rest = self._sums.rest(totals.numbers if told is None else told.sums)
            if told is not None:
                loss, rest = self._sums.take(told), float(rest)  # gradients are not divided by a number that is 1
        reached = reached_anywhere(wanted, self._world) if len(self.parts) > 1 else wanted  # one is always reached
        if self._exact or not self.phases.alone:
            check_summed_once(self._summed_up, reached)
        self._summed_up += reached
        known = [part.synchronise(rest, agreed=host is None) is True and self._max_norm is None for part in reached]
        if self._sums.without_gradient and not any(part.has_gradients for part in self.parts):
            raise UsageError(code="batch-without-gradient", place=self._where)
        asked = [part for part, fine in zip(reached, known, strict=True) if not fine and math.isfinite(loss)]
        judged = [part.judged(self._max_norm) for part in asked]
        if late:  # all is launched, and the GPU busy with it
            self.ahead.begin()
        found = read_at_once([*([totals] if totals and late else []), *judged])
        if totals and late:
            loss = self._sums.take(totals.made(found.pop(0)))
        finite = math.isfinite(loss)
        for one, numbers in zip(judged, found, strict=True):
            if finite:
                finite, self._result.grad_norm = one.made(numbers)
        for part in reached if finite else ():
            part.run_hooks(after_accumulation=True)
        if not finite:
            in_loss, self._result.grad_norm = not math.isfinite(loss), None
            self._result.left_out = self._not_finite(reached, None if in_loss else host, in_loss=in_loss)

    def _not_finite(self, reached: Sequence[Trainee], host: Hosts | None, *, in_loss: bool) -> nonfinite.NotFinite:
        """Who made it so (a collective, of this `host` unless all know; none if it is the loss scale)."""
        if not in_loss and (found := self.parts[0].overflowed(self._where)):
            return found
        if self._forward is not None:  # nothing follows in this body
            self._around.close()
            for part in self.parts:
                part.replica.put_back_buffers()
        seen, gather = self._sums.seen, by_all(self._world) if host is None else by_host(host)
        found = nonfinite.losses_not_finite(seen, self._where, gather) if in_loss or host is not None else None
        if found is None or not (in_loss or found.samples):
            replicas, tick = {part.prefix: part.replica for part in reached}, partial(self._enter, Phase.BACKWARD)
            found = nonfinite.gradients_not_finite(replicas, seen, self._forward, self._where, tick, gather)
        if not self._may_leave_out:
            raise told_once(nonfinite.stopped(found, self._way_out), self._world, by=found.told_by)
        return found
