"""One step of a session: bodies of the user's loop, one for each micro-batch of this rank, then one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from paceline.contract.evidence import Phase
from paceline.data.loader import MicroBatch
from paceline.errors import UsageError
from paceline.sessions.bodies import Body, Reduction, check_alike, weighted
from paceline.sessions.phases import Phases
from paceline.sessions.prepared import Prepared
from paceline.sessions.summing import Stepped, Sums, stopped
from paceline.sums import start_totals, sum_over_ranks, told_once
from paceline.train.nonfinite import gradients_are_finite
from paceline.train.order import CallOrder
from paceline.train.votes import Votes
from paceline.worker.world import World


class Steps:
    """The state of the step that is under way."""

    def __init__(self, world: World, virtual_ranks: int, enter: Callable[[Phase], object], exact: bool) -> None:
        self.parts: list[Prepared] = []
        self.phases = Phases(self.parts)
        self._around = ExitStack()
        self._usual: tuple[int, tuple[int, ...]] | None = None  # what the bodies of the step before have done
        self.body: Body | None = None
        self.merged = False
        self.in_backward = False
        self.in_step = False
        """whether a step has begun that is not over"""
        self.updating = False
        """whether parameters may be halfway between two steps"""
        self.votes: Callable[[], Votes] = Votes
        self.order: CallOrder | None = None
        self.may_leave_out = False
        self._world, self._virtual_ranks, self._enter, self._exact = world, virtual_ranks, enter, exact

    def begin(self, where: str, one_each: bool, bodies: int) -> None:
        """A global batch begins, in `bodies` micro-batches of this rank; `one_each`: in one of every rank."""
        for part in self.parts:
            part.begin()
        self._where, self.in_step = where, True
        self.phases.begin(bodies)
        self._sums = Sums(self._world, self._virtual_ranks, one_each)
        self._first: Body | None = None
        self._summed_up: list[Prepared] = []
        self._summed = Stepped(0.0, Votes(), None)

    def enter(self, batch: MicroBatch, is_last: bool) -> None:
        """The loop's body begins on this micro-batch."""
        self._around = ExitStack()
        for part in self.parts:
            self._around.enter_context(part.replica.body(batch, is_last))
        self.body = Body(batch, is_last)
        self._sums.in_round = 0
        self._rates = [] if is_last else [part.rates() for part in self.parts]
        self._enter(Phase.FORWARD)

    def leave(self) -> None:
        """The loop's body has ended.

        Raises:
            UsageError: if it did not do what the other bodies of the step did.
        """
        body = self.body
        assert body is not None
        self.body = None
        self._around.close()
        check_alike(body, self._first)
        if not body.is_last and [part.rates() for part in self.parts] != self._rates:
            raise UsageError(
                "the learning rate changes from micro-batch to micro-batch of one step. Give the scheduler to "
                "s.prepare(model, optimizer, scheduler): it then steps once for all of them"
            )
        self._first = self._first or body
        self.phases.number = self._first.phase + 1

    @property
    def is_over(self) -> bool:
        """Whether this is the last micro-batch of the last pass: what is due once a step is due now."""
        return self.body is None or self.phases.is_last(self.body)

    @property
    def untouched(self) -> bool:
        """Whether nothing of this step has been computed yet that another rank may count on."""
        return self._first is None and (self.body is None or self.body.done == (0, ()))

    @property
    def is_whole(self) -> bool:
        """Whether the body at hand, the step's last, has done all that the bodies before it did."""
        body, usual = self.body, self._usual
        return body is not None and self.is_over and bool(body.weights) and usual in (None, body.done)

    def end(self) -> Stepped:
        """All bodies have run."""
        self._usual = self._first.done if self._first else None
        if self._summed.left_out is not None:
            for part in self.parts:
                part.replica.put_back_buffers()
        self.updating = self.in_step = False
        return self._summed

    def give_up(self) -> None:
        """The step ends in its middle: gradients and buffers are again what they were before it."""
        self.body, self.in_step = None, False
        self._around.close()
        for part in self.parts:
            part.give_up()

    def backward(
        self, loss: Tensor, weight: float | Tensor | None, reduction: Reduction, more: bool, only: Sequence[Prepared]
    ) -> None:
        """See `Session.backward`."""
        body = self.body
        if body is None:
            raise UsageError("s.backward(loss) belongs into the body of a loop over s.loader(...)")
        total, weighed = weighted(loss, weight, reduction, body)
        if body.has_stepped:
            body.phase, body.has_stepped = body.phase + 1, False
        if not self.phases.counts(body):
            body.weights.append(weighed)
            return
        last = body.is_last and not more
        self._sums.count(total, weighed, reduction, body)
        finish = None
        if last:
            first = self._sums.divisor is None
            said = [*self.votes(), *(self.order.hashes() if self.order else ())] if first else []
            finish = start_totals(self._sums.rows, said)  # travels during backward
        wanted = [part for part in self.parts if not only or part in only]
        for part in self.parts:
            part.open(part in wanted)
        self._enter(Phase.BACKWARD)
        self.in_backward = True
        try:
            with ExitStack() as stack:
                for part in wanted:
                    # with several models nobody knows yet whom this backward reaches: nothing leaves early
                    stack.enter_context(part.replica.backward(body.work, last and len(self.parts) == 1))
                total.backward()
        finally:
            self.in_backward = False
        for part in self.parts:
            if part not in wanted:
                part.drop()
        if finish is None:
            self._put_aside(wanted, body)
            return
        self._enter(Phase.SYNC)
        totals = finish()
        if self._sums.divisor is None:
            voted = len(Votes._fields)
            self._summed = Stepped(0.0, Votes(*totals.votes[:voted]), None)
            if self.order is not None:
                self.order.check(totals.votes[voted:], self._where)
        self._synchronise(wanted, totals.sums)

    # what `Prepared` asks

    def may_update(self, prepared: Prepared) -> bool:
        """See Gate."""
        body = self.body
        if body is None:
            return True
        body.stepped.append(prepared.number)
        body.has_stepped = True
        self.phases.keep_buffers(body)
        if not (body.is_last and self.phases.counts(body)) or self._summed.left_out is not None:
            return False
        if prepared.has_aside:
            raise UsageError(
                "optimizer.step() after s.backward(loss, more=True): the last backward before a step comes without it"
            )
        self._enter(Phase.OPTIMIZER)
        self.updating = True
        return True

    def holds_back(self) -> bool:
        """See Gate."""
        return not self.is_over

    def check_evaluation(self, prepared: Prepared) -> None:
        """See Gate."""
        if self.merged or self.body is not None or self._virtual_ranks == 1:
            return
        if any(buffer.is_floating_point() for buffer in prepared.replica.model.buffers()):
            raise UsageError(
                "the model is evaluated with the buffers (batch norm's statistics, say) of one virtual rank. Evaluate "
                "in a loop over s.loader(...), or inside `with s.evaluating():`, where they are those of all"
            )

    # inside

    def _put_aside(self, wanted: Sequence[Prepared], body: Body) -> None:
        for part in wanted:
            reached = part.reached
            if not self.phases.alone and part.number in body.stepped and reached:
                raise UsageError(
                    f"a backward after the step of optimizer {part.number + 1} has reached its model again, and this "
                    "rank's next micro-batches would add up what belongs to two steps. Say whose gradients it is for: "
                    "s.backward(loss, only=optimizer)"
                )
            part.close(reached)

    def _synchronise(self, wanted: Sequence[Prepared], sums: Sequence[float]) -> None:
        """Gradients of all models that the backward has reached become the global batch's (a collective)."""
        world = self._world
        loss, divide_by = self._sums.divide(sums, self._where)
        reached = wanted
        if len(self.parts) > 1:  # one model is always reached; of several each rank asks whether any rank has
            flags = torch.tensor([float(part.reached) for part in wanted], dtype=torch.float64, device=world.device)
            found = sum_over_ranks(flags, "models reached by a backward").tolist()
            reached = [part for part, ranks in zip(wanted, found, strict=True) if ranks]
            for part in wanted:
                if part not in reached:
                    part.close(reached=False)
        if self._exact and any(part in self._summed_up for part in reached):
            raise UsageError(
                "two backwards of one model in one step would be added up in an order that depends on the number of "
                "ranks. Say more=True in all but the last, s.backward(loss, more=True), or whose gradients are wanted, "
                "s.backward(loss, only=optimizer)"
            )
        self._summed_up += reached
        finite = math.isfinite(loss)
        for part in reached:
            known = part.synchronise(torch.tensor(divide_by, dtype=torch.float64, device=world.device))
            finite = finite and bool(known or gradients_are_finite(part.replica))
        self._summed = replace(self._summed, loss=self._summed.loss + loss)
        if not finite:
            names = [h.name for p in reached for h in p.replica.gradients() if not bool(h.tensor.isfinite().all())]
            found = self._sums.not_finite(names if math.isfinite(loss) else [], self._where)
            if not self.may_leave_out:
                raise told_once(stopped(found), world, by=found.told_by)
            self._summed = replace(self._summed, left_out=found)
