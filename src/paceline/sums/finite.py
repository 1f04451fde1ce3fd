"""Whether gradients hold an infinity or NaN: asked in every step, of every element."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.sums.buckets import by_type
from paceline.sums.pending import Pending, costs


def are_finite(gradients: Sequence[Tensor], device: torch.device) -> Pending[bool]:
    """Whether none of them, all on `device`, holds an infinity or NaN; `numbers` are [0], or [1]: perhaps one does."""
    if not gradients:
        return Pending(torch.zeros(1, dtype=torch.float64, device=device), lambda _: True)
    if not costs(device):
        # A sum is several times faster than a look at each element, and never finite where an element is not. As a
        # sum of finite elements may overflow, too, each element is then looked at.
        sums = [one.sum(dtype=torch.promote_types(one.dtype, torch.float32)) for one in gradients]
        quick = torch.stack(sums).isfinite().all()
    else:  # one kernel for many of them, and it cannot overflow
        quick = nn.utils.get_total_norm(gradients, math.inf).isfinite()
    perhaps = (~quick).double().view(1)
    return Pending(perhaps, lambda bad: not bad[0] or all(bool(gradient.isfinite().all()) for gradient in gradients))


def scaled(gradients: Sequence[Tensor], factor: Tensor, device: torch.device) -> Pending[bool]:
    """Multiply gradients, all on `device`, by the scalar `factor`; the same question of them, answered on the way."""
    # on the CPU that kernel takes as much memory again; and the factor it takes is a float32
    if not gradients or not costs(device) or any(gradient.dtype != torch.float32 for gradient in gradients):
        for group, number in by_type(gradients, factor):
            torch._foreach_mul_(group, number)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        return are_finite(gradients, device)
    factor = factor.float()
    # an element is looked at before it is multiplied: by more than one, it may overflow then
    perhaps = (factor.abs() > 1).float().view(1)
    torch._amp_foreach_non_finite_check_and_unscale_([*gradients], perhaps, factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return Pending(perhaps.double(), lambda found: not found[0] or all(bool(g.isfinite().all()) for g in gradients))
