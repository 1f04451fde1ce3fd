"""The computation of one micro-batch in a loop body: its backwards, optimizer steps and losses."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from msgspec import Struct, field
from torch import Tensor

from paceline.collectives.control import device_constant
from paceline.data.loader import MicroBatch
from paceline.data.plan import MicroBatchPlan
from paceline.errors import UsageError
from paceline.stepping.hooks import graph_nodes

Reduction = Literal["mean", "sum"]
HALF_PRECISION = (torch.float16, torch.bfloat16)
TORCH_NO_REDUCTION, TORCH_MEAN_REDUCTION = 0, 1  # torch's numbers of reduction="none" and "mean"
# names of torch's functions in a graph
TARGET_FUNCTIONS = ("NllLossBackward0", "NllLoss2DBackward0")
REDUCING_FUNCTIONS = (
    *TARGET_FUNCTIONS, "MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0",
    "BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0",
)  # fmt: skip
SCALING_FUNCTIONS = ("MulBackward0", "DivBackward0")
SIMPLE_FUNCTIONS = ("NegBackward0", "MulBackward1")  # the latter in C++, for example in label smoothing
ADDING_FUNCTIONS = ("AddBackward0", "SubBackward0")
LINEAR_FUNCTIONS = (*SCALING_FUNCTIONS, *ADDING_FUNCTIONS)
NONLINEAR_FUNCTIONS = (
    "SqrtBackward0", "PowBackward0", "ExpBackward0", "LogBackward0", "Log10Backward0", "LinalgVectorNormBackward0",
)  # fmt: skip


class MicroStep(Struct):
    """The state of the micro-batch that a loop body computes."""

    batch: MicroBatch
    work: MicroBatchPlan
    """its samples"""
    is_last: bool
    """of this rank's micro-batches, in one pass"""
    learning_rates: list[float]
    """learning rates at its start, if it is not the last"""
    phase: int = 0
    """number of finished parts, each with backwards and optimizer steps"""
    weights: list[float | Tensor] = field(default_factory=list[float | Tensor])
    """of each backward"""
    stepped_optimizers: list[int] = field(default_factory=list[int])
    """numbers of the optimizers whose `step` was called, in order"""
    has_stepped: bool = False
    """whether an optimizer has stepped since the last backward"""
    has_failed: bool = False
    """whether a backward has begun and not ended"""
    is_alone: bool = False
    """whether the step has no other micro-batch on any rank: then weights have no effect"""

    @property
    def samples(self) -> int:
        """Number of samples of the batch; a collate function may have dropped some."""
        samples = self.batch.samples
        if samples is not None and samples < 0 and self.is_alone:
            samples = None
        if samples is not None and samples < 0:
            raise UsageError(code="samples-not-counted", samples=len(self.work.indices))
        has_samples = self.work.is_counted or self.work.is_repeated
        return (self.work.indices.numel() if samples is None else samples) * has_samples

    @property
    def completed_calls(self) -> tuple[int, tuple[int, ...]]:
        """Number of backwards and the optimizers that stepped. They must be equal for all micro-batches of a step."""
        return len(self.weights), tuple(self.stepped_optimizers)

    @property
    def completed_calls_text(self) -> str:
        return f"{len(self.weights)} backward and {len(self.stepped_optimizers)} optimizer.step()"


class MeanDivisor(Struct, frozen=True):
    """What a mean was divided by."""

    count: float | Tensor
    has_weight: bool = False
    """whether torch counted targets, and the loop gave their weight; otherwise they may not belong to samples"""


def find_mean_divisors(loss: Tensor, micro_step: MicroStep, weight: float | Tensor | None) -> list[MeanDivisor | None]:
    """What the last functions of torch divided each term of `loss` by; None if it is not known.

    Targets that are ignored do not count. With class weights it is the sum of the weights of the targets.
    """
    local = 0 if (micro_step.batch.samples or 0) < 0 else micro_step.samples
    terms, waiting = list[Any](), [loss.grad_fn]
    while waiting:
        node, divisor, _ = _without_constants(term := waiting.pop())
        # a sum that is divided by the samples may have a term for each sample
        if type(node).__name__ in ADDING_FUNCTIONS and (divisor is None or divisor not in (local, weight)):
            waiting += [function for function, _ in node.next_functions if function is not None]
        else:
            terms.append(term)
    return [_find_mean_divisor(term, local, micro_step, weight is not None, len(terms) == 1) for term in terms]


def _find_mean_divisor(
    term: Any, local: int, micro_step: MicroStep, has_weight: bool, is_only: bool
) -> MeanDivisor | None:
    node, divisor, factor = _without_constants(term)
    if _is_of_one_tensor(node) or factor == 0:
        return None  # a penalty
    whole = micro_step.work.global_samples
    is_part = micro_step.work.is_counted and 0 < local < whole
    if is_only and is_part and local > 1 and _is_nonlinear(node, local):
        raise UsageError(code="loss-not-linear", function=type(node).__name__.removesuffix("Backward0"))
    shape, is_mean = _reduced(node)
    if not shape:
        return None
    if is_part and not has_weight:
        is_of_whole = divisor == whole and whole not in _partial_products(shape)
        is_sum = shape[0] == local and not is_mean
        # a vector may be the losses of several tasks, not of samples; weights of elements may divide by their number
        before = node.next_functions[0][0]
        is_scaled = type(before).__name__ in SCALING_FUNCTIONS and None in (f for f, _ in before.next_functions)
        is_bare_sum = is_sum and divisor is None and not is_scaled
        is_bare_sum = is_bare_sum and (len(shape) > 1 or type(node).__name__ in REDUCING_FUNCTIONS)
        # a term of few parameters may be a penalty
        is_bare_sum = is_bare_sum and (is_only or sum(hasattr(n, "variable") for n in graph_nodes(node)) > 2)
        is_share_of_mean = is_mean and isinstance(factor, int) and factor == local > 1  # len(x); 1.0 is no count
        if is_bare_sum or (is_of_whole and (is_sum or is_share_of_mean)):
            raise UsageError(code="loss-is-sum", samples=local, whole=whole)
    if is_mean and type(node).__name__ in TARGET_FUNCTIONS:
        count = _saved(node, "total_weight")
        # in half precision the count of torch is rounded
        return None if count is None or count.dtype in HALF_PRECISION else MeanDivisor(count, has_weight)
    if local == 1:
        return None  # the mean of one sample, which may have any number of elements
    count = math.prod(shape) if is_mean else divisor
    return None if count is None else MeanDivisor(count)


def _saved(node: Any, name: str) -> Tensor | None:
    """A tensor that a function has saved. None if a hook has packed it: torch's checkpoint would compute it again."""
    is_packed = getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", None) is not None
    return None if is_packed else getattr(node, f"_saved_{name}")


def _reduced(node: Any) -> tuple[Sequence[int], bool]:
    """(the shape that a function has reduced to a mean or sum, whether it is a mean); () if it did something else."""
    name = type(node).__name__
    if name in ("MeanBackward0", "SumBackward0"):
        return node._saved_self_sym_sizes, name == "MeanBackward0"
    if name in REDUCING_FUNCTIONS and node._saved_reduction != TORCH_NO_REDUCTION:
        values = _saved(node, "self")
        return () if values is None else values.shape, node._saved_reduction == TORCH_MEAN_REDUCTION
    return (), False


def _is_nonlinear(node: Any, local: int) -> bool:
    """Whether a function is a nonlinear one of a mean or sum over this many samples."""
    if type(node).__name__ not in NONLINEAR_FUNCTIONS:
        return False
    if type(node).__name__ == "LinalgVectorNormBackward0":
        values = _saved(node, "self")
        shape = () if values is None else values.shape
    else:
        node = node.next_functions[0][0]
        while type(node).__name__ in LINEAR_FUNCTIONS and node.next_functions[1][0] is None:
            node = node.next_functions[0][0]
        shape, _ = _reduced(node)
    return bool(shape) and math.prod(shape) % local == 0


def _is_of_one_tensor(node: Any) -> bool:
    """Whether a value depends on a single parameter, and on no data."""
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return type(node).__name__ == "AccumulateGrad"


def _partial_products(shape: Sequence[int]) -> set[int]:
    """The first dimension times some of the others: a sum over the rest may be divided by it."""
    products = {shape[0]}
    for size in shape[1:]:
        products |= {product * size for product in products}
    return products


def _without_constants(node: Any) -> tuple[Any, float | None, float | None]:
    """(the last function before a division and a multiplication by constants, the divisor, the factor)."""
    constants: dict[str, float] = {}
    while (name := type(node).__name__) in (*SCALING_FUNCTIONS, *SIMPLE_FUNCTIONS) and name not in constants:
        if name in SCALING_FUNCTIONS:
            if node.next_functions[0][0] is None or node.next_functions[1][0] is not None:
                break
            if (other := _saved(node, "other")) is None:
                break
            constants[name] = other.item()
        node = node.next_functions[0][0]
    return node, constants.get("DivBackward0"), constants.get("MulBackward0")


class WeightedLoss(Struct, frozen=True):
    """A loss that was passed to `s.backward`, with its weight."""

    value: Tensor
    """() with a graph: the mean, or the sum of values"""
    factor: float | Tensor
    """the weighted sum is `value` times `factor`"""
    weight: float | Tensor
    """the sum of the weights of all micro-batches divides the weighted sum"""
    is_weight_num_samples: bool = False
    """whether the form of the loss implies that the weight is the number of samples, apart from dropped ones"""
    has_unit_sample_weights: bool = False
    """whether the form of the loss implies that each sample of the batch weighs 1"""

    def add_to(self, total: float | Tensor, *, out: Tensor | None = None) -> Tensor:
        """`total` plus the weighted sum, () float64 on the device."""
        value = self.value.detach()
        if not isinstance(total, Tensor):
            total = device_constant(value.device, total, torch.float64)
        if isinstance(self.factor, Tensor):
            return torch.add(total, value * self.factor, out=out)
        return torch.add(total, value, alpha=self.factor, out=out)


def weigh_loss(
    loss: Tensor, weight: float | Tensor | None, reduction: Reduction, micro_step: MicroStep
) -> WeightedLoss:
    """The loss with its weight, in float32 at least."""
    if not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(code="loss-not-a-tensor", kind=type(loss).__name__)
    if reduction not in ("mean", "sum"):
        raise UsageError(code="reduction-unknown", value=reduction)
    counted = micro_step.work.is_counted or micro_step.work.is_repeated
    if loss.dtype in HALF_PRECISION:
        loss = loss.float()
    if loss.numel() == 1 and (loss.ndim == 1 or micro_step.work.indices.numel() > 1):
        # a mean that kept its dimensions; or the value of one sample, which is its mean
        loss = loss.reshape(()) if loss.ndim else loss
        weight = weight.reshape(()) if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    if loss.ndim == 0:
        if reduction == "sum":
            if weight is not None:
                raise UsageError(code="weight-of-sum")
            return WeightedLoss(loss, 1.0, micro_step.samples, is_weight_num_samples=True, has_unit_sample_weights=True)
        weighed = micro_step.samples if weight is None else weight.detach() if isinstance(weight, Tensor) else weight
        if isinstance(weighed, Tensor) and weighed.ndim:
            raise UsageError(code="weight-of-mean", shape=tuple(weighed.shape))
        # zeros replace the gradients of a dummy batch, so its factor only has to be finite
        plain = weight is None
        factor, of_mean = (weighed, weighed) if counted else (1.0, 0)
        return WeightedLoss(loss, factor, of_mean, is_weight_num_samples=plain, has_unit_sample_weights=plain)
    if isinstance(weight, Tensor) and weight.shape == loss.shape:
        weight = upcast_to_float32(weight)
        return WeightedLoss((loss * weight).sum(), 1.0, weight.detach().sum() if counted else 0)
    if weight is not None:
        raise UsageError(code="weight-not-of-losses", shape=tuple(loss.shape))
    if loss.ndim == 1 and micro_step.batch.samples is None and len(loss) % len(micro_step.work.indices):
        raise UsageError(code="loss-shape", shape=tuple(loss.shape), samples=len(micro_step.work.indices))
    in_row, counts = loss.ndim == 1, loss.numel() if counted else 0
    one_for_each = in_row and len(loss) == len(micro_step.work.indices)
    return WeightedLoss(loss.sum(), 1.0, counts, is_weight_num_samples=in_row, has_unit_sample_weights=one_for_each)


def upcast_to_float32(values: Tensor) -> Tensor:
    """`values` in float32 at least: in bfloat16 the sum of 257 ones is 256."""
    return values.float() if values.dtype in HALF_PRECISION else values
