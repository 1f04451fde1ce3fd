"""Laws of who sees what; of the permutation of very many samples; and of the number that says which were used."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.errors import raises

from paceline.data import plan as plan_module
from paceline.data.plan import (
    BatchPlan,
    combine_fingerprints,
    fingerprint_indices,
    permute,
    plan_rank_micro_batches,
    shuffled_indices,
    virtual_ranks_of,
)

plans = st.builds(
    BatchPlan,
    num_samples=st.integers(1, 300),
    global_batch=st.integers(1, 80),
    virtual_ranks=st.integers(1, 9),
    accumulation=st.integers(1, 4),
    seed=st.integers(0, 5),
)


def epoch_of(plan: BatchPlan, epoch: int, world_size: int, *, merged: bool = False) -> Counter[int]:
    seen: Counter[int] = Counter()
    for step in range(plan.steps_per_epoch):
        for rank in range(world_size):
            for work in plan_rank_micro_batches(
                plan, epoch, step, virtual_ranks_of(plan.virtual_ranks, rank, world_size), merged=merged
            ):
                seen.update(work.indices.tolist() if work.is_counted else [])
    return seen


@given(plans, st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_every_sample_exactly_once_an_epoch_at_any_world_size(plan, world_size, epoch, merged):
    seen = epoch_of(plan, epoch, min(world_size, plan.virtual_ranks), merged=merged)
    assert seen == Counter(range(plan.num_samples))


@given(plans, st.integers(1, 9), st.data())
def test_global_batch_does_not_depend_on_virtual_ranks(plan, virtual_ranks, data):
    step = data.draw(st.integers(0, plan.steps_per_epoch - 1))
    other = BatchPlan(plan.num_samples, plan.global_batch, virtual_ranks, 1, plan.seed)
    assert torch.equal(plan.global_indices(2, step), other.global_indices(2, step))
    dealt = torch.cat([plan.indices(2, step, v) for v in range(plan.virtual_ranks)])
    assert sorted(dealt.tolist()) == sorted(other.global_indices(2, step).tolist())


@given(plans, st.data())
def test_shares_differ_by_at_most_one_and_microbatches_cut_them(plan, data):
    step = data.draw(st.integers(0, plan.steps_per_epoch - 1))
    shares = [plan.indices(0, step, v) for v in range(plan.virtual_ranks)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for v, share in enumerate(shares):
        parts = [plan.microbatch(0, step, v, part) for part in range(plan.parts(0, step))]
        assert torch.equal(torch.cat(parts), share)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(plan.microbatch(0, step, 0, plan.parts(0, step) - 1)) > 0  # no part is empty on every rank


@given(plans, st.integers(1, 9), st.data())
def test_every_rank_works_in_every_step_and_merged_ranks_equally_often(plan, world_size, data):
    step = data.draw(st.integers(0, plan.steps_per_epoch - 1))
    world_size = min(world_size, plan.virtual_ranks)
    shares = [virtual_ranks_of(plan.virtual_ranks, rank, world_size) for rank in range(world_size)]
    assert all(plan_rank_micro_batches(plan, 0, step, share) for share in shares)
    assert len({len(plan_rank_micro_batches(plan, 0, step, share, merged=True)) for share in shares}) == 1


@given(plans, st.data())
def test_random_streams_belong_to_the_work_not_to_the_rank(plan, data):
    step = data.draw(st.integers(0, plan.steps_per_epoch - 1))

    def streams(world_size: int) -> dict[tuple[int, int], int]:
        works = [
            work
            for rank in range(world_size)
            for work in plan_rank_micro_batches(plan, 1, step, virtual_ranks_of(plan.virtual_ranks, rank, world_size))
        ]
        return {(w.virtual_rank, w.micro_batch): w.random_seed(plan.seed) for w in works if w.is_counted}

    everywhere = [streams(size) for size in range(1, plan.virtual_ranks + 1)]
    assert all(s == everywhere[0] for s in everywhere)
    assert len(set(everywhere[0].values())) == len(everywhere[0])


@given(st.integers(1, 40), st.integers(1, 40))
def test_ranks_share_cuts_the_virtual_ranks_into_runs(virtual_ranks, world_size):
    if world_size > virtual_ranks:
        with raises("more-ranks-than-virtual-ranks"):
            virtual_ranks_of(virtual_ranks, 0, world_size)
        return
    shares = [list(virtual_ranks_of(virtual_ranks, rank, world_size)) for rank in range(world_size)]
    assert [v for share in shares for v in share] == list(range(virtual_ranks))
    assert all(shares)


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    def order(seed: int, epoch: int) -> list[int]:
        return BatchPlan(100, 100, seed=seed).global_indices(epoch, 0).tolist()

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]  # (0, 1) and (1, 0) above all
    assert len({tuple(o) for o in orders}) == 9
    assert order(1, 2) == order(1, 2)


def test_unshuffled_example_of_the_docstring():
    plan = BatchPlan(10, 6, virtual_ranks=2, shuffle=False)
    shown = [[plan.indices(0, step, v).tolist() for v in range(2)] for step in range(2)]
    assert shown == [[[0, 2, 4], [1, 3, 5]], [[6, 8], [7, 9]]]


@pytest.mark.parametrize(
    ("last_batch", "steps", "lengths"), [("keep", 3, [4, 4, 2]), ("drop", 2, [4, 4]), ("pad", 3, [4, 4, 4])]
)
def test_tails(last_batch, steps, lengths):
    plan = BatchPlan(10, 4, last_batch=last_batch)
    assert plan.steps_per_epoch == steps
    assert [len(plan.global_indices(0, step)) for step in range(steps)] == lengths
    assert plan.samples_per_epoch == sum(lengths)


def test_a_batch_larger_than_the_data_is_one_ragged_batch_or_is_padded():
    assert len(BatchPlan(3, 10).global_indices(0, 0)) == 3
    assert Counter(BatchPlan(3, 10, last_batch="pad").global_indices(0, 0).tolist()).total() == 10


@pytest.mark.parametrize("wrong", [{"num_samples": 0}, {"global_batch": 0}, {"virtual_ranks": 0}, {"accumulation": -1}])
def test_numbers_must_be_positive(wrong):
    [(name, value)] = wrong.items()
    with raises("less-than-one", name=name, value=value):
        BatchPlan(**{"num_samples": 8, "global_batch": 4, **wrong})


def test_a_misspelt_last_batch_and_dropping_everything_are_errors():
    with raises("unknown-name", value="dropp"):  # "keep" in its place would be a different training
        BatchPlan(8, 3, last_batch="dropp")
    with raises("no-whole-batch"):
        BatchPlan(3, 4, last_batch="drop")


def test_positions_outside_are_errors():
    plan = BatchPlan(8, 4, virtual_ranks=2)
    with pytest.raises(IndexError):
        plan.global_indices(0, 2)
    with pytest.raises(IndexError):
        plan.indices(0, 0, 2)


# ---- the order of very many samples --------------------------------------------------------------------------------


BINS = 64


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1))
def test_each_sample_stands_at_one_place(size: int, key: int) -> None:
    assert permute(torch.arange(size), size, key).sort().values.equal(torch.arange(size))


def test_a_part_of_an_epoch_is_that_part_of_the_whole() -> None:
    whole = permute(torch.arange(1000), 1000, 7)
    assert permute(torch.tensor([3, 999, 500]), 1000, 7).equal(whole[[3, 999, 500]])


def chi_square(first: torch.Tensor, second: torch.Tensor, size: int) -> float:
    """Of a table of BINS x BINS pairs against independence, as standard deviations from its mean."""
    pairs = (first * BINS // size) * BINS + second * BINS // size
    counts = torch.bincount(pairs, minlength=BINS * BINS).double()
    expected = len(first) / BINS**2
    freedom = BINS**2 - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("size", [2**26 - 5, 10**9])
def test_places_neighbours_and_epochs_are_independent(size: int) -> None:
    places = torch.arange(200_000) * (size // 200_000)  # from all over the epoch
    images = [permute(places, size, key) for key in (1, 2)]
    assert abs(chi_square(places, images[0], size)) < 5
    assert abs(chi_square(images[0], permute(places + 1, size, 1), size)) < 5
    assert abs(chi_square(images[0], images[1], size)) < 5
    near = torch.arange(200_000)  # a run of places, as a batch is
    found = permute(near, size, 3)
    assert abs(chi_square(found[:-1], found[1:], size)) < 5
    assert len(found.unique()) == len(found)


def test_few_samples_keep_the_order_that_they_always_had(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = BatchPlan(num_samples=10, global_batch=4, seed=0)
    assert [plan.global_indices(0, step).tolist() for step in range(3)] == [[7, 0, 4, 8], [9, 2, 5, 6], [1, 3]]
    monkeypatch.setattr(plan_module, "MAX_LISTED_SAMPLES", 5)
    assert sorted(shuffled_indices(torch.arange(10), 10, 0, 0).tolist()) == [*range(10)]


LARGE = """
import resource, time
from paceline.data.plan import BatchPlan
import numpy, torch
from paceline.data.plan import splitmix64
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
plan = BatchPlan(num_samples=10**9, global_batch=4096, virtual_ranks=8)
first = plan.indices(0, 0, 3)
at = plan.global_indices(0, 7 * 10**8 // 4096)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.perf_counter() - began, len(first), len(at))
"""


def test_of_a_billion_samples_the_first_batch_needs_no_list() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, timeout=150)
    kilobytes, _, first, at = done.stdout.split()
    assert int(kilobytes) < 50_000 and (first, at) == ("512", "4096")


# ---- fingerprints --------------------------------------------------------------------------------------------------


samples = st.lists(st.integers(0, 2**62), max_size=40)


def of(indices: list[int]) -> int:
    return fingerprint_indices(torch.tensor(indices, dtype=torch.int64))


def mixed_by_python(index: int) -> int:
    """The hash of one sample in Python's own integers."""
    z = (index + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_numbers_in_run_folders_keep_their_meaning():
    assert of([0]) == 0xE220A8397B1DCDAF  # splitmix64's first output from state 0
    assert of([]) == 0


@given(samples)
def test_it_is_the_sum_of_the_hashes(indices):
    assert of(indices) == sum(map(mixed_by_python, indices)) % 2**64


@given(samples, st.randoms())
def test_order_does_not_matter(indices, random):
    assert of(random.sample(indices, len(indices))) == of(indices)


@given(st.lists(samples, max_size=4))
def test_parts_add_up(parts):
    assert combine_fingerprints(*map(of, parts)) == of([index for part in parts for index in part])


@given(samples, st.data())
def test_a_sample_missing_doubled_or_exchanged_is_always_seen(indices, data):
    assume(indices)
    at, other = data.draw(st.integers(0, len(indices) - 1)), data.draw(st.integers(0, 2**62))
    rest = indices[:at] + indices[at + 1 :]
    assert of(rest) != of(indices)
    assert of([*indices, indices[at]]) != of(indices)
    assert (of([*rest, other]) == of(indices)) == (other == indices[at])


@pytest.mark.parametrize("indices", [torch.arange(10).reshape(2, 5), torch.arange(20)[::2]])
def test_any_shape_and_stride_and_the_argument_stays(indices):
    before = indices.clone()
    assert fingerprint_indices(indices) == of(indices.flatten().tolist())
    assert torch.equal(indices, before)
