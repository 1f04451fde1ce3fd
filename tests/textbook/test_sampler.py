"""Laws of the textbook sampler, for any number of samples and ranks; torch's own is the yardstick."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler import DistributedSampler, chunked, dealt, global_batches, padded
from torch.utils.data.distributed import DistributedSampler as TorchSampler

sizes = st.integers(0, 60)
worlds = st.integers(1, 12)
seeds = st.integers(-(2**63), 2**64)


def shares(cls: type, num_samples: int, world_size: int, epoch: int = 0, **options: object) -> list[list[int]]:
    result = []
    for rank in range(world_size):
        sampler = cls(range(num_samples), world_size, rank, **options)
        sampler.set_epoch(epoch)
        result.append(list(sampler))
        assert len(sampler) == len(result[-1]) == sampler.num_samples
        assert sampler.total_size == sampler.num_samples * world_size
    return result


@settings(deadline=None)
@given(sizes, worlds, st.booleans())
def test_unshuffled_it_is_torchs(num_samples: int, world_size: int, drop_last: bool) -> None:
    options = {"shuffle": False, "drop_last": drop_last}
    ours = shares(DistributedSampler, num_samples, world_size, **options)
    assert ours == shares(TorchSampler, num_samples, world_size, **options)
    if not drop_last:
        assert ours == padded(num_samples, world_size)


@settings(deadline=None)
@given(sizes, worlds, st.booleans(), seeds, st.integers(0, 1000))
def test_shuffled_all_ranks_share_one_permutation(
    num_samples: int, world_size: int, drop_last: bool, seed: int, epoch: int
) -> None:
    ours = shares(DistributedSampler, num_samples, world_size, epoch, seed=seed, drop_last=drop_last)
    torchs = shares(TorchSampler, num_samples, world_size, seed=0, drop_last=drop_last)
    assert [len(s) for s in ours] == [len(s) for s in torchs]
    counts = Counter(index for share in ours for index in share)
    assert set(counts) <= set(range(num_samples))
    # How often the samples are read, whichever they are: torch's counts exactly.
    torch_counts = Counter(index for share in torchs for index in share)
    assert sorted(counts.values()) == sorted(torch_counts.values())


def test_parameters_are_torchs_by_position() -> None:
    mine, torchs = DistributedSampler(range(9), 4, 1, True, 7, True), TorchSampler(range(9), 4, 1, True, 7, True)
    for name in ("num_replicas", "rank", "shuffle", "seed", "drop_last", "epoch", "num_samples", "total_size"):
        assert getattr(mine, name) == getattr(torchs, name)
    assert mine.dataset == range(9)


def test_each_seed_and_epoch_has_an_order_of_its_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(shares(DistributedSampler, 50, 1, epoch, seed=seed)[0])

    orders = {order(seed, epoch) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36  # seed + epoch would give 11
    assert order(3, 2) == order(3, 2)
    assert DistributedSampler(range(50), 1, 0).epoch == 0


@pytest.mark.parametrize(
    ("world", "words"), [((2, -1), r"0\.\.1, got -1"), ((2, 2), r"0\.\.1, got 2"), ((), "process group")]
)
def test_a_rank_outside_and_no_numbers_without_a_group_are_refused(world: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DistributedSampler(range(3), *world)


@settings(deadline=None)
@given(sizes, worlds, st.integers(1, 5))
def test_dealt_reads_each_sample_once_in_one_processs_batches(n: int, world: int, batch: int) -> None:
    ours = dealt(n, world)
    assert sorted(i for share in ours for i in share) == list(range(n))
    assert max(map(len, ours)) - min(map(len, ours)) <= 1
    assert global_batches(ours, batch) == global_batches(dealt(n, 1), batch * world)


@settings(deadline=None)
@given(st.integers(1, 60), worlds, st.integers(1, 5))
def test_padded_differs_from_one_process_in_the_last_batch_only(n: int, world: int, batch: int) -> None:
    ours = padded(n, world)
    assert len(set(map(len, ours))) == 1
    assert set(range(n)) == {i for share in ours for i in share}
    one = global_batches(dealt(n, 1), batch * world)
    assert global_batches(ours, batch)[:-1] == one[:-1]
    assert set(global_batches(ours, batch)[-1]) >= set(one[-1])
    repeated = sum(map(len, ours)) - n
    assert repeated == -n % world


def test_the_documents_examples() -> None:
    assert dealt(10, 4) == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert padded(10, 4) == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert chunked(10, 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]
    assert chunked(3, 8) == [[0], [1], [2], [0], [1], [2], [], []]  # ranks 6 and 7: nothing, hence a hang
    assert padded(3, 8) == [[0], [1], [2], [0], [1], [2], [0], [1]]
    one = global_batches(dealt(10, 1), 8)
    assert sum(a == b for a, b in zip(global_batches(chunked(10, 4), 2), one, strict=True)) == 0


@pytest.mark.parametrize("scheme", [dealt, chunked, padded])
@pytest.mark.parametrize(("n", "world"), [(-1, 2), (3, 0)])
def test_impossible_numbers_are_refused(scheme: object, n: int, world: int) -> None:
    with pytest.raises(ValueError, match=f"got {n} samples, {world} ranks"):
        scheme(n, world)  # type: ignore[operator]
