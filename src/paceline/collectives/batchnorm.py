"""Batch normalization with the statistics of the whole global batch.

torch's SyncBatchNorm does not support CPU tensors. This one supports every device of its process group.
examples/textbook/batchnorm.py is a runnable short version with an explanation.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from paceline.collectives.torch_collectives import start_all_gather, start_all_reduce


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations (M2), per channel."""

    size: Tensor  # (), the count; `count` is a method of tuples
    mean: Tensor  # (C,)
    m2: Tensor  # (C,)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """The moments of the union of two sets, either of which may be empty.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    size = a.size + b.size
    weight = b.size / size.clamp(min=1)  # of b in the union; 0 if both are empty
    delta = b.mean - a.mean
    return Moments(size, a.mean + delta * weight, a.m2 + b.m2 + delta.square() * a.size * weight)


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the inputs of all ranks. In eval mode it is torch's batch norm.

    Input and output are (N, C, ...) in any floating dtype. N may differ between ranks and be 0. Forward and backward
    are collectives in training mode: every rank must run the same ones. The gradients of weight and bias are those of
    this rank, to be summed over ranks.

    If the inputs of all ranks are empty, they are normalized by the running statistics, which do not change. In eval
    mode with `track_running_stats=False`, each rank uses the statistics of its batch, like torch: ranks may evaluate
    different numbers of batches.

    Attributes:
        counted: False for a dummy batch. Its input is normalized by the statistics of the other ranks, is not part of
            them, and gets no gradient.
        group: the ranks that normalize together. None: all, or only this rank if there is no process group. If gradient
            buckets are sent during backward, use a separate group (`dist.new_group()`): a group matches messages by
            their order, and the order of buckets and batch norms can differ between ranks.

    Raises:
        ValueError: if an input is not (N, num_features, ...). On every rank, if all ranks together have one value per
            channel, like torch.
    """

    def __init__(self, num_features: int, *, group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.group = group
        self.counted = True

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected (N, {self.num_features}, ...), got {tuple(input.shape)}")
        is_alone = not dist.is_initialized() or dist.get_world_size(self.group) == 1
        if not self.training or (is_alone and self.counted and input.numel() > 0):
            return super().forward(input)  # nothing to exchange
        own_count = input.numel() // self.num_features if self.counted else 0
        with torch.no_grad():
            union = self._union(_moments(input, own_count))
            mean, variance = self._statistics(union, own_count)
            invstd = (variance + self.eps).rsqrt()
        numbers = mean, invstd, union.size, self.counted, self.group
        return cast(Tensor, _Normalize.apply(input, self.weight, self.bias, *numbers))

    def _check_input_dim(self, input: Tensor) -> None:
        """Accepts any (N, C, ...): one class for BatchNorm1d, 2d and 3d."""

    def _union(self, moments: Moments) -> Moments:
        """The moments of all ranks, added in rank order: every rank computes the same bits."""
        if not dist.is_initialized():
            return moments
        packed = torch.cat([moments.size.reshape(1), moments.mean, moments.m2])  # (1 + 2C,)
        zeros = torch.zeros_like(moments.mean)
        union = Moments(torch.zeros_like(moments.size), zeros, zeros)
        for row in start_all_gather(packed, "statistics of batchnorm", self.group)():
            mean, m2 = row[1:].split(self.num_features)
            union = merge_moments(union, Moments(row[0], mean, m2))
        return union

    def _statistics(self, union: Moments, own_count: int) -> tuple[Tensor, Tensor]:
        """(mean, biased variance) for the normalization, each (C,). Updates the running statistics."""
        count, mean, m2 = union
        # On a GPU, a read of `count` would wait in every layer. The union can be 0 or 1 only if this rank's count, a
        # Python number, is 0 or 1. Then the wait costs little.
        few = own_count <= 1
        if few and count == 0:
            if self.running_mean is None or self.running_var is None:
                return mean, torch.ones_like(mean)
            return self.running_mean.to(mean.dtype), self.running_var.to(mean.dtype)
        if few and count == 1:
            raise ValueError("batch norm in training needs more than 1 value per channel, all ranks together have 1")
        if self.running_mean is not None and self.running_var is not None:
            momentum = self._count_batch()
            for running, new in ((self.running_mean, mean), (self.running_var, m2 / (count - 1))):
                running.mul_(1 - momentum).add_((momentum * new).to(running.dtype))
        return mean, m2 / count

    def _count_batch(self) -> float:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        assert self.num_batches_tracked is not None
        return 1.0 / float(self.num_batches_tracked)  # the plain mean of all batches so far


def convert_sync_batchnorm(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Turn every BatchNorm1d, 2d and 3d in `module` into a SyncBatchNorm, in place; returns `module`.

    Only the class of the layers changes (as with torch's lazy layers). Parameters, buffers, names, hooks and layers
    with several names stay. An existing optimizer remains valid. TypeError, before any change, for other kinds of batch
    norm.
    """
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
    for name, layer in layers:
        if type(layer) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, SyncBatchNorm):
            raise TypeError(
                f"cannot synchronize layer {name!r}, a {type(layer).__name__}: only BatchNorm1d, BatchNorm2d and "
                "BatchNorm3d are supported. Run a forward of a lazy layer first; replace others by one of these."
            )
    for _, layer in layers:
        layer.__class__ = SyncBatchNorm
        assert isinstance(layer, SyncBatchNorm)
        layer.group, layer.counted = group, True
    return module


def _moments(input: Tensor, count: int) -> Moments:
    """The moments of (N, C, ...) over all dimensions except C; zeros for a count of 0.

    Half precision is computed in float32. The moments are float64 for the exchange: a count above 2^24 has no exact
    float32, and the union is as precise as its parts.
    """
    if count == 0:
        zeros = torch.zeros(input.shape[1], dtype=torch.float64, device=input.device)
        return Moments(zeros.new_zeros(()), zeros, zeros)
    values = _to_compute_dtype(input)
    mean = values.mean(_reduced_dims(values))
    m2 = (values - _per_channel(mean, values)).square().sum(_reduced_dims(values))
    return Moments(mean.new_full((), count, dtype=torch.float64), mean.double(), m2.double())


class _Normalize(torch.autograd.Function):
    """(input - mean) * invstd * weight + bias; mean and invstd depend on the inputs of all ranks.

    The gradient of the input, with x = input - mean, g = the output's gradient and sums over the N values of all ranks:

        weight * invstd * (g - sum(g) / N - x * invstd^2 * sum(g x) / N)

    The ranks exchange these sums. Source: Ioffe, Szegedy, "Batch Normalization", 2015, section 3.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor,
        total_count: Tensor, counted: bool, group: dist.ProcessGroup | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(input, weight, bias, mean, invstd, total_count)
        ctx.counted, ctx.group = counted, group
        values = _to_compute_dtype(input)
        scale = invstd if weight is None else invstd * weight
        output = (values - _per_channel(mean, values)) * _per_channel(scale, values)
        if bias is not None:
            output = output + _per_channel(bias, values)
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight, bias, mean, invstd, total_count = ctx.saved_tensors
        gradient = _to_compute_dtype(grad_output)
        centred = _to_compute_dtype(input) - _per_channel(mean, gradient)
        sums = torch.stack(
            [gradient.sum(_reduced_dims(gradient)), (gradient * centred).sum(_reduced_dims(gradient))]
        )  # (2, C)
        if not ctx.counted:
            sums.zero_()
        own_sum, own_product = sums.clone()
        # Always, even if this rank needs no input gradient: other ranks may need one.
        if dist.is_initialized():
            sums = start_all_reduce(sums.flatten(), "gradients of batchnorm", ctx.group)().view(2, -1)
        grad_input = torch.zeros_like(input)
        if ctx.counted:
            mean_gradient, mean_product = sums / total_count.clamp(min=1)
            scale = invstd if weight is None else invstd * weight
            through_statistics = _per_channel(mean_gradient, gradient) + centred * _per_channel(
                invstd.square() * mean_product, gradient
            )
            grad_input = ((gradient - through_statistics) * _per_channel(scale, gradient)).to(input.dtype)
        grad_weight = None if weight is None else (own_product * invstd).to(weight.dtype)
        grad_bias = None if bias is None else own_sum.to(bias.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _to_compute_dtype(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _reduced_dims(values: Tensor) -> list[int]:
    return [0, *range(2, values.dim())]


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """(C,) -> (1, C, 1, ...), in the precision of `like`."""
    return vector.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))
