"""The bits of the norm depend on the gradients only, not on their shards."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.run_ranks import run_ranks
from tests.worlds import worlds
from torch import Tensor

from paceline.collectives.norm import (
    BLOCK_ELEMENTS,
    BlockTree,
    ShardedNorm,
    ShardSlice,
    block_square_sums,
    merge_block_ranges,
    split_blocks_evenly,
)
from paceline.collectives.sum_tree import TreeNode, split_into_subtrees

CPU = torch.device("cpu")


def plain_root(leaves: list[float]) -> float:
    """The definition: neighbours are added, and an odd last one moves up unchanged."""
    while len(leaves) > 1:
        odd = leaves[-1:] if len(leaves) % 2 else []
        leaves = [a + b for a, b in zip(leaves[0::2], leaves[1::2], strict=False)] + odd
    return leaves[0]


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 70), st.lists(st.integers(0, 70), max_size=6), st.integers(0, 2**30))
def test_the_root_is_the_same_however_the_blocks_are_held(blocks: int, cuts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(blocks, generator=generator, dtype=torch.float64).exp2() ** 9  # the order shows
    tree = BlockTree([blocks * BLOCK_ELEMENTS])
    handed_on: dict[TreeNode, float] = {}
    for first, stop in pairwise(sorted({0, blocks, *(cut for cut in cuts if cut < blocks)})):
        places, sums = tree.subtrees_to_send((first, stop)), tree.subtree_sums((first, stop), values[first:stop])
        assert len(places) == len(sums) <= 2 * math.ceil(math.log2(blocks) + 1)
        assert not handed_on.keys() & {*places}
        assert sorted(places) == split_into_subtrees((first, stop), blocks)
        handed_on |= {place: float(one) for place, one in zip(places, sums, strict=True)}
    assert tree.root_sum(handed_on) == plain_root(values.tolist())


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(1, 400),
    st.integers(0, 6),
    st.integers(0, 2**30),
)
def test_a_block_has_the_same_sum_in_any_company(dtype: torch.dtype, size: int, first: int, seed: int) -> None:
    values = torch.randn(size + first * BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(seed)).exp().to(dtype)
    everything = block_square_sums(values)
    assert everything.dtype == torch.float64
    assert torch.equal(block_square_sums(values[first * BLOCK_ELEMENTS :]), everything[first:])
    assert torch.equal(block_square_sums(values[: first * BLOCK_ELEMENTS]), everything[:first])
    wanted = (
        torch.nn.functional.pad(values.double(), (0, -len(values) % BLOCK_ELEMENTS))
        .square()
        .view(-1, BLOCK_ELEMENTS)
        .sum(1)
    )
    torch.testing.assert_close(everything, wanted, rtol=1e-5 if dtype != torch.float64 else 1e-14, atol=0)


def test_a_share_that_begins_within_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="begins at element 10, within a block"):
        BlockTree([100]).block_range(0, 10, 100)


def test_neighbouring_runs_become_one() -> None:
    assert merge_block_ranges([(4, 6), (0, 2), (2, 4), (9, 10), (7, 7)]) == [(0, 6), (9, 10)]


SIZES = (1, 700, 64, 5000, 37, 2222, 900)


def gradients(dtype: torch.dtype, salt: int = 0) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(salt)
    found: list[Tensor | None] = [(torch.randn(n, generator=generator) * (1 + n % 5)).to(dtype) for n in SIZES]
    found[2] = None
    return found


def of_world(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        found += [one_run_each(rank, world_size, gradients(dtype, salt)) for salt in range(1, 9)]
        values = gradients(dtype)
        found.append(one_run_each(rank, world_size, values))
        finite = torch.cat([v.double() for v in values if v is not None]).norm()
        torch.testing.assert_close(torch.tensor(found[-1], dtype=torch.float64), finite, rtol=1e-6, atol=0)
        values[3] = torch.full((5000,), 1e25, dtype=dtype)  # its square is beyond float32
        found.append(one_run_each(rank, world_size, values))
        assert found[-1] == pytest.approx(1e25 * math.sqrt(5000), rel=1e-2)
        values[1][650] = math.nan  # pyright: ignore[reportOptionalSubscript]
        assert math.isnan(one_run_each(rank, world_size, values))
        values[1][650] = -math.inf  # pyright: ignore[reportOptionalSubscript]
        assert math.isinf(one_run_each(rank, world_size, values))
    return found


def one_run_each(rank: int, world_size: int, values: list[Tensor | None]) -> float:
    """Each rank holds one run of each parameter; runs have different lengths, and some are empty."""
    of_ranks: list[list[ShardSlice]] = [[] for _ in range(world_size)]
    for index, size in enumerate(SIZES):
        cuts = [min(size, size * r // world_size // BLOCK_ELEMENTS * BLOCK_ELEMENTS) for r in range(world_size)] + [
            size
        ]
        for holder, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop:
                of_ranks[(holder + index) % world_size].append((index, start, stop))
    shared = ShardedNorm(SIZES, of_ranks, rank, CPU)
    own = {i: value[start:stop] for i, start, stop in of_ranks[rank] if (value := values[i]) is not None}
    return shared(own).result()


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.integers(1, 5))
def test_even_shares_hold_each_element_once_and_as_many_blocks_each(sizes, holders):
    seen = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    blocks = []
    for shares in split_blocks_evenly(sizes, holders):
        blocks.append(0)
        for index, start, stop in shares:
            assert start % BLOCK_ELEMENTS == 0 and (stop % BLOCK_ELEMENTS == 0 or stop == sizes[index])
            seen[index][start:stop] += 1
            blocks[-1] += -(-(stop - start) // BLOCK_ELEMENTS)
    assert all(bool((one == 1).all()) for one in seen)
    assert max(blocks) - min(blocks) <= 1


def everything(rank: int, world_size: int, folder: str) -> dict[int, list[Any]]:
    return {size: of_world(rank, size) for size in worlds(rank, (1, 2, 3), folder)}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(450)
def test_the_norm_has_the_same_bits_at_every_world_size(tmp_path: Path) -> None:
    of_ranks = run_ranks(everything, 3, tmp_path, str(tmp_path / "worlds"), timeout=420)
    alone = of_ranks[0][1]
    assert len({*alone}) == 30
    for found in of_ranks:
        for size, norms in found.items():
            assert norms == alone, size
