"""Records the collectives of this process and their call sites, with thin wrappers around torch's functions.

Each call adds a record to the ring in the status page, which outlives the process. Each call also goes into a hash, by
which ranks compare the order of their calls (`take_order_hash`). A wrapper never raises an error, never changes a
result, and costs microseconds.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from threading import get_ident, main_thread
from types import CodeType, ModuleType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from paceline.protocol.evidence import Op, Phase
from paceline.protocol.marks import GROUPS, ROOTED, CallHistory, NamesWriter, append_call
from paceline.protocol.status_page import NO_PEER, RECORDS, StatusPage, encode_op
from paceline.rank.imports import hide_from_warnings
from paceline.rank.sites import Site, call_site

_SOURCE, _TARGET = ("src", "group_src"), ("dst", "group_dst")
CANONICAL_OPS = {  # functions that count as the same call, because they differ only in name or in waiting
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "isend": "send",
    "irecv": "recv",
}
C10D_MODULE = "torch.distributed.distributed_c10d"
MAX_TAKEN, MAX_CACHED = 256, 4096
COLLECTIVE_NAME_KEY = "collective"  # a key in a tensor's __dict__, with which a caller names the collective: "bucket 3"


@dataclass(frozen=True)
class CallArgumentRule:
    """How to read a function's arguments. The ledger keeps only values that must be equal on all ranks."""

    tensor_parameter: str = ""  # the argument with the shape and type: a tensor, or a list of tensors
    records_shape: bool = True  # False if ranks may pass different sizes
    peer_parameters: tuple[str, str] | None = None  # the peer or root: its rank in the world, and in the group
    is_message: bool = False  # a point-to-point message, not a collective
    is_counted_once: bool = True  # whether it raises torch's number by one; else the increment depends on the backend


ARGUMENT_RULES: Mapping[str, CallArgumentRule] = {
    "all_reduce": CallArgumentRule("tensor"),
    "all_reduce_coalesced": CallArgumentRule("tensors"),
    "broadcast": CallArgumentRule("tensor", peer_parameters=_SOURCE),
    "reduce": CallArgumentRule("tensor", peer_parameters=_TARGET),
    "all_gather": CallArgumentRule("tensor", records_shape=False),
    "all_gather_coalesced": CallArgumentRule("input_tensor_list", records_shape=False, is_counted_once=False),
    "all_gather_single": CallArgumentRule("input_tensor"),
    "all_gather_into_tensor": CallArgumentRule("input_tensor"),
    "gather": CallArgumentRule("tensor", peer_parameters=_TARGET),
    "scatter": CallArgumentRule("tensor", peer_parameters=_SOURCE),
    "reduce_scatter": CallArgumentRule("output", records_shape=False, is_counted_once=False),
    "reduce_scatter_single": CallArgumentRule("output"),
    "reduce_scatter_tensor": CallArgumentRule("output"),
    "all_to_all": CallArgumentRule("output_tensor_list", records_shape=False),
    "all_to_all_single": CallArgumentRule("input", records_shape=False),
    "barrier": CallArgumentRule(),
    "monitored_barrier": CallArgumentRule(is_counted_once=False),
    "send": CallArgumentRule("tensor", peer_parameters=_TARGET, is_message=True),
    "recv": CallArgumentRule("tensor", peer_parameters=_SOURCE, is_message=True),
    "isend": CallArgumentRule("tensor", peer_parameters=_TARGET, is_message=True),
    "irecv": CallArgumentRule("tensor", peer_parameters=_SOURCE, is_message=True),
}


@dataclass(eq=False)
class GroupRecord:
    """The calls over one process group.

    Collectives are numbered per group, from 1, and a call counts once. Torch's numbers also rise with messages to a
    peer, and rise by several for calls that torch composes of others (`GroupRecord.to_own_sequence_number`).
    """

    name: str
    has_all_ranks: bool  # whether all ranks of the world are members
    members: tuple[int, ...]
    can_poll: bool  # whether `is_completed` may be called on a work at any time
    group_ref: weakref.ref[Any]
    composed_spans: deque[tuple[int, float, int]] = field(default_factory=lambda: deque(maxlen=512))
    """Calls that raise torch's numbers more than ours: (number before, number after, total difference so far)."""
    number_offset: int = 0
    call_count: int = 0  # for backends that do not count
    message_counts: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    pending_works: deque[tuple[int, weakref.ref[Any]]] = field(
        default_factory=lambda: deque[tuple[int, weakref.ref[Any]]](maxlen=RECORDS)
    )
    enqueued_calls: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """Record and number of NCCL calls that may be in flight: NCCL returns as soon as the GPU has queued the call."""
    message_total: int = 0  # number of sent and received messages

    def to_own_sequence_number(self, number: int) -> int | None:
        """Our number for torch's number; None inside a composed call, or if the call is too old."""
        if len(self.composed_spans) == self.composed_spans.maxlen and number <= self.composed_spans[0][0]:
            return None
        ahead = 0
        for before, after, total in self.composed_spans:
            if number <= before:
                break
            if number <= after:
                return None
            ahead = total
        return number - ahead

    def update_number_offset(self, begun: StartedCall) -> None:
        """Record by how much a call that has returned raised torch's number more than ours."""
        after = torch_sequence_number(begun.backend, self)
        self.number_offset += after - begun.number_before - (not begun.rule.is_message)
        if not begun.rule.is_message:
            self.composed_spans.pop()  # the open span
        if after > begun.number_before:
            self.composed_spans.append((begun.number_before, after, self.number_offset))

    def end_returned_call(self, begun: StartedCall, result: Any, page: StatusPage) -> None:
        """End the record of a call that has returned, unless it may still be in flight (with a `Work`)."""
        if self.can_poll and hasattr(result, "is_completed"):
            self.pending_works.append((begun.record, weakref.ref(result)))
        elif self.can_poll:
            page.end_op(begun.record)
        else:
            self.enqueued_calls.append((begun.record, begun.number))
            if len(self.enqueued_calls) > RECORDS // 2:  # old enough to count as completed
                page.end_op(self.enqueued_calls.popleft()[0])

    def end_enqueued(self, pending: Collection[tuple[str, int]], page: StatusPage) -> None:
        for entry in [*self.enqueued_calls]:
            if (self.name, entry[1]) not in pending:
                with suppress(ValueError):  # removed meanwhile by the main thread
                    self.enqueued_calls.remove(entry)
                page.end_op(entry[0])

    def end_completed_calls(self, page: StatusPage) -> None:
        """End the records of completed asynchronous calls, up to the first that is still in flight."""
        while self.pending_works:
            entry = self.pending_works.popleft()
            work = entry[1]()
            if work is not None and not work.is_completed():  # None: no code can wait for it
                self.pending_works.appendleft(entry)
                return
            page.end_op(entry[0])


@dataclass(frozen=True)
class CachedCall:
    """The description of a call at one line with one set of arguments, which is made once."""

    code: CodeType  # keeps this and the next object alive, so that no other code gets the same id
    library_code: CodeType
    op: Op
    text: bytes
    order_hash: int = 0  # a hash of the parts that are equal on all ranks, for the order of calls


class StartedCall(Struct, frozen=True):  # made at every call; a dataclass costs several times the time
    record: int
    group: GroupRecord
    number: int  # our number; for messages -1, -2, ... in the order of this process's messages over the group
    backend: Any = None
    number_before: int = 0  # torch's number
    rule: CallArgumentRule = CallArgumentRule()


def torch_sequence_number(backend: Any, group: GroupRecord) -> int:
    try:
        return backend._get_sequence_number_for_group()
    except RuntimeError:  # MPI, and groups of two backends
        return group.call_count


def world_rank_of_peer(asked: list[Any], group: GroupRecord, kind: CallArgumentRule) -> int:
    """The peer or root of a call as a rank of the world, from the arguments that may contain it."""
    world_rank, group_rank = [*asked, None][:2]
    if world_rank is not None:
        return world_rank
    if group_rank is not None:
        return group.members[group_rank]
    return NO_PEER if kind.is_message else 0  # recv from any rank; torch's default root


def skip_in_torch_compile(function: Any) -> None:
    """Have compiled code call `function` untraced, as torch's functions, without importing the compiler."""
    function._torchdynamo_disable = True
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    with suppress(AttributeError, TypeError):  # a torch with different names traces the code, which is slower
        action = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(action, action))


class CollectiveRecorder:
    """The collectives of this process. A process has one ledger, because torch's functions can be wrapped only once."""

    def __init__(self, page: StatusPage, warn_once: Callable[[BaseException], None]) -> None:
        """`warn_once` receives internal errors of the ledger, which do not affect the calls."""
        self.active = True
        # for a script: records the order of calls, and shows waits as phases
        self.marker: CollectiveOrderRecorder | None = None
        self.failed: Callable[[BaseException], None] | None = None
        """Called with the errors of a script's collectives, and of its waits for a `Work`."""
        self.groups: dict[int, GroupRecord] = {}
        # since the last `take_order_hash`: (checksum of the calls over all ranks, their number). It keeps the records
        # of destroyed groups: their calls count, because ranks drop a group at different moments
        self._orders: dict[GroupRecord, tuple[int, int]] = {}
        self._page, self._warn_once = page, warn_once
        self._torch: Any = None
        self._inside: set[int] = set()  # threads inside a wrapped call; nested calls are part of it
        self._main = main_thread().ident
        self._own = 0  # operations of paceline in flight
        self._known: dict[tuple[object, ...], CachedCall] = {}
        self._current: deque[tuple[CachedCall, int]] = deque(maxlen=MAX_TAKEN)
        self._taken: list[tuple[CachedCall, int]] = []

    @property
    def is_waiting(self) -> bool:
        in_flight = any(group.pending_works or group.enqueued_calls for group in [*self.groups.values()])
        return bool(self._inside) or self._own > 0 or in_flight

    def install(self, distributed: ModuleType, *others: ModuleType, late: bool = False) -> None:
        """Install the wrappers in torch's module, and in the modules that have imported its functions.

        `late`: programs may have imported functions as well. isend and irecv are not replaced then, because torch
        compares them by identity in P2POp.
        """
        if self._torch is not None:
            return
        self._torch = distributed
        for name, rule in ARGUMENT_RULES.items():
            call = getattr(distributed, name, None)
            if call is None or (late and name in ("isend", "irecv")):  # None: a different version of torch
                continue
            wrapper = self._wrapped(call, CANONICAL_OPS.get(name, name), rule)
            for module in (distributed, *others):
                if getattr(module, name, None) is call:
                    setattr(module, name, wrapper)
        self._wrap_wait(distributed.Work)

    def take_order_hash(self) -> int:
        """A hash, 0 <= n < 2**52, of the calls over all ranks since the last `take_order_hash`; equal if ranks agree.

        It depends on the order within each group, not between groups. It covers kind, name, type, line, and the shape
        if all ranks must pass the same shape.
        """
        orders, self._orders = self._orders, {}  # at once: another thread may call a collective
        parts = [(group.name, *order) for group, order in orders.items()]
        self._taken = [*self._current]
        self._current.clear()
        digest = hashlib.blake2b(repr(sorted(parts)).encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little") >> 4

    def last_ordered_calls(self) -> list[Op]:
        """The calls in the last `take_order_hash`, the oldest first; at most the last 256."""
        return [replace(call.op, seq=seq, done=True) for call, seq in self._taken]

    def begin_internal_op(
        self, owner: object, ranks: tuple[int, ...], op: Op, *, of_all: bool = True
    ) -> StartedCall | None:
        """Record the start of a paceline operation, for `end_internal_op`; None if nothing is recorded. Never raises.

        `owner` takes the role of a process group for its `ranks` of the world: numbers rise during its lifetime. `op`
        has no number and no line yet. `of_all`: these are all ranks of the world.
        """
        if not self.active:
            return None
        try:
            group = self.groups.get(id(owner))
            if group is None or group.group_ref() is not owner:
                group = self.groups[id(owner)] = GroupRecord(op.group, of_all, ranks, True, weakref.ref(owner))
            caller_site = call_site(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
            call = self._cached_call_at(caller_site, (op,), lambda site: replace(op, site=site))
            group.call_count += 1
            self._own += 1
            record = self._record_start(call, group, group.call_count, NO_PEER if op.peer is None else op.peer)
            return StartedCall(record, group, group.call_count)
        except Exception as error:
            self._warn_once(error)
            return None

    def end_internal_op(self, begun: StartedCall | None, work: Any = None, *, failed: bool = False) -> None:
        """Record the end of an operation; with a `work`, it ends when `work.is_completed()`."""
        if begun is None:
            return
        self._own -= 1
        try:
            if work is not None:
                begun.group.pending_works.append((begun.record, weakref.ref(work)))
            elif not failed:  # the record of a failed call stays in flight
                self._page.end_op(begun.record)
        except Exception as error:
            self._warn_once(error)

    def group_of(self, backend: Any) -> GroupRecord | None:
        """The record of a process group; None if this rank is not a member."""
        group = self.groups.get(id(backend))
        if group is not None and group.group_ref() is backend:
            return group
        world = self._torch._world
        if backend not in world.pg_names:
            return None
        for key, group in [*self.groups.items()]:
            if group.group_ref() is None:
                del self.groups[key]
        members = tuple(sorted(world.pg_group_ranks[backend]))
        of_all = len(members) == world.default_pg.size()
        # querying NCCL during the capture of a CUDA graph would invalidate the graph
        polled = "nccl" not in str(world.pg_backend_config[backend])
        group = GroupRecord(world.pg_names[backend], of_all, members, polled, weakref.ref(backend))
        self.groups[id(backend)] = group
        return group

    def _wrapped(self, call: Callable[..., Any], name: str, rule: CallArgumentRule) -> Callable[..., Any]:
        positions = {parameter: at for at, parameter in enumerate(signature(call).parameters)}
        tensor_name, group_at = rule.tensor_parameter, positions["group"]
        tensor_at = positions.get(tensor_name, 99)
        peers = [(positions[peer], peer) for peer in rule.peer_parameters or () if peer in positions]
        inside = self._inside

        @hide_from_warnings
        @wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            if thread in inside or not self.active:
                return call(*args, **kwargs)
            started_call, internal_error = None, None
            try:
                group = args[group_at] if len(args) > group_at else kwargs.get("group")
                tensor_arg = args[tensor_at] if len(args) > tensor_at else kwargs.get(tensor_name)
                peer_args = peers and [args[at] if len(args) > at else kwargs.get(peer) for at, peer in peers]
                started_call = self._begin(name, rule, tensor_arg, group, peer_args)
            except Exception as error:
                internal_error = error
            if started_call is None:
                result = call(*args, **kwargs)  # if it also raises, the arguments were invalid
                if internal_error is not None:
                    self._warn_once(internal_error)
                return result
            inside.add(thread)
            before = self._page.enter(Phase.SYNC) if self.marker is not None and thread == self._main else None
            try:
                result = call(*args, **kwargs)
            except BaseException as error:
                self._end(started_call, None, failed=True)
                self._report(error)
                raise
            finally:
                inside.discard(thread)
                if before is not None and not self._page.get("released"):  # an unblocked call is not progress
                    self._page.enter(before)
            self._end(started_call, result)
            return result

        skip_in_torch_compile(wrapper)
        return wrapper

    def _wrap_wait(self, work: Any) -> None:
        """Report errors of `wait`, where calls with `async_op=True` fail. Instances of `Work` accept no attribute."""
        call = work.wait

        # By this name and its first argument, pybind11 recognizes that it has called this function already. Otherwise
        # it takes the function for the `wait` of a script's subclass and recurses infinitely.
        @wraps(call)
        def wait(self_: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(self_, *args, **kwargs)
            except BaseException as error:
                self._report(error)
                raise

        skip_in_torch_compile(wait)
        work.wait = wait

    def _report(self, error: BaseException) -> None:
        if self.failed is not None and self.active:
            try:
                self.failed(error)
            except Exception as internal_error:
                self._warn_once(internal_error)

    def _begin(
        self, name: str, rule: CallArgumentRule, tensor_arg: Any, group: Any, peers: list[Any]
    ) -> StartedCall | None:
        backend = self._torch._world.default_pg if group is None else group
        group_record = None if backend is None else self.group_of(backend)
        if group_record is None:
            return None  # torch raises an error or does nothing
        call = self._describe_call(name, rule, tensor_arg, group_record.name)
        before = torch_sequence_number(backend, group_record)
        peer = world_rank_of_peer(peers, group_record, rule) if peers else NO_PEER
        if rule.is_message:
            seq = group_record.message_counts[name, peer] = group_record.message_counts.get((name, peer), 0) + 1
        else:
            seq = before + 1 - group_record.number_offset
            group_record.call_count += 1
        if not rule.is_counted_once:
            # open until the call returns
            group_record.composed_spans.append((before, float("inf"), group_record.number_offset))
        record = self._record_start(call, group_record, seq, peer, message=rule.is_message)
        if rule.is_message:
            group_record.message_total += 1
            seq = -group_record.message_total
        return StartedCall(record, group_record, seq, backend, before, rule)

    def _record_start(self, call: CachedCall, group: GroupRecord, seq: int, peer: int, *, message: bool = False) -> int:
        if group.pending_works:
            group.end_completed_calls(self._page)
        if group.has_all_ranks and not message:
            checksum, count = self._orders.get(group, (0, 0))
            self._orders[group] = zlib.crc32(call.text, checksum), count + 1
            self._current.append((call, seq))
            if self.marker is not None:
                self.marker.record_call(group.name, len(group.members), call.order_hash, call.text)
        return self._page.begin_encoded_op(seq, peer, call.text)

    def _describe_call(self, name: str, rule: CallArgumentRule, tensor_arg: Any, group: str) -> CachedCall:
        caller_site = call_site(sys._getframe(3))  # pyright: ignore[reportPrivateUsage]
        shape = dtype = None
        label, is_sequence = "", isinstance(tensor_arg, list | tuple)
        if tensor_arg is not None and not (is_sequence and not tensor_arg):
            first = tensor_arg[0] if is_sequence else tensor_arg
            dtype, label = first.dtype, first.__dict__.get(COLLECTIVE_NAME_KEY, "")
            if rule.records_shape:
                shape = tuple([tensor.shape for tensor in tensor_arg]) if is_sequence else first.shape

        def made(site: str) -> Op:
            shapes = () if shape is None else shape if is_sequence else (shape,)
            shapes_text = " ".join(str([*size]) for size in shapes)
            return Op(group, 0, name, str(label), shapes_text, str(dtype).removeprefix("torch.") if dtype else "", site)

        return self._cached_call_at(caller_site, (name, shape, dtype, label, group), made)

    def _cached_call_at(self, site: Site, key_parts: tuple[object, ...], make_op: Callable[[str], Op]) -> CachedCall:
        frame, library = site.frame, site.library
        code = sys._getframe().f_code if frame is None else frame.f_code  # pyright: ignore[reportPrivateUsage]
        inner = code if library is None else library.f_code
        key = (id(code), -1 if frame is None else frame.f_lasti, id(inner), library and library.f_lasti, *key_parts)
        call = self._known.get(key)
        if call is not None and call.code is code and call.library_code is inner:
            return call
        op = make_op(site.describe())
        call = CachedCall(code, inner, op, encode_op(op), call_hash(op))
        if len(self._known) >= MAX_CACHED:  # varying shapes fill the cache
            self._known.clear()
        self._known[key] = call
        return call

    def _end(self, started_call: StartedCall, result: Any, *, failed: bool = False) -> None:
        try:
            if started_call.rule.is_message or not started_call.rule.is_counted_once:
                started_call.group.update_number_offset(started_call)
            if not failed:  # the record of a failed call stays in flight
                started_call.group.end_returned_call(started_call, result, self._page)
        except Exception as error:
            self._warn_once(error)


def call_hash(op: Op) -> int:
    """A hash of the parts of a call that must be equal on all ranks, without the line of rooted and named calls."""
    return zlib.crc32(encode_op(replace(op, site="") if op.name or op.kind in ROOTED else op))


class CollectiveOrderRecorder:
    """Records the order of a script's collectives over the first groups of all ranks; agents compare the orders."""

    def __init__(self, page: StatusPage, names: NamesWriter) -> None:
        self._page, self._names = page, names
        self._groups: dict[str, tuple[int, CallHistory]] = {}

    def record_call(self, group: str, members: int, call: int, text: bytes) -> None:
        if group not in self._groups:
            self._groups[group] = len(self._groups), CallHistory(zlib.crc32(group.encode()), members, 0, ())
            self._page.put("marks", self._page.get("marks") + 1)
        table, order = self._groups[group]
        if table < GROUPS:
            self._names.set_call(call, text)
            append_call(self._page, table, order, call)
            self._groups[group] = table, order._replace(num_calls=order.num_calls + 1)
