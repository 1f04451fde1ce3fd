"""One optimizer step, the same for every strategy.

The gradient of the mean over the *global* batch is exact because nothing is averaged on the way: each micro-batch
back-propagates its weighted *sum*, gradients are summed over micro-batches and ranks, and divided once by the total
weight. A mean of means would weigh the samples of a smaller share more. In numbers: 97 samples on 3 ranks are shares
of 33, 32 and 32; every sample's gradient enters with 1/97, not with 1/(3*33) or 1/(3*32).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.contract.evidence import Phase
from paceline.data.loader import MicroBatch
from paceline.data.plan import Work
from paceline.errors import ExitCode, TrainingError, UsageError
from paceline.nested import batch_size
from paceline.strategies.base import Replica
from paceline.sums import Totals, start_totals, told_once
from paceline.tasks.task import Loss
from paceline.train.lockstep import as_many_as_any
from paceline.train.nonfinite import NotFinite, gradients_are_finite, gradients_not_finite, losses_not_finite
from paceline.train.order import CallOrder
from paceline.train.votes import Votes

Seen = list[tuple[MicroBatch, Tensor]]
"""What this rank has computed: micro-batches and their losses."""


@dataclass(frozen=True)
class StepResult:
    """What a step did, over all ranks: the global batch's weighted loss sum, its total weight, the gradient norm."""

    loss_sum: float
    weight: float
    grad_norm: float | None
    votes: Votes = field(default_factory=Votes)
    """added up over ranks"""
    left_out: NotFinite | None = None
    """why the parameters were not changed, if they were not"""

    @property
    def loss(self) -> float:
        """The mean loss of the global batch."""
        return self.loss_sum / self.weight


def ignore(phase: Phase) -> None:
    """Do nothing."""


def train_step(
    replica: Replica,
    microbatches: Sequence[MicroBatch],
    loss: Loss,
    *,
    max_norm: float | None = None,
    votes: Callable[[], Votes] | None = None,
    enter: Callable[[Phase], object] = ignore,
    order: CallOrder | None = None,
    may_leave_out: bool = False,
) -> StepResult:
    """Take one step on this rank's micro-batches of a global batch.

    Args:
        replica: from a strategy.
        microbatches: at least one, as the loader gives them.
        loss: one value per sample, or (values, weights).
        max_norm: clip the global gradient norm to this.
        votes: asked once in the step, on all ranks or on none, for what they have to agree on between two steps; costs
            no message of its own.
        enter: told what begins.
        order: compares which collectives the ranks have called.
        may_leave_out: where the loss or a gradient is not finite, leave parameters and buffers as they are, on all
            ranks, and return, instead of raising.

    Raises:
        UsageError: if the loss does not give one value per sample, or the batches are for more virtual ranks than the
            replica.
        TrainingError: if the global loss or a gradient is not finite (on the first rank that made it so, naming ranks
            and samples), the weights are all zero, or the ranks have called different collectives; ToldElsewhere on
            the others. Parameters and buffers are still those before the step.
    """
    replica.keep_buffers()
    if replica.in_lockstep:
        microbatches = as_many_as_any(microbatches, replica.world)
    where = _position(microbatches[0].work)
    try:
        finish_totals, seen = _forward_backward(replica, microbatches, loss, votes, enter, order)
        enter(Phase.SYNC)
        summed = finish_totals()
        voted = 0 if votes is None else len(Votes._fields)
        agreed = Votes(*summed.votes[:voted])
        if order is not None:
            order.check(summed.votes[voted:], where)
        loss_total, weight_total = summed.sums
        if weight_total == 0:
            error = TrainingError(f"the loss weights of the global batch at {where} sum to 0: its mean is undefined")
            raise told_once(error, replica.world)
        known = replica.sync_gradients(torch.tensor(weight_total, dtype=torch.float64, device=replica.world.device))
        finite = math.isfinite(loss_total)
        norm = float(replica.clip_grad_norm(max_norm)) if finite and max_norm is not None else None
        if not (finite and ((norm is not None and math.isfinite(norm)) or known or gradients_are_finite(replica))):
            found = _not_finite(replica, seen, loss, loss_total, where, enter)
            if not may_leave_out:
                raise told_once(_stopped(found), replica.world, by=found.told_by)
            replica.put_back_buffers()
            return StepResult(loss_total, weight_total, None, agreed, found)
    except BaseException:
        replica.put_back_buffers()
        raise
    enter(Phase.OPTIMIZER)
    replica.optimizer.step()
    return StepResult(loss_total, weight_total, norm, agreed)


def _forward_backward(
    replica: Replica,
    microbatches: Sequence[MicroBatch],
    loss: Loss,
    votes: Callable[[], Votes] | None,
    enter: Callable[[Phase], object],
    order: CallOrder | None,
) -> tuple[Callable[[], Totals], Seen]:
    """The gradients of this rank's samples, on their way; what waits for the totals, and what was computed."""
    replica.model.zero_grad(set_to_none=True)  # not the optimizer's: one that is sharded knows only its share
    # (V, 2): loss sum and weight of each virtual rank
    totals = torch.zeros(replica.virtual_ranks, 2, dtype=torch.float64, device=replica.world.device)
    seen: Seen = []
    for microbatch in microbatches:
        is_last = microbatch is microbatches[-1]
        enter(Phase.FORWARD)
        with replica.microbatch(microbatch, is_last):
            losses, weights = weighted_losses(loss, replica.module(microbatch.inputs), microbatch.targets)
            loss_sum = losses.sum() if weights is None else (losses * weights).sum()
            if microbatch.work.counted:
                row = _row(totals, microbatch.work)
                row[0] += loss_sum.detach()
                row[1] += losses.numel() if weights is None else weights.detach().sum()
                seen.append((microbatch, losses.detach()))
            if is_last:
                said = [*(votes() if votes else ()), *(order.hashes() if order else ())]
                finish_totals = start_totals(totals, said)  # travels during backward
            enter(Phase.BACKWARD)
            loss_sum.backward()
    return finish_totals, seen  # pyright: ignore[reportPossiblyUnboundVariable]


def _row(totals: Tensor, work: Work) -> Tensor:
    if work.virtual_rank >= len(totals):
        raise UsageError(
            f"a micro-batch of virtual rank {work.virtual_rank} for a replica of {len(totals)}: give the strategy the "
            "plan's number, virtual_ranks=plan.virtual_ranks"
        )
    return totals[work.virtual_rank]


def weighted_losses(loss: Loss, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
    """Call `loss` and check what it gives: losses (B, ...) and weights of the same shape, or None for all ones.

    In float32 at least: in bfloat16 the sum of 257 ones is 256.

    Raises:
        UsageError: if there is not one loss per sample, or losses and weights differ in shape.
    """
    result = loss(outputs, targets)
    losses, weights = result if isinstance(result, tuple) else (result, None)
    batch = batch_size(targets)
    if losses.ndim == 0 or (batch is not None and len(losses) != batch):
        raise UsageError(
            f"the loss gave a tensor of shape {tuple(losses.shape)} for {batch or 'several'} samples, but must give "
            f"one value per sample, shape (B,) or (B, T): a mean over a rank's share cannot be turned into the mean "
            f"over all ranks when shares differ. With torch's losses say reduction='none', e.g. "
            f"F.cross_entropy(outputs, targets, reduction='none')."
        )
    if weights is not None and weights.shape != losses.shape:
        raise UsageError(f"losses have shape {tuple(losses.shape)}, but their weights {tuple(weights.shape)}")
    return _added_in(losses), None if weights is None else _added_in(weights)


def _added_in(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _not_finite(
    replica: Replica, seen: Seen, loss: Loss, loss_total: float, where: str, enter: Callable[[Phase], object]
) -> NotFinite:
    """Who made it so (a collective)."""
    if not math.isfinite(loss_total):
        return losses_not_finite(replica, seen, where)

    def forward(inputs: Any, targets: Any) -> Tensor:
        losses, weights = weighted_losses(loss, replica.model(inputs), targets)
        return losses.sum() if weights is None else (losses * weights).sum()

    replica.put_back_buffers()
    batches = [microbatch for microbatch, _ in seen]
    return gradients_not_finite(replica, batches, forward, where, partial(enter, Phase.BACKWARD))


def _stopped(found: NotFinite) -> TrainingError:
    return TrainingError(
        f"{found.words}. The parameters are still those before this step. Likely: a learning rate too high, or bad "
        "values in these samples. --not-finite skip leaves such steps out.",
        ExitCode.NOT_FINITE,
    )


def _position(work: Work) -> str:
    return f"epoch {work.epoch + 1}, step {work.step + 1} of that epoch"
