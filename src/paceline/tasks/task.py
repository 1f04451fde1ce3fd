"""The definition of a task: a model, data and a loss, written for a single device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from paceline.errors import UsageError
from paceline.tasks.metric import AnyMetric, Metric, accepts_positional, is_torchmetric

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
"""(outputs, targets) -> one loss per sample, shape (B, ...), or (losses, weights) of equal shapes (B, ...)."""
KEYWORD_PARAMETER_KINDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class CallbackState:
    """The state of a training after a step, for callbacks. It is equal on all ranks, except for `rank`."""

    step: int
    """The number of completed optimizer steps."""
    total_steps: int
    """The number of steps in the run; 0 if unknown (epochs over a stream)."""
    epoch: int
    """The epoch of the last step, from 0."""
    loss: float
    """The mean loss of the last global batch."""
    lr: float
    """The learning rate of the last step, of the optimizer's first parameter group."""
    grad_norm: float | None
    """The global gradient norm before clipping; None without clipping."""
    metrics: Mapping[str, float]
    """The results of the last evaluation; empty before the first one."""
    model: nn.Module
    """The plain model. With fsdp its parameters are sharded."""
    rank: int
    """The rank of this process, from 0."""
    world_size: int
    """The number of ranks."""
    stop: Callable[[], None]
    """Ends the training on all ranks after the next step, which then counts as the last one. One rank may call it."""


Callback = Callable[[CallbackState], object]


@dataclass(frozen=True)
class Task:
    """A single-device training that paceline can run on any number of ranks.

    The loss must not be a mean over the batch. paceline sums the losses of samples (or tokens: losses and weights of
    shape (B, T)) over micro-batches and ranks, and divides once by the total weight. So the samples of uneven batches
    have equal weights.
    """

    make_model: Callable[[], nn.Module]
    """Makes the model, without arguments. Each rank calls it with the same random numbers, which depend on --seed."""
    make_dataset: Callable[[Any], Dataset[Any]]
    """Split -> its dataset of (input, target) pairs or dicts (then the dict is both), equal on all ranks. The dataset
    must be map-style; the training data can also be a stream."""
    loss: Loss
    """(outputs, targets) -> one loss per sample, (B, ...), or (losses, weights) of equal shapes (B, ...)."""
    metrics: Mapping[str, AnyMetric] = field(default_factory=dict[str, AnyMetric])
    """By name; see AnyMetric."""
    collate: Callable[[list[Any]], Any] | None = None
    """Samples -> batch. Default: torch's default_collate."""
    splits: Sequence[Split] = ("train", "test")
    """The splits of the data. "validation" is evaluated during training, and then "test" at the end only."""
    on_step: Callback | None = None
    """Called on every rank after each step, with a CallbackState."""
    on_evaluation: Callback | None = None
    """Called on every rank after each evaluation."""
    on_end: Callback | None = None
    """Called on every rank after the last step, when the weights are saved."""
    make_optimizer: Callable[[nn.Module], Optimizer | Sequence[Optimizer]] | None = None
    """Model -> its optimizer, with any parameter groups, or several. Default: that of --optimizer, --lr, ..."""
    make_schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    """(optimizer, steps of the run) -> a torch scheduler, which steps after each update. Default: the schedule of
    --schedule; with make_optimizer, constant learning rates."""
    parallelize: Callable[[nn.Module], Mapping[str, str]] | None = None
    """Model -> how to shard its layers with --mesh tensor=N, by name or pattern of modules: colwise, rowwise, qkv
    (fused queries, keys and values), heads (nn.MultiheadAttention), vocabulary (nn.Embedding) or whole (not sharded).
    paceline detects the sharding of all other layers."""

    def __post_init__(self) -> None:
        type_name = type(self.make_model).__name__
        if isinstance(self.make_model, nn.Module):
            raise UsageError(code="make-model-is-a-model", kind=type_name)
        if isinstance(self.make_dataset, (Dataset, DataLoader)):
            type_name = type(self.make_dataset).__name__
            raise UsageError(code="make-dataset-is-a-dataset", kind=type_name)
        fields: dict[str, Any] = {"make_model": self.make_model, "make_dataset": self.make_dataset, "loss": self.loss}
        fields |= {f"metrics[{name!r}]": metric for name, metric in _named(self.metrics).items()}
        optional = ("collate", "on_step", "on_evaluation", "on_end", "make_optimizer", "make_schedule", "parallelize")
        fields |= {name: getattr(self, name) for name in optional if getattr(self, name) is not None}
        for name, value in fields.items():
            if not callable(value) and not isinstance(value, Metric):
                raise UsageError(code="task-not-a-function", name=name, kind=type(value).__name__)
        if not accepts_positional(self.make_model, 0):
            raise UsageError(code="make-model-arguments")
        if not accepts_positional(self.make_dataset, 1):
            raise UsageError(code="make-dataset-arguments")
        if self.make_optimizer is not None and not accepts_positional(self.make_optimizer, 1):
            raise UsageError(code="make-optimizer-arguments")
        if self.make_schedule is not None and not accepts_positional(self.make_schedule, 2):
            raise UsageError(code="make-schedule-arguments")
        if not isinstance(self.splits, (tuple, list)) or not {"train"} < {*self.splits} <= {*SPLITS}:
            raise UsageError(code="task-splits", value=self.splits)


def _named(metrics: Any) -> Mapping[str, Any]:
    if not isinstance(metrics, Mapping) and not (is_torchmetric(metrics) and hasattr(metrics, "items")):
        raise UsageError(code="metrics-not-a-table", kind=type(metrics).__name__)
    if "loss" in metrics:
        raise UsageError(code="metric-called-loss")
    return metrics


def call_model(model: nn.Module, inputs: Any, through: Callable[..., Any] | None = None) -> Any:
    """Call `model`, or `through` in its place (e.g. the wrapper of a strategy), with the inputs of a batch.

    If `inputs` is a dict, its entries become keyword arguments: those that the forward accepts, or all of them if it
    has **kwargs. If the forward accepts none of them, or requires an argument that is missing, it gets the dict.
    """
    function = model if through is None else through
    if not isinstance(inputs, Mapping):
        return function(inputs)
    parameters = signature(model.forward).parameters
    named = {name: p for name, p in parameters.items() if p.kind in KEYWORD_PARAMETER_KINDS}
    takes_all = any(p.kind == Parameter.VAR_KEYWORD for p in parameters.values())
    accepted = {key: value for key, value in inputs.items() if isinstance(key, str) and (takes_all or key in named)}
    lacks_one = any(p.default is Parameter.empty and name not in accepted for name, p in named.items())
    return function(inputs) if lacks_one or not accepted else function(**accepted)
