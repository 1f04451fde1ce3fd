"""Puts together what torch's flight recorder has recorded and what the ledger has, into one list.

NCCL has a separate flight recorder; all other backends have one in common. Both are read.
DDP's buckets are called from C++, where no wrapper sees them: only the flight recorder has them. It does not have
messages to a peer, nor names; those are the ledger's. A torch without a flight recorder leaves what the ledger has.
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

from paceline.protocol.evidence import Op, Stack
from paceline.protocol.places import Activity, activity_of, shown_site_of
from paceline.protocol.status_page import of_this_life
from paceline.rank.ledger import KINDS, MODULE, SAME, Group
from paceline.rank.sites import frame_of

capturing = threading.Event()
"""A CUDA graph is being captured: NCCL's recorder is not read, since it asks the GPU, which would spoil the graph."""
MAX_OPS, MAX_FRAMES, MAX_THREADS = 64, 96, 24
UNTITLED = ("", "undefined", "default_pg")
"""torch's titles of groups without a title"""
Dated = tuple[int, Op]  # When it began, in ns of CLOCK_MONOTONIC, and what.


def distributed() -> ModuleType | None:
    """Torch's module of collectives, once it is imported as a whole."""
    module = sys.modules.get(MODULE)
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module


def merged(ring: Sequence[Dated], groups: Mapping[str, Group], stack: Stack | None = None) -> list[Op]:
    """The last 64 operations of this process, the oldest first: of the `ring`, and what torch has called in `groups`.

    If the main thread's `stack` is in torch, it gives the line of the operation in flight that torch itself has called.
    The flight recorder knows the lines, too, but its first answer with them takes seconds of a core, in which this
    process answers nothing and seems to hold the interpreter's lock.
    """
    frames = stack.frames if stack is not None else ()
    inner = next((frame for frame in frames if activity_of(frame.file) is not Activity.GUARD), None)
    line = shown_site_of(frames) if inner is not None and inner.file.startswith("torch/") else ""
    own = of_this_life(ring)
    called = {(op.group, op.seq): (at, op) for at, op in own if not op.is_message}
    for at, op in of_this_life(_recorded(groups)):
        ours = called.get((op.group, op.seq))
        # torch knows best what is over, also of what nobody has waited for
        known = replace(op, site="" if op.done else line) if ours is None else replace(ours[1], done=op.done)
        called[op.group, op.seq] = (at if ours is None else ours[0], known)
    everything = [*(dated for dated in own if dated[1].is_message), *called.values()]
    ops = [op for _, op in sorted(everything, key=lambda dated: dated[0])]
    return _begun(ops, {name for name, group in groups.items() if not group.polled})[-MAX_OPS:]


def _begun(ops: Sequence[Op], enqueuing: Collection[str]) -> list[Op]:
    """Without operations queued behind a message in flight: over the groups `enqueuing` they have not begun."""
    kept: list[Op] = []
    behind: set[str] = set()
    for op in ops:
        if op.done or op.group not in behind:
            kept.append(op)
        if op.is_message and not op.done and op.group in enqueuing:
            behind.add(op.group)
    return kept


def _groups() -> list[tuple[Any, str]]:
    """The process groups of this process, and their names."""
    module: Any = distributed()
    return [] if module is None else [*module._world.pg_names.items()]


def group_members() -> dict[str, tuple[int, ...]]:
    """The ranks of the world in each process group of this process; none for one of all ranks."""
    groups = {name: sys.modules[MODULE]._world.pg_group_ranks[group] for group, name in _groups()}
    most = max(map(len, groups.values()), default=0)  # the first one's
    return {name: tuple(sorted(ranks)) if len(ranks) < most else () for name, ranks in groups.items()}


def group_titles() -> dict[str, str]:
    """The titles of process groups, by name."""
    titles = {name: getattr(group, "group_desc", "") for group, name in _groups()}
    return {name: title for name, title in titles.items() if title not in UNTITLED}


def sequence_numbers() -> dict[str, int]:
    """The number of collectives over each group, as torch counts; without groups that torch does not count."""
    found: dict[str, int] = {}
    for group, name in _groups():
        with suppress(RuntimeError):  # MPI does not count
            found[name] = group._get_sequence_number_for_group()
    return found


def in_flight() -> bool:
    """Whether torch has an operation in flight, by the flight recorder; it may also be True if there is none.

    The count is late when gloo's threads end two operations in the other order, until the next one has ended.
    """
    found = [status for dump in _dumps(collectives=False) for status in dump.get("pg_status", {}).values()]
    return any(one["last_enqueued_collective"] > one["last_completed_collective"] for one in found)


def pending(groups: Mapping[str, Group]) -> set[tuple[str, int]]:
    """By group and number, the operations of torch in flight; messages are -1, -2, ..., as NCCL counts them."""
    entries = [entry for dump in _dumps(collectives=True) for entry in dump.get("entries", ())]
    messages = [one for one in entries if one["is_p2p"] and not one["retired"]]
    found = {(one["process_group"][0], -one["p2p_seq_id"]) for one in messages}
    return found | {(op.group, op.seq) for _, op in _recorded(groups) if not op.done}


def stacks(main: int) -> tuple[Stack, ...]:
    """The stacks of all threads of this process, the main thread (by its identity) first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    running = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    order = sorted((ident for ident in running if ident != threading.get_ident()), key=lambda ident: ident != main)
    found: list[Stack] = []
    for ident in order[:MAX_THREADS]:
        frames = tuple(frame_of(frame) for frame, _ in islice(walk_stack(running[ident]), MAX_FRAMES))
        found.append(Stack("main" if ident == main else str(names.get(ident, ident))[:64], frames))
    return tuple(found)


def _dumps(*, collectives: bool) -> list[dict[str, Any]]:
    binding = sys.modules.get("torch._C._distributed_c10d")
    names = ["_dump_fr_trace"] if capturing.is_set() else ["_dump_fr_trace", "_dump_nccl_trace"]
    dumps = [getattr(binding, name, None) for name in names]
    if distributed() is None:
        return []
    # Pickle, but of this process's own making: it comes out of its memory, from nobody else.
    return [pickle.loads(dump(collectives, False, False)) for dump in dumps if dump]  # without stacks: see `merged`


def _recorded(groups: Mapping[str, Group]) -> list[Dated]:
    to_monotonic = time.monotonic_ns() - time.time_ns()
    newest = sequence_numbers()
    found: list[Dated] = []
    for entry in [entry for dump in _dumps(collectives=True) for entry in dump.get("entries", ())]:
        group, gloo = entry["process_group"][0], entry["profiling_name"].startswith("gloo:")
        # gloo counts messages among its operations, but does not record them; NCCL counts them apart
        number = entry["op_id"] if gloo else entry["collective_seq_id"]
        own = groups[group].own(number) if group in groups else number
        earlier_life = number > newest.get(group, number)
        if not (entry["is_p2p"] or own is None or earlier_life):
            found.append((entry["time_created_ns"] + to_monotonic, _op(entry, group, own)))
    return found


def _op(entry: Mapping[str, Any], group: str, number: int) -> Op:
    kind = entry["profiling_name"].rpartition(":")[2]
    side = "output" if kind in ("scatter", "reduce_scatter") else "input"  # the one that all ranks pass alike
    known = KINDS.get(SAME.get(kind, kind))
    shapes = entry[f"{side}_sizes"] if known is None or known.shape else ()
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
"""What C++ calls torch's types."""
