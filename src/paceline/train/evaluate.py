"""Exact evaluation on all ranks: every sample once, at any world size."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from paceline.collectives.control import gather_tensors
from paceline.data.fingerprint import probes
from paceline.data.loader import Loading, fetch
from paceline.data.plan import ranks_share
from paceline.stepping.step import Part, as_many_parts_as_any
from paceline.strategies.base import Strategy
from paceline.tasks.metric import AnyMetric
from paceline.tasks.task import Loss, call
from paceline.train.metrics import scores, states_of, tallies


def evaluate(
    replica: Strategy,
    dataset: Dataset[Any],
    loss: Loss,
    metrics: Mapping[str, AnyMetric],
    loading: Loading,
    *,
    batch_size: int = 256,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The mean loss (over the loss's weights) and each metric, by name, on `dataset` (a collective).

    Each virtual rank takes every V-th sample, and their states are combined: no sample counts twice, as it would after
    padding, and an uneven rest is weighted right. Several numbers of a metric are named `metric/number`. Buffers are
    merged over ranks first, so all ranks evaluate one model.
    `tick` is called after each batch.
    """
    world, virtual_ranks, line = replica.world, replica.virtual_ranks, replica.pipeline
    share = ranks_share(virtual_ranks, world.data.rank, world.data.size)
    mine = {v: torch.arange(len(dataset))[v::virtual_ranks] for v in share}  # pyright: ignore[reportArgumentType]
    work: list[Part] = [(v, indices) for v in share for indices in mine[v].split(batch_size) if len(indices)]
    if replica.in_lockstep:
        work = as_many_parts_as_any(work, len(dataset), virtual_ranks, world.data, batch_size)  # pyright: ignore[reportArgumentType]
    found = tallies(loss, metrics, world.device)
    requests = ((0, indices) for _, indices in work)
    with (
        replica.evaluated(),
        evaluating(replica.model),
        closing(fetch(dataset, requests, 0, loading)) as batches,
    ):
        for (virtual_rank, _), (inputs, targets) in zip(work, batches, strict=True):
            forward = partial(call, replica.model, inputs)
            outputs = forward() if line is None else line.stage.forward(forward).result
            if virtual_rank is not None and world.leads:
                for tally in found.values():
                    tally.add(virtual_rank, outputs, targets)
            tick()
        if line is not None:
            line.settle()
    told = gather_tensors(states_of(found), world, "states of metrics")
    return scores(found, told, len(dataset), virtual_ranks)  # pyright: ignore[reportArgumentType]


def try_evaluation(
    model: nn.Module, dataset: Dataset[Any], loss: Loss, metrics: Mapping[str, AnyMetric], loading: Loading
) -> None:
    """Go through an evaluation of a few samples, as two virtual ranks, on this rank alone."""
    found = tallies(loss, metrics, loading.device)
    indices = torch.tensor(probes(len(dataset)))  # pyright: ignore[reportArgumentType]
    halves = [indices[v::2] for v in range(min(2, len(indices)))]
    with evaluating(model):
        for v, (inputs, targets) in enumerate(fetch(dataset, ((0, half) for half in halves), 0, loading)):
            outputs = call(model, inputs)
            for tally in found.values():
                tally.add(v, outputs, targets)
        scores(found, [states_of(found)], len(indices), 2)


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
