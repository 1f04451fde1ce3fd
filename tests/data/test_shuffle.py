"""The permutation of very many samples is one, and looks random: places, neighbours, epochs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import plan as shuffle
from paceline.data.plan import BatchPlan, permuted, shuffled

BINS = 64


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1))
def test_each_sample_stands_at_one_place(size: int, key: int) -> None:
    assert permuted(torch.arange(size), size, key).sort().values.equal(torch.arange(size))


def test_a_part_of_an_epoch_is_that_part_of_the_whole() -> None:
    whole = permuted(torch.arange(1000), 1000, 7)
    assert permuted(torch.tensor([3, 999, 500]), 1000, 7).equal(whole[[3, 999, 500]])


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
    images = [permuted(places, size, key) for key in (1, 2)]
    assert abs(chi_square(places, images[0], size)) < 5
    assert abs(chi_square(images[0], permuted(places + 1, size, 1), size)) < 5
    assert abs(chi_square(images[0], images[1], size)) < 5
    near = torch.arange(200_000)  # a run of places, as a batch is
    found = permuted(near, size, 3)
    assert abs(chi_square(found[:-1], found[1:], size)) < 5
    assert len(found.unique()) == len(found)


def test_few_samples_keep_the_order_that_they_always_had(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = BatchPlan(num_samples=10, global_batch=4, seed=0)
    assert [plan.global_indices(0, step).tolist() for step in range(3)] == [[7, 0, 4, 8], [9, 2, 5, 6], [1, 3]]
    monkeypatch.setattr(shuffle, "LISTED", 5)
    assert sorted(shuffled(torch.arange(10), 10, 0, 0).tolist()) == [*range(10)]


LARGE = """
import resource, time
from paceline.data.plan import BatchPlan
import numpy, torch
from paceline.data.consumed import mixed
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
plan = BatchPlan(num_samples=10**9, global_batch=4096, virtual_ranks=8)
first = plan.indices(0, 0, 3)
at = plan.global_indices(0, 7 * 10**8 // 4096)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.perf_counter() - began, len(first), len(at))
"""


def test_of_a_billion_samples_the_first_batch_needs_no_list() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, timeout=50)
    kilobytes, _, first, at = done.stdout.split()
    assert int(kilobytes) < 50_000 and (first, at) == ("512", "4096")
