"""Fingerprints of parameters that must be equal on ranks. Each optimizer step fingerprints a part of the parameters.

The parameters are split into pieces, a few hundred for a large model. Each step sums a few pieces, with their bits read
as integers. This sum is exact, does not depend on the order, and reads a 64th of the data that the optimizer reads. The
number of the step determines the pieces, so ranks in the same step use the same pieces. Each step also includes the
last piece, which usually contains the bias of the output. Therefore even a short run shows whether ranks stay equal.

Parameters that may differ have no fingerprint: shards (FSDP, DTensor, ZeRO: their layouts differ), parameters that DDP
ignores, and replicas that step alone for some time (local SGD) or have left DDP (steps.py). Such steps do not count.
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

from paceline.protocol import marks
from paceline.protocol.marks import NamesWriter
from paceline.protocol.status_page import StatusPage
from paceline.rank.probes import DeferredReads, ScriptListener, is_not_capturing
from paceline.rank.probes.steps import OptimizerHistory, SyncedOptimizerDetector, synced_parameters

LEAST_ELEMENTS, SHARE = 4096, 64  # a step sums at least LEAST_ELEMENTS elements, and 1/SHARE of all
ROTATING_PIECES = marks.PARTS - 1  # pieces per step, except the last piece
MAX_UNSYNCED_STEPS = 2  # consecutive steps without gradients of others, which are then intended
LOCAL_COMM_HOOKS = ("post_localSGD_hook", "noop_hook")
UINT32_MAX = 0xFFFFFFFF


@dataclass
class ParameterSlice:
    name: str
    parameter: Any
    start: int
    stop: int
    address: int = 0
    integer_view: Any = None

    def as_integers(self) -> Any:
        if self.integer_view is None or self.address != self.parameter.data_ptr():
            torch = sys.modules["torch"]
            integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            tensor = self.parameter.detach()
            flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
            self.address = self.parameter.data_ptr()
            self.integer_view = flat[self.start : self.stop].view(integers[tensor.element_size()])
        return self.integer_view


@dataclass
class WatchedOptimizer:
    table_index: int
    has_replica: bool  # whether it belongs to a replica
    count: int = 0
    version: object = None
    layout_hash: int = 0
    flags: int = 0
    pieces: list[ParameterSlice] = field(default_factory=list[ParameterSlice])
    replica: weakref.ref[Any] | None = None
    unsynced_steps: int = 0  # consecutive steps without gradients of others


class FingerprintWriter(ScriptListener):
    """Writes fingerprints after the steps of at most four optimizers at a time."""

    def __init__(self, page: StatusPage, names: NamesWriter, joint: SyncedOptimizerDetector | None = None) -> None:
        self._page, self._names, self._later = page, names, DeferredReads()
        self._joint = joint or SyncedOptimizerDetector(lambda: page.get("ops"))
        self._watched: WeakKeyDictionary[Any, WatchedOptimizer] = WeakKeyDictionary()
        # number of optimizers, and the last step in each table: [without a replica, with a replica]
        self._known, self._numbers = [0, 0], ([0] * marks.TABLES, [0] * marks.TABLES)
        self._size = int(os.environ.get("WORLD_SIZE", "1"))
        self._several_hosts = os.environ.get("LOCAL_WORLD_SIZE", "") != str(self._size)

    def on_step_end(self, optimizer: Any) -> None:
        self._later.deliver_arrived()
        history = self._joint.history_of(optimizer)
        if self._size == 1 or self._page.get("uneven") or history.bypasses_ddp:
            return
        watched = self._watched.get(optimizer)
        if watched is None or (history.has_shared_parameters and not watched.has_replica):
            watched = self._watched[optimizer] = self._next_table(own=history.has_shared_parameters)
        if watched.table_index >= marks.TABLES:
            return
        watched.count += 1
        self._numbers[watched.has_replica][watched.table_index] = watched.count
        version = [self._joint.replicas_version, *(len(group["params"]) for group in optimizer.param_groups)]
        if watched.version != version:
            watched.version = version
            self._plan_pieces(watched, optimizer)
        if watched.pieces and self._is_synced(watched, history):
            self._write_fingerprint(watched, tuple(sum(_setting_values(optimizer, name)) for name in marks.SETTINGS))

    def _next_table(self, *, own: bool) -> WatchedOptimizer:
        """Assign the next table, in the same order on all ranks. A later optimizer continues the count of the others.

        Optimizers of replicas are numbered separately and have precedence, because a rank may have other optimizers
        that no other rank has.
        """
        numbers, table = self._numbers[own], self._known[own] % marks.TABLES
        self._known[own] += 1
        for other in self._watched.values():
            if other.table_index == table and (own <= other.has_replica):
                return WatchedOptimizer(marks.TABLES, own)
            if other.table_index == table:
                other.table_index = marks.TABLES
        return WatchedOptimizer(table, own, max(numbers[table], max(numbers) - 1))

    def _is_synced(self, watched: WatchedOptimizer, history: OptimizerHistory) -> bool:
        ddp = watched.replica and watched.replica()
        if ddp is None:
            return True
        # without any forward, the script called the module without DDP, which is an error
        counts = history.counts_since_step
        synced = counts is None or not counts.forwards or counts.synced_forwards > 0
        if watched.unsynced_steps < MAX_UNSYNCED_STEPS:
            watched.unsynced_steps = 0 if synced else watched.unsynced_steps + 1
        hook_names = {getattr(hook, "__name__", "") for hook, _ in getattr(ddp, "_comm_hooks", ())}
        return not watched.unsynced_steps and hook_names.isdisjoint(LOCAL_COMM_HOOKS)

    def _plan_pieces(self, watched: WatchedOptimizer, optimizer: Any) -> None:
        """Determine the parameters to compare, and the ranks on which they must be equal."""
        watched.pieces, watched.replica = [], None
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
        kept_by_id = {id(p): (name, ddp) for ddp in self._joint.replicas for name, p in synced_parameters(ddp)}
        of_ddp = [p for p in parameters if id(p) in kept_by_id]
        torch = sys.modules["torch"]
        plain = all(type(p) in (torch.nn.Parameter, torch.Tensor) and _dense(p) for p in of_ddp or parameters)
        if not plain or getattr(optimizer, "_overlap_with_ddp", False):
            return
        flags, members = 0, range(self._size)
        if of_ddp:
            ddp = kept_by_id[id(of_ddp[0])][1]
            members = torch.distributed.get_process_group_ranks(ddp.process_group)
            watched.replica, flags = weakref.ref(ddp), marks.BY_DDP
        if self._several_hosts or any(p.is_cuda for p in parameters):
            flags |= marks.SUMMED
        named = [(kept_by_id[id(p)][0] if of_ddp else f"parameter {n}", p) for n, p in enumerate(of_ddp or parameters)]
        watched.pieces = [*_split_into_pieces(named)]
        watched.flags = watched.table_index | flags | len(members) << 16
        layout = repr(([(name, [*p.shape], str(p.dtype)) for name, p in named], [*members], bool(of_ddp)))
        watched.layout_hash = zlib.crc32(layout.encode())
        self._names.set_tensor_names(watched.layout_hash, [piece.name for piece in watched.pieces])

    def _write_fingerprint(self, watched: WatchedOptimizer, settings: tuple[float, ...]) -> None:
        torch, pieces, number = sys.modules["torch"], watched.pieces, watched.count
        if not is_not_capturing(pieces[0].parameter):
            return
        last = len(pieces) - 1
        indices = [(number * ROTATING_PIECES + n) % last for n in range(min(ROTATING_PIECES, last))] + [last]
        sums = [pieces[at].as_integers().sum() for at in indices]
        if watched.flags & marks.SUMMED:
            floats = (pieces[at].as_integers().view(pieces[at].parameter.dtype) for at in indices)
            sums += [values.sum(dtype=torch.float64).view(torch.int64) for values in floats]

        def put(values: list[int]) -> None:
            hashes = [value & UINT32_MAX for value in values[: len(indices)]]
            totals = [struct.unpack("d", struct.pack("q", value))[0] for value in values[len(indices) :]]
            parts = _pad_to_parts(indices, UINT32_MAX), _pad_to_parts(hashes), _pad_to_parts(totals)
            marks.put_replica_fingerprint(
                self._page, marks.ReplicaFingerprint(number, watched.layout_hash, watched.flags, *parts, settings)
            )

        if sums[0].is_cuda:
            self._later.read(torch.stack(sums), put)
        else:
            put([total.item() for total in sums])


def _setting_values(optimizer: Any, name: str) -> Iterator[float]:
    """The value of a setting in each parameter group; of betas the first. Tensors count as 0: they may be on a GPU."""
    for group in optimizer.param_groups:
        value = group.get(name)
        value = value[0] if isinstance(value, (tuple, list)) else value
        yield value if isinstance(value, (int, float)) else 0.0


def _pad_to_parts(values: Sequence[Any], filling: int = 0) -> tuple[Any, ...]:
    return (*values, *[filling] * marks.PARTS)[: marks.PARTS]


def _dense(tensor: Any) -> bool:
    if tensor.layout is not sys.modules["torch"].strided or tensor.element_size() > 8:
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel()


def _split_into_pieces(named: list[tuple[str, Any]]) -> Iterator[ParameterSlice]:
    """Split all elements into pieces, of which an odd number take turns.

    With an odd number, the fingerprints that the page keeps longest (of multiples of powers of 2) cover all pieces.
    """
    piece_size = max(LEAST_ELEMENTS, sum(parameter.numel() for _, parameter in named) // SHARE) // marks.PARTS
    pieces = [
        ParameterSlice(name, parameter, start, min(start + piece_size, parameter.numel()))
        for name, parameter in named
        for start in range(0, parameter.numel(), piece_size)
    ]
    if len(pieces) > marks.PARTS and len(pieces) % 2:
        yield pieces[0]
    yield from pieces
