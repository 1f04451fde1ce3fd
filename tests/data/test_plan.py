"""Laws of who sees what."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises

from paceline.data.plan import BatchPlan, rank_work, ranks_share

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
            for work in rank_work(plan, epoch, step, ranks_share(plan.virtual_ranks, rank, world_size), merged=merged):
                seen.update(work.indices.tolist() if work.counted else [])
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
    shares = [ranks_share(plan.virtual_ranks, rank, world_size) for rank in range(world_size)]
    assert all(rank_work(plan, 0, step, share) for share in shares)
    assert len({len(rank_work(plan, 0, step, share, merged=True)) for share in shares}) == 1


@given(plans, st.data())
def test_random_streams_belong_to_the_work_not_to_the_rank(plan, data):
    step = data.draw(st.integers(0, plan.steps_per_epoch - 1))

    def streams(world_size: int) -> dict[tuple[int, int], int]:
        works = [
            work
            for rank in range(world_size)
            for work in rank_work(plan, 1, step, ranks_share(plan.virtual_ranks, rank, world_size))
        ]
        return {(w.virtual_rank, w.part): w.random_seed(plan.seed) for w in works if w.counted}

    everywhere = [streams(size) for size in range(1, plan.virtual_ranks + 1)]
    assert all(s == everywhere[0] for s in everywhere)
    assert len(set(everywhere[0].values())) == len(everywhere[0])


@given(st.integers(1, 40), st.integers(1, 40))
def test_ranks_share_cuts_the_virtual_ranks_into_runs(virtual_ranks, world_size):
    if world_size > virtual_ranks:
        with raises("more-ranks-than-virtual-ranks"):
            ranks_share(virtual_ranks, 0, world_size)
        return
    shares = [list(ranks_share(virtual_ranks, rank, world_size)) for rank in range(world_size)]
    assert [v for share in shares for v in share] == list(range(virtual_ranks))
    assert all(shares)


def test_the_tail_of_60001_samples_on_3_ranks_is_33_32_32():
    plan = BatchPlan(60_001, 384, virtual_ranks=3)
    last = plan.steps_per_epoch - 1
    assert [len(plan.indices(0, last, v)) for v in range(3)] == [33, 32, 32]


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
    ("tail", "steps", "lengths"), [("keep", 3, [4, 4, 2]), ("drop", 2, [4, 4]), ("pad", 3, [4, 4, 4])]
)
def test_tails(tail, steps, lengths):
    plan = BatchPlan(10, 4, tail=tail)
    assert plan.steps_per_epoch == steps
    assert [len(plan.global_indices(0, step)) for step in range(steps)] == lengths
    assert plan.samples_per_epoch == sum(lengths)


def test_a_batch_larger_than_the_data_is_one_ragged_batch_or_is_padded():
    assert len(BatchPlan(3, 10).global_indices(0, 0)) == 3
    assert Counter(BatchPlan(3, 10, tail="pad").global_indices(0, 0).tolist()).total() == 10


@pytest.mark.parametrize("wrong", [{"num_samples": 0}, {"global_batch": 0}, {"virtual_ranks": 0}, {"accumulation": -1}])
def test_numbers_must_be_positive(wrong):
    [(name, value)] = wrong.items()
    with raises("less-than-one", name=name, value=value):
        BatchPlan(**{"num_samples": 8, "global_batch": 4, **wrong})


def test_dropping_everything_is_refused():
    with raises("no-whole-batch"):
        BatchPlan(3, 4, tail="drop")


def test_positions_outside_are_errors():
    plan = BatchPlan(8, 4, virtual_ranks=2)
    with pytest.raises(IndexError):
        plan.global_indices(0, 2)
    with pytest.raises(IndexError):
        plan.indices(0, 0, 2)
