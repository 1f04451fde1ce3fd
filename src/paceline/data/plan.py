"""Plans which rank uses which sample in which step: a pure function of five integers, the same on all ranks.

In each epoch the samples are shuffled and split into *global batches*. Each global batch is distributed to the virtual
ranks in turn, like cards. With 10 samples, a global batch of 6 and 2 virtual ranks, unshuffled:

    step 0: virtual rank 0 gets 0 2 4, virtual rank 1 gets 1 3 5
    step 1: virtual rank 0 gets 6 8,   virtual rank 1 gets 7 9

The k-th global batch does not depend on the number of (virtual) ranks, and each sample occurs once per epoch. The
portions of virtual ranks can differ by one sample instead of being padded. The step weights each sample equally, so no
sample needs to be repeated or dropped.

A 64-bit fingerprint identifies the set of samples that were used: the sum modulo 2**64 of a hash of each index. So the
fingerprints of the ranks in a step, or of the steps in an epoch, add up to the fingerprint of all their samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import UsageError, plural, unknown_name_error
from paceline.protocol.balance import assign_virtual_ranks
from paceline.seeding import derive_seed

LastBatch = Literal["keep", "drop", "pad"]
"""The last, incomplete global batch of an epoch: use it as it is, drop it, or pad it with repeated samples."""
MAX_LISTED_SAMPLES = 1 << 24  # up to this number of samples, the order of an epoch is a list (128 MB, created in 0.5 s)
FEISTEL_ROUNDS = 6
FINGERPRINT_MODULUS = 2**64
_SPLITMIX_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_SPLITMIX_ROUNDS = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]
_SPLITMIX_LAST_SHIFT = np.uint64(31)


@dataclass(frozen=True)
class BatchPlan:
    """Distributes `num_samples` samples to global batches, and each global batch to the virtual ranks.

    `accumulation` is the number of micro-batches into which a virtual rank splits its portion of a global batch.
    A position in a run is three integers: (seed, epoch, step).

    Raises:
        UsageError: if a number is not positive, or `last_batch="drop"` would leave nothing to train on.
    """

    own_order = False  # True: the order is not known in advance, so the used samples are recorded
    parts_of_stream = 0  # 0: not a stream

    num_samples: int
    """The number of samples in the dataset."""
    global_batch: int
    """The number of samples per step, over all ranks."""
    virtual_ranks: int = 1
    """The number of virtual ranks, to which each global batch is distributed."""
    accumulation: int = 1
    """The number of micro-batches per virtual rank and step."""
    seed: int = 0
    """The seed of the order of the samples, and in `load_steps` of random augmentations and dropout."""
    shuffle: bool = True
    """Whether each epoch has a new random order. Otherwise it has that of the dataset."""
    last_batch: LastBatch = "keep"
    """For the last, incomplete global batch of an epoch: "keep", "drop", or "pad" with repeated samples."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch", "virtual_ranks", "accumulation"):
            if getattr(self, name) < 1:
                raise UsageError(code="less-than-one", name=name, value=getattr(self, name))
        if self.last_batch not in get_args(LastBatch):
            raise unknown_name_error("last_batch", self.last_batch, get_args(LastBatch))
        if self.steps_per_epoch == 0:
            raise UsageError(code="no-whole-batch", samples=self.num_samples, global_batch=self.global_batch)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps, i.e. global batches, in one epoch."""
        num_full, rest = divmod(self.num_samples, self.global_batch)
        return num_full + (rest > 0 and self.last_batch != "drop")

    @property
    def known_steps_per_epoch(self) -> int:
        """Steps per epoch; 0 for a stream, whose length is unknown."""
        return 0 if self.parts_of_stream else self.steps_per_epoch

    @property
    def epoch_size_text(self) -> str:
        """Text for the first lines of a run."""
        return f"{self.num_samples:,} samples = {plural(self.steps_per_epoch, 'step')} an epoch"

    @property
    def samples_per_epoch(self) -> int:
        """Samples used in one epoch, including the repeated samples of `last_batch="pad"`."""
        return self.num_samples if self.last_batch == "keep" else self.steps_per_epoch * self.global_batch

    def global_indices(self, epoch: int, step: int) -> Tensor:
        """(n,) int64: all samples of global batch `step` of `epoch`; n = `global_batch`, or less in the last batch.

        Args:
            epoch: from 0.
            step: number of the step in the epoch, from 0.

        Raises:
            IndexError: the epoch has no such step.
        """
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} is outside an epoch of {self.steps_per_epoch} steps")
        start, count = step * self.global_batch, self.num_samples
        stop = start + self.global_batch
        if self.shuffle and stop <= count:
            return shuffled_indices(slice(start, stop), count, self.seed, epoch)
        positions = torch.arange(start, stop if self.last_batch == "pad" else min(stop, count)) % count
        return shuffled_indices(positions, self.num_samples, self.seed, epoch) if self.shuffle else positions

    def indices(self, epoch: int, step: int, virtual_rank: int) -> Tensor:
        """(n,) int64: the portion of `virtual_rank`. n differs by at most one between virtual ranks, and can be 0.

        Args:
            epoch: from 0.
            step: number of the step in the epoch, from 0.
            virtual_rank: from 0.

        Raises:
            IndexError: there is no such step or virtual rank.
        """
        if not 0 <= virtual_rank < self.virtual_ranks:
            raise IndexError(f"virtual rank {virtual_rank} is not in 0..{self.virtual_ranks - 1}")
        return self.global_indices(epoch, step)[virtual_rank :: self.virtual_ranks]

    def parts(self, epoch: int, step: int) -> int:
        """The number of micro-batches in this step: `accumulation`, minus those that would be empty on all ranks.

        Args:
            epoch: from 0.
            step: number of the step in the epoch, from 0.

        Raises:
            IndexError: the epoch has no such step.
        """
        return len(self.microbatches(self.global_indices(epoch, step), 0))

    def microbatch(self, epoch: int, step: int, virtual_rank: int, part: int) -> Tensor:
        """(n,) int64: micro-batch `part` of the virtual rank's portion, which is split into nearly equal parts.

        Args:
            epoch: from 0.
            step: number of the step in the epoch, from 0.
            virtual_rank: from 0.
            part: from 0, below `parts(epoch, step)`.

        Raises:
            IndexError: there is no such step or part.
        """
        return self.microbatches(self.global_indices(epoch, step), virtual_rank)[part]

    def microbatches(self, whole: Tensor, virtual_rank: int) -> Sequence[Tensor]:
        """All micro-batches of the virtual rank's portion of a global batch, (k,) int64 each. k can be 0.

        Args:
            whole: (n,) int64, the samples of the global batch, as from `global_indices`.
            virtual_rank: from 0.
        """
        portion = whole[virtual_rank :: self.virtual_ranks]
        parts = min(self.accumulation, -(-whole.numel() // self.virtual_ranks))
        return (portion,) if parts == 1 else portion.tensor_split(parts)


class MicroBatchPlan(Struct, frozen=True):
    """One forward and backward of a rank within a step: micro-batch `micro_batch` of `virtual_rank`.

    A rank without samples in a step computes a padding batch of one sample (`is_counted` is False), so that all ranks
    join the collectives of the step. Its gradient, loss and buffers do not count.
    """

    epoch: int
    step: int
    virtual_rank: int
    micro_batch: int
    indices: Tensor  # (n,) int64, n >= 1
    is_counted: bool = True
    global_samples: int = 0  # in the global batch; 0 for a stream, whose length is unknown
    is_repeated: bool = False  # for an audit: computed as on its own rank, but not counted

    def random_seed(self, seed: int) -> int:
        """The seed of the random stream (e.g. for dropout) in this forward. It does not depend on the rank."""
        return derive_seed(seed, "forward", self.epoch, self.step, self.virtual_rank, self.micro_batch)


def plan_rank_micro_batches(
    plan: BatchPlan, epoch: int, step: int, share: range, *, merged: bool = False
) -> list[MicroBatchPlan]:
    """The work of a rank with the virtual ranks `share` in one step, in order: at least a padding batch.

    With `merged`, the k-th micro-batches of all its virtual ranks become one, so that each rank computes the same
    number. Synchronized batch norm needs this, because its statistics cover the k-th micro-batches of all ranks.
    """
    batch_indices = plan.global_indices(epoch, step)
    size = batch_indices.numel()
    work: list[MicroBatchPlan] = []
    if merged:
        for part, micro_batches in enumerate(zip(*[plan.microbatches(batch_indices, v) for v in share], strict=True)):
            counted = any(indices.numel() for indices in micro_batches)
            indices = torch.cat(micro_batches) if counted else batch_indices[:1]
            work.append(MicroBatchPlan(epoch, step, share[0], part, indices, counted, size))
        return work
    for virtual_rank in share:
        for part, indices in enumerate(plan.microbatches(batch_indices, virtual_rank)):
            if indices.numel():
                work.append(MicroBatchPlan(epoch, step, virtual_rank, part, indices, global_samples=size))
    return work or [MicroBatchPlan(epoch, step, share[0], 0, batch_indices[:1], is_counted=False, global_samples=size)]


def virtual_ranks_of(virtual_ranks: int, rank: int, world_size: int) -> range:
    """The virtual ranks that `rank` computes, if all ranks are equally fast. See `assign_virtual_ranks`.

    Example: 8 virtual ranks on 3 ranks are 0-1, 2-4, 5-7.

    Args:
        virtual_ranks: number of virtual ranks of the run.
        rank: from 0.
        world_size: number of ranks.

    Raises:
        UsageError: with more ranks than virtual ranks, because some ranks would have no work.
    """
    return assign_virtual_ranks(virtual_ranks, world_size)[rank]


def shuffled_indices(positions: Tensor | slice, num_samples: int, seed: int, epoch: int) -> Tensor:
    """(n,) int64: the samples at `positions`, (n,) or a slice, in the shuffled epoch.

    For a slice of at most MAX_LISTED_SAMPLES samples, the result is a view without a copy.
    """
    if num_samples <= MAX_LISTED_SAMPLES:
        return _shuffled_order(num_samples, seed, epoch)[positions]
    if isinstance(positions, slice):
        positions = torch.arange(positions.start, positions.stop)
    return permute(positions, num_samples, derive_seed(seed, "order", epoch))


@lru_cache(maxsize=2)  # the current epoch, and the next one, which loader workers already fetch
def _shuffled_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator)


def permute(positions: Tensor, size: int, key: int) -> Tensor:
    """(n,) int64: the images of `positions` (n,), in [0, size), under the permutation of [0, size) that `key` names.

    A Feistel network permutes [0, 4**k) by halves of k bits, for any round function. The round function here is
    `splitmix64` with a key for each round. An image outside [0, size) (at most three of four) is permuted again until
    it is inside (cycle walking). The result is a permutation of [0, size).

    Source: Black, Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 3 and 5.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.uint64(derive_seed(key, "round", number)) for number in range(FEISTEL_ROUNDS)]
    images = positions.numpy().astype(np.uint64)
    outside = np.arange(len(images))
    while len(outside):
        left, right = images[outside] >> half, images[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (splitmix64(right ^ round_key) & mask)
        images[outside] = (left << half) | right
        outside = outside[images[outside] >= np.uint64(size)]
    return torch.from_numpy(images.astype(np.int64))


def fingerprint_indices(indices: Tensor) -> int:
    """The fingerprint, in [0, 2**64), of samples `indices`: int64 of any shape, none negative. 0 for no samples.

    If two multisets of samples differ, their fingerprints differ by the sum of c * hash(index). The integer c is how
    often the one has that sample more than the other. The hash is one to one and is 0 for no index below 2**62. So one
    sample missing, doubled, or exchanged for another *always* changes the fingerprint. For larger differences take the
    hash as random: if any c is odd, the sum is 0 with probability 2**-64; if 2**k divides them all, with 2**(k - 64).
    This detects accidents only: samples with a given fingerprint can be constructed on purpose.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014; the
    multipliers are Stafford's variant 13).
    """
    return int(splitmix64(indices.detach().cpu().numpy().reshape(-1).astype(np.uint64)).sum(dtype=np.uint64))


def splitmix64(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = numbers + _SPLITMIX_INCREMENT  # else the hash of 0 would be 0, and a missing sample 0 would not be detected
    for shift, factor in _SPLITMIX_ROUNDS:
        z ^= z >> shift
        z *= factor
    z ^= z >> _SPLITMIX_LAST_SHIFT
    return z


def combine_fingerprints(*fingerprints: int) -> int:
    return sum(fingerprints) % FINGERPRINT_MODULUS
