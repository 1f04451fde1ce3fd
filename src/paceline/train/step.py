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
from typing import Any

import torch
from torch import Tensor

from paceline.collectives import gather_words, start_totals, told_once
from paceline.data.loader import MicroBatch
from paceline.data.plan import Work
from paceline.errors import PacelineError, TrainingError, UsageError
from paceline.strategies.base import Replica
from paceline.tasks.task import Loss

MAX_NAMED_SAMPLES = 8  # in an error message


@dataclass(frozen=True)
class StepResult:
    """What a step did, over all ranks: the global batch's weighted loss sum, its total weight, the gradient norm."""

    loss_sum: float
    weight: float
    grad_norm: float | None
    votes: list[float] = field(default_factory=list[float])
    """the sums over ranks of what each rank had to say"""

    @property
    def loss(self) -> float:
        """The mean loss of the global batch."""
        return self.loss_sum / self.weight


def train_step(
    replica: Replica,
    microbatches: Sequence[MicroBatch],
    loss: Loss,
    *,
    max_norm: float | None = None,
    votes: Callable[[], Sequence[float]] = tuple,
) -> StepResult:
    """Take one step on this rank's micro-batches of a global batch.

    Args:
        replica: from a strategy.
        microbatches: at least one, as the loader gives them.
        loss: one value per sample, or (values, weights).
        max_norm: clip the global gradient norm to this.
        votes: asked once in the step for numbers to be added up over ranks (equally many on each), which costs no
            message of its own: for what ranks have to agree on between two steps.

    Raises:
        UsageError: if the loss does not give one value per sample, or the batches are for more virtual ranks than the
            replica.
        TrainingError: if the global loss is not finite (on the first rank that made it so, naming ranks and samples)
            or the weights are all zero; ToldElsewhere on the others. The parameters are still those before the step.
    """
    replica.model.zero_grad(set_to_none=True)  # not the optimizer's: one that is sharded knows only its share
    # (V, 2): loss sum and weight of each virtual rank
    totals = torch.zeros(replica.virtual_ranks, 2, dtype=torch.float64, device=replica.world.device)
    seen: list[tuple[MicroBatch, Tensor]] = []
    for microbatch in microbatches:
        is_last = microbatch is microbatches[-1]
        with replica.microbatch(microbatch, is_last):
            losses, weights = weighted_losses(loss, replica.module(microbatch.inputs), microbatch.targets)
            loss_sum = losses.sum() if weights is None else (losses * weights).sum()
            if microbatch.work.counted:
                weight = losses.new_tensor(losses.numel()) if weights is None else weights.detach().sum()
                _row(totals, microbatch.work)[:] += torch.stack([loss_sum.detach(), weight])
                seen.append((microbatch, losses.detach()))
            if is_last:
                finish_totals = start_totals(totals, votes())  # travels during backward
            loss_sum.backward()
    summed = finish_totals()  # pyright: ignore[reportPossiblyUnboundVariable]
    loss_total, weight_total = summed.sums
    if not math.isfinite(loss_total):
        raise _not_finite(replica, microbatches[0].work, seen)
    if weight_total == 0:
        at = _position(microbatches[0].work)
        error = TrainingError(f"the loss weights of the global batch at {at} sum to 0: its mean is undefined")
        raise told_once(error, replica.world)
    replica.sync_gradients(totals.new_tensor(weight_total))
    norm = None if max_norm is None else float(replica.clip_grad_norm(max_norm))
    replica.optimizer.step()
    return StepResult(loss_total, weight_total, norm, summed.votes)


def _row(totals: Tensor, work: Work) -> Tensor:
    if work.virtual_rank >= len(totals):
        raise UsageError(
            f"a micro-batch of virtual rank {work.virtual_rank} for a replica of {len(totals)}: give the strategy the "
            "plan's number, virtual_ranks=plan.virtual_ranks"
        )
    return totals[work.virtual_rank]


def weighted_losses(loss: Loss, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
    """Call `loss` and check what it gives: losses (B, ...) and weights of the same shape, or None for all ones.

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
    return losses, weights


def batch_size(batch: Any) -> int | None:
    """The length of the first tensor in `batch`; None if there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for part in parts if (size := batch_size(part)) is not None), None)


def _not_finite(replica: Replica, work: Work, seen: Sequence[tuple[MicroBatch, Tensor]]) -> PacelineError:
    """What each rank raises when the global loss is not finite: the first rank that made it so tells (a collective)."""
    mine: list[int] = []
    for microbatch, losses in seen:
        bad = (~losses.isfinite()).reshape(len(losses), -1).any(1)  # (B,)
        mine += microbatch.work.indices[bad.cpu()].tolist()
    guilty = {rank: bad for rank, bad in enumerate(gather_words(mine, replica.world)) if bad}
    named = "; ".join(f"rank {rank}: {_samples(bad)}" for rank, bad in guilty.items())
    error = TrainingError(
        f"the loss is not finite at {_position(work)}; {named or 'each loss is finite, but not their sum'}. "
        "The parameters are still those before this step. Likely: a learning rate too high, or bad values in these "
        "samples."
    )
    return told_once(error, replica.world, by=min(guilty, default=0))


def _position(work: Work) -> str:
    return f"epoch {work.epoch + 1}, step {work.step + 1} of that epoch"


def _samples(indices: Sequence[int]) -> str:
    more = f" and {len(indices) - MAX_NAMED_SAMPLES} more" if len(indices) > MAX_NAMED_SAMPLES else ""
    return f"samples {', '.join(map(str, indices[:MAX_NAMED_SAMPLES]))}{more}"
