"""One run of a loop's body, on one micro-batch: what it has done, and the loss that it gives."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from paceline.data.loader import MicroBatch
from paceline.data.plan import Work
from paceline.errors import UsageError

Reduction = Literal["mean", "sum"]


@dataclass
class Body:
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

    @property
    def work(self) -> Work:
        """Which samples it is about."""
        return self.batch.work

    @property
    def done(self) -> tuple[int, tuple[int, ...]]:
        """What it has done: the same in all bodies of a step, or a rank's micro-batches were not treated alike."""
        return len(self.weights), tuple(self.stepped)

    @property
    def words(self) -> str:
        """What it has done."""
        return f"{len(self.weights)} backward and {len(self.stepped)} optimizer.step()"


def check_alike(body: Body, first: Body | None, rates: list[float]) -> None:
    """Refuse a body that has not done what the first one of its step did, or nothing, or has changed the `rates`.

    Raises:
        UsageError: says what each has done.
    """
    if not body.weights:
        raise UsageError(
            "a batch was taken and no s.backward(loss) called: the gradient of the global batch would lack it. To "
            "evaluate, call model.eval(), or write `with torch.no_grad():` around the loop"
        )
    if first is not None and body.done != first.done:
        raise UsageError(
            f"the micro-batches of one step were not treated alike: {first.words} in the first, "
            f"{body.words} in another. A body runs once for each micro-batch, not for each batch: count batches "
            "by s.batch, and to add up several give s.loader(..., accumulation=N)"
        )
    if rates != body.rates:
        raise UsageError(
            "the learning rate changes from micro-batch to micro-batch of one step. Give the scheduler to "
            "s.prepare(model, optimizer, scheduler): it then steps once for all of them"
        )


def weighted(
    loss: Tensor, weight: float | Tensor | None, reduction: Reduction, body: Body
) -> tuple[Tensor, float | Tensor]:
    """The loss as a sum, and its weight: (scalar with a graph, number)."""
    if not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"s.backward takes the loss as a tensor, not a {type(loss).__name__}")
    if reduction not in ("mean", "sum"):
        raise UsageError(f"s.backward(loss, reduction={reduction!r}). Choose from: mean, sum")
    loss = added_in(loss)
    samples = len(body.work.indices) if body.work.counted else 0
    if loss.ndim == 0:
        if reduction == "sum":
            if weight is not None:
                raise UsageError("s.backward(loss, weight=..., reduction='sum'): a sum is not divided by weights")
            return loss, samples
        weighed = samples if weight is None else weight.detach() if isinstance(weight, Tensor) else weight
        if isinstance(weighed, Tensor) and weighed.ndim:
            raise UsageError(
                f"weight has shape {tuple(weighed.shape)}, but the loss is one mean: its weight is one number, "
                "mask.sum() say"
            )
        # a stand-in's mean may be of nothing; what it weighs is no part of any sum
        return loss * (weighed if body.work.counted else 1), weighed if body.work.counted else 0
    if isinstance(weight, Tensor) and weight.shape == loss.shape:
        weight = added_in(weight)
        return (loss * weight).sum(), weight.detach().sum() if body.work.counted else 0
    if weight is not None:
        raise UsageError(f"the losses have shape {tuple(loss.shape)}, so their weights must be a tensor of that shape")
    return loss.sum(), loss.numel() if body.work.counted else 0


def added_in(values: Tensor) -> Tensor:
    """In float32 at least: in bfloat16 the sum of 257 ones is 256."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def same(a: float | Tensor, b: float | Tensor) -> bool:
    """Whether two weights are one number."""
    return a is b or bool(torch.as_tensor(a) == torch.as_tensor(b))
