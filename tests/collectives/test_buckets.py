"""Gradients are packed and laid out as described."""

import pytest
import torch
from tests.doubles.test_kernels import Kernels
from torch import nn

from paceline.collectives.buckets import (
    ALIGNED_BYTES,
    PackedBucket,
    agree_on_gradient_layouts,
    convert_gradients_to_layouts,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_each_gradient_is_aligned_as_autograds_own_are(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(*shape, dtype=dtype)) for shape in ((2, 3), (5,), (64,), (1,))]
    grads = [torch.full_like(p, i + 1) for i, p in enumerate(parameters)]
    bucket = PackedBucket(parameters)
    flat = bucket.pack([*grads[:3], None])
    assert len(flat) == bucket.size
    bucket.unpack(flat, [True, True, True, False])
    for parameter, grad in zip(parameters[:3], grads, strict=False):
        assert parameter.grad is not None and parameter.grad.equal(grad)
        assert parameter.grad.data_ptr() % ALIGNED_BYTES == 0
    assert parameters[3].grad is None


def channels_last(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape).contiguous(memory_format=torch.channels_last))


def test_gradients_in_memory_order_are_not_copied_one_by_one() -> None:
    parameters = [channels_last(4, 3, 2, 2), channels_last(4, 8, 1, 1), nn.Parameter(torch.zeros(5, 3))]
    grads = [torch.randn(p.shape).as_strided(p.shape, p.stride()) for p in parameters]
    grads[1] = grads[1].as_strided((4, 8, 1, 1), (8, 1, 1, 1))  # as of a convolution: the same memory
    bucket = PackedBucket(parameters, agree_on_gradient_layouts(parameters, 1))
    with Kernels() as kernels:
        bucket.unpack(bucket.pack(grads), [True] * 3)
    assert kernels.count == 1
    for parameter, grad in zip(parameters, grads, strict=True):
        assert parameter.grad is not None and parameter.grad.equal(grad)
        assert parameter.grad.stride() == parameter.stride()  # or a fused optimizer mixes up elements


def test_a_gradient_in_another_memory_order_than_agreed_keeps_its_elements() -> None:
    parameters = [channels_last(4, 3, 2, 2), nn.Parameter(torch.zeros(4, 3, 2, 2))]
    bucket = PackedBucket(parameters, agree_on_gradient_layouts(parameters, 1))
    grads = [torch.randn(4, 3, 2, 2), torch.randn(4, 2, 2, 3).permute(0, 3, 1, 2)]
    parameters[1].data = parameters[1].data.contiguous(memory_format=torch.channels_last)  # after the agreement
    bucket.unpack(bucket.pack(grads), [True, True])
    for parameter, grad in zip(parameters, grads, strict=True):
        assert parameter.grad is not None and parameter.grad.equal(grad)
        assert parameter.grad.stride() == parameter.stride()


def test_a_gradient_with_other_strides_is_copied_on_its_own_device() -> None:
    meta = torch.device("meta")  # has no memory, but is another device than the default
    parameter = nn.Parameter(torch.empty(4, 3, device=meta))
    (found,) = convert_gradients_to_layouts(
        [torch.empty(3, 4, device=meta).T], [parameter.dtype], [((4, 3), (3, 1))]
    ) or [None]
    assert found is not None and found.device == meta and found.stride() == (3, 1)
