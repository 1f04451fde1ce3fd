"""The totals of a step: its losses and their weights, over micro-batches and ranks, and what they are divided by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data.plan import Work
from paceline.errors import ExitCode, TrainingError, UsageError, first_few
from paceline.sessions.bodies import Body, Reduction, same
from paceline.sums import gather_words, told_once
from paceline.train.nonfinite import MAX_NAMED, NotFinite
from paceline.train.votes import Votes
from paceline.worker.world import World


@dataclass(frozen=True)
class Stepped:
    """What a step has come to, over all ranks."""

    loss: float
    votes: Votes
    left_out: NotFinite | None


class Sums:
    """Of one step."""

    def __init__(self, world: World, virtual_ranks: int, one_each: bool) -> None:
        """`one_each`: every rank computes the step in one micro-batch, so that each exchange has weights of its own."""
        self._world, self._virtual_ranks, self._one_each = world, virtual_ranks, one_each
        self.rows = self._no_rows()
        """(virtual ranks, 2) float64: of each the sum of its weighted losses, and of their weights"""
        self.divisor: float | None = None
        """the sum of all weights, once it is known"""
        self.in_round = 0
        """backwards of this body since the last exchange"""
        self._seen: list[tuple[Work, Tensor]] = []
        self._reduction: Reduction | None = None

    def count(self, total: Tensor, weighed: float | Tensor, reduction: Reduction, body: Body) -> None:
        """Add a loss and its weight to the totals. Backwards that share one division must have one weight."""
        shared = bool(body.weights) and (self.in_round > 0 or not self._one_each)
        if reduction != (self._reduction or reduction) and (shared or not self._one_each):
            raise UsageError("the losses of one step are sums and means: give each s.backward the same reduction=")
        self._reduction = reduction
        if shared and not same(weighed, body.weights[-1]):
            raise UsageError(
                f"the losses of one step have different weights, {float(body.weights[-1]):g} and {float(weighed):g}: "
                "they are divided by the sum of weights together. Give each s.backward the same weight=, or add the "
                "losses up yourself"
            )
        if body.work.counted:
            row = self.rows[body.work.virtual_rank]
            row[0] += total.detach()
            if not self.in_round:
                row[1] += weighed
            self._seen.append((body.work, total.detach()))
        self.in_round += 1
        body.weights.append(weighed)

    def divide(self, sums: Sequence[float], where: str) -> tuple[float, float]:
        """From the totals over ranks the mean loss, and what the gradients are to be divided by; a new round begins.

        Raises:
            TrainingError: on one rank, if all weights are zero; ToldElsewhere on the others.
        """
        loss_total, weight_total = sums
        if self.divisor is not None and not self._one_each:  # its weights were counted with the first
            weight_total = self.divisor
        if weight_total == 0:
            words = f"the weights of the global batch at {where} sum to 0: its mean is undefined"
            raise told_once(TrainingError(words), self._world)
        self.divisor = weight_total
        self.rows, self.in_round = self._no_rows(), 0
        return loss_total / weight_total, 1.0 if self._reduction == "sum" else weight_total

    def not_finite(self, parameters: Sequence[str], where: str) -> NotFinite:
        """Whose losses, or which `parameters`' gradients, are not finite (a collective)."""
        bad = [i for work, loss in self._seen if not bool(loss.isfinite()) for i in work.indices.tolist()]
        told = gather_words(bad, self._world)
        guilty = {rank: samples for rank, samples in enumerate(told) if samples}
        who = "; ".join(f"rank {r}: among samples {first_few([*map(str, s)], MAX_NAMED)}" for r, s in guilty.items())
        what = f"the gradient of {first_few([*parameters], 3)}" if parameters else "the loss"
        words = f"{what} is not finite at {where}" + (f"; {who}" if who else "")
        return NotFinite(words, [i for of_rank in guilty.values() for i in of_rank], min(guilty, default=0))

    def _no_rows(self) -> Tensor:
        return torch.zeros(self._virtual_ranks, 2, dtype=torch.float64, device=self._world.device)


def stopped(found: NotFinite) -> TrainingError:
    """What ends a run whose step is not finite."""
    advice = "Likely: a learning rate too high, or bad values in these samples"
    return TrainingError(f"{found.words}. The parameters are those before this step. {advice}", ExitCode.NOT_FINITE)
