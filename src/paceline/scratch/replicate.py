"""How does every rank get the same model to start from?

Rank 0's parameters and buffers are broadcast, once, before training. From then on equal gradients keep equal copies
equal. Two things are easily forgotten. Buffers (BatchNorm's running statistics) are no parameters, and must travel
too. And a broadcast fits by position, not by name: ranks that built different models would exchange the wrong tensors
without a word, or wait for ever. So the models are compared first.

Run me: `torchrun --nproc-per-node 2 -m paceline.scratch.replicate`, or alone with `python -m`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

MAX_NAMED_RANKS = 8  # in an error message


@torch.no_grad()
def broadcast_module(module: nn.Module, src: int = 0) -> None:
    """Give every rank the parameters and buffers of rank `src`, in place (a collective over all ranks).

    Example, `nn.Linear(1, 1)` on 2 ranks that started from different random numbers:

        before: rank 0: weight 0.5, bias 1.0       rank 1: weight -0.3, bias 0.2
        after:  rank 0: weight 0.5, bias 1.0       rank 1: weight  0.5, bias 1.0

    Args:
        module: the same architecture on every rank, already on its device. Shapes, strides and types are free.
        src: the rank to copy from.

    Raises:
        ValueError: the same on every rank, if the ranks' modules differ in a name, shape or type, or in what is
            trained. The ranks in the minority come first; no tensor has been touched.
    """
    tensors = named_tensors(module)
    device = next((t.device for t in tensors.values()), _default_device())
    check_same(_gather_strings([describe(name, t) for name, t in tensors.items()], device))
    for tensor in tensors.values():
        if tensor.numel() == 0:
            continue  # nothing to send, on any rank: the shapes are the same
        # Bytes, because a backend knows few types (gloo no int16, no complex); contiguous, because it sends memory.
        copy = tensor.detach().contiguous()
        dist.broadcast(copy.reshape(-1).view(torch.uint8), src=src)
        tensor.copy_(copy)


def _default_device() -> torch.device:
    # Only for a module without any tensor: it still has to take part in the comparison.
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All that is broadcast, by what people call it."""
    tensors = {f"parameter {name}": p for name, p in module.named_parameters()}
    return tensors | {f"buffer {name}": b for name, b in module.named_buffers()}


def describe(name: str, tensor: Tensor) -> str:
    """What must be the same on all ranks."""
    # What is trained belongs to it: gradients are sent by position, too.
    frozen = ", frozen" if name.startswith("parameter") and not tensor.requires_grad else ""
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen}"


def check_same(of_rank: Sequence[Sequence[str]]) -> None:
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


def _gather_strings(mine: Sequence[str], device: torch.device) -> list[list[str]]:
    """Every rank's strings, by rank. JSON, not torch's object collectives: those unpickle, i.e. run, a peer's bytes."""
    message = torch.tensor(list(json.dumps(list(mine)).encode()), dtype=torch.uint8, device=device)  # (bytes,)
    length = torch.tensor([len(message)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)  # first the lengths: all messages of a collective must have the same one
    sizes = [int(n) for n in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(message)] = message
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [json.loads(bytes(r[:n].tolist())) for r, n in zip(received, sizes, strict=True)]


def _name_ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MAX_NAMED_RANKS} more" if len(ranks) > MAX_NAMED_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:MAX_NAMED_RANKS]))}{more}"


def _main() -> None:
    from paceline.scratch._demo import joined_world, of_all_ranks, say

    def show(what: str, mine: Tensor) -> None:
        say(f"{what:<18}" + "   ".join(f"rank {rank}: {values}" for rank, values in enumerate(of_all_ranks(mine))))

    with joined_world() as (rank, world_size):
        model = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0]]) + 10 * rank)
        show("before broadcast", model.weight.detach()[0])
        broadcast_module(model)
        show("after broadcast", model.weight.detach()[0])
        # The other way to hand something out: scatter gives each rank a piece of its own.
        pieces = [torch.tensor([10.0 * each, 10.0 * each + 1]) for each in range(world_size)]
        mine = torch.zeros(2)
        show("before scatter", mine)
        dist.scatter(mine, pieces if rank == 0 else None, src=0)
        show("after scatter", mine)


if __name__ == "__main__":
    _main()
