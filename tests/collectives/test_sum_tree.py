"""The tree's sum has one order of additions for any number of ranks, empty leaves and buckets."""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.odd_model import over_torch
from tests.collectives.one_backward import one_backward
from tests.run_ranks import run_ranks
from tests.worlds import worlds
from torch import Tensor, nn

from paceline.collectives.reducer import Reducer
from paceline.collectives.sum_tree import (
    LeafPartition,
    PartialSums,
    TreeNode,
    add_gradient_lists,
    add_optional,
    find_split_leaf,
    is_tree_node,
    split_into_subtrees,
    tree_sum,
)

# ---- the tree: pure


def all_nodes(first: int, stop: int) -> set[TreeNode]:
    """The definition: split at the largest power of two that leaves a right part."""
    if stop - first == 1:
        return {(first, stop)}
    power = 1
    while 2 * power < stop - first:
        power *= 2
    return {(first, stop)} | all_nodes(first, first + power) | all_nodes(first + power, stop)


def plain_sum(leaves: list[Tensor]) -> Tensor:
    if len(leaves) == 1:
        return leaves[0]
    power = 1
    while 2 * power < len(leaves):
        power *= 2
    return plain_sum(leaves[:power]) + plain_sum(leaves[power:])


def bits(tensor: Tensor) -> list[int | str]:
    """As integers. All NaN are equal, because the processor chooses which of two NaN a sum keeps."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    whole = tensor.detach().contiguous().flatten().view(kinds[tensor.element_size()]).tolist()
    return ["nan" if nan else n for n, nan in zip(whole, tensor.isnan().flatten().tolist(), strict=True)]


@st.composite
def cuts(draw: st.DrawFn, most: int = 24) -> list[TreeNode]:
    """The leaves of each rank: consecutive runs from 0 to V."""
    leaves = draw(st.integers(1, most))
    inner = draw(st.sets(st.integers(1, leaves - 1))) if leaves > 1 else set[int]()
    return [*pairwise([0, *sorted(inner), leaves])]


def test_the_docstrings_examples() -> None:
    assert [find_split_leaf(node) for node in ((0, 6), (0, 4), (4, 6))] == [4, 2, 5]
    assert split_into_subtrees((0, 3), 6) == [(0, 2), (2, 3)]
    assert split_into_subtrees((3, 6), 6) == [(3, 4), (4, 6)]
    words = {(i, i + 1): letter for i, letter in enumerate("abcdef")}
    whole = tree_sum(words, lambda left, right: f"({left}+{right})", 6)
    assert whole == "(((a+b)+(c+d))+(e+f))"


@settings(deadline=None)
@given(cuts())
def test_subtrees_tile_the_owned_run_and_each_is_a_node(owned: list[TreeNode]) -> None:
    leaves = owned[-1][1]
    nodes = all_nodes(0, leaves)
    assert {(a, b) for a in range(leaves) for b in range(a + 1, leaves + 1) if is_tree_node((a, b), leaves)} == nodes
    for first, stop in owned:
        found = split_into_subtrees((first, stop), leaves)
        assert [found[0][0], *(node[1] for node in found)] == [*(node[0] for node in found), stop]
        assert found[0][0] == first and set(found) <= nodes
        for node in nodes:  # none larger fits in: fewer subtrees are less to send
            inside = first <= node[0] and node[1] <= stop
            assert not inside or any(big[0] <= node[0] and node[1] <= big[1] for big in found)


TELLING = [1e8, 1.0, -1e8, 0.1, -0.1, 3e38, -3e38, 1e-45, 0.0, -0.0, math.inf, -math.inf, math.nan]
VALUES = st.one_of(st.sampled_from(TELLING), st.floats(width=32))


@st.composite
def leaves_of(draw: st.DrawFn) -> tuple[list[TreeNode], list[list[float] | None]]:
    owned = draw(cuts(16))
    number = st.one_of(st.none(), st.lists(VALUES, min_size=2, max_size=2))
    return owned, draw(st.lists(number, min_size=owned[-1][1], max_size=owned[-1][1]))


def in_parts(owned: list[TreeNode], values: Sequence[list[float] | None]) -> Tensor:
    """(2,): the sum from the parts of ranks with these runs."""
    parts: dict[TreeNode, Tensor] = {}
    for run in owned:
        sums = PartialSums(run, len(values), add_optional)
        for leaf in range(*run):
            if (value := values[leaf]) is not None:
                sums.add(leaf, torch.tensor(value))
            elif leaf % 2:  # None may be said, or left out
                sums.add(leaf, None)
        found = [torch.zeros(2) if value is None else value for value in sums.finish()]
        parts |= zip(split_into_subtrees(run, len(values)), found, strict=True)
    return tree_sum(parts, torch.add, len(values))


def in_one(values: Sequence[list[float] | None]) -> Tensor:
    return plain_sum([torch.zeros(2) if value is None else torch.tensor(value) for value in values])


@settings(deadline=None, max_examples=200)
@given(leaves_of())
def test_any_cut_has_the_very_bits_of_the_plain_sum(case: tuple[list[TreeNode], list[list[float] | None]]) -> None:
    owned, values = case
    assert bits(in_parts(owned, values)) == bits(in_one(values))


def test_a_leaf_left_out_makes_minus_zero_plus_zero_as_real_zeros_do() -> None:
    for leaves in (1, 2, 3, 4):
        for values in product((None, [-0.0, 1.0]), repeat=leaves):
            for inner in product((False, True), repeat=leaves - 1):
                owned = [*pairwise([0, *(at for at, cut in enumerate(inner, start=1) if cut), leaves])]
                assert bits(in_parts(owned, values)) == bits(in_one(values)), (owned, values)


def test_lists_are_added_one_by_one_and_none_is_zeros() -> None:
    a, b = torch.tensor([1.0, -0.0]), torch.tensor([-0.0])
    assert add_gradient_lists(None, None) is None
    found = add_gradient_lists([a, None, b, None], [torch.tensor([2.0, -0.0]), None, None, torch.tensor([-0.0])])
    assert found is not None and found[1] is None
    assert [bits(value) for value in found if value is not None] == [bits(torch.tensor([3.0, -0.0])), [0], [0]]
    for pair in ((None, [torch.tensor([-0.0]), None]), ([torch.tensor([-0.0]), None], None)):
        (zero, nothing) = add_gradient_lists(*pair) or []
        assert nothing is None and zero is not None and bits(zero) == [0]


@settings(deadline=None)
@given(cuts(70))
def test_a_rank_keeps_few_partial_sums(owned: list[TreeNode]) -> None:
    for first, stop in owned:
        sums, kept = PartialSums((first, stop), owned[-1][1], add_optional), weakref.WeakSet[Tensor]()
        count = stop - first
        # Sizes go up to the middle of the run, and then down: each at most doubles the leaves that it takes.
        most = math.log2(count) + 1 if first == 0 else 2 * math.log2(count + 2) - 2
        for leaf in range(first, stop):
            value = torch.ones(1)
            kept.add(value)
            sums.add(leaf, value)
            del value
            assert len(kept) <= most


def test_a_leaf_is_refused_where_it_would_be_added_wrongly() -> None:
    sums = PartialSums((2, 5), 8, add_optional)
    for foreign in (1, 5, -1):
        with pytest.raises(ValueError, match=rf"leaf {foreign} is not one of 2\.\.4"):
            sums.add(foreign, torch.ones(1))
    sums.add(3, torch.ones(1))
    for past in (3, 2):
        with pytest.raises(ValueError, match=rf"leaf {past} is not one of 4\.\.4"):
            sums.add(past, torch.ones(1))
    assert sums.finish() == [torch.ones(1), None]  # leaves 2 and 3; 4


# ---- on ranks

SIZES = (1, 2, 3, 4, 5)
VIRTUAL = (8, 7, 5)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32)
SHAPES = ((4, 3), (), (150,), (6, 3), (5,), (300,), (2,))
UNUSED = 6  # a weight that no virtual rank uses
RARE = 3  # one that odd virtual ranks alone use


class Mixed(nn.Module):
    """Parameters of several types and layouts, some unused. The sum of its gradients depends on the order."""

    def __init__(self) -> None:
        super().__init__()
        tensors = [torch.ones(shape, dtype=dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]
        tensors[3] = tensors[3].reshape(3, 6).t()
        self.weights = nn.ParameterList(tensors)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def backward(self, values: list[Tensor | None], order: int = 1) -> None:
        pairs = [(w, v) for w, v in zip(self.weights, values, strict=True) if v is not None][::order]
        sum(((w * v).sum().double() for w, v in pairs), torch.zeros(())).backward()


@cache
def values_of(virtual_rank: int, salt: int) -> list[Tensor | None]:
    """For each weight: numbers of very different sizes, some of them -0; None if it is not used."""
    generator = torch.Generator().manual_seed(1000 * salt + virtual_rank)
    values: list[Tensor | None] = []
    for index, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True)):
        exponent = torch.randint(-8, 8, shape, generator=generator)
        value = torch.randn(shape, generator=generator) * 2.0**exponent
        value = torch.where(torch.rand(shape, generator=generator) < 0.1, -0.0, value).to(dtype)
        used = index != UNUSED and (index != RARE or virtual_rank % 2 == 1)
        values.append(value if used else None)
    return values


def empty(virtual_ranks: int, salt: int) -> set[int]:
    only_one = set(range(virtual_ranks)) - {1}
    return [set[int](), {2, 3}, {0, virtual_ranks - 1}, only_one][salt % 4]


@cache
def wanted_gradients(virtual_ranks: int, salt: int, divisor: float) -> list[Tensor | None]:
    gradients: list[Tensor | None] = []
    for index, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True)):
        leaves: list[Tensor] = []
        used = False
        for v in range(virtual_ranks):
            first, second = values_of(v, salt)[index], values_of(v, salt + 500)[index]
            if v in empty(virtual_ranks, salt) or first is None or second is None:
                leaves.append(torch.zeros(shape, dtype=dtype))
            else:
                leaves.append(first + second)
                used = True
        total = plain_sum(leaves)
        wide = total.float() if total.element_size() < 4 else total
        gradients.append((wide / divisor).to(dtype) if used else None)
    return gradients


def partition_of(rank: int, world_size: int, virtual_ranks: int) -> LeafPartition:
    at = [r * virtual_ranks // world_size for r in range(world_size + 1)]
    return LeafPartition([*pairwise(at)], rank)


def take_step(model: Mixed, reducer: Reducer, partition: LeafPartition, salt: int) -> None:
    """Two backwards for each virtual rank of this rank with samples; a dummy batch if none has samples."""
    order = -1 if partition.rank % 2 else 1
    share = range(*partition.ranges[partition.rank])
    mine = [v for v in share if v not in empty(partition.leaf_count, salt)]
    for v in mine:
        with one_backward(reducer, v, is_last=False):
            model.backward(values_of(v, salt), order)
        with one_backward(reducer, v, is_last=v == mine[-1]):
            model.backward(values_of(v, salt + 500), order)
    if not mine:
        with one_backward(reducer, share[0], is_last=True, counted=False):
            model.backward([torch.full_like(w, math.inf) for w in model.weights], order)


Reduced = tuple[Reducer, Callable[[nn.Parameter, Tensor | None], tuple[Tensor | None, Tensor | None] | None]]
"""a reducer, and (weight, wanted gradient) -> what this rank has of it and what it should have; None: no part"""


def same_bits(rank: int, world_size: int, make: Callable[[Mixed, LeafPartition, int], Reduced]) -> None:
    """Compare the sums of the reducers from `make` (model, partition, bucket bytes) with those of one process."""
    for virtual_ranks in VIRTUAL:
        partition = partition_of(rank, world_size, virtual_ranks)
        for bucket_bytes in (600, 25 << 20) if virtual_ranks == 7 else (600,):
            model = Mixed()
            reducer, own = make(model, partition, bucket_bytes)
            for salt in range(4):
                model.zero_grad()
                take_step(model, reducer, partition, salt)
                divisor = 3.0 + salt
                reducer.finish(torch.tensor(divisor, dtype=torch.float64) if salt % 2 else divisor)
                for index, gradient in enumerate(wanted_gradients(virtual_ranks, salt, divisor)):
                    if (pair := own(model.weights[index], gradient)) is None:
                        continue
                    (found, wanted), case = pair, (virtual_ranks, salt, index)
                    assert (found is None) == (wanted is None), case
                    if found is not None and wanted is not None:
                        assert found.dtype == wanted.dtype and found.shape == wanted.shape
                        assert bits(found) == bits(wanted), case
                assert model.frozen.grad is None


def whole_gradients(model: Mixed, partition: LeafPartition, bucket_bytes: int) -> Reduced:
    return over_torch(model, partition, bucket_bytes=bucket_bytes), lambda weight, wanted: (weight.grad, wanted)


def everything(rank: int, world_size: int, folder: str) -> None:
    for size in worlds(rank, SIZES, folder):
        same_bits(rank, size, whole_gradients)


@pytest.mark.ranks
@pytest.mark.timeout(450)
@pytest.mark.slow
def test_gradients_have_the_same_bits_at_every_world_size(tmp_path: Path) -> None:
    # in one start: it costs more than all checks; a traceback names the check
    run_ranks(everything, 5, tmp_path, str(tmp_path / "worlds"), timeout=420)
