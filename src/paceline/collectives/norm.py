"""The norm of gradients, to the same *bits* whether one rank holds them or each of N ranks holds a share of them.

The norm is the root of a sum of squares, and a sum depends on its order. So the order is fixed before anybody asks who
holds what: every parameter is cut into blocks of 64 elements, all blocks of all parameters in the model's order are the
leaves of one binary tree, and neighbours are added up pairwise until one sum is left (an odd one out goes up alone).
Who holds a run of blocks adds up what lies wholly within it, and hands on the few sums that are left.

    6 blocks a..f:  ((a+b) + (c+d)) + (e+f)

    1 rank  holds a..f            knows the root
    2 ranks hold  a..c and d..f   the first hands on a+b and c, the second d and e+f
    all of them finish with       ((a+b) + (c+d)) + (e+f): the same additions in the same order

That is log2 of the number of blocks in sums for each run. Shares must begin at a block: `shards` sees to it.
examples/textbook/norm.py is the same on one page, to be run.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from paceline.collectives.control import Pending, costs, sum_over_ranks

BLOCK = 64  # elements
CHUNK = 1 << 18  # elements squared at a time: their squares stay in a core's cache
CHUNK_OF_GPU = 1 << 26  # as many as possible, in memory that may be there

TreePlace = tuple[int, int]
"""Where a sum stands in the tree: level (0: a block), and position in that level."""

OwnShare = tuple[int, int, int]
"""(position of a parameter, start, stop): the elements [start, stop) of it, flattened."""


@dataclass(frozen=True)
class BlockRun:
    """Neighbouring blocks, [first, stop), of one holder."""

    first: int
    stop: int


class BlockTree:
    """The tree over all blocks of parameters with so many elements each."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._firsts: list[int] = []
        self.blocks = 0
        for size in sizes:
            self._firsts.append(self.blocks)
            self.blocks += -(-size // BLOCK)

    def run(self, parameter: int, start: int, stop: int) -> BlockRun:
        """The blocks of the elements [start, stop) of a parameter, which is given by its position."""
        if start % BLOCK:
            raise ValueError(f"a share begins at element {start}, within a block of {BLOCK}")
        first = self._firsts[parameter]
        return BlockRun(first + start // BLOCK, first + -(-stop // BLOCK))

    def places(self, run: BlockRun) -> list[TreePlace]:
        """Which sums the holder of a run hands on."""
        found: list[TreePlace] = []
        for level, first, stop, left, right in _levels(run, self.blocks):
            found += [(level, first)] * left + [(level, stop - 1)] * right
        return found

    def sums(self, run: BlockRun, of_blocks: Tensor) -> list[Tensor]:
        """Those sums, in the order of `places`, from those of the run's blocks, (stop - first,)."""
        found: list[Tensor] = []
        for _, _, _, left, right in _levels(run, self.blocks):
            if left:
                found.append(of_blocks[0])
            if right:
                found.append(of_blocks[-1])
            of_blocks = _pairs(of_blocks[int(left) : len(of_blocks) - int(right)])
        return found

    def root(self, sums: Mapping[TreePlace, float]) -> float:
        """The sum of everything, from what all holders hand on."""
        counts = [self.blocks]
        while counts[-1] > 1:
            counts.append(-(-counts[-1] // 2))

        def value(level: int, position: int) -> float:
            if (level, position) in sums:
                return sums[level, position]
            left = value(level - 1, 2 * position)
            return left + value(level - 1, 2 * position + 1) if 2 * position + 1 < counts[level - 1] else left

        return value(len(counts) - 1, 0) if self.blocks else 0.0


class SharedNorm:
    """The norm of gradients of which each rank holds shares: one small message, and the same bits on any number."""

    def __init__(
        self, sizes: Sequence[int], shares: Sequence[Sequence[OwnShare]], rank: int, device: torch.device
    ) -> None:
        """`sizes` of all parameters, in elements; `shares[rank]`, which together hold each element once."""
        self._tree, self._device = BlockTree(sizes), device
        self._own = sorted(shares[rank])
        runs = [joined_runs([self._tree.run(*share) for share in of_rank]) for of_rank in shares]
        self._runs = runs[rank]
        self._places = [[place for run in of_rank for place in self._tree.places(run)] for of_rank in runs]
        self._rank = rank

    def __call__(self, gradients: Mapping[int, Tensor]) -> Pending[float]:
        """The same on all ranks (a collective); NaN or infinite only if an element is, or its square is.

        `gradients` are those of this rank's shares, flat, by the parameter's position; what is missing is zeros.
        """

        def root(total: float) -> float:
            if not math.isfinite(total):
                total = self._total(gradients, torch.float64).now()
            return math.sqrt(total)

        return self._total(gradients, None).then(root)

    def _total(self, gradients: Mapping[int, Tensor], dtype: torch.dtype | None) -> Pending[float]:
        of_blocks = [
            square_sums(_joined([gradients[index] for index, _, _ in shares]), dtype)
            if shares[0][0] in gradients
            else torch.zeros(-(-(shares[0][2] - shares[0][1]) // BLOCK), dtype=torch.float64, device=self._device)
            for shares in self._at_once(gradients)
        ]
        slots = torch.zeros(sum(map(len, self._places)), dtype=torch.float64, device=self._device)
        if of_blocks:
            of_runs = torch.cat(of_blocks).split([run.stop - run.first for run in self._runs])
            own = [one for run, blocks in zip(self._runs, of_runs, strict=True) for one in self._tree.sums(run, blocks)]
            first = sum(map(len, self._places[: self._rank]))
            slots[first : first + len(own)] = torch.stack(own)
        if len(self._places) > 1:
            # each slot is one rank's and zero elsewhere, so no order of additions shows
            slots = sum_over_ranks(slots, "norm of the gradients")
        return Pending(slots, lambda sums: self._tree.root(dict(zip(chain(*self._places), sums, strict=True))))

    def _at_once(self, gradients: Mapping[int, Tensor]) -> list[list[OwnShare]]:
        """Our shares, one by one; on a GPU those of one type together, as far as a chunk has room."""
        found: list[list[OwnShare]] = []
        room, kind = 0, None
        for share in self._own:
            size, now = share[2] - share[1], gradients[share[0]].dtype if share[0] in gradients else None
            if now is None or now != kind or size > room:
                found.append([])
                room, kind = CHUNK_OF_GPU if costs(self._device) else 0, now
            found[-1].append(share)
            room -= size
        return found


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One after another, each filled up to whole blocks with zeros."""
    zeros = tensors[0].new_zeros(BLOCK)
    return tensors[0] if len(tensors) == 1 else torch.cat([p for t in tensors for p in (t, zeros[: -len(t) % BLOCK])])


def even_shares(sizes: Sequence[int], holders: int) -> list[list[OwnShare]]:
    """Shares of as many blocks each, for holders of whole gradients that share the work only."""
    tree = BlockTree(sizes)
    shares: list[list[OwnShare]] = []
    for holder in range(holders):
        first, stop = (tree.blocks * number // holders for number in (holder, holder + 1))
        runs = [(i, size, tree.run(i, 0, size).first) for i, size in enumerate(sizes)]
        cut = [(i, max(0, first - at) * BLOCK, min(size, (stop - at) * BLOCK)) for i, size, at in runs]
        shares.append([(i, start, end) for i, start, end in cut if start < end])
    return shares


def total_norm(gradients: Sequence[Tensor]) -> Pending[float]:
    """The norm of all elements together; in float64 if the square of one is beyond float32."""

    def made(numbers: list[float]) -> float:
        (norm,) = numbers
        return norm if math.isfinite(norm) else float(nn.utils.get_total_norm([one.double() for one in gradients]))

    return Pending(nn.utils.get_total_norm(gradients).double().view(1), made)


@torch.no_grad()
def scale_to_norm(gradients: Sequence[Tensor], norm: float, max_norm: float) -> float:
    """Make a norm above `max_norm` equal to it; one that is not finite is left to be looked into. Returns `norm`."""
    factor = max_norm / (norm + 1e-6)  # as torch's clip_grad_norm_
    if factor < 1.0 and math.isfinite(norm) and gradients:
        torch._foreach_mul_([*gradients], factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return norm


def joined_runs(runs: Sequence[BlockRun]) -> list[BlockRun]:
    """The same blocks in as few runs as possible."""
    found: list[BlockRun] = []
    for run in sorted(runs, key=lambda r: r.first):
        if found and found[-1].stop == run.first:
            found[-1] = BlockRun(found[-1].first, run.stop)
        elif run.stop > run.first:
            found.append(run)
    return found


@torch.no_grad()
def square_sums(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(ceil(n / 64),) float64: the sum of squares of each block of `values`, (n,).

    Squared and added up in `dtype`; by default in float32 for float32 and shorter types, which is infinite for values
    beyond 1e18: then say float64.
    """
    values = values.abs() if values.is_complex() else values
    kind = dtype or torch.promote_types(values.dtype, torch.float32)
    found = values.new_empty(-(-len(values) // BLOCK), dtype=torch.float64)
    size = CHUNK_OF_GPU if costs(values.device) else CHUNK
    for start in range(0, len(values), size):
        chunk = values[start : start + size].to(kind)
        if missing := -len(chunk) % BLOCK:
            chunk = torch.nn.functional.pad(chunk, (0, missing))
        squares = (chunk * chunk).view(-1, BLOCK)
        # Halves are added by hand: how a library sums a row may depend on how many rows there are.
        while (width := squares.shape[1] // 2) > 0:
            squares = squares[:, :width] + squares[:, width:]
        found[start // BLOCK : start // BLOCK + len(squares)] = squares[:, 0]
    return found


def _levels(run: BlockRun, blocks: int) -> Generator[tuple[int, int, int, bool, bool]]:
    """From the blocks up: (level, first, stop, is the first one handed on?, is the last one?)."""
    first, stop, level = run.first, run.stop, 0
    while first < stop:
        is_root = blocks == 1
        left = is_root or first % 2 == 1  # its left neighbour is somebody else's
        right = not is_root and stop % 2 == 1 and stop < blocks  # its right one is; the very last has none
        yield level, first, stop, left, right
        if is_root:
            return
        first, stop, blocks, level = -(-first // 2), (stop // 2 if right else -(-stop // 2)), -(-blocks // 2), level + 1


def _pairs(values: Tensor) -> Tensor:
    even = values[: len(values) // 2 * 2]
    added = even[0::2] + even[1::2]
    return added if len(even) == len(values) else torch.cat([added, values[-1:]])
