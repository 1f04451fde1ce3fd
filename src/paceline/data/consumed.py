"""Fingerprints of sets of samples: one 64-bit number, however many there are and in whatever order they come.

It is the sum modulo 2**64 of a mixing hash of each index, so the fingerprints of a step's ranks, or of an epoch's
steps, add up to that of all their samples together.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MODULUS = 2**64
_STEP = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]
_LAST_SHIFT = np.uint64(31)


def fingerprint(indices: Tensor) -> int:
    """The fingerprint, in [0, 2**64), of samples `indices`: int64 of any shape, none negative. 0 for no samples.

    Where two multisets of samples differ, their fingerprints differ by the sum of c * hash(index), where the integer c
    is how often the one has that sample more than the other. The hash is one to one and is 0 for no index below 2**62.
    So one sample missing, doubled, or exchanged for another is *always* seen. For larger differences take the hash as
    random: if any c is odd, the sum is 0 with probability 2**-64; if 2**k divides them all, with 2**(k - 64). This
    guards against accidents only: samples with a given fingerprint can be found on purpose.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014; the
    multipliers are Stafford's variant 13).
    """
    return int(mixed(indices.detach().cpu().numpy().reshape(-1).astype(np.uint64)).sum(dtype=np.uint64))


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The hash of each of `numbers`, as a new array."""
    z = numbers + _STEP  # else sample 0 would have hash 0, and would never be missed
    for shift, factor in _ROUNDS:
        z ^= z >> shift
        z *= factor
    z ^= z >> _LAST_SHIFT
    return z


def add(*prints: int) -> int:
    """The fingerprint of several sets of samples together, from theirs."""
    return sum(prints) % MODULUS
