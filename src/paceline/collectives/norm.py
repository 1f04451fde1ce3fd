"""The norm of gradients: the same *bits* whether one rank holds all gradients or each of N ranks holds a shard.

The norm is the root of a sum of squares, and the bits of a sum depend on its order. The order must therefore not depend
on the ranks. Every parameter is split into blocks of 64 elements. All blocks of all parameters, in the model's order,
are the leaves of the binary tree of `tree`. A rank that holds a run of blocks adds up the complete subtrees in it, and
sends their sums: at most 2 log2 of the number of blocks for each run. Shards must begin at a block (see `shards`).

    6 blocks a..f:  ((a+b) + (c+d)) + (e+f)

    1 rank  holds a..f            has the root
    2 ranks hold  a..c and d..f   the first sends a+b and c, the second d and e+f

examples/textbook/norm.py is a runnable short version.
"""

import math
import operator
from collections.abc import Generator, Mapping, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor, nn

from paceline.collectives.control import Deferred, device_constant, is_async_device, sum_over_ranks
from paceline.collectives.sum_tree import TreeNode, tree_sum

BLOCK_ELEMENTS = 64  # elements
CHUNK = 1 << 18  # elements squared at a time: their squares stay in a core's cache
CHUNK_OF_GPU = 1 << 26  # large; a GPU has the memory for it

ShardSlice = tuple[int, int, int]
"""(position of a parameter, start, stop): its elements [start, stop), flattened."""


class BlockTree:
    """The tree over all blocks of the parameters. A run of blocks is [first, stop)."""

    def __init__(self, sizes: Sequence[int]) -> None:
        *self._firsts, self.blocks = accumulate((-(-size // BLOCK_ELEMENTS) for size in sizes), initial=0)

    def block_range(self, parameter: int, start: int, stop: int) -> TreeNode:
        if start % BLOCK_ELEMENTS:
            raise ValueError(f"a shard begins at element {start}, within a block of {BLOCK_ELEMENTS}")
        first = self._firsts[parameter]
        return first + start // BLOCK_ELEMENTS, first + -(-stop // BLOCK_ELEMENTS)

    def subtrees_to_send(self, run: TreeNode) -> list[TreeNode]:
        nodes: list[TreeNode] = []
        for level, first, stop, left, right in _levels(run, self.blocks):
            for position in [first] * left + [stop - 1] * right:
                nodes.append((position << level, min((position + 1) << level, self.blocks)))
        return nodes

    def subtree_sums(self, run: TreeNode, of_blocks: Tensor) -> list[Tensor]:
        sums: list[Tensor] = []
        for _, _, _, left, right in _levels(run, self.blocks):
            if left:
                sums.append(of_blocks[0])
            if right:
                sums.append(of_blocks[-1])
            of_blocks = _add_pairs(of_blocks[int(left) : len(of_blocks) - int(right)])
        return sums

    def root_sum(self, sums: dict[TreeNode, float]) -> float:
        return tree_sum(sums, operator.add, self.blocks) if self.blocks else 0.0


class ShardedNorm:
    """The norm of gradients of which each rank holds shards; takes one small message."""

    def __init__(
        self, sizes: Sequence[int], shards: Sequence[Sequence[ShardSlice]], rank: int, device: torch.device
    ) -> None:
        """`sizes`: the number of elements of each parameter. `shards`: by rank; they contain each element once."""
        self._tree, self._device, self._rank = BlockTree(sizes), device, rank
        self._own = sorted(shards[rank])
        runs = [merge_block_ranges([self._tree.block_range(*shard) for shard in rank_shards]) for rank_shards in shards]
        self._runs = runs[rank]
        self._nodes = [[node for run in rank_runs for node in self._tree.subtrees_to_send(run)] for rank_runs in runs]

    def __call__(self, gradients: Mapping[int, Tensor]) -> Deferred[float]:
        """The norm, the same on all ranks (a collective). It is NaN or infinite only if an element or its square is.

        `gradients`: of this rank's shards, flat, by the parameter's position. A missing one is zeros.
        """

        def root(total: float) -> float:
            if not math.isfinite(total):
                total = self._total(gradients, torch.float64).result()
            return math.sqrt(total)

        return self._total(gradients, None).map(root)

    def _total(self, gradients: Mapping[int, Tensor], dtype: torch.dtype | None) -> Deferred[float]:
        of_blocks = [
            block_square_sums(_joined([gradients[index] for index, _, _ in group]), dtype)
            if group[0][0] in gradients
            else torch.zeros(
                -(-(group[0][2] - group[0][1]) // BLOCK_ELEMENTS), dtype=torch.float64, device=self._device
            )
            for group in self._groups(gradients)
        ]
        slots = torch.zeros(sum(map(len, self._nodes)), dtype=torch.float64, device=self._device)
        if of_blocks:
            of_runs = torch.cat(of_blocks).split([stop - first for first, stop in self._runs])
            parts = zip(self._runs, of_runs, strict=True)
            sums = [total for run, part in parts for total in self._tree.subtree_sums(run, part)]
            first = sum(map(len, self._nodes[: self._rank]))
            slots[first : first + len(sums)] = torch.stack(sums)
        if len(self._nodes) > 1:
            # only one rank adds a number other than zero to a slot: the order of additions has no effect
            slots = sum_over_ranks(slots, "norm of the gradients")
        return Deferred(slots, lambda sums: self._tree.root_sum(dict(zip(chain(*self._nodes), sums, strict=True))))

    def _groups(self, gradients: Mapping[int, Tensor]) -> list[list[ShardSlice]]:
        """This rank's shards, each alone on a CPU. On a GPU, shards of one type form groups of up to a chunk."""
        groups: list[list[ShardSlice]] = []
        room, group_dtype = 0, None
        for shard in self._own:
            size, dtype = shard[2] - shard[1], gradients[shard[0]].dtype if shard[0] in gradients else None
            if dtype is None or dtype != group_dtype or size > room:
                groups.append([])
                room, group_dtype = CHUNK_OF_GPU if is_async_device(self._device) else 0, dtype
            groups[-1].append(shard)
            room -= size
        return groups


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    zeros = tensors[0].new_zeros(BLOCK_ELEMENTS)  # pads each tensor to whole blocks
    return (
        tensors[0]
        if len(tensors) == 1
        else torch.cat([p for t in tensors for p in (t, zeros[: -len(t) % BLOCK_ELEMENTS])])
    )


def split_blocks_evenly(sizes: Sequence[int], holders: int) -> list[list[ShardSlice]]:
    """Shards with the same number of blocks, for ranks that hold whole gradients and split only the work."""
    tree = BlockTree(sizes)
    shards: list[list[ShardSlice]] = []
    for holder in range(holders):
        first, stop = (tree.blocks * number // holders for number in (holder, holder + 1))
        runs = [(i, size, tree.block_range(i, 0, size)[0]) for i, size in enumerate(sizes)]
        parts = [
            (i, max(0, first - at) * BLOCK_ELEMENTS, min(size, (stop - at) * BLOCK_ELEMENTS)) for i, size, at in runs
        ]
        shards.append([(i, start, end) for i, start, end in parts if start < end])
    return shards


def unsharded_grad_norm(gradients: Sequence[Tensor]) -> Deferred[float]:
    """The norm of all elements. If the square of one overflows float32, it is computed again in float64."""

    def compute(numbers: list[float]) -> float:
        (norm,) = numbers
        return norm if math.isfinite(norm) else float(nn.utils.get_total_norm([grad.double() for grad in gradients]))

    return Deferred(nn.utils.get_total_norm(gradients).double().view(1), compute)


@torch.no_grad()
def clip_to_norm(gradients: Sequence[Tensor], norm: float, max_norm: float) -> float:
    factor = max_norm / (norm + 1e-6)  # as in torch's clip_grad_norm_
    if factor < 1.0 and math.isfinite(norm) and gradients:
        torch._foreach_mul_([*gradients], factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return norm


@torch.no_grad()
def clip_to_norm_on_device(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """The same for a `norm`, (1,) float64, that the host has not read. If it is not finite, the result is not valid."""
    largest = device_constant(norm.device, max_norm, torch.float64)
    factor = torch.div(largest, norm + 1e-6).clamp(max=1.0)  # rounded as on the host; a product with 1 is exact
    torch._foreach_mul_([*gradients], factor.float().view(()))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def merge_block_ranges(runs: Sequence[TreeNode]) -> list[TreeNode]:
    merged: list[TreeNode] = []
    for first, stop in sorted(runs):
        if merged and merged[-1][1] == first:
            merged[-1] = merged[-1][0], stop
        elif stop > first:
            merged.append((first, stop))
    return merged


@torch.no_grad()
def block_square_sums(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of squares of each block of `values`, (n,) -> (ceil(n / 64),) float64.

    Computed in `dtype`, by default in float32 for float32 and shorter types. There, values beyond 1e18 give infinity.
    """
    values = values.abs() if values.is_complex() else values
    dtype = dtype or torch.promote_types(values.dtype, torch.float32)
    sums = values.new_empty(-(-len(values) // BLOCK_ELEMENTS), dtype=torch.float64)
    size = CHUNK_OF_GPU if is_async_device(values.device) else CHUNK
    for start in range(0, len(values), size):
        chunk = values[start : start + size].to(dtype)
        if missing := -len(chunk) % BLOCK_ELEMENTS:
            chunk = torch.nn.functional.pad(chunk, (0, missing))
        squares = (chunk * chunk).view(-1, BLOCK_ELEMENTS)
        # Add halves instead of torch.sum: the order of a library's sum may depend on the number of rows.
        while (width := squares.shape[1] // 2) > 0:
            squares = squares[:, :width] + squares[:, width:]
        sums[start // BLOCK_ELEMENTS : start // BLOCK_ELEMENTS + len(squares)] = squares[:, 0]
    return sums


def _levels(run: TreeNode, blocks: int) -> Generator[tuple[int, int, int, bool, bool]]:
    """For each level, from the blocks up: (level, first, stop, whether to send the first sum, whether the last one)."""
    (first, stop), level = run, 0
    while first < stop:
        is_root = blocks == 1
        left = is_root or first % 2 == 1  # its left neighbour is not in the run
        right = not is_root and stop % 2 == 1 and stop < blocks  # its right neighbour is not; the last block has none
        yield level, first, stop, left, right
        if is_root:
            return
        first, stop, blocks, level = -(-first // 2), (stop // 2 if right else -(-stop // 2)), -(-blocks // 2), level + 1


def _add_pairs(values: Tensor) -> Tensor:
    even = values[: len(values) // 2 * 2]
    sums = even[0::2] + even[1::2]
    return sums if len(even) == len(values) else torch.cat([sums, values[-1:]])
