"""Gradients are packed and laid out as described."""

import pytest
import torch
from torch import nn

from paceline.collectives.buckets import ALIGNED_BYTES, convert_to_layouts, pack, packed_size, unpack


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_each_gradient_is_aligned_as_autograds_own_are(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(*shape, dtype=dtype)) for shape in ((2, 3), (5,), (64,), (1,))]
    grads = [torch.full_like(p, i + 1) for i, p in enumerate(parameters)]
    flat = pack(parameters, [*grads[:3], None])
    assert len(flat) == packed_size(parameters)
    unpack(flat, parameters, [True, True, True, False])
    for parameter, grad in zip(parameters[:3], grads, strict=False):
        assert parameter.grad is not None and parameter.grad.equal(grad)
        assert parameter.grad.data_ptr() % ALIGNED_BYTES == 0
    assert parameters[3].grad is None


def test_a_gradient_with_other_strides_is_copied_on_its_own_device() -> None:
    meta = torch.device("meta")  # has no memory, but is another device than the default
    parameter = nn.Parameter(torch.empty(4, 3, device=meta))
    (found,) = convert_to_layouts([torch.empty(3, 4, device=meta).T], [parameter.dtype], [((4, 3), (3, 1))]) or [None]
    assert found is not None and found.device == meta and found.stride() == (3, 1)
