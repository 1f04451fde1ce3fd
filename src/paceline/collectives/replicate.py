"""The same model on every rank to start from, and other tensors that all ranks get from one.

Equal gradients keep equal copies equal. Buffers (BatchNorm's running statistics) are no parameters, and travel too. A
broadcast fits by position, not by name: ranks that built different models would exchange the wrong tensors without a
word, or wait for ever. So the models are compared first.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.collectives.communicator import communicator, make_communicator
from paceline.collectives.torch_collectives import CPU

MAX_NAMED_RANKS = 8  # in an error message


def broadcast_module(module: nn.Module, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the parameters and buffers of rank `src`, in place (a collective over all ranks of the group).

    Args:
        module: the same architecture on every rank, already on its device. Shapes, strides and types are free.
        src: the rank to copy from, of the group.
        group: None: the default one.

    Raises:
        ValueError: the same on every rank, if the ranks' modules differ in a name, shape or type, or in what is
            trained. The ranks in the minority come first; no tensor has been touched.
    """
    tensors = {f"parameter {name}": p for name, p in module.named_parameters()}
    tensors |= {f"buffer {name}": b for name, b in module.named_buffers()}
    device = next((t.device for t in tensors.values()), _default_device())
    exchange = make_communicator(group=group)  # a collective: made by all ranks, however their models differ
    mine = [_described(name, tensor) for name, tensor in tensors.items()]
    check_same_model(exchange.gather(mine, "words of broadcast_module", device))
    broadcast([*tensors.values()], src, "model", group)


@torch.no_grad()
def broadcast(
    tensors: Sequence[Tensor], src: int = 0, name: str = "broadcast", group: dist.ProcessGroup | None = None
) -> None:
    """Give every rank the contents of rank `src`'s tensors, in place (a collective); alike on all ranks, on any device.

    Contiguous, because a backend sends memory.
    """
    copies = {tensor: tensor.detach().contiguous() for tensor in tensors if tensor.numel()}
    if copies:
        communicator(group).broadcast([*copies.values()], src, name)
    for tensor, copy in copies.items():
        if copy.data_ptr() != tensor.data_ptr():
            tensor.copy_(copy)


def check_same_model(of_rank: Sequence[Sequence[str]]) -> None:
    """Compare all ranks' entries. Every rank sees them all, so every rank raises the same error, or none.

    Raises:
        ValueError: see `broadcast_module`.
    """
    for position, values in enumerate(zip_longest(*of_rank, fillvalue="nothing")):
        ranks_with: dict[str, list[int]] = defaultdict(list)
        for rank, value in enumerate(values):
            ranks_with[value].append(rank)
        if len(ranks_with) > 1:
            odd_first = sorted(ranks_with.items(), key=lambda item: (len(item[1]), item[1]))
            told = ", but ".join(f"{_name_ranks(ranks)}: {value}" for value, ranks in odd_first)
            raise ValueError(
                f"the ranks' models differ, first at entry {position}: {told}. "
                "Every rank must build the same model: same code, same configuration."
            )


def _described(name: str, tensor: Tensor) -> str:
    """What must be the same on all ranks."""
    # What is trained belongs to it: gradients are sent by position, too.
    frozen = ", frozen" if name.startswith("parameter") and not tensor.requires_grad else ""
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen}"


def _default_device() -> torch.device:
    # Only for a module without any tensor: it still has to take part in the comparison.
    return torch.accelerator.current_accelerator() or CPU if dist.get_backend() in ("nccl", "xccl") else CPU


def _name_ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MAX_NAMED_RANKS} more" if len(ranks) > MAX_NAMED_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:MAX_NAMED_RANKS]))}{more}"
