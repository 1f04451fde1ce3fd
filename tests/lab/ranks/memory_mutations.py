"""Bugs that `paceline verify` must find and name, planted into sums through shared memory (`paceline.collectives`).

As in mutations.py: each changes the result and nothing else, and no rank leaves out a tick that another one makes. They
are run with little memory, so that even small models pass through it in many chunks, by shares.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from tests.lab.ranks.mutations import Mutation, planted
from tests.lab.ranks.mutations import bug as bug_of_reducer
from torch import Tensor

from paceline.collectives import shm_collectives
from paceline.collectives.buckets import divide
from paceline.collectives.shared_memory import SharedMemoryGroup
from paceline.collectives.shm_collectives import (
    AsyncAllReduce,
    Results,
    SlotBuffers,
    TensorChunk,
    TensorList,
    TensorSegment,
    TreeSum,
)
from paceline.collectives.sum_tree import TreeNode

BULK_BYTES = 16 << 10
ODD_RANK = 1  # the one that does something wrong, where only one does

MEMORY_MUTATIONS: list[Mutation] = []
bug = partial(bug_of_reducer, strategies="bucketed exact", policies="none", to=MEMORY_MUTATIONS)
Load = Callable[..., None]
Take = Callable[[SlotBuffers, TensorChunk, int, int, Results], None]


# right up to rounding, and so for `verify --bitwise` alone
@bug("PERFORMANCE.md's prototype", "bits", strategies="exact")
def memory_other_order() -> AbstractContextManager[None]:
    def root_of(
        parts: dict[TreeNode, Tensor], leaves: int, out: Tensor, spare: list[Tensor], divisor: float | Tensor | None
    ) -> None:
        first, *others = parts.values()
        total = first.clone()
        for other in others:
            total += other
        out.copy_(total if divisor is None else divide(total, divisor))

    return planted((shm_collectives, "sum_subtrees", root_of))


@bug("a loop that ends one chunk early", "sync")
def memory_chunk_left_out() -> AbstractContextManager[None]:
    original: Take = SlotBuffers.collect_results

    def take(self: SlotBuffers, chunk: TensorChunk, slot: int, at: int, results: Results) -> None:
        if chunk is not self.chunks[-1]:
            original(self, chunk, slot, at, results)

    return planted((SlotBuffers, "collect_results", take))


@bug("a last chunk that is rounded down", "sync")
def memory_chunk_short() -> AbstractContextManager[None]:
    original: Take = SlotBuffers.collect_results

    def take(self: SlotBuffers, chunk: TensorChunk, slot: int, at: int, results: Results) -> None:
        piece = chunk.segments[-1]
        result = results[piece.tensor_index]
        end = TensorSegment(piece.tensor_index, piece.stop - 1, piece.stop)
        last = None if result is None or chunk is not self.chunks[-1] else end.view_of(result)
        before = None if last is None else last.clone()
        original(self, chunk, slot, at, results)
        if last is not None and before is not None:
            last.copy_(before)

    return planted((SlotBuffers, "collect_results", take))


@bug("each share, and then the whole", "mean", task="tokens")
def memory_divided_twice() -> AbstractContextManager[None]:
    original = TreeSum.run

    def run(
        self: TreeSum, own: Sequence[TensorList | None], divisor: float | Tensor | None = None
    ) -> list[Tensor | None]:
        return [None if r is None else divide(r, divisor or 1.0) for r in original(self, own, divisor)]

    return planted((TreeSum, "run", run))


@bug("a slot that is read before it is written anew", "gradient")
def memory_share_stale() -> AbstractContextManager[None]:
    original: Load = SlotBuffers.write_chunk
    kept: WeakKeyDictionary[SlotBuffers, dict[TensorChunk, Tensor]] = WeakKeyDictionary()

    def load(self: SlotBuffers, chunk: TensorChunk, own: Sequence[TensorList | None], slot: int, **more: bool) -> None:
        original(self, chunk, own, slot, **more)
        rank = self._memory.rank
        if rank == ODD_RANK:
            mine = self._memory.bulk.slots_as(chunk.dtype)[slot][rank][: self._lane_sizes[chunk.dtype]]
            of_sum = kept.setdefault(self, {})
            before, of_sum[chunk] = of_sum.get(chunk), mine.clone()
            if before is not None:
                mine.copy_(before)

    return planted((SlotBuffers, "write_chunk", load))


@bug("a missing barrier", "sync gradient")
def memory_no_wait() -> AbstractContextManager[None]:
    right_run, right_load = TreeSum.run, SlotBuffers.write_chunk

    def run(self: TreeSum, *arguments: Any) -> Any:
        bulk: Any = self._memory.bulk
        bulk.wait = lambda: setattr(bulk, "_waited", bulk.tick)
        try:
            return right_run(self, *arguments)
        finally:
            del bulk.wait

    def load(self: SlotBuffers, *arguments: Any, **more: bool) -> None:
        if self._memory.rank == ODD_RANK:
            time.sleep(0.01)  # a race that is always lost
        right_load(self, *arguments, **more)

    return planted((TreeSum, "run", run), (SlotBuffers, "write_chunk", load))


@bug("002; flags that nobody reads", "none", task="unused")
def memory_none_as_zero() -> AbstractContextManager[None]:
    return planted((SlotBuffers, "read_used_flags", lambda self: [True] * len(self._sizes)))


# bucketed has zeros there
@bug("a rank without samples that writes nothing", "gradient accumulation", strategies="exact")
def memory_none_as_garbage() -> AbstractContextManager[None]:
    original: Load = SlotBuffers.write_chunk

    def load(self: SlotBuffers, chunk: TensorChunk, own: Sequence[TensorList | None], slot: int, **more: bool) -> None:
        if any(tensor is not None for flat in own for tensor in flat or ()):
            original(self, chunk, own, slot, **more)

    return planted((SlotBuffers, "write_chunk", load))


@bug("a rank that is not counted", "loss error")
def memory_totals_short() -> AbstractContextManager[None]:
    original = AsyncAllReduce.__init__

    def init(self: AsyncAllReduce, memory: SharedMemoryGroup, numbers: Sequence[float], name: str) -> None:
        original(self, memory, [0.0] * len(numbers) if memory.rank == ODD_RANK else numbers, name)

    return planted((AsyncAllReduce, "__init__", init))


@bug("weights sent before they are written", "optimizer", strategies="zero")
def memory_weights_late() -> AbstractContextManager[None]:
    original = shm_collectives.all_gather
    kept: dict[int, Tensor] = {}

    def all_gather(memory: SharedMemoryGroup, mine: Tensor, out: Tensor, name: str) -> None:
        late = mine
        if mine.is_floating_point():  # no message
            late, kept[out.data_ptr()] = kept.get(out.data_ptr(), mine), mine.clone()
        original(memory, late if memory.rank == ODD_RANK else mine, out, name)

    return planted((shm_collectives, "all_gather", all_gather))


OTHER_ORDER = MEMORY_MUTATIONS[0]
