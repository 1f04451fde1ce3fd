"""A checksum of the bits of a tensor. Ranks compare it instead of the tensor."""

from functools import cache

import torch
from torch import Tensor

CHUNK = 1 << 17  # words that are multiplied at once; a processor keeps them in its cache
FACTOR = 6364136223846793005  # odd, so that multiplying loses no bit of an int64


def checksum(tensor: Tensor) -> Tensor:
    """() int64: a hash of the bits of a tensor, and of their order.

    It is a sum of words of 32 bits, each times an odd number of 64 bits, modulo 2**64. So one changed word always
    changes it. In words of 64 bits, the signs of two numbers would cancel: 2**63 times any odd number is 2**63.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.as_strided(flat.shape, (1,))  # the stride of a single element can be anything
    if data.element_size() < 4:
        data = data.view(torch.uint8)
        if data.storage_offset() % 4 or len(data) % 4:
            data = torch.nn.functional.pad(data, (0, -len(data) % 4))  # a copy
    total: Tensor | None = None
    for words in data.view(torch.int32).split(CHUNK):
        odd = _odd_numbers(data.device)[: len(words)]
        # `dot` needs no copy of the products, but a GPU has none for integers
        part = torch.dot(words.long(), odd) if data.is_cpu else (words * odd).sum()
        total = part if total is None else torch.add(part, total, alpha=FACTOR)
    assert total is not None
    return total


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (CHUNK,), generator=generator).mul_(2).add_(1).to(device)
