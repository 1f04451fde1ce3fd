"""Sums in shared memory have the bits of one process, and chunks contain each element once."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.memory_harness import in_threads

from paceline.collectives import shm_collectives
from paceline.collectives.buckets import divide
from paceline.collectives.shm_collectives import (
    ALIGNMENT_ELEMENTS,
    TreeSum,
    all_gather,
    all_gather_object,
    barrier,
    broadcast_in_memory,
    reduce_scatter,
    spare_buffer_count,
    split_into_chunks,
    sum_subtrees,
)
from paceline.collectives.sum_tree import LeafPartition, add_optional, find_split_leaf, tree_sum
from paceline.errors import ExitCode, TrainingError

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BULK_BYTES = 16 << 10
ROOM = BULK_BYTES // 4


def partitions(size: int, leaves: int) -> list[LeafPartition]:
    cuts = [rank * leaves // size for rank in range(size + 1)]
    return [LeafPartition([*pairwise(cuts)], rank) for rank in range(size)]


def leaf(number: int, tensor: int, size: int, dtype: torch.dtype, absent: set) -> torch.Tensor | None:
    """Values whose sum depends on the order; some are -0."""
    if (number, tensor) in absent:
        return None
    generator = torch.Generator().manual_seed(1000 * number + tensor)
    values = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-3, 4, (size,), generator=generator)
    values[::7] = -0.0
    return values.to(dtype)


def node_sum(node, tensor, size, dtype, absent):
    if node[1] - node[0] == 1:
        return leaf(node[0], tensor, size, dtype, absent)
    cut = find_split_leaf(node)
    return add_optional(
        node_sum((node[0], cut), tensor, size, dtype, absent), node_sum((cut, node[1]), tensor, size, dtype, absent)
    )


def bits(tensor: torch.Tensor | None) -> bytes | None:
    return None if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_sum_has_the_bits_of_one_process_on_every_rank(data):
    world = data.draw(st.integers(2, 4))
    leaves = data.draw(st.integers(world, 9))
    border = st.integers(-2, 2)
    size = st.one_of(st.integers(0, 70), border.map(lambda d: ROOM + d), border.map(lambda d: 2 * ROOM // world + d))
    sizes = data.draw(st.lists(size, min_size=1, max_size=6))
    dtypes = [data.draw(st.sampled_from(FLOATS)) for _ in sizes]
    pairs = [(number, tensor) for number in range(leaves) for tensor in range(len(sizes))]
    absent = set(data.draw(st.lists(st.sampled_from(pairs), max_size=8)))
    absent |= {(n, 0) for n in range(leaves)} if data.draw(st.booleans()) else set()
    divisor = data.draw(st.sampled_from([None, 3.0, torch.tensor(70001.0, dtype=torch.float64)]))
    direct = data.draw(st.sampled_from([0, shm_collectives.MAX_DIRECT_SUM_BYTES]))
    check_sums(world, leaves, sizes, dtypes, absent, divisor, direct)


def test_a_chunk_of_one_type_does_not_write_over_the_sums_of_another():
    check_sums(3, 8, [0, 4096, 65], [torch.float64, torch.float32, torch.float64], set(), None, 0)


def check_sums(world, leaves, sizes, dtypes, absent, divisor, direct):
    wanted = [node_sum((0, leaves), i, n, d, absent) for i, (n, d) in enumerate(zip(sizes, dtypes, strict=True))]
    wanted = [w if w is None or divisor is None else divide(w, divisor) for w in wanted]

    def act(memory):
        partition = partitions(world, leaves)[memory.rank]
        total = TreeSum(memory, sizes, dtypes, partition)
        found = []
        for _ in range(2):  # the second time every slot has been used
            own = [
                [node_sum(node, i, n, d, absent) for i, (n, d) in enumerate(zip(sizes, dtypes, strict=True))]
                for node in partition.subtrees_by_rank[memory.rank]
            ]
            own = [None if all(part is None for part in flat) else flat for flat in own]
            found.append(total.run(own, divisor))
            before = own[0] or [None] * len(sizes)
            assert all(result is given for result, given in zip(found[-1], before, strict=True) if given is not None)
        return found

    old, shm_collectives.MAX_DIRECT_SUM_BYTES = shm_collectives.MAX_DIRECT_SUM_BYTES, direct
    try:
        everybody = in_threads(world, act, bulk_bytes=BULK_BYTES)
    finally:
        shm_collectives.MAX_DIRECT_SUM_BYTES = old
    for found in everybody:
        for results in found:
            assert [*map(bits, results)] == [*map(bits, wanted)]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), 3e38])
def test_what_is_known_to_be_finite_is_finite_and_known_by_all(world, bad):
    sizes = [400_000, 100]

    def act(memory):
        total = TreeSum(memory, sizes, [torch.float32] * 2, partitions(world, world)[memory.rank])
        own = [torch.ones(size) for size in sizes]
        if bad is not None and memory.rank == world - 1:
            own[0][1:3] = bad  # the share of rank 0; two of them, so that the sum of 3e38 overflows, and no element
        total.run([own])
        return total.finite

    assert in_threads(world, act) == [bad is None] * world


@pytest.mark.parametrize("world", range(2, 17))
def test_no_more_sums_wait_than_there_is_room_for_and_all_the_room_is_used(world):
    for leaves in range(world, 41):
        partition = partitions(world, leaves)[0]
        nodes = [node for of_rank in partition.subtrees_by_rank for node in of_rank]
        parts = {node: torch.randn(3) for node in nodes}
        wanted = tree_sum({node: part.clone() for node, part in parts.items()}, torch.add, leaves)
        spare = [torch.full((3,), torch.nan) for _ in range(spare_buffer_count(nodes, leaves))]
        out = torch.empty(3)
        sum_subtrees(parts, leaves, out, spare, None)
        assert torch.equal(out, wanted) and not any(one.isnan().any() for one in spare), leaves


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(0, 5), st.sampled_from([64, 4096, 4096 * 2 + 64]), st.sampled_from(FLOATS))
def test_shares_of_the_sum_are_pieces_of_the_whole_and_gather_to_it(world, more, share, dtype):
    leaves = world + more
    whole = node_sum((0, leaves), 0, world * share, dtype, set())

    def act(memory):
        partition = partitions(world, leaves)[memory.rank]
        own = [node_sum(node, 0, world * share, dtype, set()) for node in partition.subtrees_by_rank[memory.rank]]
        mine = reduce_scatter(memory, own, partition, torch.empty(share, dtype=dtype))
        out = torch.empty(world * share, dtype=dtype)
        all_gather(memory, mine, out)
        in_place = torch.zeros_like(out)
        part = in_place[memory.rank * share : (memory.rank + 1) * share].copy_(mine)
        all_gather(memory, part, in_place)
        assert torch.equal(in_place, out)
        return out

    for out in in_threads(world, act, bulk_bytes=BULK_BYTES):
        assert bits(out) == bits(whole)


def test_a_broadcast_carries_every_type_and_words_of_any_length():
    types = (torch.bool, torch.int16, torch.int64, torch.complex64, torch.bfloat16, torch.float64)
    wanted = [torch.arange(n).to(dtype) for n, dtype in zip((0, 1, 5000, 3, 40000, 7), types, strict=True)]

    def act(memory):
        mine = [tensor.clone() if memory.rank == 1 else torch.zeros_like(tensor) for tensor in wanted]
        barrier(memory)
        broadcast_in_memory(memory, mine, src=1)
        words = all_gather_object(memory, {"rank": memory.rank, "text": "ä" * 90_000 * memory.rank}, "words")
        return mine, [(one["rank"], len(one["text"])) for one in words]

    for found, words in in_threads(3, act):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert words == [(0, 0), (1, 90_000), (2, 180_000)]


def test_ranks_that_call_different_things_are_told_and_mix_up_nothing():
    def act(memory):
        partition = partitions(2, 2)[memory.rank]
        size = 100 + memory.rank
        mine = torch.ones(size)
        with pytest.raises(TrainingError, match=r"rank 0 called all_reduce 'gradients' \[100\] float32; rank 1 .*101"):
            TreeSum(memory, [size], [torch.float32], partition).run([[mine]])
        with pytest.raises(RuntimeError, match="has left the shared memory"):  # what would follow is not to be trusted
            barrier(memory)
        return mine

    for rank, mine in enumerate(in_threads(2, act)):
        assert torch.equal(mine, torch.ones(100 + rank))
    with pytest.raises(TrainingError) as raised:
        in_threads(
            2,
            lambda m: (
                broadcast_in_memory(m, [torch.ones(4)]) if m.rank else all_gather(m, torch.ones(2), torch.ones(4))
            ),
        )
    assert raised.value.exit_code == ExitCode.MISMATCH


TYPES = (torch.float32, torch.float16)
SIZES = st.lists(st.one_of(st.integers(0, 40), st.integers(200, 300), st.integers(500, 3000)), max_size=20)


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 8), st.data())
def test_each_element_is_in_one_chunk_that_fits_and_holds_one_type(sizes, units, data):
    dtypes = [data.draw(st.sampled_from(TYPES)) for _ in sizes]
    rooms = dict.fromkeys(TYPES, units * ALIGNMENT_ELEMENTS)
    seen = [[0] * size for size in sizes]
    for chunk in split_into_chunks(sizes, dtypes, rooms):
        assert 0 < chunk.size <= rooms[chunk.dtype]
        for piece in chunk.segments:
            assert dtypes[piece.tensor_index] == chunk.dtype
            assert piece.start % ALIGNMENT_ELEMENTS == 0
            for at in range(piece.start, piece.stop):
                seen[piece.tensor_index][at] += 1
    assert all(count == 1 for tensor in seen for count in tensor)


def test_small_tensors_travel_together_and_a_large_one_alone():
    chunks = split_into_chunks([10, 5000, 20, 0, 30], [torch.float32] * 5, {torch.float32: 1024})
    assert [len(chunk.segments) for chunk in chunks] == [1] * 5 + [3]
    assert {chunk.size for chunk in chunks[:4]} == {1024}
