"""Exact evaluation on all ranks: every sample once, at any world size."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.data.loader import Loading, fetch
from paceline.data.plan import ranks_share
from paceline.errors import UsageError
from paceline.stepping.lockstep import Part, as_many_parts_as_any
from paceline.strategies.base import Replica
from paceline.sums import start_totals
from paceline.tasks.task import Loss, Metric
from paceline.train.step import weighted_losses


def evaluate(
    replica: Replica,
    dataset: Dataset[Any],
    loss: Loss,
    metrics: Mapping[str, Metric],
    loading: Loading,
    *,
    batch_size: int = 256,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The mean loss (over the loss's weights) and the mean of each metric (over samples) on `dataset`.

    Each virtual rank takes every V-th sample, and the sums are added up: no sample counts twice, as it would after
    padding, and an uneven rest is weighted right. Buffers are merged over ranks first, so all ranks evaluate one model.
    `tick` is called after each batch.
    """
    world, virtual_ranks = replica.world, replica.virtual_ranks
    share = ranks_share(virtual_ranks, world.rank, world.size)
    mine = {v: torch.arange(v, len(dataset), virtual_ranks) for v in share}  # pyright: ignore[reportArgumentType]
    work: list[Part] = [(v, indices) for v in share for indices in mine[v].split(batch_size) if len(indices)]
    if replica.in_lockstep:
        work = as_many_parts_as_any(work, len(dataset), virtual_ranks, world, batch_size)  # pyright: ignore[reportArgumentType]
    totals = torch.zeros(  # (V, 2 + 2M): sum and weight of the loss and of each metric
        virtual_ranks, 2 + 2 * len(metrics), dtype=torch.float64, device=world.device
    )
    requests = ((0, indices) for _, indices in work)
    with (
        replica.merged_buffers(),
        evaluating(replica.model),
        closing(fetch(dataset, requests, 0, loading)) as batches,
    ):
        for (virtual_rank, _), (inputs, targets) in zip(work, batches, strict=True):
            found = batch_totals(replica.model, inputs, targets, loss, metrics)
            if virtual_rank is not None:
                totals[virtual_rank] += found
            tick()
    names = ["loss", *metrics]
    sums = iter(start_totals(totals)().sums)
    return {name: total / weight for name, total, weight in zip(names, sums, sums, strict=True)}


def batch_totals(model: nn.Module, inputs: Any, targets: Any, loss: Loss, metrics: Mapping[str, Metric]) -> Tensor:
    """Sum and weight of the loss, then of each metric, over a batch: (2 + 2 metrics,) float64.

    Raises:
        UsageError: for a loss or metric that does not give one value per sample.
    """
    outputs = model(inputs)
    losses, weights = weighted_losses(loss, outputs, targets)
    if weights is None:
        weights = torch.ones_like(losses)
    totals = [(losses * weights).sum(), weights.sum()]
    for name, metric in metrics.items():
        values = metric(outputs, targets)
        if values.ndim == 0:
            raise UsageError(f"metric {name!r} must give one value per sample, shape (B,), not one for all")
        totals += [values.sum(), values.new_tensor(values.numel())]
    return torch.stack([t.double() for t in totals])


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Inside, the model is in eval mode and nothing is recorded for backward; then each module is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
