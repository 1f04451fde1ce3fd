"""What every rank has to say, on every rank, over torch.distributed alone."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")


def gather_over_torch(
    words: Any, size: int, device: torch.device = CPU, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """The `words` (anything JSON can hold) of all `size` ranks of a group, the default one, by rank, on every rank."""
    if size == 1:
        return [words]
    payload = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)
    length = labelled(torch.tensor([len(payload)], device=device), "lengths of words")
    lengths = [torch.zeros_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(n) for n in lengths]
    padded = labelled(torch.zeros(max(sizes), dtype=torch.uint8, device=device), "words")
    padded[: len(payload)] = payload.to(device)
    received = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(received, padded, group=group)
    return [json.loads(bytes(r[:n].tolist())) for r, n in zip(received, sizes, strict=True)]


def labelled(tensor: Tensor, name: str) -> Tensor:
    """Give the collective that `tensor` is passed to a name, for whoever watches; torch itself takes no notice."""
    vars(tensor)["collective"] = name
    return tensor
