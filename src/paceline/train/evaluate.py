"""Exact evaluation on all ranks: each sample counts once, at any world size."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.collectives.control import all_gather_tensors
from paceline.data.fingerprint import probe_indices
from paceline.data.loader import LoadingOptions, fetch_inputs_and_targets
from paceline.strategies.base import Strategy
from paceline.tasks.metric import AnyMetric
from paceline.tasks.task import Loss, call_model
from paceline.train.metrics import collect_metric_states, compute_metrics, make_accumulators


def evaluate(
    replica: Strategy, dataset: Dataset[Any], loss: Loss, metrics: Mapping[str, AnyMetric], loading: LoadingOptions, *,
    batch_size: int = 256, tick: Callable[[], object] = lambda: None,
) -> dict[str, float]:  # fmt: skip
    """Return the mean loss (weighted, if the loss has weights) and each metric on `dataset` (collective).

    Of V virtual ranks, virtual rank v evaluates the samples v, v + V, v + 2V, ... The states of their metrics are then
    combined. No sample counts twice, as it would with padding, and uneven portions have the correct weight. A metric
    with several results has the names `metric/result`. Buffers are merged over the ranks first, so all ranks evaluate
    the same model.

    Args:
        replica: the model with its strategy.
        dataset: a map-style dataset of (input, target) pairs or dicts, equal on all ranks.
        loss: returns one value per sample, (B, ...), or (values, weights) of equal shapes.
        metrics: by name: a Metric, an object of torchmetrics, a function without arguments that makes one of these, or
            a function (outputs, targets) -> (B,), whose values are averaged.
        loading: how batches are fetched. With `evaluates=True`, the next batch for a GPU is loaded ahead.
        batch_size: number of samples per forward, at most.
        tick: called after each batch of this rank. Its result is ignored. Default: nothing.

    Returns:
        The results by name, the same on all ranks. "loss" is the mean loss.

    Raises:
        UsageError: the loss or a metric of samples returns one value per batch, a result of a metric is not a number,
            or the items of the dataset are neither pairs nor dicts.
    """
    world, virtual_ranks, pipeline = replica.world, replica.virtual_ranks, replica.pipeline
    share = world.data.share(virtual_ranks)
    samples = {v: torch.arange(len(dataset))[v::virtual_ranks] for v in share}  # pyright: ignore[reportArgumentType]
    work: list[tuple[int | None, Tensor]] = [
        (v, indices) for v in share for indices in samples[v].split(batch_size) if len(indices)
    ]
    if replica.in_lockstep:  # a forward is a collective: ranks with fewer batches compute dummy batches
        sizes = [[len(range(v, len(dataset), virtual_ranks)) for v in s] for s in world.data.shares(virtual_ranks)]  # pyright: ignore[reportArgumentType]
        missing = max(sum(-(-size // batch_size) for size in rank_sizes) for rank_sizes in sizes) - len(work)
        work += [(None, torch.zeros(1, dtype=torch.int64))] * missing
    accumulators = make_accumulators(loss, metrics, world.device)
    requests = ((0, indices) for _, indices in work)
    with (
        replica.evaluated(),
        eval_mode(replica.model),
        closing(fetch_inputs_and_targets(dataset, requests, 0, loading)) as batches,
    ):
        for (virtual_rank, _), (inputs, targets) in zip(work, batches, strict=True):
            forward = partial(call_model, replica.model, inputs)
            outputs = forward() if pipeline is None else pipeline.stage.forward(forward).result
            if virtual_rank is not None and world.is_replica_leader:
                for accumulator in accumulators.values():
                    accumulator.add(virtual_rank, outputs, targets)
            tick()
        if pipeline is not None:
            pipeline.wait_for_sends()
    by_rank = all_gather_tensors(collect_metric_states(accumulators), world, "states of metrics")
    return compute_metrics(accumulators, by_rank, len(dataset), virtual_ranks)  # pyright: ignore[reportArgumentType]


def try_evaluation(
    model: nn.Module, dataset: Dataset[Any], loss: Loss, metrics: Mapping[str, AnyMetric], loading: LoadingOptions
) -> None:
    accumulators = make_accumulators(loss, metrics, loading.device)
    indices = torch.tensor(probe_indices(len(dataset)))  # pyright: ignore[reportArgumentType]
    halves = [indices[v::2] for v in range(min(2, len(indices)))]
    with eval_mode(model):
        requests = ((0, half) for half in halves)
        for v, (inputs, targets) in enumerate(fetch_inputs_and_targets(dataset, requests, 0, loading)):
            outputs = call_model(model, inputs)
            for accumulator in accumulators.values():
                accumulator.add(v, outputs, targets)
        compute_metrics(accumulators, [collect_metric_states(accumulators)], len(indices), 2)


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Switch the model to eval mode, without gradients. Afterwards restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
