"""The other collectives through shared memory: sums of which each rank keeps its share, and what is only moved.

Each is made of ticks (see `Channel`), as many as its size takes; all ranks call the same ones in the same order.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.buckets import divide
from paceline.collectives.memory import SharedMemory
from paceline.collectives.memory_sum import Chunk, cut, ring_sum, root_of, spare_count
from paceline.collectives.tree import ALIGNED, Forest


def barrier(memory: SharedMemory) -> None:
    """Return when all ranks have come."""
    with memory.operation(memory.bulk, memory.called("barrier", "barrier")):
        memory.bulk.write()
        memory.bulk.publish()
        memory.bulk.wait()


def broadcast_in_memory(memory: SharedMemory, tensors: Sequence[Tensor], src: int = 0, name: str = "broadcast") -> None:
    """Give all ranks the contents of rank `src`'s tensors, in place; contiguous, of any type, the same on all ranks."""
    flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
    sizes, bulk, is_source = [len(one) for one in flat], memory.bulk, memory.rank == src
    slots = bulk.typed(torch.uint8)
    chunks = cut(sizes, [torch.uint8] * len(flat), {torch.uint8: bulk.data_bytes // ALIGNED * ALIGNED})
    with memory.operation(bulk, memory.called("broadcast", name, f"[{sum(sizes)}]", "bytes")):
        for chunk in chunks or [Chunk(torch.uint8, ())]:  # one tick at least, in which calls are compared
            slot = bulk.write()
            places = slots[slot][src][: chunk.size].split(chunk.lengths)
            pieces = [flat[piece.tensor][piece.start : piece.stop] for piece in chunk.pieces]
            if is_source:
                for place, piece in zip(places, pieces, strict=True):
                    place.copy_(piece)
            bulk.publish()
            bulk.wait()
            if not is_source:
                for place, piece in zip(places, pieces, strict=True):
                    piece.copy_(place)


def all_gather(memory: SharedMemory, mine: Tensor, out: Tensor, name: str = "shares") -> None:
    """Bring all ranks' equal shares together: `mine` (s,) of rank r becomes `out`[r * s : (r + 1) * s].

    `mine` may be this rank's part of `out`.
    """
    share, bulk = len(mine), memory.bulk
    slots, room = bulk.typed(mine.dtype), bulk.data_bytes // mine.element_size()
    parts = out.view(memory.size, share)
    with memory.operation(bulk, memory.called("all_gather", name, f"[{share}]", mine.dtype)):
        for start in range(0, share, room):
            stop = min(start + room, share)
            slot = bulk.write()
            slots[slot][memory.rank][: stop - start] = mine[start:stop]
            bulk.publish()
            bulk.wait()
            for rank, part in enumerate(parts):
                if rank != memory.rank or mine.data_ptr() != part.data_ptr():
                    part[start:stop] = slots[slot][rank][: stop - start]


def reduce_scatter(
    memory: SharedMemory,
    own: Sequence[Tensor | None],
    forest: Forest,
    out: Tensor,
    divisor: float | Tensor | None = None,
    name: str = "gradients",
    *,
    as_gloo: bool = False,
) -> Tensor:
    """This rank's share of the sum over all leaves, in the tree's order, divided as `buckets.divide` does.

    Args:
        memory: of all ranks.
        own: (n,) for each of this rank's subtrees; None for all zeros. Only read.
        forest: who owns which leaves.
        out: (n / W,), where the share goes: elements [rank * n / W, (rank + 1) * n / W).
        divisor: the same on every rank; None: the sum.
        name: for the hang guard.
        as_gloo: add in the order of gloo's reduce_scatter (see `ring_sum`); each rank then has one leaf.
    """
    nodes, bulk, share = forest.nodes(), memory.bulk, len(out)
    lanes, size = max(map(len, nodes)), memory.size
    slots = bulk.typed(out.dtype)
    room = bulk.data_bytes // out.element_size() // (lanes * size) // ALIGNED * ALIGNED
    spare = [torch.empty_like(out[:room]) for _ in range(spare_count([*chain(*nodes)], forest.leaves))]
    shares = [None if flat is None else flat.view(size, share) for flat in own]
    with memory.operation(bulk, memory.called("reduce_scatter", name, f"[{share * size}]", out.dtype)):
        for start in range(0, share, room):
            stop = min(start + room, share)
            slot = bulk.write()
            mine = slots[slot][memory.rank][: lanes * size * room].view(lanes, size, room)[:, :, : stop - start]
            for lane, flat in enumerate(shares):
                for rank, place in enumerate(mine[lane]):
                    if flat is None:
                        place.zero_()
                    elif rank != memory.rank:  # our own share is read where it is
                        place.copy_(flat[rank, start:stop])
            bulk.publish()
            bulk.wait()
            parts = {
                node: slots[slot][rank][(at := (lane * size + memory.rank) * room) : at + stop - start]
                for rank, of_rank in enumerate(nodes)
                for lane, node in enumerate(of_rank)
            }
            for node, flat in zip(nodes[memory.rank], shares, strict=True):
                if flat is not None:
                    parts[node] = flat[memory.rank, start:stop]
            total = out[start:stop]
            if as_gloo and size > 2:  # of two, either order is the same
                ring_sum([*parts.values()], memory.rank * share + start, size * share, total)
            else:
                root_of(parts, forest.leaves, total, [one[: stop - start] for one in spare], None)
            if divisor is not None:
                divide(total, divisor)
    return out


class StartedSum:
    """A small sum over ranks that has begun, in shared memory; the hang guard asks it as it asks torch's `Work`."""

    def __init__(self, memory: SharedMemory, slots: Tensor, name: str) -> None:
        """Begin with this rank's `slots`, float64."""
        self._memory, self._size, self._sum = memory, len(slots), slots
        self._is_over, self._error = False, ""
        if isinstance(memory.running, StartedSum):  # its slots of two ticks ago are written over now
            memory.running.finish()
        channel = memory.totals
        with memory.operation(channel, memory.called("all_reduce", name, f"[{self._size}]", slots.dtype), self):
            slot = channel.write()
            channel.typed(slots.dtype)[slot][memory.rank][: self._size] = slots
            self._tick = channel.publish()
            memory.running = self

    def is_completed(self) -> bool:
        """Whether all ranks have begun it, or some never will."""
        return self._is_over or bool(self._error) or self._memory.totals.arrived(self._tick)

    def finish(self) -> Tensor:
        """The sum, in the order of ranks."""
        if self._is_over:
            return self._sum
        if self._error:
            raise RuntimeError(f"this sum has failed already: {self._error}")
        memory, channel = self._memory, self._memory.totals
        try:
            channel.wait()
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            memory.leave()
            raise
        of_rank: list[Any] = channel.typed(self._sum.dtype)[self._tick & 1]
        total = of_rank[0][: self._size].clone()
        for other in of_rank[1:]:
            total += other[: self._size]
        self._sum, self._is_over, memory.running = total, True, None
        return total
