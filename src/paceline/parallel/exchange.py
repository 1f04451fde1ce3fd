"""What moves a tensor from one placement to another: everywhere alike, or a share of it on each rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

EVERYWHERE, SUMMANDS = [Replicate()], [Partial()]


def everywhere(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """What every rank has alike; its gradient is the sum of what each rank's share of the work gives."""
    return DTensor.from_local(tensor if torch.is_grad_enabled() else tensor.detach(), mesh, EVERYWHERE)


def share_along(one: DTensor, dim: int) -> Tensor:
    """This rank's share along `dim`, as a plain tensor that lies in memory without gaps.

    Between two dimensions by one all-to-all, forward and backward; torch's own leaves gaps, which its views refuse.
    """
    place, ranks = one.placements[0], one.device_mesh.size()
    if not place.is_shard() or place.is_shard(dim) or one.shape[dim] % ranks or one.shape[place.dim] % ranks:  # pyright: ignore[reportAttributeAccessIssue]
        return without_gaps(one.redistribute(placements=[Shard(dim)]).to_local())
    return _Exchange.apply(one.to_local(), one.device_mesh.get_group(), ranks, place.dim, dim)  # pyright: ignore


def without_gaps(tensor: Tensor) -> Tensor:
    """The same; its gradient lies in memory without gaps, as torch takes for granted of a DTensor's."""
    if tensor.requires_grad:
        tensor.register_hook(Tensor.contiguous)
    return tensor


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: Any, ranks: int, whole: int, cut: int) -> Tensor:
        """A share along `cut`, of everything along `whole`, from one the other way round."""
        ctx.asked = group, ranks, cut, whole
        return _exchanged(share, group, ranks, whole, cut)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The same, back."""
        return _exchanged(gradients[0], *ctx.asked), None, None, None, None


def _exchanged(share: Tensor, group: Any, ranks: int, whole: int, cut: int) -> Tensor:
    sent = torch.stack(share.chunk(ranks, cut))
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return torch.cat(got.unbind(), whole)
