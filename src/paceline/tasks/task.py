"""A task is what a user brings: a model, data and a loss, which know nothing of ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from paceline.errors import UsageError
from paceline.tasks.metric import AnyMetric, Metric, is_torchmetric, takes

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
"""(outputs, targets) -> one loss per sample, shape (B, ...), or (losses, weights) of equal shapes (B, ...)."""
NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Moment:
    """A training between two steps. On every rank the same, but for `rank`."""

    step: int
    """optimizer steps done"""
    total_steps: int
    """of the run; 0 where nobody knows, of passes over a stream"""
    epoch: int
    """that step's, from 0"""
    loss: float
    """mean of that step's global batch"""
    lr: float
    grad_norm: float | None
    """global, before clipping; None where nothing is clipped"""
    metrics: Mapping[str, float]
    """of the newest evaluation; empty before the first"""
    model: nn.Module
    """the plain model; under fsdp its parameters are shares"""
    rank: int
    world_size: int
    stop: Callable[[], None]
    """end the training after the next step, on all ranks, as if that had been its last; one rank may ask alone"""


Callback = Callable[[Moment], object]


@dataclass(frozen=True)
class Task:
    """A single-device training, ready to be run on any number of ranks.

    The loss must not average: paceline sums over samples (or tokens: losses and weights of shape (B, T)), over
    micro-batches and over ranks, and divides once by the total weight. Only so is an uneven batch weighted right.
    """

    make_model: Callable[[], nn.Module]
    make_dataset: Callable[[Any], Dataset[Any]]
    """of a Split the dataset of (input, target) pairs, or dicts, which are both; the same on every rank. Map-style; to
    train on, also a stream"""
    loss: Loss
    metrics: Mapping[str, AnyMetric] = field(default_factory=dict[str, AnyMetric])
    """by name; see AnyMetric"""
    collate: Callable[[list[Any]], Any] | None = None
    """samples -> batch, by default torch's default_collate"""
    splits: Sequence[Split] = ("train", "test")
    """which there are; "validation", if there is one, is evaluated on the way, and "test" then only at the end"""
    on_step: Callback | None = None
    """called on every rank after each step, with a Moment: numbers of the step, the model, a way to stop"""
    on_evaluation: Callback | None = None
    """called on every rank after each evaluation"""
    on_end: Callback | None = None
    """called on every rank when the last step is done and the weights are saved"""
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None
    """model -> its optimizer, with any groups of parameters; by default what --optimizer, --lr, ... say"""
    make_schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    """(optimizer, steps of the run) -> a scheduler of torch, stepped after each update; by default what --schedule
    says, or beside make_optimizer none: learning rates stay as the optimizer's groups have them"""
    parallelize: Callable[[nn.Module], Mapping[str, str]] | None = None
    """model -> how its layers are cut with --mesh tensor=N, by name or pattern of modules: colwise, rowwise, qkv
    (queries, keys and values side by side), heads (nn.MultiheadAttention), vocabulary (nn.Embedding), whole; what it
    does not name is cut as found"""

    def __post_init__(self) -> None:
        kind = type(self.make_model).__name__
        if isinstance(self.make_model, nn.Module):
            raise UsageError(code="make-model-is-a-model", kind=kind)
        if isinstance(self.make_dataset, (Dataset, DataLoader)):
            kind = type(self.make_dataset).__name__
            raise UsageError(code="make-dataset-is-a-dataset", kind=kind)
        given: dict[str, Any] = {"make_model": self.make_model, "make_dataset": self.make_dataset, "loss": self.loss}
        given |= {f"metrics[{name!r}]": metric for name, metric in _named(self.metrics).items()}
        optional = ("collate", "on_step", "on_evaluation", "on_end", "make_optimizer", "make_schedule", "parallelize")
        given |= {name: getattr(self, name) for name in optional if getattr(self, name) is not None}
        for name, value in given.items():
            if not callable(value) and not isinstance(value, Metric):
                raise UsageError(code="task-not-a-function", name=name, kind=type(value).__name__)
        if not takes(self.make_model, 0):
            raise UsageError(code="make-model-arguments")
        if not takes(self.make_dataset, 1):
            raise UsageError(code="make-dataset-arguments")
        if self.make_optimizer is not None and not takes(self.make_optimizer, 1):
            raise UsageError(code="make-optimizer-arguments")
        if self.make_schedule is not None and not takes(self.make_schedule, 2):
            raise UsageError(code="make-schedule-arguments")
        if not isinstance(self.splits, (tuple, list)) or not {"train"} < {*self.splits} <= {*SPLITS}:
            raise UsageError(code="task-splits", value=self.splits)


def _named(metrics: Any) -> Mapping[str, Any]:
    if not isinstance(metrics, Mapping) and not (is_torchmetric(metrics) and hasattr(metrics, "items")):
        raise UsageError(code="metrics-not-a-table", kind=type(metrics).__name__)
    if "loss" in metrics:
        raise UsageError(code="metric-called-loss")
    return metrics


def call(model: nn.Module, inputs: Any, through: Callable[..., Any] | None = None) -> Any:
    """What `model` gives for `inputs`.

    The values of a dict are given by name where the forward takes names of its keys: only those that it takes, all of
    them with **kwargs. A forward that takes none of them, or needs something else besides, gets the dict as it is.

    Args:
        model: whose forward says what it takes.
        inputs: of a batch.
        through: what is called, if not the model itself: a strategy's wrapper of it.
    """
    called = model if through is None else through
    names = _taken(model, inputs) if isinstance(inputs, Mapping) else []
    return called(**{name: inputs[name] for name in names}) if names else called(inputs)


def _taken(model: nn.Module, inputs: Mapping[Any, Any]) -> list[str]:
    parameters = signature(model.forward).parameters
    keys = [key for key in inputs if isinstance(key, str)]
    named = {name: p for name, p in parameters.items() if p.kind in NAMED}
    if any(p.default is Parameter.empty and name not in keys for name, p in named.items()):
        return []
    takes_all = any(p.kind == Parameter.VAR_KEYWORD for p in parameters.values())
    return [key for key in keys if takes_all or key in named]
