"""One run of a loop's body, on one micro-batch: what it has done, and the loss that it gives."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.collectives.control import number_on
from paceline.data.loader import MicroBatch
from paceline.data.plan import Work
from paceline.errors import UsageError

Reduction = Literal["mean", "sum"]
MEAN = 1  # torch's number of reduction="mean"


@dataclass
class MicroStep:
    """One run of the loop's body."""

    batch: MicroBatch
    is_last: bool
    """of its pass over this rank's micro-batches"""
    rates: list[float]
    """learning rates at its begin, if it is not the last"""
    phase: int = 0
    """how many parts of it, each with its backwards and steps, are over"""
    weights: list[float | Tensor] = field(default_factory=list[float | Tensor])
    """of each backward so far"""
    stepped: list[int] = field(default_factory=list[int])
    """which optimizers were asked to step, in order"""
    has_stepped: bool = False
    """since its last backward"""
    has_failed: bool = False
    """whether a backward has begun that did not end"""
    is_alone: bool = False
    """whether the step has no other, on any rank: then weights do not matter"""
    work: Work = field(init=False)
    """which samples it is about"""

    def __post_init__(self) -> None:
        self.work = self.batch.work

    @property
    def samples(self) -> int:
        """How many samples count: those that the batch has, which a collate function may have made fewer.

        Raises:
            UsageError: if that is not known.
        """
        found = self.batch.samples
        if found is not None and found < 0 and self.is_alone:
            found = None
        if found is not None and found < 0:
            raise UsageError(code="samples-not-counted", samples=len(self.work.indices))
        return (len(self.work.indices) if found is None else found) * self.work.counted

    @property
    def done(self) -> tuple[int, tuple[int, ...]]:
        """What it has done: the same in all bodies of a step, or a rank's micro-batches were not treated alike."""
        return len(self.weights), tuple(self.stepped)

    @property
    def words(self) -> str:
        """What it has done."""
        return f"{len(self.weights)} backward and {len(self.stepped)} optimizer.step()"


def check_alike(micro_step: MicroStep, first: MicroStep | None, rates: list[float]) -> None:
    """Refuse a body that has not done what the first one of its step did, or nothing, or has changed the `rates`.

    Raises:
        UsageError: says what each has done.
    """
    if not micro_step.weights:
        raise UsageError(code="no-backward")
    if first is not None and micro_step.done != first.done:
        raise UsageError(code="bodies-differ", first=first.words, other=micro_step.words)
    if rates != micro_step.rates:
        raise UsageError(code="learning-rate-in-step")


def targets_of(loss: Tensor) -> Tensor | None:
    """The number of targets over which torch's cross_entropy or nll_loss averaged `loss`; None for all other losses.

    Targets that are ignored do not count. With class weights it is the sum of the weights of the targets.
    """
    node: Any = loss.grad_fn
    if type(node).__name__ not in ("NllLossBackward0", "NllLoss2DBackward0") or node._saved_reduction != MEAN:
        return None
    return node._saved_total_weight


@dataclass(frozen=True)
class Weighed:
    """A loss as `s.backward` was given it."""

    value: Tensor
    """() with a graph: the mean, or the sum of values"""
    factor: float | Tensor
    """`value` times this is the weighted sum"""
    weight: float | Tensor
    """what the weighted sum is divided by, together with the weights of the other micro-batches"""
    by_samples: bool = False
    """whether by its form alone the weight is the number of samples, or would be if none was dropped"""
    one_for_each: bool = False
    """whether each sample of the batch weighs 1 by the form of the loss"""

    def sum(self) -> float:
        """The weighted sum, with the bits of `added_to`; on a GPU the host would wait for it."""
        if isinstance(self.factor, Tensor):
            return float(self.value.detach() * self.factor)
        return self.value.item() * self.factor

    def added_to(self, total: float | Tensor) -> Tensor:
        """The weighted sum and `total`, () float64 on the device."""
        value = self.value.detach()
        if not isinstance(total, Tensor):
            total = number_on(value.device, total, torch.float64)
        if isinstance(self.factor, Tensor):
            return total + value * self.factor
        return torch.add(total, value, alpha=self.factor)

    @property
    def is_nothing(self) -> bool:
        """Whether the loss has no weight. A weight on a GPU is not read: that would wait for the device."""
        on_host = not isinstance(self.factor, Tensor) or self.factor.device.type == "cpu"
        return on_host and float(self.factor) == 0


def weighted(loss: Tensor, weight: float | Tensor | None, reduction: Reduction, micro_step: MicroStep) -> Weighed:
    """The loss with its weight, in float32 at least."""
    if not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(code="loss-not-a-tensor", kind=type(loss).__name__)
    if reduction not in ("mean", "sum"):
        raise UsageError(code="reduction-unknown", value=reduction)
    loss, counted = added_in(loss), micro_step.work.counted
    if loss.numel() == 1 and (loss.ndim == 1 or len(micro_step.work.indices) > 1):
        # a mean that kept its dimensions; or the value of one sample, which is its mean
        loss = loss.reshape(()) if loss.ndim else loss
        weight = weight.reshape(()) if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    if loss.ndim == 0:
        if reduction == "sum":
            if weight is not None:
                raise UsageError(code="weight-of-sum")
            return Weighed(loss, 1.0, micro_step.samples, by_samples=True, one_for_each=True)
        weighed = micro_step.samples if weight is None else weight.detach() if isinstance(weight, Tensor) else weight
        if isinstance(weighed, Tensor) and weighed.ndim:
            raise UsageError(code="weight-of-mean", shape=tuple(weighed.shape))
        # a stand-in's gradients are replaced by zeros, so its factor only has to be finite
        plain = weight is None
        factor, of_mean = (weighed, weighed) if counted else (1.0, 0)
        return Weighed(loss, factor, of_mean, by_samples=plain, one_for_each=plain)
    if isinstance(weight, Tensor) and weight.shape == loss.shape:
        weight = added_in(weight)
        return Weighed((loss * weight).sum(), 1.0, weight.detach().sum() if counted else 0)
    if weight is not None:
        raise UsageError(code="weight-not-of-losses", shape=tuple(loss.shape))
    if loss.ndim == 1 and micro_step.batch.samples is None and len(loss) % len(micro_step.work.indices):
        raise UsageError(code="loss-shape", shape=tuple(loss.shape), samples=len(micro_step.work.indices))
    in_row, counts = loss.ndim == 1, loss.numel() if counted else 0
    one_for_each = in_row and len(loss) == len(micro_step.work.indices)
    return Weighed(loss.sum(), 1.0, counts, by_samples=in_row, one_for_each=one_for_each)


def sum_of_nothing(model: nn.Module) -> Tensor:
    """A loss that gives each parameter a gradient of zeros."""
    return torch.stack([p.sum().double() * 0 for p in model.parameters() if p.requires_grad]).sum()


def added_in(values: Tensor) -> Tensor:
    """In float32 at least: in bfloat16 the sum of 257 ones is 256."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def same(a: float | Tensor, b: float | Tensor) -> bool:
    """Whether two weights are one number."""
    return a is b or bool(torch.as_tensor(a) == torch.as_tensor(b))
