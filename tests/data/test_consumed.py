"""Laws of the number that says which samples were used."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.data.consumed import add, fingerprint

samples = st.lists(st.integers(0, 2**62), max_size=40)


def of(indices: list[int]) -> int:
    return fingerprint(torch.tensor(indices, dtype=torch.int64))


def mixed(index: int) -> int:
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
    assert of(indices) == sum(map(mixed, indices)) % 2**64


@given(samples, st.randoms())
def test_order_does_not_matter(indices, random):
    assert of(random.sample(indices, len(indices))) == of(indices)


@given(st.lists(samples, max_size=4))
def test_parts_add_up(parts):
    assert add(*map(of, parts)) == of([index for part in parts for index in part])


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
    assert fingerprint(indices) == of(indices.flatten().tolist())
    assert torch.equal(indices, before)
