"""A checksum depends on each bit of a tensor and on their order, and not on the layout in memory."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bit_flips import flipped
from torch import nn

from paceline.checkpoint.shards import CHECKSUM_CHUNK, checksum

TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor, in any layout, and the same with one flipped bit."""
    dtype = draw(st.sampled_from(TYPES))
    shape = draw(st.lists(st.integers(1, 7), max_size=3))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    offset = draw(st.integers(0, 9))
    strides, size = [0] * len(shape), 1
    for axis in draw(st.permutations(range(len(shape)))):  # transposed, and with gaps
        strides[axis] = size * steps[axis]
        size = strides[axis] * shape[axis]
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    storage = torch.randint(0, 256, ((offset + size) * dtype.itemsize,), dtype=torch.uint8, generator=noise)
    is_bool = dtype is torch.bool  # other bytes than 0 and 1 are no booleans; a copy makes them ones
    storage = storage & 1 if is_bool else storage
    at = offset + sum(draw(st.integers(0, n - 1)) * stride for n, stride in zip(shape, strides, strict=True))
    other = storage.clone()
    byte = at * dtype.itemsize + draw(st.integers(0, dtype.itemsize - 1))
    other[byte] ^= 1 << (0 if is_bool else draw(st.integers(0, 7)))
    before, after = (s.view(dtype).as_strided(shape, strides, offset) for s in (storage, other))
    return before, after


@given(pairs())
@settings(deadline=None, max_examples=150)
def test_every_flipped_bit_changes_the_checksum(pair):
    before, after = pair
    assert int(checksum(before)) != int(checksum(after))


@given(pairs())
@settings(deadline=None, max_examples=50)
def test_the_layout_in_memory_is_no_difference(pair):
    tensor, _ = pair
    assert int(checksum(tensor)) == int(checksum(tensor.clone(memory_format=torch.contiguous_format)))


def test_nothing_and_one_element_with_gaps_have_a_checksum_too():
    assert int(checksum(torch.empty(0, 3))) == 0
    assert int(checksum(nn.Parameter(torch.zeros(())))) == 0
    alone = torch.arange(6).reshape(3, 2)[2:, 1]  # contiguous to torch, although its stride is 2
    assert int(checksum(alone)) == int(checksum(torch.tensor([5])))


def test_equal_flips_in_many_numbers_do_not_cancel_and_the_order_counts():
    values = torch.randn(64, 4)
    assert len({int(checksum(v)) for v in (values, -values, values.flip(0), values.t(), values * 2)}) == 5
    for width in (torch.float32, torch.float64, torch.bfloat16):  # as a defective unit that computes each n-th number
        values = torch.randn(64, dtype=width)
        signs = [values.where(torch.arange(64) % step != step - 1, -values) for step in (1, 2, 4, 8, 16, 32)]
        assert len({int(checksum(v)) for v in (values, *signs)}) == 7
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    assert int(checksum(conjugate)) == int(checksum(conjugate.resolve_conj()))
    negated = conjugate.imag[:1]  # its sign is a flag of the tensor
    assert int(checksum(negated)) == int(checksum(negated.resolve_neg()))
    long = torch.zeros(4 * CHECKSUM_CHUNK + 3)
    ends = [flipped(long, place, 31) for place in (0, 2 * CHECKSUM_CHUNK, 4 * CHECKSUM_CHUNK, 4 * CHECKSUM_CHUNK + 2)]
    assert len({int(checksum(v)) for v in (long, *ends)}) == 5
