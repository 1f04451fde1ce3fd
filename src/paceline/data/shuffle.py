"""The order of an epoch: of few samples a list, of very many a permutation that is computed for each position."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paceline.data.consumed import mixed
from paceline.seeding import derive

LISTED = 1 << 24  # samples up to which an epoch's order is a list: 128 MB, and half a second to make it
ROUNDS = 6


def shuffled(positions: Tensor, num_samples: int, seed: int, epoch: int) -> Tensor:
    """(n,) int64: which sample stands at each of `positions` (n,) in the shuffled epoch."""
    if num_samples <= LISTED:
        return _listed(num_samples, seed, epoch)[positions]
    return permuted(positions, num_samples, derive(seed, "order", epoch))


def stretch(start: int, stop: int, num_samples: int, seed: int, epoch: int) -> Tensor:
    """(stop - start,) int64: as `shuffled` of these places, which all exist; of a list without a copy."""
    if num_samples <= LISTED:
        return _listed(num_samples, seed, epoch)[start:stop]
    return permuted(torch.arange(start, stop), num_samples, derive(seed, "order", epoch))


@lru_cache(maxsize=2)  # the epoch in training, and the next one, which loader workers already fetch
def _listed(num_samples: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator)


def permuted(positions: Tensor, size: int, key: int) -> Tensor:
    """(n,) int64: the images of `positions` (n,), in [0, size), under the permutation of [0, size) that `key` names.

    A Feistel network permutes [0, 4**k) by halves of k bits, whatever its round function is; here that is the hash of
    `data.consumed` with a key for each round. An image outside [0, size), at most three of four, is permuted again
    until it is inside (cycle walking), which is a permutation of [0, size).

    Source: Black, Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 3 and 5.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.uint64(derive(key, "round", number)) for number in range(ROUNDS)]
    images = positions.numpy().astype(np.uint64)
    outside = np.arange(len(images))
    while len(outside):
        left, right = images[outside] >> half, images[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (mixed(right ^ round_key) & mask)
        images[outside] = (left << half) | right
        outside = outside[images[outside] >= np.uint64(size)]
    return torch.from_numpy(images.astype(np.int64))
