"""Merges the operations in torch's flight recorder and in the ledger into one list.

NCCL has a separate flight recorder; all other backends use a common one. This module reads both. C++ code calls the
collectives of DDP's buckets without a Python wrapper, so only the flight recorder contains them. Only the ledger
contains messages to a peer, and names. If torch has no flight recorder, the list contains only the ledger's operations.
"""

import pickle
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from traceback import walk_stack
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from paceline.protocol.code_locations import FrameActivity, activity_of_source_file, format_stack_location
from paceline.protocol.evidence import Op, Stack
from paceline.protocol.status_page import drop_calls_of_earlier_groups
from paceline.rank.collective_recorder import ARGUMENT_RULES, C10D_MODULE, CANONICAL_OPS, GroupRecord
from paceline.rank.sites import frame_record

graph_capture = threading.Event()
"""Set while a CUDA graph is captured. NCCL's recorder queries the GPU, which would invalidate the graph."""
MAX_OPS, MAX_FRAMES, MAX_THREADS = 64, 96, 24
DEFAULT_GROUP_TITLES = ("", "undefined", "default_pg")  # torch's titles of groups without a title
TimedOp = tuple[int, Op]  # start in ns of CLOCK_MONOTONIC, operation


def loaded_c10d_module() -> ModuleType | None:
    """Torch's module of collectives, if its import is complete."""
    module = sys.modules.get(C10D_MODULE)
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module


def merge_recent_ops(
    ring: Sequence[TimedOp], groups: Mapping[str, GroupRecord], stack: Stack | None = None
) -> list[Op]:
    """The last 64 operations of this process, the oldest first: those in the `ring`, and torch's calls in `groups`.

    If the main thread's `stack` is in torch, it provides the line of an operation in flight that torch itself called.
    The flight recorder also contains lines. But its first answer with lines takes seconds of CPU time, during which
    this process does not answer and appears to hold the interpreter lock.
    """
    frames = stack.frames if stack is not None else ()
    inner = next((frame for frame in frames if activity_of_source_file(frame.file) is not FrameActivity.GUARD), None)
    line = format_stack_location(frames) if inner is not None and inner.file.startswith("torch/") else ""
    from_ring = drop_calls_of_earlier_groups(ring)
    dated_by_seq = {(op.group, op.seq): (at, op) for at, op in from_ring if not op.is_message}
    for at, op in drop_calls_of_earlier_groups(_flight_recorder_ops(groups)):
        ours = dated_by_seq.get((op.group, op.seq))
        # torch's state `done` is also right for operations without a wait
        merged_op = replace(op, site="" if op.done else line) if ours is None else replace(ours[1], done=op.done)
        dated_by_seq[op.group, op.seq] = (at if ours is None else ours[0], merged_op)
    everything = [*(dated for dated in from_ring if dated[1].is_message), *dated_by_seq.values()]
    ops = [op for _, op in sorted(everything, key=lambda dated: dated[0])]
    return _without_queued(ops, {name for name, group in groups.items() if not group.can_poll})[-MAX_OPS:]


def _without_queued(ops: Sequence[Op], enqueuing: Collection[str]) -> list[Op]:
    """Remove operations that are queued behind a message in flight: in the groups `enqueuing` they have not begun."""
    kept_ops: list[Op] = []
    blocked_groups: set[str] = set()
    for op in ops:
        if op.done or op.group not in blocked_groups:
            kept_ops.append(op)
        if op.is_message and not op.done and op.group in enqueuing:
            blocked_groups.add(op.group)
    return kept_ops


def _groups() -> list[tuple[Any, str]]:
    module: Any = loaded_c10d_module()
    return [] if module is None else [*module._world.pg_names.items()]


def ranks_by_group() -> dict[str, tuple[int, ...]]:
    """The ranks of the world in each process group of this process; empty for a group of all ranks."""
    groups = {name: sys.modules[C10D_MODULE]._world.pg_group_ranks[group] for group, name in _groups()}
    world_size = max(map(len, groups.values()), default=0)  # size of the default group
    return {name: tuple(sorted(ranks)) if len(ranks) < world_size else () for name, ranks in groups.items()}


def group_descriptions() -> dict[str, str]:
    titles = {name: getattr(group, "group_desc", "") for group, name in _groups()}
    return {name: title for name, title in titles.items() if title not in DEFAULT_GROUP_TITLES}


def sequence_numbers() -> dict[str, int]:
    """The number of collectives of each group, by torch's count; without groups that torch does not count."""
    numbers: dict[str, int] = {}
    for group, name in _groups():
        with suppress(RuntimeError):  # MPI does not count
            numbers[name] = group._get_sequence_number_for_group()
    return numbers


def has_op_in_flight() -> bool:
    """Whether torch has an operation in flight, by the flight recorder. May be True although there is none.

    If gloo's threads complete two operations in reverse order, the count is late until the next one completes.
    """
    dumps = _flight_recorder_dumps(collectives=False)
    statuses = (status for dump in dumps for status in dump.get("pg_status", {}).values())
    return any(status["last_enqueued_collective"] > status["last_completed_collective"] for status in statuses)


def pending_op_ids(groups: Mapping[str, GroupRecord]) -> set[tuple[str, int]]:
    """The operations of torch in flight, by group and number. Messages have NCCL's numbers, negated: -1, -2, ..."""
    entries = [entry for dump in _flight_recorder_dumps(collectives=True) for entry in dump.get("entries", ())]
    messages = {(e["process_group"][0], -e["p2p_seq_id"]) for e in entries if e["is_p2p"] and not e["retired"]}
    return messages | {(op.group, op.seq) for _, op in _flight_recorder_ops(groups) if not op.done}


def collect_thread_stacks(main: int) -> tuple[Stack, ...]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    running = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    idents = sorted((ident for ident in running if ident != threading.get_ident()), key=lambda ident: ident != main)
    collected: list[Stack] = []
    for ident in idents[:MAX_THREADS]:
        frames = tuple(frame_record(frame) for frame, _ in islice(walk_stack(running[ident]), MAX_FRAMES))
        collected.append(Stack("main" if ident == main else str(names.get(ident, ident))[:64], frames))
    return tuple(collected)


def _flight_recorder_dumps(*, collectives: bool) -> list[dict[str, Any]]:
    binding = sys.modules.get("torch._C._distributed_c10d")
    names = ["_dump_fr_trace"] if graph_capture.is_set() else ["_dump_fr_trace", "_dump_nccl_trace"]
    dumps = [getattr(binding, name, None) for name in names]
    if loaded_c10d_module() is None:
        return []
    # safe to unpickle: the data comes from the memory of this process
    # without stacks: see `merge_recent_ops`
    return [pickle.loads(dump(collectives, False, False)) for dump in dumps if dump]


def _flight_recorder_ops(groups: Mapping[str, GroupRecord]) -> list[TimedOp]:
    to_monotonic = time.monotonic_ns() - time.time_ns()
    newest_numbers = sequence_numbers()
    recorded: list[TimedOp] = []
    for entry in [entry for dump in _flight_recorder_dumps(collectives=True) for entry in dump.get("entries", ())]:
        group, is_gloo = entry["process_group"][0], entry["profiling_name"].startswith("gloo:")
        # gloo counts messages with collectives, but does not record them; NCCL counts them separately
        number = entry["op_id"] if is_gloo else entry["collective_seq_id"]
        our_number = groups[group].to_own_sequence_number(number) if group in groups else number
        of_earlier_group = number > newest_numbers.get(group, number)
        if not (entry["is_p2p"] or our_number is None or of_earlier_group):
            recorded.append((entry["time_created_ns"] + to_monotonic, _op(entry, group, our_number)))
    return recorded


def _op(entry: Mapping[str, Any], group: str, number: int) -> Op:
    kind = entry["profiling_name"].rpartition(":")[2]
    side = "output" if kind in ("scatter", "reduce_scatter") else "input"  # equal on all ranks
    rule = ARGUMENT_RULES.get(CANONICAL_OPS.get(kind, kind))
    shapes = entry[f"{side}_sizes"] if rule is None or rule.records_shape else ()
    types: list[str] = entry[f"{side}_dtypes"]
    return Op(
        group, number, kind,
        shape=" ".join(str(shape) for shape in shapes), dtype=_TYPES.get(types[0], types[0].lower()) if types else "",
        done=entry["retired"],
    )  # fmt: skip


_TYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Byte": "uint8",
    "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
"""The names of torch's types in C++."""
