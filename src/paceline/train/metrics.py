"""What an evaluation counts: a state of each metric for each virtual rank, from which comes one result.

A state belongs to a virtual rank, never to a process: all ranks get all states, and combine them in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.collectives.tree import tree_sum
from paceline.errors import UsageError
from paceline.nested import mapped
from paceline.tasks.metric import AnyMetric, Metric, PerSample, is_torchmetric, made, several
from paceline.tasks.task import Loss
from paceline.train.step import weighted_losses

States = dict[str, list[Any]]
"""Of each metric, by name: [virtual rank, state] for each that has samples here."""


def tallies(loss: Loss, metrics: Mapping[str, AnyMetric], device: torch.device) -> dict[str, Tally]:
    """Of the loss and each metric, by the name of its result. Metrics of torchmetrics are copied."""
    found: dict[str, Tally] = {"loss": OfStates(_of_loss(loss))}
    for name, metric in metrics.items():
        for part, one in several(made(name, metric)).items():
            whole = f"{name}/{part}" if part else name
            if is_torchmetric(one):
                found[whole] = OfTorchmetrics(deepcopy(one).to(device))
            else:
                found[whole] = OfStates(one if isinstance(one, Metric) else _of_samples(name, one))
    return found


def states_of(found: Mapping[str, Tally]) -> States:
    """What this rank has counted."""
    return {name: [[v, state] for v, state in tally.states.items()] for name, tally in found.items()}


def scores(found: Mapping[str, Tally], told: Sequence[States], samples: int, virtual_ranks: int) -> dict[str, float]:
    """The results by name, from the states of all ranks, on data of `samples` samples.

    Raises:
        UsageError: if one is no number.
    """
    order = dealt(samples, virtual_ranks)
    numbers: dict[str, float] = {}
    for name, tally in found.items():
        states = {v: state for of_rank in told for v, state in of_rank[name]}
        try:
            result = tally.result([states.get(v) for v in range(virtual_ranks)], order)
        except Exception as error:
            error.add_note(f"This is metric {name!r}, computed for {samples} samples.")
            raise
        numbers |= _numbers(name, result)
    return numbers


def _numbers(name: str, result: Any) -> dict[str, float]:
    if isinstance(result, Mapping):
        return {key: number for part, one in result.items() for key, number in _numbers(f"{name}/{part}", one).items()}
    if isinstance(result, Tensor) and result.ndim == 1 and len(result) > 1:  # one for each class, say
        return {f"{name}/{i}": float(number) for i, number in enumerate(result)}
    try:
        return {name: float(result)}
    except (TypeError, ValueError, RuntimeError):
        kind = f"tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise UsageError(code="metric-not-a-number", name=name, kind=kind) from None


def _of_loss(loss: Loss) -> Metric:
    def update(outputs: Any, targets: Any) -> dict[str, Tensor]:
        losses, weights = weighted_losses(loss, outputs, targets)
        if weights is None:
            weights = torch.ones_like(losses)
        return {"sum": (losses * weights).sum(), "weight": weights.sum()}

    return Metric(update, _mean)


def _of_samples(name: str, metric: PerSample) -> Metric:
    def update(outputs: Any, targets: Any) -> dict[str, Any]:
        values = metric(outputs, targets)
        if values.ndim == 0:
            raise UsageError(code="metric-of-batch", name=name)
        return {"sum": values.sum(), "weight": values.numel()}

    return Metric(update, _mean)


def _mean(total: dict[str, Tensor]) -> Tensor:
    return total["sum"] / total["weight"]


class OfStates:
    """Of a Metric. `states` are by virtual rank."""

    def __init__(self, metric: Metric) -> None:
        self._metric, self.states = metric, dict[int, Any]()
        # rows are kept in lists of what each batch gave: what adds numbers joins lists
        self._combine = metric.combine if callable(metric.combine) else partial(_each, operator.add)

    def add(self, virtual_rank: int, outputs: Any, targets: Any) -> None:
        """Count a batch, the next of this virtual rank's."""
        state = _each(torch.as_tensor, self._metric.update(outputs, targets))
        if self._metric.combine == "sum":
            state = _each(Tensor.double, state)
        elif self._metric.combine == "concatenate":
            state = _each(_listed, state)
        self.states[virtual_rank] = self._joined(self.states.get(virtual_rank), state)

    def result(self, states: Sequence[Any], order: Tensor) -> Any:
        """What it comes to, from the states of all virtual ranks, None for one without samples.

        `order` is the sample at each row, (N,), where the states' rows, one after another, are one for each sample.
        """
        total = tree_sum({(v, v + 1): state for v, state in enumerate(states)}, self._joined, len(states))
        if self._metric.combine == "concatenate":
            total = _each(partial(in_order, order=order), total)
        return self._metric.compute(mapped(total, Tensor.cpu))

    def _joined(self, one: Any, other: Any) -> Any:
        return other if one is None else one if other is None else self._combine(one, other)


def _each(change: Callable[..., Any], *states: Any) -> Any:
    """`change` of a state's parts, where it has several; of two states, each with its like."""
    if isinstance(states[0], Mapping):
        return {name: change(*(state[name] for state in states)) for name in states[0]}
    return change(*states)


def _listed(rows: Tensor) -> list[Tensor]:
    return [torch.atleast_1d(rows)]


def dealt(samples: int, shares: int) -> Tensor:
    """(samples,) int64: which sample is at each row, where they are dealt to `shares`, and these put together."""
    return torch.cat([torch.arange(samples)[share::shares] for share in range(shares)])


def in_order(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """The rows of all parts, each at its place in `order`; as they come, where they are not as many."""
    rows = torch.cat([*parts])
    if len(rows) != len(order):
        return rows
    found = torch.empty_like(rows)
    found[order.to(rows.device)] = rows
    return found


class OfTorchmetrics:
    """Of an object of torchmetrics, whose states belong to virtual ranks as elsewhere to processes."""

    def __init__(self, metric: nn.Module) -> None:
        self._metric: Any = metric
        self.states: dict[int, Any] = {}

    def add(self, virtual_rank: int, outputs: Any, targets: Any) -> None:
        """As above."""
        if virtual_rank not in self.states:
            self._metric.reset()
        self._metric.update(outputs, targets)
        self.states[virtual_rank] = state_of(self._metric)

    def result(self, states: Sequence[Any], order: Tensor) -> Any:
        """As above."""
        return result_of(self._metric, [state for state in states if state is not None], order)


def state_of(metric: nn.Module) -> dict[str, Any]:
    """The states of an object of torchmetrics and of those in it, by path and name, and how often each was updated."""
    return {
        path: {"updates": part.update_count, "states": {k: _kept(v) for k, v in part.metric_state.items()}}
        for path, part in _parts(metric).items()
    }


def result_of(metric: nn.Module, states: Sequence[dict[str, Any]], order: Tensor | None = None) -> Any:
    """What `metric` computes from several states, joined as it says itself (dist_reduce_fx); it stays as it is.

    Raises:
        UsageError: for a mean of states that differ, and if none was updated.
    """
    states = [state for state in states if any(of_part["updates"] for of_part in state.values())]
    if not states:
        raise UsageError(code="metric-not-updated", metric=type(metric).__name__)
    metric = deepcopy(metric)
    for path, part in _parts(metric).items():
        part.reset()
        part.distributed_available_fn = lambda: False  # what it would sync is joined here
        part._update_count = sum(state[path]["updates"] for state in states)
        for name, reduce in part._reductions.items():
            values = [state[path]["states"][name] for state in states]
            setattr(part, name, _reduced(f"{type(part).__name__}.{name}", values, reduce, order))
    return metric.compute()  # pyright: ignore[reportCallIssue]


def _parts(metric: nn.Module) -> dict[str, Any]:
    return {path: part for path, part in metric.named_modules() if is_torchmetric(part)}


def _kept(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state  # reset clears the list itself


def _reduced(name: str, values: list[Any], reduce: Callable[..., Any] | None, order: Tensor | None) -> Any:
    """One state from several, as torchmetrics joins those of processes."""
    if isinstance(values[0], list):
        rows = [row for value in values for row in value]
        joined = reduce(rows) if rows and reduce is not None else rows
        if isinstance(joined, Tensor) and joined.ndim and order is not None:
            joined = in_order([joined], order)
        return joined
    if len(values) == 1:
        return values[0]
    if getattr(reduce, "__name__", "").endswith("mean") and not all(torch.equal(values[0], v) for v in values):
        raise UsageError(code="metric-averaged", name=name)
    stacked = torch.stack(values)
    return stacked if reduce is None else reduce(stacked)


Tally = OfStates | OfTorchmetrics
