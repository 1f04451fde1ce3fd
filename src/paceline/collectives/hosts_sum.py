"""Sums of lists of tensors over ranks on several hosts: most of it in memory, as little as can be over the wire.

Each host adds up its largest subtrees in shared memory, chunk by chunk, where rank i of a host keeps the i-th share of
each chunk. As soon as there is a bundle of them it exchanges it over gloo with rank i of all other hosts
(`Exchange`, a tree whose leaves are those of hosts, so the additions and their order are those of one
process). In the end the sums go out in shared memory. While one bundle is on its way the next ones are added up.

    V = 6, 2 hosts of 3 ranks      host 0: a+b in memory, and c        host 1: d, and e+f in memory
                                   over gloo, a third by each rank:    ((a+b) + (c+d)) + (e+f)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.collectives.buckets import divide
from paceline.collectives.hosts import Hosts
from paceline.collectives.memory_sum import (
    Chunk,
    Flat,
    Lane,
    Lanes,
    Results,
    Scratch,
    by_node,
    in_words,
    root_of,
    spare_count,
)
from paceline.collectives.torch_collectives import Exchange
from paceline.collectives.tree import ALIGNED, Forest, Node

BUNDLE_BYTES = 1 << 20  # of each rank: enough to hide gloo's latency, little enough that the first one leaves early


@dataclass(frozen=True)
class Subtree:
    """One sum that a host makes: of how many leaves, and in which lanes its parts lie; counted from its first leaf."""

    leaves: int
    parts: Mapping[Node, Lane]


@dataclass(frozen=True)
class Nesting:
    """How a sum over all ranks is made of sums of hosts."""

    within: Sequence[Subtree]  # that this host makes
    lanes: int  # the most that any rank of the world has
    across: Forest  # whose ranks are the hosts


@dataclass(frozen=True)
class Bundle:
    """Chunks of one type of which each rank's share travels between hosts at once."""

    dtype: torch.dtype
    chunks: Sequence[Chunk]


def by_leaf(forest: Forest, size: int) -> Nesting:
    """In the order of the tree over all leaves of `forest`, whose ranks are those of the world, `size` on each host."""
    nodes, number = forest.nodes(), forest.rank // size
    firsts = range(0, len(forest.owned), size)
    across = Forest([(forest.owned[first][0], forest.owned[first + size - 1][1]) for first in firsts], number)
    lanes = by_node(nodes[number * size : (number + 1) * size])
    within = [
        Subtree(stop - first, {(a - first, b - first): at for (a, b), at in lanes.items() if first <= a and b <= stop})
        for first, stop in across.nodes()[number]
    ]
    return Nesting(within, max(map(len, nodes)), across)


def by_rank(forest: Forest, size: int) -> Nesting:
    """Over the ranks of `forest` in another order: each host has one sum, however many ranks it has."""
    hosts = [(number, number + 1) for number in range(len(forest.owned) // size)]
    host = Subtree(size, {(rank, rank + 1): (rank, 0) for rank in range(size)})
    return Nesting([host], 1, Forest(hosts, forest.rank // size))


class HostsSum:
    """As `TreeSum`, over the ranks of several hosts, and in two parts. A new one is no collective."""

    def __init__(
        self,
        hosts: Hosts,
        sizes: Sequence[int],
        dtypes: Sequence[torch.dtype],
        nesting: Nesting,
        name: str = "gradients",
        scratch: Scratch | None = None,
    ) -> None:
        """For one tensor or more of `sizes` elements and these types, the same on all ranks; at most MAX_TENSORS."""
        self._hosts, self._memory, self._nesting, self._name = hosts, hosts.memory, nesting, name
        unit = ALIGNED * self._memory.size
        rooms = {d: self._memory.bulk.data_bytes // d.itemsize // nesting.lanes // unit * unit for d in dtypes}
        self._tensors = len(sizes)
        self._lanes = Lanes(self._memory, sizes, dtypes, rooms, scratch or Scratch())
        # without elements the flags travel alone
        self._bundles = _bundled(self._lanes.chunks, self._memory.size) or [Bundle(dtypes[0], ())]
        self.forget()
        self._call = self._memory.called("reduce_scatter", name, *in_words(sizes, dtypes))

    def begin(self, own: Sequence[Flat | None], after: HostsSum | None = None) -> None:
        """Add up what the ranks of this host have, and let it leave (a collective).

        Any number of sums may be begun before the first one ends, in the same order on all ranks.

        Args:
            own: as in `TreeSum.run`; written over later, when the sum ends.
            after: the sum begun before, of which the second half may leave now.
        """
        self._own = own
        with self._memory.operation(self._memory.bulk, self._call):
            for bundle in self._bundles:
                exchange = self._left(bundle, first=not self._under_way)
                before = self if self._under_way else after
                if before is not None:
                    before.gather()
                self._under_way.append(exchange)
                self._gathered = False

    def gather(self) -> None:
        """Let the second half leave of what has begun last, when the first has arrived: the sums of our share."""
        if not self._gathered:
            self._under_way[-1].gather()
            self._gathered = True

    def end(self, divisor: float | Tensor | None = None) -> list[Tensor | None]:
        """Wait for the sum over all ranks, and hand it out within this host (a part of a collective of the memory).

        Returns:
            see `TreeSum.run`.
        """
        results: list[Tensor | None] = []
        self.gather()
        for number, bundle in enumerate(self._bundles):
            flat, size = self._under_way.popleft().end(), self._width(bundle)
            if number == 0:
                used: list[float] = flat[size : size + self._tensors].tolist()
                results = self._lanes.results(self._own, [count != 0 for count in used])
            if divisor is not None:
                divide(flat[:size], divisor)
            self._hand_out(bundle, flat, results)
        self.forget()
        return results

    def forget(self) -> None:
        """Let go of what is under way, after an error: it would keep connections open."""
        self._under_way = deque[Exchange]()
        self._own: Sequence[Flat | None] = ()
        self._gathered = True

    def _left(self, bundle: Bundle, *, first: bool) -> Exchange:
        """This host's part of a bundle, of which our share leaves; with the first one the flags."""
        bulk, lanes, nesting = self._memory.bulk, self._lanes, self._nesting
        size, flags = self._width(bundle), self._tensors if first else 0
        # one element at least: gloo is not asked to send nothing
        sums = torch.empty(len(nesting.within), nesting.across.padded(max(1, size + flags)), dtype=bundle.dtype)
        sums[:, size:] = 0
        at = 0
        for number, chunk in enumerate(bundle.chunks or [None]):
            slot = bulk.write()
            if first and number == 0:
                lanes.set_flags(slot, self._own)
            if chunk is not None:
                lanes.load(chunk, self._own, slot)
            bulk.publish()
            bulk.wait()
            if first and number == 0:
                sums[0, size : size + flags] = torch.tensor(lanes.used()).to(bundle.dtype)
            if chunk is not None:
                at += self._add_up(chunk, slot, sums[:, at:])
        return Exchange(nesting.across, [*sums.unbind()], self._hosts.across(), self._name)

    def _add_up(self, chunk: Chunk, slot: int, sums: Tensor) -> int:
        """This host's sums of our share of a chunk, into the first of `sums` (subtrees, n); how many elements."""
        start, stop = self._lanes.share(chunk, self._memory.rank)
        width = stop - start
        for subtree, row in zip(self._nesting.within, sums, strict=True):
            parts, out = self._lanes.parts(subtree.parts, chunk, slot, start, stop), row[:width]
            if len(parts) == 1:
                out.copy_(next(iter(parts.values())))
            else:
                spare = self._lanes.spare(chunk.dtype, spare_count(parts, subtree.leaves), width)
                root_of(parts, subtree.leaves, out, spare, None)
        return width

    def _hand_out(self, bundle: Bundle, flat: Tensor, results: Results) -> None:
        """Give all ranks of this host our share of the sums, and take theirs."""
        bulk, at = self._memory.bulk, 0
        for chunk in bundle.chunks:
            start, stop = self._lanes.share(chunk, self._memory.rank)
            slot = bulk.write()
            mine = bulk.typed(chunk.dtype)[slot][self._memory.rank]
            mine[: stop - start] = flat[at : at + stop - start]
            at += stop - start
            bulk.publish()
            bulk.wait()
            self._lanes.take(chunk, slot, 0, results)

    def _width(self, bundle: Bundle) -> int:
        """The elements of our share of a bundle."""
        shares = [self._lanes.share(chunk, self._memory.rank) for chunk in bundle.chunks]
        return sum(stop - start for start, stop in shares)


def _bundled(chunks: Sequence[Chunk], ranks: int) -> list[Bundle]:
    """Chunks of one type, as they come, until each rank's share of them is large enough."""
    bundles: list[Bundle] = []
    together: list[Chunk] = []
    for chunk in chunks:
        size = sum(one.size for one in together) * chunk.dtype.itemsize // ranks
        if together and (together[0].dtype != chunk.dtype or size >= BUNDLE_BYTES):
            bundles.append(Bundle(together[0].dtype, together))
            together = []
        together.append(chunk)
    return [*bundles, Bundle(together[0].dtype, together)] if together else bundles
