"""Measures the memory of a rank by purpose, and the bytes that it sends, in the first steps.

Weights, gradients and optimizer state are counted, each piece of memory once. All other memory, including that of C++
(DDP's buckets), comes from torch's profiler, which reports each allocation and release.
"""

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import msgspec
import torch
from torch.distributed import distributed_c10d  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.compute.memory import storage_bytes, trim_host_memory
from paceline.compute.resources import peak_resident_memory
from paceline.data.loader import MicroBatch
from paceline.lab.measurement import MemoryUse
from paceline.nested import tensors
from paceline.parallel.pipeline import Pipeline
from paceline.protocol.evidence import Phase
from paceline.protocol.status_page import RECORDS, StatusPage
from paceline.rank.world import World
from paceline.strategies import Strategy
from paceline.train.records import count_tensor_bytes

MARK = "paceline: "
SHARED = "shared"  # the name of the shared-memory group in the recorder's ring
ELEMENT_BYTES = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Int": 4, "Long": 8,
}  # fmt: skip


class MemoryInspection:
    """Observes a replica from its creation until it has taken its first steps."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._open = device, True
        self._weights = self._gradients = self._optimizer = self._batch = 0
        self._in_stages = False
        self.found: MemoryUse | None = None

    def watch(self, replica: Strategy) -> None:
        """Count the replica's tensors before and after each step of its optimizer."""

        def before(*_: object) -> None:
            if self._open:
                updated = [p for group in replica.optimizer.param_groups for p in group["params"]]  # or shards
                parameters = [*replica.model.parameters(), *updated]
                gradients = [shard.tensor for shard in replica.gradients()]
                self._gradients = storage_bytes([*gradients, *(p.grad for p in parameters)])
                self._weights = storage_bytes([*replica.model.parameters(), *replica.model.buffers()])

        def after(*_: object) -> None:
            if self._open:
                states = [s for one in replica.optimizers for s in one.state.values()]
                self._optimizer = storage_bytes(v for state in states for v in state.values())

        self._in_stages = replica.pipeline is not None
        replica.optimizer.register_step_pre_hook(before)
        replica.optimizer.register_step_post_hook(after)

    def mark_phase(self, phase: Phase) -> None:
        if self._open:
            with record_function(MARK + phase.word):
                pass

    def record_batch_bytes(self, microbatches: Sequence[MicroBatch]) -> None:
        """Count the data of the step, which belong to no purpose."""
        self._batch = storage_bytes(t for m in microbatches for t in tensors((m.inputs, m.targets)))

    def compute_memory_use(self, profiler: profile) -> None:
        self._open = False
        sizes = (self._weights, self._gradients, self._optimizer)
        events = _timeline(profiler, self._device)
        has_allocations = any(isinstance(event, int) for event in events)
        levels = compute_memory_levels(events, sum(sizes) + self._batch) if has_allocations else (None,) * 3
        activations, exchange, peak = levels
        if self._in_stages:  # forwards and backwards alternate, so there is no moment to measure these
            activations = exchange = None
        self.found = MemoryUse(*sizes, activations, exchange, peak, peak_resident_memory() or None)


@contextmanager
def record_allocations(device: torch.device) -> Generator[MemoryInspection]:
    """Record allocations inside the block; afterwards `found` has the memory by purpose."""
    inspection = MemoryInspection(device)
    trim_host_memory()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield inspection
    inspection.compute_memory_use(profiler)


def compute_memory_levels(events: Sequence[int | str], known: int) -> tuple[int, int, int]:
    """(activations, exchange, peak) in bytes, from allocations (bytes, negative when released) and names of phases.

    Activations: the memory that the largest forward of the last step left for backward. Exchange: the maximum in the
    last step's synchronisation, without `known` bytes of weights, gradients, optimizer state and data.
    """
    level = peak = activations = exchange = lowest = 0
    phase = ""
    for event in events:
        if isinstance(event, str):
            if event == Phase.DATA.word:
                activations = exchange = 0  # the next step
            if event == Phase.FORWARD.word:
                lowest = level
            if event == Phase.BACKWARD.word:
                activations = max(activations, level - lowest)
            phase = event
        else:
            level += event
            peak = max(peak, level)
            lowest = min(lowest, level)  # memory that a strategy releases in its forward is not an activation
        if phase == Phase.SYNC.word:
            exchange = max(exchange, level - known)
    return activations, exchange, peak


def _timeline(profiler: profile, device: torch.device) -> list[int | str]:
    """Allocations and phases, in order; empty if this version of torch has a different profiler."""
    results: Any = getattr(profiler.profiler, "kineto_results", None)
    events: list[tuple[int, int | str]] = []
    for event in results.events() if results is not None else ():
        name: str = event.name()
        if name == "[memory]" and str(event.device_type()).lower().endswith(device.type):
            events.append((event.start_ns(), event.nbytes()))
        elif name.startswith(MARK):
            events.append((event.start_ns(), name.removeprefix(MARK)))
    return [event for _, event in sorted(events, key=lambda pair: pair[0])]


class SentBytesCounter:
    """Counts the bytes that this rank sends, from its creation to the call of `sent_bytes`."""

    def __init__(self, page: StatusPage, world: World, pipeline: Pipeline | None) -> None:
        self._page, self._world, self._line = page, world, pipeline
        self._last = max((entry["record_id"] for entry in _entries()), default=-1)
        self._calls, self._since_ns = self._page.get("ops"), time.monotonic_ns()
        self._messages = self._line.sent_bytes if self._line else 0

    def sent_bytes(self) -> float | None:
        """Bytes that this rank has sent; None if the records are incomplete."""
        entries = [entry for entry in _entries() if entry["record_id"] > self._last and not entry["is_p2p"]]
        shared = [op for began_ns, op in self._page.recent_ops() if began_ns >= self._since_ns and op.group == SHARED]
        messages = self._line.sent_bytes - self._messages if self._line else 0
        is_incomplete = self._page.get("ops") - self._calls > RECORDS  # the ring has overwritten the oldest
        if is_incomplete or not (entries or shared or messages):
            return 0.0 if self._world.size == 1 else None
        calls = [(entry["profiling_name"], _bytes(entry), self._group_size(entry)) for entry in entries]
        calls += [(op.kind, count_tensor_bytes(op.shape, op.dtype), self._world.data.size) for op in shared]
        return sum(collective_sent_bytes(*call) for call in calls) + messages

    def _group_size(self, entry: dict[str, Any]) -> int:
        """The size of the collective's group. Each dimension of a mesh has a separate group."""
        resolve: Any = distributed_c10d._resolve_process_group  # pyright: ignore
        with suppress(LookupError, RuntimeError, ValueError):  # the group was destroyed
            return resolve(entry["process_group"][0]).size()
        return self._world.size


def collective_sent_bytes(kind: str, size: int, ranks: int) -> float:
    """Bytes that each of `ranks` sends in a collective whose input has `size` bytes on each rank.

    The bytes are those of a ring, the minimum of all algorithms: 2 (n-1)/n of the input of an all-reduce, (n-1) times
    the input of an all-gather, (n-1)/n of the input of a reduce-scatter.
    """
    kind = kind.rpartition(":")[2]  # of "gloo:all_reduce"
    if kind.startswith(("all_reduce", "allreduce")):
        return 2 * (ranks - 1) / ranks * size
    if kind.startswith(("all_gather", "_all_gather")):
        return (ranks - 1) * size
    return (ranks - 1) / ranks * size  # reduce-scatter, all-to-all, broadcast


def _bytes(entry: dict[str, Any]) -> int:
    return sum(
        ELEMENT_BYTES.get(dtype, 4) * prod(map(int, sizes))
        for sizes, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    )


def _entries() -> list[dict[str, Any]]:
    binding = sys.modules.get("torch._C._distributed_c10d")
    dump: Any = getattr(binding, "_dump_fr_trace_json", None)
    return [] if dump is None else msgspec.json.decode(dump(True, False)).get("entries", [])
