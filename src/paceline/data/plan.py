"""Plans who sees which sample, and when: a pure function of five integers, the same on every rank.

The *global batch* is the unit. In each epoch the samples are shuffled, cut into global batches, and each global batch
is dealt to the virtual ranks like cards. With 10 samples, a global batch of 6 and 2 virtual ranks, unshuffled:

    step 0: virtual rank 0 gets 0 2 4, virtual rank 1 gets 1 3 5
    step 1: virtual rank 0 gets 6 8,   virtual rank 1 gets 7 9

The k-th global batch never depends on the number of (virtual) ranks, every sample occurs once an epoch, and shares are
uneven (by one) rather than padded: the step weights by samples, so nothing needs to be repeated or left out.

Which samples were used is one 64-bit number, a fingerprint: the sum modulo 2**64 of a hash of each index. So the
fingerprints of a step's ranks, or of an epoch's steps, add up to the one of all their samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import UsageError, plural
from paceline.seeding import derive

Tail = Literal["keep", "drop", "pad"]
"""What becomes of an epoch's last, incomplete global batch: trained as it is, left out, or filled up with repeats."""
LISTED = 1 << 24  # samples up to which an epoch's order is a list: 128 MB, and half a second to make it
ROUNDS = 6
MODULUS = 2**64
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIXING = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]
_LAST_SHIFT = np.uint64(31)


@dataclass(frozen=True)
class BatchPlan:
    """Deals `num_samples` samples into global batches and these to virtual ranks.

    `accumulation` is the number of micro-batches that a virtual rank's share of a global batch is processed in.
    A position in a run is three integers, (seed, epoch, step); `steps_per_epoch` turns them into a step count.

    Raises:
        UsageError: if a number is not positive, or `tail="drop"` would leave nothing to train on.
    """

    own_order = False  # an order that no plan knows beforehand: what is used is written down
    parts_of_stream = 0  # what is dealt is no stream

    num_samples: int
    global_batch: int
    virtual_ranks: int = 1
    accumulation: int = 1
    seed: int = 0
    shuffle: bool = True
    tail: Tail = "keep"

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch", "virtual_ranks", "accumulation"):
            if getattr(self, name) < 1:
                raise UsageError(code="less-than-one", name=name, value=getattr(self, name))
        if self.steps_per_epoch == 0:
            raise UsageError(code="no-whole-batch", samples=self.num_samples, global_batch=self.global_batch)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps, i.e. global batches, in one epoch."""
        whole, rest = divmod(self.num_samples, self.global_batch)
        return whole + (rest > 0 and self.tail != "drop")

    @property
    def known_steps(self) -> int:
        """Steps of an epoch; 0 for a stream, whose length is unknown."""
        return 0 if self.parts_of_stream else self.steps_per_epoch

    @property
    def size_words(self) -> str:
        """For the opening line."""
        return f"{self.num_samples:,} samples = {plural(self.steps_per_epoch, 'step')} an epoch"

    @property
    def samples_per_epoch(self) -> int:
        """Samples seen in one epoch, repeats of `tail="pad"` included."""
        return self.num_samples if self.tail == "keep" else self.steps_per_epoch * self.global_batch

    def global_indices(self, epoch: int, step: int) -> Tensor:
        """(n,) int64: all samples of global batch `step` of `epoch`; n = `global_batch` except at a kept tail."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} is outside an epoch of {self.steps_per_epoch} steps")
        start = step * self.global_batch
        stop = start + self.global_batch
        if self.shuffle and stop <= self.num_samples:
            return shuffled(slice(start, stop), self.num_samples, self.seed, epoch)
        places = torch.arange(start, stop if self.tail == "pad" else min(stop, self.num_samples)) % self.num_samples
        return shuffled(places, self.num_samples, self.seed, epoch) if self.shuffle else places

    def indices(self, epoch: int, step: int, virtual_rank: int) -> Tensor:
        """(n,) int64: the share of `virtual_rank`. n differs by at most one between virtual ranks, and can be 0."""
        if not 0 <= virtual_rank < self.virtual_ranks:
            raise IndexError(f"virtual rank {virtual_rank} is not in 0..{self.virtual_ranks - 1}")
        return self.global_indices(epoch, step)[virtual_rank :: self.virtual_ranks]

    def parts(self, epoch: int, step: int) -> int:
        """How many micro-batches this step has: `accumulation`, less those that would be empty on every rank."""
        return self._parts(self.global_indices(epoch, step))

    def _parts(self, whole: Tensor) -> int:
        return min(self.accumulation, -(-whole.numel() // self.virtual_ranks))

    def microbatch(self, epoch: int, step: int, virtual_rank: int, part: int) -> Tensor:
        """(n,) int64: micro-batch `part` of the virtual rank's share, which is split into nearly equal parts."""
        return self.microbatches(self.global_indices(epoch, step), virtual_rank)[part]

    def microbatches(self, whole: Tensor, virtual_rank: int) -> Sequence[Tensor]:
        """All micro-batches of the virtual rank's share of a global batch `whole`, (n,) int64."""
        share = whole[virtual_rank :: self.virtual_ranks]
        return (share,) if (parts := self._parts(whole)) == 1 else share.tensor_split(parts)


class Work(NamedTuple):
    """One forward and backward of a rank within a step: micro-batch `part` of `virtual_rank`.

    A padding batch (`counted` is False) is one sample that a rank without a share still runs, so that every rank joins
    the collectives of the step; its gradient, loss and buffers count for nothing.
    """

    epoch: int
    step: int
    virtual_rank: int
    part: int
    indices: Tensor  # (n,) int64, n >= 1
    counted: bool = True
    global_samples: int = 0  # in the global batch; 0 for a stream, whose length is unknown

    def random_seed(self, seed: int) -> int:
        """The seed of this forward's random stream (dropout): the same on every rank."""
        return derive(seed, "forward", self.epoch, self.step, self.virtual_rank, self.part)


def rank_work(plan: BatchPlan, epoch: int, step: int, share: range, *, merged: bool = False) -> list[Work]:
    """What a rank that owns the virtual ranks `share` computes in one step, in order; at least a padding batch.

    With `merged`, the k-th micro-batches of all its virtual ranks become one, so that each rank runs the same number.
    Synchronised batch norm needs this: its statistics are over the k-th micro-batches of all ranks.
    """
    whole = plan.global_indices(epoch, step)
    size = whole.numel()
    work: list[Work] = []
    if merged:
        of_all = zip(*[plan.microbatches(whole, v) for v in share], strict=True)
        for part, own in enumerate(of_all):
            indices = torch.cat(own)
            counted = indices.numel() > 0
            work.append(Work(epoch, step, share[0], part, indices if counted else whole[:1], counted, size))
        return work
    for virtual_rank in share:
        for part, indices in enumerate(plan.microbatches(whole, virtual_rank)):
            if indices.numel():
                work.append(Work(epoch, step, virtual_rank, part, indices, global_samples=size))
    return work or [Work(epoch, step, share[0], 0, whole[:1], counted=False, global_samples=size)]


def ranks_share(virtual_ranks: int, rank: int, world_size: int) -> range:
    """The virtual ranks that `rank` computes: a contiguous run, so that it is made of whole subtrees of a sum.

    Example: 8 virtual ranks on 3 ranks are 0-1, 2-4, 5-7.

    Raises:
        UsageError: with more ranks than virtual ranks, since some would have nothing to do.
    """
    if world_size > virtual_ranks:
        raise UsageError(code="more-ranks-than-virtual-ranks", world_size=world_size, virtual_ranks=virtual_ranks)
    return range(rank * virtual_ranks // world_size, (rank + 1) * virtual_ranks // world_size)


def shuffled(positions: Tensor | slice, num_samples: int, seed: int, epoch: int) -> Tensor:
    """(n,) int64: which sample is at each of `positions`, (n,) or a slice, in the shuffled epoch.

    For a slice of a list there is no copy.
    """
    if num_samples <= LISTED:
        return _listed(num_samples, seed, epoch)[positions]
    if isinstance(positions, slice):
        positions = torch.arange(positions.start, positions.stop)
    return permuted(positions, num_samples, derive(seed, "order", epoch))


@lru_cache(maxsize=2)  # the epoch in training, and the next one, which loader workers already fetch
def _listed(num_samples: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator)


def permuted(positions: Tensor, size: int, key: int) -> Tensor:
    """(n,) int64: the images of `positions` (n,), in [0, size), under the permutation of [0, size) that `key` names.

    A Feistel network permutes [0, 4**k) by halves of k bits, whatever its round function is. Here that is `mixed`, with
    a key for each round. An image outside [0, size), at most three of four, is permuted again until it is inside (cycle
    walking), which is a permutation of [0, size).

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


def fingerprint(indices: Tensor) -> int:
    """The fingerprint, in [0, 2**64), of samples `indices`: int64 of any shape, none negative. 0 for no samples.

    If two multisets of samples differ, their fingerprints differ by the sum of c * hash(index). The integer c is how
    often the one has that sample more than the other. The hash is one to one and is 0 for no index below 2**62. So one
    sample missing, doubled, or exchanged for another *always* changes the fingerprint. For larger differences take the
    hash as random: if any c is odd, the sum is 0 with probability 2**-64; if 2**k divides them all, with 2**(k - 64).
    This guards against accidents only: samples with a given fingerprint can be found on purpose.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014; the
    multipliers are Stafford's variant 13).
    """
    return int(mixed(indices.detach().cpu().numpy().reshape(-1).astype(np.uint64)).sum(dtype=np.uint64))


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The hash of each of `numbers`, as a new array."""
    z = numbers + _STEP  # else sample 0 would have hash 0, and would never be missed
    for shift, factor in _MIXING:
        z ^= z >> shift
        z *= factor
    z ^= z >> _LAST_SHIFT
    return z


def add(*prints: int) -> int:
    """The fingerprint of several sets of samples together, from theirs."""
    return sum(prints) % MODULUS
