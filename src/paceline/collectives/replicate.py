"""The same model on every rank to start from: `scratch.replicate`, through shared memory where there is any."""

from __future__ import annotations

import torch
from torch import nn

from paceline.collectives.moves import broadcast, gather_words_in_memory
from paceline.collectives.transport import shared_memory
from paceline.scratch import replicate


@torch.no_grad()
def broadcast_module(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, in place (a collective).

    Raises:
        ValueError: the same on every rank, if the ranks' modules differ; see `scratch.replicate.broadcast_module`.
    """
    tensors = replicate.named_tensors(module)
    memory = shared_memory() if all(tensor.device.type == "cpu" for tensor in tensors.values()) else None
    if memory is None:
        replicate.broadcast_module(module)
        return
    told = gather_words_in_memory(memory, [replicate.describe(name, tensor) for name, tensor in tensors.items()])
    replicate.check_same(told)
    whole = {tensor: tensor.detach().contiguous() for tensor in tensors.values()}
    broadcast(memory, [*whole.values()], name="model")
    for tensor, copy in whole.items():
        if copy.data_ptr() != tensor.data_ptr():
            tensor.copy_(copy)
