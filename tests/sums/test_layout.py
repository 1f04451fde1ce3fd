"""Where the copy of a gradient lies."""

import torch
from torch import nn

from paceline.sums.layout import laid_out


def test_a_gradient_with_other_strides_is_copied_on_its_own_device() -> None:
    meta = torch.device("meta")  # has no memory, but is another device than the default
    parameter = nn.Parameter(torch.empty(4, 3, device=meta))
    found = laid_out(torch.empty(3, 4, device=meta).T, parameter, (3, 1))
    assert found is not None and found.device == meta and found.stride() == (3, 1)
