"""Fingerprints of parameters that must be equal on ranks, after an optimizer's step: a part of them each time.

The parameters are split into pieces, some hundreds for a large model; each step a few of them are added up as the whole
numbers that their bits are. That is exact, the same in any order, and a 64th of what the optimizer reads. Which pieces
follows from the number of the step, so ranks that are in the same step mark the same. The last one, mostly of the
output's bias, is marked at each step: so even a short run shows whether ranks have the same while it changes.

Parameters that may differ are not marked: shards (FSDP, DTensor, ZeRO: their layouts differ), those that DDP leaves
out, and replicas that step alone for a while (local SGD), or have left DDP (steps.py): such steps do not count either.
"""

from __future__ import annotations

import os
import struct
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from paceline.protocol.marks import (
    PARTS,
    SAME_BY_DDP,
    SETTINGS,
    SUMMED,
    TABLES,
    Names,
    ReplicaFingerprint,
    put_fingerprint,
)
from paceline.protocol.status_page import StatusPage
from paceline.rank.probes import DeferredReads, Events, may_compute
from paceline.rank.probes.steps import JointOptimizers, OptimizerHistory, kept_equal

LEAST_ELEMENTS, SHARE = 4096, 64  # of all elements, that a step marks
IN_TURN = PARTS - 1  # pieces of a mark
ALONE_STEPS = 2  # in a row, without gradients of others: that is meant so
LOCAL_HOOKS = ("post_localSGD_hook", "noop_hook")
NONE = 0xFFFFFFFF


@dataclass
class Slice:
    """Some elements of one parameter, as whole numbers."""

    name: str
    parameter: Any
    start: int
    stop: int
    address: int = 0
    bits: Any = None

    def view(self) -> Any:
        """A view of the memory that the parameter has now."""
        if self.bits is None or self.address != self.parameter.data_ptr():
            torch = sys.modules["torch"]
            kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            tensor = self.parameter.detach()
            whole = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
            self.address = self.parameter.data_ptr()
            self.bits = whole[self.start : self.stop].view(kinds[tensor.element_size()])
        return self.bits


@dataclass
class WatchedOptimizer:
    """One optimizer's parameters."""

    table: int
    own: bool  # of a replica
    count: int = 0
    version: object = None
    layout: int = 0
    flags: int = 0
    pieces: list[Slice] = field(default_factory=list[Slice])
    replica: weakref.ref[Any] | None = None
    alone: int = 0  # steps in a row


class Fingerprints(Events):
    """Watches this process's optimizers, four at a time."""

    def __init__(self, box: StatusPage, names: Names, joint: JointOptimizers | None = None) -> None:
        self._box, self._names, self._later = box, names, DeferredReads()
        self._joint = joint or JointOptimizers(lambda: box.get("ops"))
        self._watched: WeakKeyDictionary[Any, WatchedOptimizer] = WeakKeyDictionary()
        # optimizers so far, and the last step marked in each table: of those of no replica, and of a replica
        self._known, self._numbers = [0, 0], ([0] * TABLES, [0] * TABLES)
        self._size = int(os.environ.get("WORLD_SIZE", "1"))
        self._several_hosts = os.environ.get("LOCAL_WORLD_SIZE", "") != str(self._size)

    def step_ended(self, optimizer: Any) -> None:
        self._later.look()
        turn = self._joint.of(optimizer)
        if self._size == 1 or self._box.get("uneven") or turn.past:
            return
        watched = self._watched.get(optimizer)
        if watched is None or (turn.own and not watched.own):
            watched = self._watched[optimizer] = self._next_table(own=turn.own)
        if watched.table >= TABLES:
            return
        watched.count += 1
        self._numbers[watched.own][watched.table] = watched.count
        version = [self._joint.version, *(len(group["params"]) for group in optimizer.param_groups)]
        if watched.version != version:
            watched.version = version
            self._lay_out(watched, optimizer)
        if watched.pieces and self._meets_others(watched, turn):
            self._mark(watched, tuple(sum(_numbers(optimizer, name)) for name in SETTINGS))

    def _next_table(self, *, own: bool) -> WatchedOptimizer:
        """The tables in turn, so that all ranks use the same; a later optimizer counts from where the others are.

        Optimizers of replicas are numbered separately, and come first: a rank may have others that no other rank has.
        """
        numbers, table = self._numbers[own], self._known[own] % TABLES
        self._known[own] += 1
        for other in self._watched.values():
            if other.table == table and (own <= other.own):
                return WatchedOptimizer(TABLES, own)
            if other.table == table:
                other.table = TABLES
        return WatchedOptimizer(table, own, max(numbers[table], max(numbers) - 1))

    def _meets_others(self, watched: WatchedOptimizer, turn: OptimizerHistory) -> bool:
        ddp = watched.replica and watched.replica()
        if ddp is None:
            return True
        # without any forward the module was called without DDP, which is no right way
        synced = turn.since is None or not turn.since.forwards or turn.since.synced > 0
        if watched.alone < ALONE_STEPS:
            watched.alone = 0 if synced else watched.alone + 1
        hooks = getattr(ddp, "_comm_hooks", ())
        return not watched.alone and not any(getattr(hook, "__name__", "") in LOCAL_HOOKS for hook, _ in hooks)

    def _lay_out(self, watched: WatchedOptimizer, optimizer: Any) -> None:
        """Find out which of its parameters are to be compared, and among whom."""
        watched.pieces, watched.replica = [], None
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.numel()]
        known = {id(one): (name, ddp) for ddp in self._joint.replicas for name, one in kept_equal(ddp)}
        shared = [one for one in parameters if id(one) in known]
        torch = sys.modules["torch"]
        plain = all(type(one) in (torch.nn.Parameter, torch.Tensor) and _dense(one) for one in shared or parameters)
        if not plain or getattr(optimizer, "_overlap_with_ddp", False):
            return
        flags, members = 0, range(self._size)
        if shared:
            ddp = known[id(shared[0])][1]
            members = torch.distributed.get_process_group_ranks(ddp.process_group)
            watched.replica, flags = weakref.ref(ddp), SAME_BY_DDP
        if self._several_hosts or any(one.is_cuda for one in parameters):
            flags |= SUMMED
        named = [(known[id(one)][0] if shared else f"parameter {n}", one) for n, one in enumerate(shared or parameters)]
        watched.pieces = [*_pieces(named)]
        watched.flags = watched.table | flags | len(members) << 16
        told = repr(([(name, [*one.shape], str(one.dtype)) for name, one in named], [*members], bool(shared)))
        watched.layout = zlib.crc32(told.encode())
        self._names.of_tensors(watched.layout, [piece.name for piece in watched.pieces])

    def _mark(self, watched: WatchedOptimizer, settings: tuple[float, ...]) -> None:
        pieces, number = watched.pieces, watched.count
        if not may_compute(pieces[0].parameter):
            return
        last = len(pieces) - 1
        chosen = [(number * IN_TURN + n) % last for n in range(min(IN_TURN, last))] + [last]
        sums = [pieces[at].view().sum() for at in chosen]
        if watched.flags & SUMMED:
            sums += [_floats(pieces[at]) for at in chosen]

        def put(values: list[int]) -> None:
            hashes = [one & NONE for one in values[: len(chosen)]]
            told = [struct.unpack("d", struct.pack("q", one))[0] for one in values[len(chosen) :]]
            parts = _four(chosen, NONE), _four(hashes), _four(told)
            put_fingerprint(self._box, ReplicaFingerprint(number, watched.layout, watched.flags, *parts, settings))

        if sums[0].is_cuda:
            self._later.read(sys.modules["torch"].stack(sums), put)
        else:
            put([one.item() for one in sums])


def _numbers(optimizer: Any, name: str) -> Iterator[float]:
    """A setting in each parameter group; of betas the first. A tensor is not read: it may be on a GPU."""
    for group in optimizer.param_groups:
        value = group.get(name)
        value = value[0] if isinstance(value, (tuple, list)) else value
        yield value if isinstance(value, (int, float)) else 0.0


def _four(values: Sequence[Any], filling: int = 0) -> tuple[Any, ...]:
    return (*values, *[filling] * PARTS)[:PARTS]


def _dense(tensor: Any) -> bool:
    """Whether its elements are all there is in its part of the memory."""
    if tensor.layout is not sys.modules["torch"].strided or tensor.element_size() > 8:
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel()


def _pieces(named: list[tuple[str, Any]]) -> Iterator[Slice]:
    """All elements; an odd number take turns: then the steps that are kept for long come to all of them."""
    most = max(LEAST_ELEMENTS, sum(one.numel() for _, one in named) // SHARE) // PARTS
    pieces = [
        Slice(name, one, start, min(start + most, one.numel()))
        for name, one in named
        for start in range(0, one.numel(), most)
    ]
    if len(pieces) > PARTS and len(pieces) % 2:
        yield pieces[0]
    yield from pieces


def _floats(piece: Slice) -> Any:
    """Their sum, as the bits of a float64."""
    torch, bits = sys.modules["torch"], piece.view()
    return bits.view(piece.parameter.dtype).sum(dtype=torch.float64).view(torch.int64)
