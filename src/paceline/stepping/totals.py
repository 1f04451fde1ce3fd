"""The totals of a step: losses, weights and votes, over micro-batches and ranks, and what losses are divided by."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.collectives.control import (
    Summed,
    Totals,
    by_itself,
    costs,
    now,
    start_totals,
    told_once,
)
from paceline.errors import ExitCode, ToldElsewhere, TrainingError, UsageError
from paceline.protocol.evidence import Phase
from paceline.rank.world import World
from paceline.stepping.micro_step import MicroStep, Reduction, Weighed, same
from paceline.stepping.nonfinite import NotFinite, Seen, losses_not_finite, stopped
from paceline.stepping.order import CallOrder


class Votes(NamedTuple):
    """Of one rank 1 or 0 for each; added up, how many ranks say it. Its order is that of the slots in the totals."""

    stop: float = 0.0
    """was asked to end the run"""
    written: float = 0.0
    """has its file of the checkpoint that is on its way on disk"""
    failed: float = 0.0
    """could not write it"""
    due: float = 0.0
    """finds by its clock that a checkpoint is due; rank 0 alone looks"""
    end: float = 0.0
    """has been told by a callback that the training is over"""
    save: float = 0.0
    """was asked to save a checkpoint now"""
    coming: float = 0.0
    """how many samples of a stream it has for the next global batch; 0 where the data are no stream"""


Finish = Callable[[], Summed]
"""waits for the totals of all ranks; on a GPU they are still to be read then"""


@dataclass
class StepResult:
    """What a step has come to, over all ranks."""

    loss: float = 0.0
    """the mean of the global batch"""
    weight: float = 0.0
    """what it is the mean of: the sum of all weights"""
    grad_norm: float | None = None
    """before it was clipped; None: it was not"""
    votes: Votes = field(default_factory=Votes)
    """added up over ranks"""
    left_out: NotFinite | None = None
    """why the parameters were not changed, if they were not"""

    @property
    def loss_sum(self) -> float:
        """The weighted sum of the global batch's losses."""
        return self.loss * self.weight


class StepTotals:
    """The totals of one step: counted on this rank, added up over all, waited for now or after the update."""

    def __init__(
        self,
        world: World,
        virtual_ranks: int,
        where: str,
        votes: Callable[[], Votes],
        order: CallOrder | None,
        *,
        one_each: bool,
        alone: bool = False,
        guess: float = 0.0,
        same_bits: bool = False,
    ) -> None:
        """`one_each`: every rank computes the step in one micro-batch, so that each exchange has weights of its own.

        `where`: which step, in words; `votes` and `order`: what ranks say with it. `alone`: this rank computes the
        step in one micro-batch, and there is no other rank. `guess`: the weight of the step before; 0 if there is none.
        """
        # for the same bits on every number of ranks the scale must not depend on which rank computes what
        self.is_alone, self._guess, self._same_bits = alone and not same_bits, guess, same_bits
        self._world, self._where, self._one_each, self._votes, self._order = world, where, one_each, votes, order
        self.result = StepResult()
        self._virtual_ranks, self._on_device = virtual_ranks, costs(world.device)
        self._begin_round()
        self.divisor: float | None = None
        """the sum of all weights, once it is known"""
        self.in_round = 0
        """backwards of this body since the last exchange"""
        self.scale: float | Tensor | None = None
        """what losses are divided by before their backward, the same on all ranks; None until a loss is known"""
        self.is_guess = False
        """whether it is near the weight of the global batch only, which is not known yet"""
        self.was_scaled = True
        """whether gradients in the last exchange's backward were those of the global batch's mean"""
        self.seen: Seen = []
        self.without_gradient = False
        """whether a loss of this rank was constant, or had no weight"""
        self._samples, self._plain, self._by_samples, self._counts_all = 0, True, True, True
        self._reduction: Reduction | None = None
        self._awaited: Finish | None = None
        self._said_scale = 0.0

    def count(
        self, loss: Tensor, weighed: Weighed, reduction: Reduction, micro_step: MicroStep, *, plain: bool
    ) -> None:
        """Add a loss and its weight to the totals. Backwards that share one division must have one weight.

        `plain`: by its form alone, which all ranks see alike, each sample weighs 1.
        """
        shared = bool(micro_step.weights) and (self.in_round > 0 or not self._one_each)
        if reduction != (self._reduction or reduction) and (shared or not self._one_each):
            raise UsageError(code="reductions-differ")
        self._reduction = reduction
        self._samples, self._plain = micro_step.work.global_samples, self._plain and plain
        self._by_samples = weighed.by_samples
        self._counts_all = self._counts_all and weighed.one_for_each and micro_step.batch.samples is None
        if shared and not same(weighed.weight, micro_step.weights[-1]):
            raise UsageError(code="weights-differ", first=float(micro_step.weights[-1]), other=float(weighed.weight))
        if self._is_counted:
            self._begin_round()
        if micro_step.work.counted and self._world.leads:  # of several that compute the same
            is_nothing = weighed.is_nothing
            self._add(micro_step.work.virtual_rank, weighed, is_nothing)
            if not is_nothing:
                self.seen.append((micro_step.batch, loss.detach()))
        self.in_round += 1
        micro_step.weights.append(weighed.weight)

    def scale_of(self, weighed: Weighed, *, waits: bool) -> float | Tensor | None:
        """What the loss is divided by before backward, so that gradients on their way are those of the mean.

        That is the weight of the global batch, if it is known: from the plan, or as all of it is here. Else it is a
        power of two near the last step's weight, which changes no bit of the sum; `rest` is divided by later. None: it
        becomes known when all ranks' totals are there, in the step's only backward (`exact_scale`).
        """
        if self.scale is None:
            if self._reduction == "sum":
                self.scale = 1.0
            elif self.is_alone:
                weight = weighed.weight
                self.scale = weight if isinstance(weight, Tensor) else weight or 1.0  # 0: `_divide` raises
            elif self._by_samples and self._samples:
                self.scale = float(self._samples)
            elif self._one_each and waits and not self._same_bits:
                return None
            else:
                self.guess(self._samples)
                self.is_guess = True
        return self.scale

    def guess(self, samples: int = 0) -> float:
        """A power of two near the weight of the global batch, as what losses are divided by before backward."""
        if self.scale is None:
            self.scale = near(self._guess or samples)
        return float(self.scale)

    def exact_scale(self, weight: float | Tensor) -> float | Tensor:
        """The weight of the global batch, from that in the totals over ranks."""
        self.scale = scale = self.weight_of(torch.as_tensor(weight, dtype=torch.float64))
        return scale

    def rest(self, summed: Summed) -> float | Tensor:
        """What the summed gradients still have to be divided by, from the totals over ranks."""
        if self.is_weight_known and isinstance(summed.weights, Tensor):
            return 1.0  # `_divide` compares
        return self.weight_of(summed.weight) / (1.0 if self.scale is None else self.scale)

    @property
    def is_weight_known(self) -> bool:
        """Whether the weight of the global batch is the number of its samples, for which all losses were scaled.

        All ranks see that alike. It is not known if a collate function may have dropped samples.
        """
        return self._counts_all and not isinstance(self.scale, Tensor) and self.scale == self._samples

    @property
    def samples(self) -> int:
        """In the global batch, if that is its weight by the form of all losses so far; else 0."""
        return self._samples if self._plain and self.divisor is None else 0

    def start(self) -> Finish:
        """Start to add up the totals over ranks, the first time with what this one has to say."""
        said = [*self._votes(), *(self._order.hashes() if self._order else ())] if self.divisor is None else []
        if self._world.size > 1:
            self._said_scale = float(self.scale or 0)
            said.append(self._said_scale)
        return start_totals(self._losses, self._weights, said, self._world)

    def put_off(self, finish: Finish) -> float:
        """Wait for the totals in `await_totals` only; the rest, as each of the `samples` weighs 1."""
        self._awaited = finish
        return 1.0

    def await_totals(self, enter: Callable[[Phase], object], way_out: str) -> None:
        """Wait for the totals that were put off, after the update.

        Raises:
            TrainingError: they are not what this rank went by; ToldElsewhere if another rank says what is wrong.
        """
        if self._awaited is None:
            return
        enter(Phase.SYNC)
        wait, self._awaited, samples = self._awaited, None, self.samples
        finite_here = all(math.isfinite(float(loss)) for loss in self._losses)
        try:
            if not math.isfinite(self.take(now(wait().totals), late=True)):
                if finite_here:
                    raise ToldElsewhere("another rank tells whose loss is not finite", ExitCode.NOT_FINITE)
                # that host may have left already: each rank speaks for itself
                raise stopped(losses_not_finite(self.seen, self._where, by_itself(self._world)), way_out, late=True)
            if self.result.weight != samples:
                raise TrainingError(
                    code="loss-weight-wrong", place=self._where, weight=self.result.weight, samples=samples
                )
        except BaseException:
            enter(Phase.OPTIMIZER)  # whoever looks at the phase must not take the step for one that has not begun
            raise

    def take(self, totals: Totals, *, late: bool = False) -> float:
        """Take note of what all ranks have said, and give the mean loss. Raises if they do not agree.

        `late`: parameters have changed already.
        """
        *said, scales = totals.votes if self._world.size > 1 else (*totals.votes, 0.0)
        if self.divisor is None:
            self.result.votes = Votes(*said[: len(Votes._fields)])
            if self._order is not None:
                self._order.check(said[len(Votes._fields) :], self._where, late=late)
        if self._world.size > 1 and scales != self._said_scale * self._world.size:
            raise told_once(UsageError(code="loss-forms-differ", place=self._where), self._world)
        loss, self.result.weight = self._divide(totals.sums)
        self.result.loss += loss
        return loss

    def weight_of(self, weight: float | Tensor) -> float | Tensor:
        """From the weight in the totals over ranks, what sums of losses are divided by."""
        known = 1.0 if self._reduction == "sum" else self._counted_before
        return weight if known is None else known

    def _divide(self, sums: Sequence[float]) -> tuple[float, float]:
        """From the totals over ranks the mean loss and its weight; a new round begins.

        Raises:
            UsageError: on one rank, if all weights are zero; ToldElsewhere on the others.
        """
        loss_total, weight_total = sums
        if self._counted_before is not None:
            weight_total = self._counted_before
        if weight_total == 0:
            raise told_once(UsageError(code="loss-weights-zero", place=self._where), self._world)
        if self.is_weight_known and weight_total != self._samples:
            raise TrainingError(code="loss-weight-wrong", place=self._where, weight=weight_total, samples=self._samples)
        self.divisor = weight_total
        known = self._reduction == "sum" or self.scale is None or isinstance(self.scale, Tensor)
        self.was_scaled = known or self.scale == weight_total
        self.in_round, self._is_counted = 0, True
        if self._one_each:
            self.scale, self.is_guess = None, False
        return loss_total / weight_total, weight_total

    @property
    def _counted_before(self) -> float | None:
        """The weight of this round, if it was counted with the first."""
        return None if self._one_each else self.divisor

    def _begin_round(self) -> None:
        """Of each virtual rank, the sum of its weighted losses, and of their weights."""
        self._losses: list[float | Tensor] = [0.0] * self._virtual_ranks
        self._weights: list[float | Tensor] = [0.0] * self._virtual_ranks
        self._is_counted = False  # whether they are those of a round that is over

    def _add(self, virtual_rank: int, weighed: Weighed, is_nothing: bool) -> None:
        """Add the weighted sum of a loss, and in a round's first backward its weight. A mean of nothing is NaN."""
        if virtual_rank >= self._virtual_ranks:
            raise UsageError(code="wrong-virtual-ranks", virtual_rank=virtual_rank, rows=self._virtual_ranks)
        if not is_nothing:
            before = self._losses[virtual_rank]
            self._losses[virtual_rank] = weighed.added_to(before) if self._on_device else before + weighed.sum()
        if not self.in_round:
            weight = weighed.weight
            self._weights[virtual_rank] += (
                weight.double() if isinstance(weight, Tensor) and self._on_device else float(weight)
            )


def near(number: float) -> float:
    """The power of two next to a positive number; 1 for 0."""
    return 2.0 ** round(math.log2(number)) if number > 0 else 1.0
