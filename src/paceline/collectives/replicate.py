"""Broadcasts a model's parameters and buffers, and other tensors, from one rank to all.

A broadcast matches tensors by position, not by name. Ranks with different models would silently exchange the wrong
tensors, or hang. The models are therefore compared first.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.collectives.communicator import get_communicator, make_communicator
from paceline.collectives.torch_collectives import CPU
from paceline.errors import first_few

MAX_NAMED_RANKS = 8  # in an error message


def broadcast_module(module: nn.Module, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copy the parameters and buffers of rank `src` of the group to every rank, in place (a collective over the group).

    ValueError on every rank, before any tensor has changed: the modules differ in a name, shape or type, or in the
    trained parameters. It lists the minority first.
    """
    tensors = {f"parameter {name}": p for name, p in module.named_parameters()}
    tensors |= {f"buffer {name}": b for name, b in module.named_buffers()}
    # without tensors, a device of the backend, because the module joins the comparison
    default = torch.accelerator.current_accelerator() or CPU if dist.get_backend() in ("nccl", "xccl") else CPU
    device = next((t.device for t in tensors.values()), default)
    exchange = make_communicator(group=group)  # a collective: all ranks call it before the check
    mine = [_described(name, tensor) for name, tensor in tensors.items()]
    check_same_model(exchange.all_gather_object(mine, "messages of broadcast_module", device))
    broadcast([*tensors.values()], src, "model", group)


@torch.no_grad()
def broadcast(
    tensors: Sequence[Tensor], src: int = 0, name: str = "broadcast", group: dist.ProcessGroup | None = None
) -> None:
    # backends send contiguous memory
    copies = {tensor: tensor.detach().contiguous() for tensor in tensors if tensor.numel()}
    if copies:
        get_communicator(group).broadcast([*copies.values()], src, name)
    for tensor, copy in copies.items():
        if copy.data_ptr() != tensor.data_ptr():
            tensor.copy_(copy)


def check_same_model(of_rank: Sequence[Sequence[str]]) -> None:
    for position, values in enumerate(zip_longest(*of_rank, fillvalue="nothing")):
        ranks_with: dict[str, list[int]] = defaultdict(list)
        for rank, value in enumerate(values):
            ranks_with[value].append(rank)
        if len(ranks_with) > 1:
            minority_first = sorted(ranks_with.items(), key=lambda item: (len(item[1]), item[1]))
            shown = ", but ".join(f"{_name_ranks(ranks)}: {value}" for value, ranks in minority_first)
            raise ValueError(
                f"the ranks' models differ, first at entry {position}: {shown}. "
                "Every rank must build the same model: same code, same configuration."
            )


def _described(name: str, tensor: Tensor) -> str:
    # frozen: gradients are also matched by position
    frozen = ", frozen" if name.startswith("parameter") and not tensor.requires_grad else ""
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen}"


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {first_few([*map(str, ranks)], MAX_NAMED_RANKS)}"
