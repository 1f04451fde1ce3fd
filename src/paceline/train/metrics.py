"""Accumulates the states of metrics, one per virtual rank, and computes the results.

A state belongs to a virtual rank, not to a process. All ranks receive all states and combine them in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.collectives.control import all_gather_tensors, raise_on_all_ranks
from paceline.collectives.sum_tree import tree_sum
from paceline.errors import UsageError
from paceline.nested import map_tensors
from paceline.rank.world import World
from paceline.tasks.metric import AnyMetric, Metric, PerSample, is_torchmetric, metrics_by_name, resolve_metric

if TYPE_CHECKING:
    from paceline.tasks.task import Loss

StatesByMetric = dict[str, list[Any]]
"""By metric, the pairs [virtual rank, state] of the virtual ranks that have samples on this rank."""


def make_accumulators(loss: Loss, metrics: Mapping[str, AnyMetric], device: torch.device) -> dict[str, Accumulator]:
    accumulators: dict[str, Accumulator] = {"loss": MetricAccumulator(_loss_metric(loss))}
    for name, metric in metrics.items():
        for part, member in metrics_by_name(resolve_metric(name, metric)).items():
            full_name = f"{name}/{part}" if part else name
            if is_torchmetric(member):
                accumulators[full_name] = TorchmetricsAccumulator(deepcopy(member).to(device))
            else:
                member = member if isinstance(member, Metric) else _per_sample_metric(name, member)
                accumulators[full_name] = MetricAccumulator(member)
    return accumulators


def collect_metric_states(accumulators: Mapping[str, Accumulator]) -> StatesByMetric:
    return {name: [[v, state] for v, state in a.states.items()] for name, a in accumulators.items()}


def compute_metrics(
    accumulators: Mapping[str, Accumulator], by_rank: Sequence[StatesByMetric], samples: int, virtual_ranks: int
) -> dict[str, float]:
    order = virtual_rank_order(samples, virtual_ranks)
    numbers: dict[str, float] = {}
    for name, accumulator in accumulators.items():
        states = {v: state for rank_states in by_rank for v, state in rank_states[name]}
        try:
            result = accumulator.result([states.get(v) for v in range(virtual_ranks)], order)
        except Exception as error:
            error.add_note(f"This is metric {name!r}, computed for {samples} samples.")
            raise
        numbers |= _numbers(name, result)
    return numbers


def _numbers(name: str, result: Any) -> dict[str, float]:
    if isinstance(result, Mapping):
        return {key: n for part, value in result.items() for key, n in _numbers(f"{name}/{part}", value).items()}
    if isinstance(result, Tensor) and result.ndim == 1 and len(result) > 1:  # e.g. one number for each class
        return {f"{name}/{i}": float(number) for i, number in enumerate(result)}
    try:
        return {name: float(result)}
    except (TypeError, ValueError, RuntimeError):
        kind = f"tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise UsageError(code="metric-not-a-number", name=name, kind=kind) from None


def _loss_metric(loss: Loss) -> Metric:
    from paceline.train.step import compute_losses_and_weights  # a session needs none of it

    def update(outputs: Any, targets: Any) -> dict[str, Tensor]:
        losses, weights = compute_losses_and_weights(loss, outputs, targets)
        if weights is None:
            weights = torch.ones_like(losses)
        return {"sum": (losses * weights).sum(), "weight": weights.sum()}

    return Metric(update, _mean)


def _per_sample_metric(name: str, metric: PerSample) -> Metric:
    def update(outputs: Any, targets: Any) -> dict[str, Any]:
        values = metric(outputs, targets)
        if values.ndim == 0:
            raise UsageError(code="metric-of-batch", name=name)
        return {"sum": values.sum(), "weight": values.numel()}

    return Metric(update, _mean)


def _mean(total: dict[str, Tensor]) -> Tensor:
    return total["sum"] / total["weight"]


class MetricAccumulator:
    """Accumulates a Metric. `states` has one entry for each virtual rank."""

    def __init__(self, metric: Metric) -> None:
        self._metric, self.states = metric, dict[int, Any]()
        # operator.add sums numbers, and also joins the lists in which "concatenate" keeps the rows of each batch
        self._combine = metric.combine if callable(metric.combine) else partial(_each, operator.add)

    def add(self, virtual_rank: int, outputs: Any, targets: Any) -> None:
        state = _each(torch.as_tensor, self._metric.update(outputs, targets))
        if self._metric.combine == "sum":
            state = _each(Tensor.double, state)
        elif self._metric.combine == "concatenate":
            state = _each(lambda rows: [torch.atleast_1d(rows)], state)
        self.states[virtual_rank] = self._joined(self.states.get(virtual_rank), state)

    def result(self, states: Sequence[Any], order: Tensor) -> Any:
        """Compute the result from the states of all virtual ranks (None for one without samples).

        `order` (N,) is the index of the sample in each row, after the rows of all states are concatenated.
        """
        total = tree_sum({(v, v + 1): state for v, state in enumerate(states)}, self._joined, len(states))
        if self._metric.combine == "concatenate":
            total = _each(partial(concatenate_in_sample_order, order=order), total)
        return self._metric.compute(map_tensors(total, Tensor.cpu))

    def _joined(self, left: Any, right: Any) -> Any:
        return right if left is None else left if right is None else self._combine(left, right)


def _each(change: Callable[..., Any], *states: Any) -> Any:
    """Apply `change` to a state, or to each entry of a state that is a dict. Two states are combined entry by entry."""
    if isinstance(states[0], Mapping):
        return {name: change(*(state[name] for state in states)) for name in states[0]}
    return change(*states)


def virtual_rank_order(samples: int, virtual_ranks: int) -> Tensor:
    """(samples,) int64: the sample indices in the order of virtual ranks; rank v has v, v + V, v + 2V, ..."""
    return torch.cat([torch.arange(samples)[v::virtual_ranks] for v in range(virtual_ranks)])


def concatenate_in_sample_order(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """Concatenate all parts and move row i to position `order[i]`. Keep the order if the lengths differ."""
    rows = torch.cat([*parts])
    if len(rows) != len(order):
        return rows
    in_sample_order = torch.empty_like(rows)
    in_sample_order[order.to(rows.device)] = rows
    return in_sample_order


class TorchmetricsAccumulator:
    """Accumulates a torchmetrics object. Its states belong to virtual ranks instead of processes."""

    def __init__(self, metric: nn.Module) -> None:
        self._metric: Any = metric
        self.states: dict[int, Any] = {}

    def add(self, virtual_rank: int, outputs: Any, targets: Any) -> None:
        if virtual_rank not in self.states:
            self._metric.reset()
        self._metric.update(outputs, targets)
        self.states[virtual_rank] = torchmetrics_state(self._metric)

    def result(self, states: Sequence[Any], order: Tensor) -> Any:
        return torchmetrics_result(self._metric, [state for state in states if state is not None], order)


def torchmetrics_state(metric: nn.Module) -> dict[str, Any]:
    return {
        path: {"updates": part.update_count, "states": {k: _copied(v) for k, v in part.metric_state.items()}}
        for path, part in _torchmetrics_in(metric).items()
    }


def torchmetrics_result(metric: nn.Module, states: Sequence[dict[str, Any]], order: Tensor | None = None) -> Any:
    """Compute `metric` from several states, which its `dist_reduce_fx` combines. The object does not change."""
    states = [state for state in states if any(part_state["updates"] for part_state in state.values())]
    if not states:
        raise UsageError(code="metric-not-updated", metric=type(metric).__name__)
    metric = deepcopy(metric)
    for path, part in _torchmetrics_in(metric).items():
        part.reset()
        part.distributed_available_fn = lambda: False  # no sync by torchmetrics: the states are combined here
        part._update_count = sum(state[path]["updates"] for state in states)
        for name, reduce in part._reductions.items():
            values = [state[path]["states"][name] for state in states]
            setattr(part, name, _reduced(f"{type(part).__name__}.{name}", values, reduce, order))
    return metric.compute()  # pyright: ignore[reportCallIssue]


def compute_over_ranks(metric: Any, world: World, where: tuple[int, ...] = ()) -> Any:
    """See `Session.compute`. `where`: the position of the program, which must be equal on all ranks."""
    with raise_on_all_ranks(world):
        if not is_torchmetric(metric):
            raise UsageError(code="compute-not-torchmetrics", kind=type(metric).__name__)
    members = metrics_by_name(metric)
    states = {name: torchmetrics_state(member) for name, member in members.items()}
    states_by_rank = all_gather_tensors(states, world, "states of metrics", where=where)
    with raise_on_all_ranks(world, prepares=False):
        by_name = {name: [state[name] for state in states_by_rank] for name in members}
        results = {name: torchmetrics_result(m, by_name[name]) for name, m in members.items()}
    return results.get("", results)


def _torchmetrics_in(metric: nn.Module) -> dict[str, Any]:
    return {path: part for path, part in metric.named_modules() if is_torchmetric(part)}


def _copied(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state  # reset() clears the list in place


def _reduced(name: str, values: list[Any], reduce: Callable[..., Any] | None, order: Tensor | None) -> Any:
    """Combine the states of several virtual ranks, as torchmetrics does with processes."""
    if isinstance(values[0], list):
        rows = [row for value in values for row in value]
        joined = reduce(rows) if rows and reduce is not None else rows
        if isinstance(joined, Tensor) and joined.ndim and order is not None:
            joined = concatenate_in_sample_order([joined], order)
        return joined
    if len(values) == 1:
        return values[0]
    if getattr(reduce, "__name__", "").endswith("mean") and not all(torch.equal(values[0], v) for v in values):
        raise UsageError(code="metric-averaged", name=name)
    stacked = torch.stack(values)
    return stacked if reduce is None else reduce(stacked)


Accumulator = MetricAccumulator | TorchmetricsAccumulator
