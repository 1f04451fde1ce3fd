"""One step of a session: bodies of the user's loop, one for each micro-batch of this rank, then one update.

A body that goes on computing after an optimizer's step (a GAN's) needs what that step has made of the model, which
only the last micro-batch can have. So it runs over all micro-batches once for each such part, its phase:

    optimizer_d.zero_grad(); s.backward(loss_d); optimizer_d.step()      # pass 1: this counts, over all micro-batches
    optimizer_g.zero_grad(); s.backward(loss_g); optimizer_g.step()      # pass 2: this counts

The gradient of the global batch's mean is what `train.step` computes: each loss is multiplied by its weight, gradients
are added up over micro-batches and ranks, and divided once by the sum of all weights. Here the loop is the user's, so
whatever it does in a body is either right for every number of bodies, or refused in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from paceline.contract.evidence import Phase
from paceline.data.loader import MicroBatch
from paceline.data.plan import Work
from paceline.errors import ExitCode, TrainingError, UsageError, first_few
from paceline.sessions.prepared import Gate, Prepared
from paceline.sums import gather_words, start_totals, sum_over_ranks, told_once
from paceline.train.nonfinite import MAX_NAMED, NotFinite, gradients_are_finite
from paceline.train.order import CallOrder
from paceline.train.votes import Votes
from paceline.worker.world import World

Reduction = Literal["mean", "sum"]


@dataclass
class Body:
    """One run of the loop's body."""

    batch: MicroBatch
    is_last: bool
    """of its pass over this rank's micro-batches"""
    phase: int = 0
    """how many parts of it, each with its backwards and steps, are over"""
    weights: list[float | Tensor] = field(default_factory=list[float | Tensor])
    """of each backward so far"""
    stepped: list[int] = field(default_factory=list[int])
    """which optimizers were asked to step, in order"""
    has_stepped: bool = False
    """since its last backward"""

    @property
    def work(self) -> Work:
        """Which samples it is about."""
        return self.batch.work

    @property
    def done(self) -> tuple[int, tuple[int, ...]]:
        """What it has done: the same in all bodies of a step, or a rank's micro-batches were not treated alike."""
        return len(self.weights), tuple(self.stepped)


@dataclass(frozen=True)
class Stepped:
    """What a step has come to, over all ranks."""

    loss: float
    votes: Votes
    left_out: NotFinite | None


class Steps(Gate):
    """The state of the step that is under way."""

    def __init__(self, world: World, virtual_ranks: int, enter: Callable[[Phase], object], exact: bool) -> None:
        self.parts: list[Prepared] = []
        self.phases = 1
        """of the loop's body, as far as is known"""
        self._around = ExitStack()
        self._usual: tuple[int, tuple[int, ...]] | None = None  # what the bodies of the step before have done
        self.body: Body | None = None
        self.merged = False
        self.updating = False
        """whether parameters may be halfway between two steps"""
        self.votes: Callable[[], Votes] = Votes
        self.order: CallOrder | None = None
        self.may_leave_out = False
        self._world, self._virtual_ranks, self._enter, self._exact = world, virtual_ranks, enter, exact

    def begin(self, where: str, one_each: bool, bodies: int) -> None:
        """A global batch begins, in `bodies` micro-batches of this rank; `one_each`: in one of every rank."""
        for part in self.parts:
            part.replica.keep_buffers()
        self._where, self._one_each, self._alone = where, one_each, bodies == 1
        self._pass = 0
        self._buffers: dict[tuple[int, int, int], list[Tensor]] = {}
        self._rows = self._no_rows()
        self._seen: list[tuple[Work, Tensor]] = []
        self._reduction: Reduction | None = None
        self._first: Body | None = None
        self._divisor: float | None = None
        self._summed_up: list[Prepared] = []
        self._in_round = 0
        self._summed = Stepped(0.0, Votes(), None)

    def enter(self, batch: MicroBatch, is_last: bool) -> None:
        """The loop's body begins on this micro-batch."""
        self._around = ExitStack()
        for part in self.parts:
            self._around.enter_context(part.replica.body(batch, is_last))
        self.body = Body(batch, is_last)
        self._in_round = 0
        self._rates = [part.rates() for part in self.parts]
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
        self._check(body)
        self._first = self._first or body
        self.phases = self._first.phase + 1

    def again(self) -> bool:
        """After a pass over the micro-batches: whether they are gone through once more, for the next phase."""
        self._pass += 1
        return not self._alone and self._pass < self.phases

    @property
    def is_over(self) -> bool:
        """Whether this is the last micro-batch of the last pass: what is due once a step is due now."""
        return self.body is None or (self.body.is_last and (self._alone or self._pass == self.phases - 1))

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
        self.updating = False
        return self._summed

    def give_up(self) -> None:
        """The step ends in its middle: buffers are again what they were before it."""
        self.body = None
        self._around.close()
        for part in self.parts:
            part.forget()
            part.replica.put_back_buffers()

    def backward(
        self, loss: Tensor, weight: float | Tensor | None, reduction: Reduction, more: bool, only: Sequence[Prepared]
    ) -> None:
        """See `Session.backward`."""
        body = self.body
        if body is None:
            raise UsageError("s.backward(loss) belongs into the body of a loop over s.loader(...)")
        total, weighed = _weighted(loss, weight, reduction, body)
        if body.has_stepped:
            body.phase, body.has_stepped = body.phase + 1, False
        if not self._counts(body):
            body.weights.append(weighed)
            return
        last = body.is_last and not more
        self._count(total, weighed, reduction, body)
        finish = None
        if last:
            first = self._divisor is None
            said = [*self.votes(), *(self.order.hashes() if self.order else ())] if first else []
            finish = start_totals(self._rows, said)  # travels during backward
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
        if self._divisor is None:
            voted = len(Votes._fields)
            self._summed = Stepped(0.0, Votes(*totals.votes[:voted]), None)
            if self.order is not None:
                self.order.check(totals.votes[voted:], self._where)
        self._synchronise(wanted, totals.sums, reduction)

    # what `Prepared` asks

    def may_update(self, prepared: Prepared) -> bool:
        """See Gate."""
        body = self.body
        if body is None:
            return True
        body.stepped.append(prepared.number)
        body.has_stepped = True
        if not self._alone:
            self._keep_buffers(body)
        if not (body.is_last and self._counts(body)) or self._summed.left_out is not None:
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

    def _counts(self, body: Body) -> bool:
        """Whether the phase that the body is in is the one that this pass is for."""
        return self._alone or body.phase == self._pass

    def _keep_buffers(self, body: Body) -> None:
        """At the end of a phase: keep the buffers as its own pass has left them; in a later pass put them back."""
        key = (body.work.virtual_rank, body.work.part, len(body.stepped))
        now = [buffer for part in self.parts for buffer in part.replica.model.buffers()]
        if body.phase == self._pass:
            self._buffers[key] = [buffer.clone() for buffer in now]
        elif body.phase < self._pass:
            with torch.no_grad():
                for buffer, then in zip(now, self._buffers[key], strict=True):
                    buffer.copy_(then)

    def _no_rows(self) -> Tensor:
        return torch.zeros(self._virtual_ranks, 2, dtype=torch.float64, device=self._world.device)

    def _count(self, total: Tensor, weighed: float | Tensor, reduction: Reduction, body: Body) -> None:
        """Add a loss and its weight to the totals. Backwards that share one division must have one weight."""
        shared = bool(body.weights) and (self._in_round > 0 or not self._one_each)
        if reduction != (self._reduction or reduction) and (shared or not self._one_each):
            raise UsageError("the losses of one step are sums and means: give each s.backward the same reduction=")
        self._reduction = reduction
        if shared and not _same(weighed, body.weights[-1]):
            raise UsageError(
                f"the losses of one step have different weights, {float(body.weights[-1]):g} and {float(weighed):g}: "
                "they are divided by the sum of weights together. Give each s.backward the same weight=, or add the "
                "losses up yourself"
            )
        if body.work.counted:
            row = self._rows[body.work.virtual_rank]
            row[0] += total.detach()
            if not self._in_round:
                row[1] += weighed
            self._seen.append((body.work, total.detach()))
        self._in_round += 1
        body.weights.append(weighed)

    def _put_aside(self, wanted: Sequence[Prepared], body: Body) -> None:
        for part in wanted:
            reached = part.reached
            if not self._alone and part.number in body.stepped and reached:
                raise UsageError(
                    f"a backward after the step of optimizer {part.number + 1} has reached its model again, and this "
                    "rank's next micro-batches would add up what belongs to two steps. Say whose gradients it is for: "
                    "s.backward(loss, only=optimizer)"
                )
            part.close(reached)

    def _synchronise(self, wanted: Sequence[Prepared], sums: Sequence[float], reduction: Reduction) -> None:
        world = self._world
        loss_total, weight_total = sums
        if self._divisor is not None and not self._one_each:  # its weights were counted with the first
            weight_total = self._divisor
        if weight_total == 0:
            error = TrainingError(f"the weights of the global batch at {self._where} sum to 0: its mean is undefined")
            raise told_once(error, world)
        self._divisor = weight_total
        divide_by = 1.0 if reduction == "sum" else weight_total
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
        finite = math.isfinite(loss_total)
        for part in reached:
            known = part.synchronise(torch.tensor(divide_by, dtype=torch.float64, device=world.device))
            finite = finite and bool(known or gradients_are_finite(part.replica))
        before = self._summed
        self._summed = Stepped(before.loss + loss_total / weight_total, before.votes, before.left_out)
        if not finite:
            self._not_finite(reached, math.isfinite(loss_total))
        self._rows, self._in_round = self._no_rows(), 0

    def _not_finite(self, reached: Sequence[Prepared], loss_is: bool) -> None:
        """Name whose loss or which gradient it is; leave the step out, or end the run (a collective)."""
        bad = [i for work, loss in self._seen if not bool(loss.isfinite()) for i in work.indices.tolist()]
        told = gather_words(bad, self._world)
        guilty = {rank: samples for rank, samples in enumerate(told) if samples}
        names = [h.name for p in reached for h in p.replica.gradients() if not bool(h.tensor.isfinite().all())]
        where = f" at {self._where}"
        who = "; ".join(f"rank {r}: among samples {first_few([*map(str, s)], MAX_NAMED)}" for r, s in guilty.items())
        what = f"the gradient of {first_few(names, 3)}" if loss_is else "the loss"
        words = f"{what} is not finite{where}" + (f"; {who}" if who else "")
        samples = [i for of_rank in guilty.values() for i in of_rank]
        found = NotFinite(words, samples, min(guilty, default=0))
        if not self.may_leave_out:
            advice = "Likely: a learning rate too high, or bad values in these samples"
            error = TrainingError(f"{words}. The parameters are those before this step. {advice}", ExitCode.NOT_FINITE)
            raise told_once(error, self._world, by=found.told_by)
        self._summed = Stepped(self._summed.loss, self._summed.votes, found)

    def _check(self, body: Body) -> None:
        if not body.weights:
            raise UsageError(
                "a batch was taken and no s.backward(loss) called: the gradient of the global batch would lack it. To "
                "evaluate, call model.eval(), or write `with torch.no_grad():` around the loop"
            )
        if self._first is not None and body.done != self._first.done:
            raise UsageError(
                f"the micro-batches of one step were not treated alike: {_told(self._first)} in the first, "
                f"{_told(body)} in another. A body runs once for each micro-batch, not for each batch: count batches "
                "by s.batch, and to add up several give s.loader(..., accumulation=N)"
            )
        if not body.is_last and [part.rates() for part in self.parts] != self._rates:
            raise UsageError(
                "the learning rate changes from micro-batch to micro-batch of one step. Give the scheduler to "
                "s.prepare(model, optimizer, scheduler): it then steps once for all of them"
            )


def _told(body: Body) -> str:
    return f"{len(body.weights)} backward and {len(body.stepped)} optimizer.step()"


def _weighted(
    loss: Tensor, weight: float | Tensor | None, reduction: Reduction, body: Body
) -> tuple[Tensor, float | Tensor]:
    """The loss as a sum, and its weight: (scalar with a graph, number)."""
    if not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"s.backward takes the loss as a tensor, not a {type(loss).__name__}")
    if reduction not in ("mean", "sum"):
        raise UsageError(f"s.backward(loss, reduction={reduction!r}). Choose from: mean, sum")
    loss = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
    samples = len(body.work.indices) if body.work.counted else 0
    if loss.ndim == 0:
        if reduction == "sum":
            if weight is not None:
                raise UsageError("s.backward(loss, weight=..., reduction='sum'): a sum is not divided by weights")
            return loss, samples
        weighed = samples if weight is None else weight.detach() if isinstance(weight, Tensor) else weight
        if isinstance(weighed, Tensor) and weighed.ndim:
            raise UsageError(
                f"weight has shape {tuple(weighed.shape)}, but the loss is one mean: its weight is one number, "
                "mask.sum() say"
            )
        # a stand-in's mean may be of nothing; what it weighs is no part of any sum
        return loss * (weighed if body.work.counted else 1), weighed if body.work.counted else 0
    if isinstance(weight, Tensor) and weight.shape == loss.shape:
        return (loss * weight).sum(), weight.detach().double().sum() if body.work.counted else 0
    if weight is not None:
        raise UsageError(f"the losses have shape {tuple(loss.shape)}, so their weights must be a tensor of that shape")
    return loss.sum(), loss.numel() if body.work.counted else 0


def _same(a: float | Tensor, b: float | Tensor) -> bool:
    return a is b or bool(torch.as_tensor(a) == torch.as_tensor(b))
