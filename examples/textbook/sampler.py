"""Deal a dataset's indices to ranks like cards, so that N ranks together see one device's batches.

Three ways to share 10 samples among 4 ranks (`*` marks a sample that is read twice):

             dealt        chunked      padded
    rank 0   0 4 8        0 1 2        0 4 8
    rank 1   1 5 9        3 4 5        1 5 9
    rank 2   2 6          6 7 8        2 6 0*
    rank 3   3 7          9 0* 1*      3 7 1*

With a batch of 2 per rank, one device's first batch of 2 x 4 is {0..7}. Dealt and padded, the ranks' first batches
together are {0 4, 1 5, 2 6, 3 7}: the same. Chunked, they are {0 1, 3 4, 6 7, 9 0}: another training altogether.

`python examples/textbook/sampler.py` prints this page.
"""

import hashlib
from collections.abc import Iterator, Sequence, Sized
from itertools import cycle, islice

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class DistributedSampler(Sampler[int]):
    """The indices one rank reads in one epoch: equally many on every rank, in an order all ranks agree on.

    A drop-in for `torch.utils.data.distributed.DistributedSampler`, with the same parameters and attributes.
    10 samples on 4 ranks, unshuffled (two cards too few, so the first two are dealt again):

        rank 0: 0 4 8        rank 2: 2 6 0*
        rank 1: 1 5 9        rank 3: 3 7 1*

    Why pad: a rank with one batch fewer leaves the others waiting in a collective for ever. What padding costs: the
    repeated samples count twice, which is 9-15 % of the gradient of a ragged batch of 13. paceline's own loader
    therefore deals without padding and weighs uneven shares instead; this class is the textbook's way.
    `drop_last` avoids the repeats by never reading the last `len(dataset) % num_replicas` samples of the order.

    Each epoch has an order of its own only if somebody calls `set_epoch`; otherwise every epoch repeats the first one.
    This rank reads `num_samples` indices in an epoch, all ranks together `total_size`.

    Raises:
        ValueError: for a rank outside 0..num_replicas - 1, or no process group to ask.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank must be in 0..{self.num_replicas - 1}, got {self.rank}")
        self.shuffle, self.seed, self.drop_last, self.epoch = shuffle, seed, drop_last, 0
        whole, rest = divmod(len(dataset), self.num_replicas)
        self.num_samples = whole if drop_last or rest == 0 else whole + 1
        self.total_size = self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration reads: call it before each epoch, on every rank."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self.dataset)))
        if self.shuffle:
            order = torch.randperm(len(order), generator=_generator(self.seed, self.epoch)).tolist()
        return iter(_repeat_to(self.total_size, order)[self.rank :: self.num_replicas])


def _generator(seed: int, epoch: int) -> torch.Generator:
    """A random stream of its own for each (seed, epoch).

    Not `seed + epoch`, as torch's sampler has it: there epoch 1 of seed 0 is epoch 0 of seed 1, so that runs "repeated
    with seeds 0, 1, 2" read mostly the same orders, one epoch apart. A hash has no such neighbours. Four bytes, because
    torch's CPU generator looks at the lowest 32 bits of a seed only.
    """
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def _repeat_to(size: int, order: Sequence[int]) -> list[int]:
    """The first `size` indices of `order`, which begins again whenever it ends.

    As often as needed: padding with one slice (`order += order[:padding]`) leaves ranks 6 and 7 of 8 without any of
    3 samples, and the other six wait for them for ever.
    """
    return list(islice(cycle(order), size))


def dealt(num_samples: int, world_size: int) -> list[list[int]]:
    """Rank r's indices are r, r + W, r + 2W, ...: without padding, so shares differ by at most one.

    dealt(10, 4) = [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]

    Repeats nothing, misses nothing. The ranks' k-th batches of B are together exactly one process's k-th batch of
    W * B, the last, ragged one included. Ranks may hold unequal counts, even none: the training step must weigh them,
    and a rank without samples must still join every collective.

    Raises:
        ValueError: for fewer than 0 samples or fewer than 1 rank; `padded` and `chunked`, too.
    """
    _check(num_samples, world_size)
    return [list(range(rank, num_samples, world_size)) for rank in range(world_size)]


def padded(num_samples: int, world_size: int) -> list[list[int]]:
    """Dealt from an order that begins again until all ranks hold equally many: torch's DistributedSampler.

    padded(10, 4) = [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]

    Misses nothing; repeats the first -N % W samples of the order (with fewer samples than ranks, some of them several
    times). All global batches equal one process's except the last, in which the repeated samples count twice.
    """
    _check(num_samples, world_size)
    order = _repeat_to(_padded_size(num_samples, world_size), range(num_samples))
    return [order[rank::world_size] for rank in range(world_size)]


def chunked(num_samples: int, world_size: int) -> list[list[int]]:
    """One contiguous block of the padded order for each rank: the counter-example, from a widespread tutorial.

    chunked(10, 4) = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]

    Its global batches are not one process's: rank 1's first batch holds samples that one process reads N / W samples
    later (measured: 0 of 72 global batches equal, dealt 72 of 72). They agree only where an epoch is a single step, or
    on one rank. Training on it is not wrong, but no run with it can be compared with one at another world size.

    Misses nothing; repeats the first samples, to pad. But it pads with one slice of the order, which is too short for
    W > 2N. chunked(3, 8) = [[0], [1], [2], [0], [1], [2], [], []]: ranks 6 and 7 get nothing, so the others wait for
    them in the first collective, for ever. Kept as the tutorial has it, as a warning; use `dealt` or `padded`.
    """
    _check(num_samples, world_size)
    size = _padded_size(num_samples, world_size)
    order = list(range(num_samples))
    order += order[: size - num_samples]
    per_rank = size // world_size
    return [order[rank * per_rank : (rank + 1) * per_rank] for rank in range(world_size)]


def global_batches(shares: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """What all ranks read together in step 0, 1, ..., each rank taking `batch_size` of its share; sorted per step.

    global_batches(dealt(10, 4), 2) = [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]; one process's are the same with one share
    and a batch of 2 * 4: global_batches(dealt(10, 1), 8).
    """
    longest = max((len(share) for share in shares), default=0)
    return [
        sorted(index for share in shares for index in share[start : start + batch_size])
        for start in range(0, longest, batch_size)
    ]


def _padded_size(num_samples: int, world_size: int) -> int:
    return -(-num_samples // world_size) * world_size  # rounded up to a multiple of the world size


def _check(num_samples: int, world_size: int) -> None:
    if num_samples < 0 or world_size < 1:
        raise ValueError(f"need at least 0 samples and 1 rank, got {num_samples} samples, {world_size} ranks")


def _main(num_samples: int = 10, world_size: int = 4, batch_size: int = 2) -> None:
    one_process = global_batches(dealt(num_samples, 1), world_size * batch_size)
    print(
        f"{num_samples} samples, {world_size} ranks, batches of {batch_size} per rank; one process reads {one_process}"
    )
    for scheme in (dealt, chunked, padded):
        shares = scheme(num_samples, world_size)
        batches = global_batches(shares, batch_size)
        equal = sum(ours == theirs for ours, theirs in zip(batches, one_process, strict=True))
        repeats = sorted(index for share in shares for index in share)
        print(f"\n{scheme.__name__}: {equal} of {len(batches)} global batches equal one process's, ", end="")
        print(f"{len(repeats) - len(set(repeats))} samples read twice")
        for rank, share in enumerate(shares):
            print(f"  rank {rank}: {share}")
    sampler = DistributedSampler(range(num_samples), world_size, rank=0, seed=0)
    print("\nDistributedSampler, rank 0, shuffled; a new order for each epoch:")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        print(f"  epoch {epoch}: {list(sampler)}")


if __name__ == "__main__":
    _main()
