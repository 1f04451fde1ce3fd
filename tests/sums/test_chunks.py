"""Every element passes exactly once, in pieces that fit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sums.chunks import ALIGNED, cut

TYPES = (torch.float32, torch.float16)
SIZES = st.lists(st.one_of(st.integers(0, 40), st.integers(200, 300), st.integers(500, 3000)), max_size=20)


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 8), st.data())
def test_each_element_is_in_one_chunk_that_fits_and_holds_one_type(sizes, units, data):
    dtypes = [data.draw(st.sampled_from(TYPES)) for _ in sizes]
    rooms = dict.fromkeys(TYPES, units * ALIGNED)
    seen = [[0] * size for size in sizes]
    for chunk in cut(sizes, dtypes, rooms):
        assert 0 < chunk.size <= rooms[chunk.dtype]
        for piece in chunk.pieces:
            assert dtypes[piece.tensor] == chunk.dtype
            assert piece.start % ALIGNED == 0
            for at in range(piece.start, piece.stop):
                seen[piece.tensor][at] += 1
    assert all(count == 1 for tensor in seen for count in tensor)


def test_small_tensors_travel_together_and_a_large_one_alone():
    chunks = cut([10, 5000, 20, 0, 30], [torch.float32] * 5, {torch.float32: 1024})
    assert [len(chunk.pieces) for chunk in chunks] == [1] * 5 + [3]
    assert {chunk.size for chunk in chunks[:4]} == {1024}
