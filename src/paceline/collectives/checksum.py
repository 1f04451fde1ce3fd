"""A checksum of the bits of a tensor. Ranks compare it instead of the tensor."""

from functools import cache

import torch
from torch import Tensor

CHUNK = 1 << 18  # words that are multiplied at once; a processor keeps them in its cache
FACTOR = 6364136223846793005  # odd, so that multiplying loses no bit of an int64


def checksum(tensor: Tensor) -> Tensor:
    """() int64: a hash of the bits of a tensor, and of their order.

    It is a sum of words of 64 bits, each times an odd number, modulo 2**64. So one changed word always changes it. Many
    words with the same flipped bit do not cancel, as in a plain sum.
    """
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    data = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # the stride of a single element can be anything
    if data.storage_offset() % 8:
        data = data.clone()
    aligned = len(data) // 8 * 8
    parts = data[:aligned].view(torch.int64).split(CHUNK)
    if aligned < len(data):
        rest = torch.nn.functional.pad(data[aligned:], (0, 8 - (len(data) - aligned)))
        parts = (*parts, rest.view(torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for part in parts:
        total = total * FACTOR + (part * _odd_numbers(data.device)[: len(part)]).sum()
    return total


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (CHUNK,), generator=generator).mul_(2).add_(1).to(device)
