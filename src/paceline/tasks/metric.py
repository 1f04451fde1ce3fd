"""What is measured of a model beside its loss, by data that several ranks go through."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from torch import Tensor

from paceline.errors import UsageError

Combine = Literal["sum", "concatenate"] | Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Metric:
    """A number of a whole split that is no mean over its samples, in three functions: F1, AUC, a confusion matrix.

        def counts(outputs, targets):
            found, there = outputs > 0, targets > 0
            return {"both": (found & there).sum(), "either": found.sum() + there.sum()}

        f1 = Metric(update=counts, compute=lambda total: 2 * total["both"] / total["either"])

    What a batch holds depends on who evaluates it; so a state must say the same of two batches apart, once combined, as
    of both together. States are combined in a fixed order: the result has the same bits at every world size.
    """

    update: Callable[[Any, Any], Any]
    """(outputs, targets) -> the state of a batch: a tensor or number, or several by name"""
    compute: Callable[[Any], Any]
    """(state of the whole split, on the CPU) -> the result: a number, or several by name"""
    combine: Combine = "sum"
    """how two states become one: added up in float64; "concatenate": their rows in the order of the samples, where
    there is one row for each; or a function (state, state) -> state"""

    def __post_init__(self) -> None:
        for name, value in {"update": self.update, "compute": self.compute}.items():
            if not callable(value):
                raise UsageError(code="metric-not-a-function", name=name, kind=type(value).__name__)
        if self.combine not in ("sum", "concatenate") and not callable(self.combine):
            raise UsageError(code="metric-combine", value=self.combine)


PerSample = Callable[[Any, Any], Tensor]
"""(outputs, targets) -> one number per sample, shape (B,), averaged over the data."""
AnyMetric = Metric | PerSample | Callable[[], Any]
"""A Metric, a torchmetrics object, a function that makes one of these, or a number per sample."""


def is_torchmetric(metric: Any) -> bool:
    """Whether it is an object of torchmetrics, a collection too. paceline itself does not need torchmetrics."""
    return all(hasattr(type(metric), name) for name in ("update", "compute", "reset", "metric_state"))


def made(name: str, metric: Any) -> Any:
    """A Metric, a torchmetrics object or a function per sample: `metric` itself, or what it makes.

    Raises:
        UsageError: if it makes something else.
    """
    if isinstance(metric, Metric) or is_torchmetric(metric):
        return metric
    if not isinstance(metric, type) and (takes(metric, 2) or not takes(metric, 0)):
        return metric
    found = metric()
    if not isinstance(found, Metric) and not is_torchmetric(found):
        raise UsageError(code="metric-called-without", name=name, kind=type(found).__name__)
    return found


def several(metric: Any) -> Mapping[str, Any]:
    """The members of a collection of torchmetrics, by name; any other object as "" alone."""
    return dict(metric.items()) if hasattr(metric, "items") else {"": metric}


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with so many arguments, as far as it tells."""
    try:
        signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # some of C's functions do not tell
        return True
    return True
