"""Brings the whole state together on every rank, to be compared; and digests it."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.state import Held
from paceline.collectives.control import gather_words
from paceline.worker.world import World


def whole(held: Sequence[Held], world: World) -> dict[str, Tensor]:
    """Every tensor of the state in its shape, by name, in the order of the names (a collective).

    What only some ranks hold is brought together; what is replicated is this rank's own.
    """
    mine: dict[str, list[Held]] = defaultdict(list)
    for h in held:
        if not (h.replicated or h.spare):
            mine[h.name].append(h)
    parts = [(name, list(h.shape), str(h.tensor.dtype).removeprefix("torch.")) for name, (h, *_) in mine.items()]
    shapes = {name: (shape, dtype) for each in gather_words(parts, world) for name, shape, dtype in each}
    state = {h.name: h.tensor for h in held if h.replicated}
    for name, (shape, dtype) in sorted(shapes.items()):
        total = torch.zeros(shape, dtype=getattr(torch, dtype), device=world.device)
        for piece in mine.get(name, ()):
            piece.place(total.view(-1)).copy_(piece.tensor.reshape(piece.count, -1))
        # as bytes: each is some rank's own and zero elsewhere, so the sum is that rank's, whatever the type
        dist.all_reduce(total.view(-1).view(torch.uint8), group=world.group)
        state[name] = total
    return dict(sorted(state.items()))


def sha256_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and every bit, in the order of the names."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return sha.hexdigest()
