"""Metrics of a model on a dataset that several ranks evaluate together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from torch import Tensor

from paceline.errors import UsageError

Combine = Literal["sum", "concatenate"] | Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Metric:
    """A metric that is not a mean over samples, defined by three functions, e.g. F1, AUC or a confusion matrix.

        def counts(outputs, targets):
            predicted, actual = outputs > 0, targets > 0
            return {"both": (predicted & actual).sum(), "either": predicted.sum() + actual.sum()}

        f1 = Metric(update=counts, compute=lambda total: 2 * total["both"] / total["either"])

    The number of ranks decides how the data are split into batches. So the combined states of two batches must be equal
    to the state of both batches together. paceline combines states in a fixed order, so the result has the same bits at
    every world size.
    """

    update: Callable[[Any, Any], Any]
    """(outputs, targets) -> the state of a batch: a tensor or number, or a dict of them."""
    compute: Callable[[Any], Any]
    """(state of all data, on the CPU) -> the result: a number, or a dict of numbers."""
    combine: Combine = "sum"
    """How to combine two states. "sum": add them in float64. "concatenate": join their rows, sorted by sample if there
    is one row per sample. Or a function (state, state) -> state."""

    def __post_init__(self) -> None:
        for name, value in {"update": self.update, "compute": self.compute}.items():
            if not callable(value):
                raise UsageError(code="metric-not-a-function", name=name, kind=type(value).__name__)
        if self.combine not in ("sum", "concatenate") and not callable(self.combine):
            raise UsageError(code="metric-combine", value=self.combine)


PerSample = Callable[[Any, Any], Tensor]
"""(outputs, targets) -> one number per sample, shape (B,). The result is their mean."""
AnyMetric = Metric | PerSample | Callable[[], Any]
"""A Metric, a torchmetrics object, a function that makes one of these, or a PerSample function."""


def is_torchmetric(metric: Any) -> bool:
    """Whether it is a metric or collection of torchmetrics. paceline itself does not need torchmetrics."""
    return all(hasattr(type(metric), name) for name in ("update", "compute", "reset", "metric_state"))


def resolve_metric(name: str, metric: Any) -> Any:
    """Return `metric`, or the object that it makes if it is a function without arguments."""
    if isinstance(metric, Metric) or is_torchmetric(metric):
        return metric
    if not isinstance(metric, type) and (accepts_positional(metric, 2) or not accepts_positional(metric, 0)):
        return metric
    result = metric()
    if not isinstance(result, Metric) and not is_torchmetric(result):
        raise UsageError(code="metric-called-without", name=name, kind=type(result).__name__)
    return result


def metrics_by_name(metric: Any) -> Mapping[str, Any]:
    """The members of a torchmetrics collection, by name; for any other object a dict with key ""."""
    return dict(metric.items()) if hasattr(metric, "items") else {"": metric}


def accepts_positional(function: Callable[..., Any], count: int) -> bool:
    """Whether the function accepts `count` positional arguments; True if its signature is unknown."""
    try:
        signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # some functions implemented in C have no signature
        return True
    return True
