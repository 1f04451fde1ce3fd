"""Separate buffers for each virtual rank, such as the running statistics of batch norm.

Virtual ranks process different samples, so the values of their buffers differ. The result must not depend on the rank
that computes a virtual rank. Therefore the buffers of a virtual rank are loaded into the module before its forward, and
read back after it.

For evaluation and checkpoints the values of all virtual ranks are merged. A module declares the reductions of its
buffers in `buffer_reductions`. The buffers of normalization layers are averaged. For all others see
`paceline.checkpoint.buffer_reductions`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from paceline.checkpoint.buffer_reductions import (
    UNDECLARED,
    BufferChangeCounts,
    BufferObservation,
    as_float64,
    digest_of,
    from_float64,
    infer_reduction,
    infer_saved_reduction,
    load_change_counts,
    may_depend_on_sample_count,
    observe_buffer,
    reduce_in_process,
    reductions_for_dtype,
)
from paceline.checkpoint.state import StateSource, TensorShard, read_matching_tensor
from paceline.collectives.batchnorm import SyncBatchNorm
from paceline.collectives.communicator import get_communicator
from paceline.collectives.control import all_gather_object, error_on_one_rank
from paceline.collectives.replicate import broadcast
from paceline.collectives.sum_tree import LeafPartition, add_optional
from paceline.collectives.torch_collectives import TreeAllReduce
from paceline.compute.forward import no_cuda_graphs
from paceline.errors import TrainingError, UsageError
from paceline.rank.world import World

if TYPE_CHECKING:
    from paceline.data.plan import MicroBatchPlan

_Buffers = dict[str, Tensor]
_SavedNames = Mapping[str, Mapping[int | None, str]]
"""By buffer, the names of its saved values, by virtual rank. None: the value of all virtual ranks."""
ALWAYS_COPIED_BYTES = 1 << 20
_IN_NORMALIZATION = {"running_mean": "mean", "running_var": "mean", "num_batches_tracked": "first"}
_SAVED_REDUCTION = re.compile(r"reduction/([a-z]+)/(.+)")
_SAVED_BUFFER = re.compile(r"buffers/(?:([0-9]{1,9})/)?(.+)")


@dataclass
class _Copies:
    """Copies of buffers, and the state that belongs to them."""

    of: dict[int, _Buffers] = field(default_factory=dict[int, _Buffers])
    """by virtual rank"""
    sources: dict[int, _Buffers] = field(default_factory=dict[int, _Buffers])
    """the copied tensors"""
    seen: dict[int, dict[str, BufferChangeCounts]] = field(default_factory=dict[int, dict[str, BufferChangeCounts]])
    large: dict[tuple[int, str], tuple[Tensor, int]] = field(default_factory=dict[tuple[int, str], tuple[Tensor, int]])
    """large buffers: the copied tensor and its version"""


class VirtualRankBuffers:
    def __init__(self, model: nn.Module, world: World, virtual_ranks: int) -> None:
        self._world, self._virtual_ranks, self._model = world, virtual_ranks, model
        self._slots = _slots(model)
        self._names_checked = self.is_idle = False  # idle: the model has no buffers, also after the first micro-batch
        self._synchronised = {n for n, slots in self._slots.items() if isinstance(slots[0][0], SyncBatchNorm)}
        self._initial = {name: buffer.clone() for name, buffer in self._in_module().items()}
        self._reductions = _reductions(model, self._slots)
        """declared or known reductions by buffer; `UNDECLARED`: to be inferred"""
        self._decided = dict(self._reductions)
        self._custom = {n: slots[0] for n, slots in self._slots.items() if not _is_in_normalization(*slots[0])}
        self._open = [name for name, reduction in self._reductions.items() if reduction == UNDECLARED]
        self._integers = [name for name in self._open if _is_integer(self._initial[name])]
        self._of: dict[int, _Buffers] = {}
        self._seen: dict[int, dict[str, BufferChangeCounts]] = {}  # changes of the `_integers`, by virtual rank
        self._counted: dict[tuple[int, int], int] = {}
        """samples of each (virtual rank, part) of this step that `_seen` includes: a phase may compute it again"""
        self._forwarded = False
        self._assigned: set[str] = set()  # buffers that the script has set outside of a step
        self._last_read: dict[str, tuple[Tensor, int]] = {}  # the module's tensors at the last read, and their versions
        self._note_read(self._slots)
        self._checks = 2 if virtual_ranks > 1 and self._open else 0
        """remaining steps with checks: a change by the loop in the first step is visible in the second"""
        self._independent: set[str] = set()  # open floating-point buffers that do not depend on the number of samples
        self._synchronised_with: dict[str, tuple[Tensor, int]] = {}
        """`_last_read` when the gradients of the current micro-batch were summed"""
        self._by_loop: set[str] = set()  # buffers that the loop body changed after that
        self._differed: set[str] = set()  # integer buffers whose values have differed between virtual ranks
        self._lent: dict[int, _Buffers] = {}  # of a virtual rank that another rank computes, for an audit
        self._inside: tuple[MicroBatchPlan, _Buffers, dict[str, tuple[Tensor, int]]] | None = None
        """the current micro-batch, the buffers before it, and `_last_read` before it"""
        self._kept, self._kept_for_repeat = _Copies(), _Copies()

    @torch.no_grad()
    def save_copies(self) -> None:
        self._apply_assigned_values()
        self._counted.clear()
        keeps = self._kept
        keeps.seen = {virtual_rank: dict(histories) for virtual_rank, histories in self._seen.items()}
        keeps.of = {virtual_rank: keeps.of.get(virtual_rank, {}) for virtual_rank in self._of}
        keeps.sources = {virtual_rank: dict(buffers) for virtual_rank, buffers in self._of.items()}
        copies: list[Tensor] = []
        originals: list[Tensor] = []
        for virtual_rank, buffers in self._of.items():
            kept = keeps.of[virtual_rank]
            for name, buffer in buffers.items():
                copy = kept.get(name)
                if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype:
                    kept[name] = buffer.clone()
                elif self._may_have_changed(virtual_rank, name, buffer):
                    copies.append(copy)
                    originals.append(buffer)
        if copies:
            torch._foreach_copy_(copies, originals)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def _may_have_changed(self, virtual_rank: int, name: str, buffer: Tensor) -> bool:
        """Whether to copy the buffer again. A large table that does not change must not be copied in each step."""
        if buffer.nbytes <= ALWAYS_COPIED_BYTES:  # batch norm's kernel does not increase the version
            return True
        copied, version = self._kept.large, buffer._version  # pyright: ignore[reportPrivateUsage]
        last_copied = copied.get((virtual_rank, name))
        copied[virtual_rank, name] = (buffer, version)
        return last_copied is None or last_copied[0] is not buffer or last_copied[1] != version

    @torch.no_grad()
    def restore_copies(self) -> None:
        """Restore all buffers from the last `save_copies`.

        A buffer stays in the same memory, unless the module has replaced it: a CUDA graph uses that memory.
        """
        current, keeps = self._of, self._kept
        self._of = {
            v: {n: _put_into(b, keeps.sources[v][n], current.get(v, {}).get(n)) for n, b in kept.items()}
            for v, kept in keeps.of.items()
        }
        self._seen = {virtual_rank: dict(histories) for virtual_rank, histories in keeps.seen.items()}
        self._counted.clear()
        self._put(next(iter(self._of.values()), {name: b.clone() for name, b in self._initial.items()}))

    def swap_saved_copies(self) -> None:
        """Set the copies of the last `save_copies` aside, until the next call. They are then the current ones again."""
        self._kept, self._kept_for_repeat = self._kept_for_repeat, self._kept

    @contextmanager
    def micro_batch_context(self, work: MicroBatchPlan) -> Generator[None]:
        self.enter_micro_batch(work)
        try:
            yield
        except BaseException:
            self.leave_micro_batch(failed=True)
            raise
        self.leave_micro_batch()

    def enter_micro_batch(self, work: MicroBatchPlan) -> None:
        """Load the buffers of this work's virtual rank into the module, until `leave`.

        Changes by a dummy batch are dropped, except those of synchronised batch norm: its statistics are global, so
        they are the same on all ranks.
        """
        if self.is_idle:
            return
        self._apply_assigned_values()
        self._forwarded = True
        lent = self._lent.get(work.virtual_rank) if work.is_repeated else None
        buffers = self._of.get(work.virtual_rank) or lent or {n: b.clone() for n, b in self._initial.items()}
        if work.is_counted:
            self._put(buffers)
        else:
            self._put({n: b if n in self._synchronised else b.clone() for n, b in buffers.items()})
        self._inside = work, buffers, dict(self._last_read) if self._integers else {}

    def broadcast_for_audit(self, virtual_rank: int, owner: int) -> None:
        """Let all ranks repeat a micro-batch of a virtual rank with the buffers of its owner (a collective if any)."""
        self._apply_assigned_values()
        buffers = self._of.get(virtual_rank) or self._initial
        self._lent = {virtual_rank: {name: buffer.clone() for name, buffer in buffers.items()}}
        if buffers:
            broadcast([*self._lent[virtual_rank].values()], owner, "buffers of an audit", self._world.group)

    def leave_micro_batch(self, *, failed: bool = False) -> None:
        """End the micro-batch that `enter` has begun. If it has `failed`, its buffers are not read."""
        if self._inside is None:
            return
        try:
            if failed:
                return
            if not self._names_checked:
                self._check_names()
            self._collect(*self._inside)
            for name, before in self._synchronised_with.items():
                tensor, version = self._last_read[name]
                if tensor is not before[0] or version != before[1]:
                    self._by_loop.add(name)
        finally:
            self._inside = None
            self._synchronised_with = {}

    def _collect(self, work: MicroBatchPlan, buffers: _Buffers, before: Mapping[str, tuple[Tensor, int]]) -> None:
        # a module may have replaced its buffer instead of writing into it
        after = self._in_module()
        for name in self._custom:
            self._check_fits(name, after[name])
        self._note_read(self._custom)
        if work.is_counted:
            self._count(work, before)
        kept = after if work.is_counted else {n: after[n] if n in self._synchronised else b for n, b in buffers.items()}
        # only virtual ranks with samples count in the mean; which ranks run dummy batches depends on the world size
        if work.is_counted or self._synchronised or work.virtual_rank in self._of:
            self._of[work.virtual_rank] = kept

    def check_mergeable(self) -> None:
        """Before an update: check that buffers can be merged (a collective in two steps, if a reduction is open)."""
        if self._inside is not None and self._open and self._virtual_ranks > 1:
            self._note_read(self._open)
            self._synchronised_with = {name: self._last_read[name] for name in self._open}
        if not self._checks:
            return
        counted, histories = dict(self._counted), {v: dict(by_name) for v, by_name in self._seen.items()}
        if self._inside is not None:
            self._collect(*self._inside)
        self._checks -= self._infer(early=True)
        if self._inside is not None:  # `leave` counts it, together with later changes by the loop
            self._counted, self._seen = counted, histories

    @contextmanager
    def merged(self) -> Generator[None]:
        """Inside, the module's buffers are merged over all virtual ranks, on every rank (a collective).

        Only virtual ranks with at least one sample count.
        """
        self._apply_assigned_values()
        before = self._in_module()
        self._put(self._merge())
        try:
            yield
        finally:
            self._put(before)

    def buffer_shards(self) -> list[TensorShard]:
        """All buffers of this rank's virtual ranks. Synchronised buffers are included once."""
        shards: list[TensorShard] = []
        for virtual_rank, buffers in self._of.items():
            local = {name: b for name, b in buffers.items() if name not in self._synchronised}
            shards += [TensorShard(f"buffers/{virtual_rank}/{name}", b, replicated=False) for name, b in local.items()]
        if self._synchronised and self._of:  # equal on all ranks
            common = next(iter(self._of.values()))
            shards += [TensorShard(f"buffers/{name}", common[name]) for name in sorted(self._synchronised)]
        for name in self._custom:
            reduction, initial = self._reductions[name], self._initial[name]
            needs_initial = reduction == "sum" or (reduction == UNDECLARED and not _is_real(initial))
            value = initial if needs_initial else initial.new_empty(0)
            shards.append(TensorShard(f"reduction/{reduction}/{name}", value))
        for virtual_rank in self._of if self._integers else ():
            counts = self._seen.get(virtual_rank, {})
            shards += [
                TensorShard(
                    f"seen/{virtual_rank}/{name}", counts.get(name, BufferChangeCounts()).tensor(), replicated=False
                )
                for name in self._integers
            ]
        return shards

    def load(self, source: StateSource) -> None:
        """Load the buffers of this rank's virtual ranks. A virtual rank without saved buffers has had no sample yet."""
        self._of, self._seen = {}, {}
        self._counted.clear()
        saved = _saved_names(source)
        self._initial |= self._initial_values(source, saved)
        virtual_ranks = self._world.share(self._virtual_ranks)
        for virtual_rank in virtual_ranks[:1] if self._synchronised else virtual_ranks:
            # synchronised: the virtual ranks of a rank have common buffers, which depend on the world size
            keys = (virtual_rank, None, 0) if self._synchronised else (virtual_rank, None)
            found = {name: [saved[name][key] for key in keys if key in saved[name]] for name in self._slots}
            if any(found.values()):
                self._of[virtual_rank] = {
                    name: self._read(source, of_name[0], name) if of_name else self._initial[name].clone()
                    for name, of_name in found.items()
                }
                self._seen[virtual_rank] = {n: load_change_counts(source, virtual_rank, n) for n in self._integers}
        if self._custom and self._has_other_ranks(saved):
            self._start_from(self._merged_in(source, saved))
        self._put(next(iter(self._of.values()), self._initial))

    def _read(self, source: StateSource, full: str, name: str, *, any_type: bool = True) -> Tensor:
        return read_matching_tensor(source, full, self._initial[name], any_type=any_type).to(self._world.device)

    def _initial_values(self, source: StateSource, saved: _SavedNames) -> _Buffers:
        values: _Buffers = {}
        for full in source.names("reduction/"):
            match = _SAVED_REDUCTION.fullmatch(full)
            if match and match[2] in self._custom and source.shape(full) == self._initial[match[2]].shape:
                values[match[2]] = self._read(source, full, match[2], any_type=False)
        for name in self._custom:  # loaded pretrained weights: equal for all virtual ranks
            if None in saved[name]:
                values[name] = self._read(source, saved[name][None], name)
        return values

    def _has_other_ranks(self, saved: _SavedNames) -> bool:
        """Whether there are values of virtual ranks, or of ranks with common buffers, that do not exist now."""
        ranks = {rank for by_rank in saved.values() for rank in by_rank if rank is not None}
        if not self._synchronised or not ranks:
            return any(virtual_rank >= self._virtual_ranks for virtual_rank in ranks)
        return ranks != {share.start for share in self._world.shares(self._virtual_ranks)}

    def _merged_in(self, source: StateSource, saved: _SavedNames) -> _Buffers:
        merged: _Buffers = {}
        for name in self._custom:
            initial = self._initial[name]
            values = {v: self._read(source, full, name) for v, full in saved[name].items() if v is not None}
            reduction = self._reductions[name]
            if values and reduction == UNDECLARED:
                reduction = infer_saved_reduction(source, name, values, initial)
            if not reduction:
                raise self._undeclared(name)
            merged[name] = reduce_in_process(values, reduction, initial, max(values) + 1) if values else initial
        return merged

    def _start_from(self, values: _Buffers) -> None:
        self._seen = {}
        for name, value in values.items():
            self._initial[name] = value.clone()
            for buffers in self._of.values():
                buffers[name] = value.clone()

    def _merge(self) -> _Buffers:
        initial, first = self._initial, self._of[min(self._of)] if self._of else self._initial
        if self._virtual_ranks == 1:
            return {name: buffer.clone() for name, buffer in first.items()}
        self._infer()
        decided = self._decided
        reduced = [name for name, reduction in decided.items() if reduction in ("mean", "sum")]
        summed = [name for name in reduced if _is_real(initial[name])]
        root = self._sum_and_count(summed, relative_to_initial={name for name in summed if decided[name] == "sum"})
        count = float(root[-1])
        merged = {name: initial[name].clone() for name in initial}
        pieces = root[:-1].split([as_float64(initial[name]).numel() for name in summed]) if summed else []
        for name, piece in zip(summed if count else (), pieces, strict=bool(count)):
            total = piece / count if decided[name] == "mean" else piece + as_float64(initial[name])
            merged[name] = from_float64(total, initial[name])
        for name, reduction in decided.items() if count else ():
            if reduction in ("sum", "max", "min") and name not in summed:
                merged[name] = self._reduced_over_ranks(name, reduction)
        of_first = {name: first[name].clone() for name, reduction in decided.items() if reduction == "first"}
        if self._world.size > 1:  # from rank 0: its virtual rank 0 has samples in every global batch
            broadcast([*of_first.values()], group=self._world.group)
        return merged | of_first

    def _sum_and_count(self, names: Sequence[str], relative_to_initial: set[str]) -> Tensor:
        """(n + 1,) float64: the sum of these buffers over virtual ranks, and the number of virtual ranks.

        For buffers in `relative_to_initial`, the sum of (value - initial value).
        """
        partition = partition_virtual_ranks(self._world, self._virtual_ranks)
        sums = partition.make_partial_sums(add_optional)
        zeros = torch.zeros(1, dtype=torch.float64, device=self._world.device)
        start = {name: as_float64(self._initial[name]) for name in names}
        size = sum(flat.numel() for flat in start.values()) + 1
        padding = zeros.expand(partition.padded(size) - size)
        for virtual_rank, buffers in sorted(self._of.items()):
            values = [(as_float64(buffers[n]), start[n] if n in relative_to_initial else 0.0) for n in names]
            flat = [value - initial for value, initial in values]
            sums.add(virtual_rank, torch.cat([*flat, zeros + 1, padding]))
        nothing = zeros.repeat(partition.padded(size))
        exchange = TreeAllReduce(
            partition, [nothing.clone() if part is None else part for part in sums.finish()], self._world.group
        )
        return exchange.wait()[:size]

    def _reduced_over_ranks(self, name: str, reduction: str) -> Tensor:
        """An integer sum, a maximum or a minimum: over this rank's virtual ranks, then over ranks (a collective)."""
        own, values = self._initial[name], {v: buffers[name] for v, buffers in self._of.items()}
        if values:
            own = reduce_in_process(values, reduction, own, self._virtual_ranks)
        if self._world.size > 1:
            has_samples = torch.tensor([bool(values)], dtype=torch.uint8, device=self._world.device)
            sent = torch.cat([has_samples, own.flatten().view(torch.uint8)])
            rows = get_communicator(self._world.group).start_all_gather(sent, "reduced buffers")()
            # cloned, because a view must be aligned
            values = {i: row[1:].clone().view(own.dtype).view(own.shape) for i, row in enumerate(rows) if row[0]}
            own = reduce_in_process(values, reduction, self._initial[name], self._virtual_ranks)
        return own

    def _infer(self, *, early: bool = False) -> bool:
        """Infer the reductions of open buffers (a collective, if there are any). False: no rank had a sample."""
        self._decided = dict(self._reductions)
        assigned = {name: digest_of(self._initial[name]) for name in sorted(self._assigned)}
        if not self._open and not any(self._decided[n] == "sum" for n in self._custom):
            return bool(self._of)
        observed_here = {str(v): {n: asdict(o) for n, o in values.items()} for v, values in self._observe().items()}
        reports = all_gather_object([assigned, observed_here], self._world)
        for name in sorted({name for digests, _ in reports for name in digests}):
            if len({digests.get(name) for digests, _ in reports}) > 1:
                raise error_on_one_rank(self._error("buffer-set-differently", name), self._world)
        ranks: list[dict[str, Any]] = [values for _, by_virtual_rank in reports for values in by_virtual_rank.values()]
        for name in self._open:
            values = [msgspec.convert(by_name[name], BufferObservation) for by_name in ranks]
            digests = {value.digest for value in values}
            if len(digests) > 1:
                self._differed.add(name)
            by_chance = early or name in self._differed
            self._decided[name] = infer_reduction(self._initial[name], values, by_chance=by_chance)
            if not self._decided[name]:
                raise error_on_one_rank(self._undeclared(name, equal=len(digests) == 1), self._world)
            if any(value.by_samples is False for value in values):
                self._independent.add(name)
        return bool(ranks)

    def _observe(self) -> dict[int, dict[str, BufferObservation]]:
        pairs = [(v, name) for v in sorted(self._of) for name in self._open]
        different = [(self._of[v][name] != self._initial[name]).any() for v, name in pairs]
        changed = torch.stack(different).tolist() if different else []  # one wait for a GPU
        values: dict[int, dict[str, BufferObservation]] = {v: {} for v in sorted(self._of)}
        for (v, name), is_changed in zip(pairs, changed, strict=True):
            history = self._seen.get(v, {}).get(name, BufferChangeCounts())
            older = self._kept.of.get(v, {}).get(name)
            value = observe_buffer(self._of[v][name], self._initial[name], older, history, changed=is_changed)
            values[v][name] = replace(value, by_samples=self._may_count_samples(v, name) if is_changed else None)
        return values

    def _may_count_samples(self, virtual_rank: int, name: str) -> bool | None:
        """See `may_depend_on_sample_count`. For a buffer that the loop changes, the change since the start counts."""
        initial, buffer = self._initial[name], self._of[virtual_rank][name]
        samples = [count for (rank, _), count in self._counted.items() if rank == virtual_rank]
        if not samples or name in self._independent or not _is_real(initial):
            return None
        before = initial if name in self._by_loop else self._kept.of.get(virtual_rank, {}).get(name, initial)
        return may_depend_on_sample_count(buffer, before, len(samples), sum(samples))

    def _count(self, work: MicroBatchPlan, before: Mapping[str, tuple[Tensor, int]]) -> None:
        key = (work.virtual_rank, work.micro_batch)
        if key in self._counted:
            return
        self._counted[key] = len(work.indices)
        histories = self._seen.setdefault(work.virtual_rank, {})
        for name in self._integers:
            (old, version), (new, new_version) = before[name], self._last_read[name]
            history = histories.get(name, BufferChangeCounts())
            histories[name] = BufferChangeCounts(
                history.micro_batches + 1,
                history.samples + len(work.indices),
                history.writes + (new_version - version if new is old else 1),
                history.replaced + (new is not old),
            )

    def _apply_assigned_values(self) -> None:
        """Apply a value that the script assigned to a buffer between steps to all virtual ranks.

        This covers all buffers before the first forward, and later all except those of normalization layers, whose
        kernels do not increase the version of a tensor.
        """
        for name in self._custom if self._forwarded else self._slots:
            new = _buffer(*self._slots[name][0])
            old, version = self._last_read[name]
            if new is old and _version(new) == version:
                continue
            self._check_fits(name, new)
            reduction, initial = self._reductions[name], self._initial[name]
            histories = [by_name[name] for by_name in self._seen.values() if name in by_name]
            accumulates = self._forwarded and (
                reduction in ("sum", "mean", "max", "min")
                or (name in self._integers and any(history.writes or history.replaced for history in histories))
            )
            if accumulates and self._virtual_ranks > 1 and bool(new.any()) and not torch.equal(new, initial):
                raise self._error("buffer-changed-between-steps", name)
            self._assigned.add(name)
            self._initial[name] = new.detach().clone()
            for by_name in self._seen.values():
                by_name.pop(name, None)
            for buffers in self._of.values():
                buffers[name] = new if buffers[name] is new else new.detach().clone()
            self._note_read([name])

    def _check_fits(self, name: str, now: Tensor) -> None:
        initial = self._initial[name]
        if now.shape == initial.shape and now.dtype == initial.dtype:
            return
        raise self._error(
            "buffer-changes-shape", name, shape=tuple(initial.shape), dtype=initial.dtype, new_shape=tuple(now.shape),
            new_dtype=now.dtype,
        )  # fmt: skip

    def _undeclared(self, name: str, *, equal: bool = False) -> UsageError:
        if name in self._by_loop:
            return self._error("buffer-changed-in-body", name)
        fitting, *others = reductions_for_dtype(self._initial[name])
        code = "buffer-count-unclear" if name in self._integers else "buffer-change-unclear" if equal else ""
        return self._error(code or "buffer-not-merged", name, fitting=fitting, others=others)

    def _error(self, code: str, name: str, **fields: Any) -> UsageError:
        owner, leaf = self._slots[name][0]
        common = {"leaf": leaf, "module": _described(self._model, owner), "owner": type(owner).__name__}
        return UsageError(code=code, virtual_ranks=self._virtual_ranks, **common, **fields)

    def _note_read(self, names: Iterable[str]) -> None:
        for name in names:
            buffer = _buffer(*self._slots[name][0])
            self._last_read[name] = (buffer, _version(buffer))

    def _in_module(self) -> _Buffers:
        return {name: _buffer(*slots[0]) for name, slots in self._slots.items()}

    def _put(self, buffers: Mapping[str, Tensor]) -> None:
        for name, slots in self._slots.items():
            for owner, leaf in slots:
                if _buffer(owner, leaf) is not buffers[name]:  # setattr of a module is slow
                    setattr(owner, leaf, buffers[name])
        self._note_read(self._custom if self._forwarded else self._slots)

    def _check_names(self) -> None:
        """After the first forward: raise TrainingError for a buffer that it created, whose values would be lost."""
        self._names_checked, self.is_idle = True, not self._slots
        if new := [name for name in _slots(self._model) if name not in self._slots]:
            raise TrainingError(code="buffer-made-in-first-forward", name=new[0])


def partition_virtual_ranks(world: World, virtual_ranks: int) -> LeafPartition:
    return LeafPartition([(share.start, share.stop) for share in world.shares(virtual_ranks)], world.rank)


def _saved_names(source: StateSource) -> _SavedNames:
    saved: dict[str, dict[int | None, str]] = defaultdict(dict)
    for full in source.names("buffers/"):
        if match := _SAVED_BUFFER.fullmatch(full):
            saved[match[2]][int(match[1]) if match[1] else None] = full
    return saved


def _put_into(values: Tensor, before: Tensor, current: Tensor | None) -> Tensor:
    is_current = current is before and before.shape == values.shape and before.dtype == values.dtype
    return before.copy_(values) if is_current else values.clone()


def _slots(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """By its first name, the places (module, attribute) of each buffer. Modules may share a buffer."""
    by_identity: dict[int, str] = {}
    slots: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, owner in model.named_modules():
        for leaf, buffer in owner.named_buffers(recurse=False):
            name = by_identity.setdefault(id(buffer), f"{prefix}.{leaf}" if prefix else leaf)
            slots.setdefault(name, []).append((owner, leaf))
    return slots


def _reductions(model: nn.Module, slots: Mapping[str, Sequence[tuple[nn.Module, str]]]) -> dict[str, str]:
    """By buffer, the declared reduction, or the built-in one of its class; else `UNDECLARED`."""
    for owner in model.modules():
        _check_declaration(model, owner)
    reductions: dict[str, str] = {}
    for name, places in slots.items():
        declared = {d for owner, leaf in places if (d := _declared(owner).get(leaf)) is not None}
        if len(declared) > 1:
            raise UsageError(code="buffer-declared-differently", name=name, declared=" and ".join(sorted(declared)))
        reductions[name] = declared.pop() if declared else _builtin_reduction(*places[0])
    return reductions


def _declared(owner: nn.Module) -> Mapping[str, str]:
    return getattr(owner, "buffer_reductions", None) or {}


def _check_declaration(model: nn.Module, owner: nn.Module) -> None:
    declared: Any = _declared(owner)
    owner_label = _described(model, owner)
    if not isinstance(declared, Mapping):
        raise UsageError(code="buffer-reductions-not-a-dict", whose=owner_label)
    buffers = owner._buffers  # pyright: ignore[reportPrivateUsage]
    for leaf, reduction in declared.items():  # pyright: ignore[reportUnknownVariableType]
        if leaf not in buffers:
            buffer_names = ", ".join(buffers) or "none"
            raise UsageError(code="buffer-unknown", whose=owner_label, leaf=leaf, known=buffer_names)
        buffer = buffers[leaf]
        if buffer is not None and reduction not in (fitting := reductions_for_dtype(buffer)):
            raise UsageError(
                code="buffer-reduction-does-not-fit", whose=owner_label, leaf=leaf, dtype=buffer.dtype, value=reduction,
                allowed=[*fitting],
            )  # fmt: skip


def _builtin_reduction(owner: nn.Module, leaf: str) -> str:
    if _is_in_normalization(owner, leaf):
        return _IN_NORMALIZATION[leaf]
    bases = [base.__name__ for base in type(owner).__mro__]
    if leaf in ("min_val", "max_val") and "MinMaxObserver" in bases and not any("MovingAverage" in b for b in bases):
        return leaf[:3]
    # the vectors of spectral norm: each forward updates them from the weight only
    parametrized = bases[0] == "_SpectralNorm" and leaf in ("_u", "_v")
    hooked = leaf[-2:] in ("_u", "_v") and f"{leaf[:-2]}_orig" in owner._parameters  # pyright: ignore[reportPrivateUsage]
    return "first" if parametrized or hooked else UNDECLARED


def _is_in_normalization(owner: nn.Module, leaf: str) -> bool:
    return isinstance(owner, _NormBase) and leaf in _IN_NORMALIZATION and leaf not in _declared(owner)


def _is_real(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _is_integer(buffer: Tensor) -> bool:
    return not _is_real(buffer) and buffer.dtype != torch.bool


def _buffer(owner: nn.Module, leaf: str) -> Tensor:
    buffer = owner._buffers.get(leaf)  # pyright: ignore[reportPrivateUsage] - getattr of a module is slow
    return getattr(owner, leaf) if buffer is None else buffer


def _described(model: nn.Module, owner: nn.Module) -> str:
    name = next(name for name, module in model.named_modules() if module is owner)
    return f"{name} ({type(owner).__name__})" if name else f"the model ({type(owner).__name__})"


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]


@contextmanager
def ignore_dummy_batch(model: nn.Module, parameters: list[nn.Parameter]) -> Generator[None]:
    """Inside, backward gives zero gradients, and synchronised batch norm ignores the batch (for dummy batches).

    Gradients are replaced, not multiplied by zero: 0 x inf would be NaN on every rank.
    """
    hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]
    synchronised = [m for m in model.modules() if isinstance(m, SyncBatchNorm)]
    for module in synchronised:
        module.counted = False
    try:
        with no_cuda_graphs():
            yield
    finally:
        for module in synchronised:
            module.counted = True
        for hook in hooks:
            hook.remove()
