"""Records the collectives of this process and their call sites, with thin wrappers around torch's functions.

Each call adds a record to the ring in the status page, which outlives the process. Each call also goes into a hash, by
which ranks compare the order of their calls (`take_order`). A wrapper never raises an error, never changes a result,
and costs microseconds.
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
from typing import Any, NamedTuple

from msgspec.structs import replace

from paceline.protocol.evidence import Op, Phase
from paceline.protocol.marks import GROUPS, ROOTED, Names, Order, put_call
from paceline.protocol.status_page import NO_PEER, RECORDS, StatusPage, ring_text
from paceline.rank.imports import hide_from_warnings
from paceline.rank.sites import Site, call_site

_SOURCE, _TARGET = ("src", "group_src"), ("dst", "group_dst")
SAME = {  # functions that count as the same call, because they differ only in name or in waiting
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "isend": "send",
    "irecv": "recv",
}
MODULE = "torch.distributed.distributed_c10d"
MAX_TAKEN, MAX_CACHED = 256, 4096
NAME = "collective"  # a key in a tensor's __dict__, with which a caller names the collective: "bucket 3"


@dataclass(frozen=True)
class ReadingRule:
    """How to read a function's arguments. The ledger keeps only values that must be equal on all ranks."""

    tensor: str = ""  # the argument with the shape and type: a tensor, or a list of tensors
    shape: bool = True  # False if ranks may pass different sizes
    peer: tuple[str, str] | None = None  # arguments with the peer or root: its rank in the world, and in the group
    message: bool = False  # a point-to-point message, not a collective
    single: bool = True  # whether it raises torch's number by one; else the increment depends on the backend


KINDS: Mapping[str, ReadingRule] = {
    "all_reduce": ReadingRule("tensor"),
    "all_reduce_coalesced": ReadingRule("tensors"),
    "broadcast": ReadingRule("tensor", peer=_SOURCE),
    "reduce": ReadingRule("tensor", peer=_TARGET),
    "all_gather": ReadingRule("tensor", shape=False),
    "all_gather_coalesced": ReadingRule("input_tensor_list", shape=False, single=False),
    "all_gather_single": ReadingRule("input_tensor"),
    "all_gather_into_tensor": ReadingRule("input_tensor"),
    "gather": ReadingRule("tensor", peer=_TARGET),
    "scatter": ReadingRule("tensor", peer=_SOURCE),
    "reduce_scatter": ReadingRule("output", shape=False, single=False),
    "reduce_scatter_single": ReadingRule("output"),
    "reduce_scatter_tensor": ReadingRule("output"),
    "all_to_all": ReadingRule("output_tensor_list", shape=False),
    "all_to_all_single": ReadingRule("input", shape=False),
    "barrier": ReadingRule(),
    "monitored_barrier": ReadingRule(single=False),
    "send": ReadingRule("tensor", peer=_TARGET, message=True),
    "recv": ReadingRule("tensor", peer=_SOURCE, message=True),
    "isend": ReadingRule("tensor", peer=_TARGET, message=True),
    "irecv": ReadingRule("tensor", peer=_SOURCE, message=True),
}


@dataclass
class Group:
    """The calls over one process group.

    Collectives are numbered per group, from 1, and a call counts once. Torch's numbers also rise with messages to a
    peer, and rise by several for calls that torch composes of others (`Group.own`).
    """

    name: str
    of_all: bool  # whether all ranks of the world are members
    members: tuple[int, ...]
    polled: bool  # whether `is_completed` may be called on a work at any time
    still_there: weakref.ref[Any]
    spans: deque[tuple[int, float, int]] = field(default_factory=lambda: deque[tuple[int, float, int]](maxlen=512))
    """Calls that raise torch's numbers more than ours: (number before, number after, total difference so far)."""
    ahead: int = 0
    calls: int = 0  # for backends that do not count
    messages: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    pending: deque[tuple[int, weakref.ref[Any]]] = field(
        default_factory=lambda: deque[tuple[int, weakref.ref[Any]]](maxlen=RECORDS)
    )
    enqueued: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """Record and number of NCCL calls that may be in flight: NCCL returns as soon as the GPU has queued the call."""
    sent: int = 0  # number of sent and received messages
    checksum: int = 0
    count: int = 0

    def own(self, number: int) -> int | None:
        """Our number for torch's number; None inside a composed call, or if the call is too old."""
        if len(self.spans) == self.spans.maxlen and number <= self.spans[0][0]:
            return None
        ahead = 0
        for before, after, total in self.spans:
            if number <= before:
                break
            if number <= after:
                return None
            ahead = total
        return number - ahead

    def count_ahead(self, begun: StartedCall) -> None:
        """Record by how much a call that has returned raised torch's number more than ours."""
        after = torch_number(begun.backend, self)
        self.ahead += after - begun.before - begun.counts
        if begun.counts:
            self.spans.pop()  # the open span
        if after > begun.before:
            self.spans.append((begun.before, after, self.ahead))

    def returned(self, begun: StartedCall, result: Any, box: StatusPage) -> None:
        """End the record of a call that has returned, unless it may still be in flight (with a `Work`)."""
        if self.polled and hasattr(result, "is_completed"):
            self.pending.append((begun.record, weakref.ref(result)))
            return
        if self.polled:
            box.end(begun.record)
            return
        self.enqueued.append((begun.record, begun.number))
        if len(self.enqueued) > RECORDS // 2:  # old enough to count as completed
            box.end(self.enqueued.popleft()[0])

    def end_enqueued(self, pending: Collection[tuple[str, int]], box: StatusPage) -> None:
        """End the records of all enqueued calls except `pending` ones (group and number)."""
        for entry in [*self.enqueued]:
            if (self.name, entry[1]) not in pending:
                with suppress(ValueError):  # removed meanwhile by the main thread
                    self.enqueued.remove(entry)
                box.end(entry[0])

    def sweep(self, box: StatusPage) -> None:
        """End the records of completed asynchronous calls, up to the first that is still in flight."""
        while self.pending:
            entry = self.pending.popleft()
            work = entry[1]()
            if work is not None and not work.is_completed():  # None: no code can wait for it
                self.pending.appendleft(entry)
                return
            box.end(entry[0])


@dataclass(frozen=True)
class CachedCall:
    """The description of a call at one line with one set of arguments, which is made once."""

    code: CodeType  # keeps this and the next object alive, so that no other code gets the same id
    inner: CodeType
    op: Op
    text: bytes
    order: int = 0  # a hash of the parts that are equal on all ranks, for the order of calls


class StartedCall(NamedTuple):  # made at every call; a dataclass costs twice the time
    """A call in flight."""

    record: int
    group: Group
    backend: Any
    before: int  # torch's number
    single: bool  # whether the call raises torch's number by one
    counts: int  # 1 for a collective, 0 for a message
    number: int  # our number; for messages -1, -2, ... in the order of this process's messages over the group


def torch_number(backend: Any, group: Group) -> int:
    """The number of collectives of this group, by torch's count."""
    try:
        return backend._get_sequence_number_for_group()
    except RuntimeError:  # MPI, and groups of two backends
        return group.calls


def peer_of(asked: list[Any], group: Group, kind: ReadingRule) -> int:
    """The peer or root of a call as a rank of the world, from the arguments that may contain it."""
    of_world, of_group = [*asked, None][:2]
    if of_world is not None:
        return of_world
    if of_group is not None:
        return group.members[of_group]
    return NO_PEER if kind.message else 0  # recv from any rank; torch's default root


def leave_untraced(code: CodeType) -> None:
    """Have torch.compile skip frames of this code and their calls, without importing the compiler."""
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    with suppress(AttributeError, TypeError):  # a torch with different names traces the code, which is slower
        action = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action, action))


class Ledger:
    """The collectives of this process. A process has one ledger, because torch's functions can be wrapped only once."""

    def __init__(self, box: StatusPage, warn_once: Callable[[BaseException], None]) -> None:
        """`warn_once` receives internal errors of the ledger, which do not affect the calls."""
        self.active = True
        self.marker: OrderMarks | None = None  # for a script: records the order of calls, and shows waits as phases
        self.failed: Callable[[BaseException], None] | None = None
        """Called with the errors of a script's collectives, and of its waits for a `Work`."""
        self.groups: dict[int, Group] = {}
        self._gone: list[Group] = []  # destroyed since the last `take_order`
        self._box, self._warn_once = box, warn_once
        self._torch: Any = None
        self._inside: set[int] = set()  # threads inside a wrapped call; nested calls are part of it
        self._main = main_thread().ident
        self._own = 0  # operations of paceline in flight
        self._known: dict[tuple[object, ...], CachedCall] = {}
        self._current: deque[tuple[CachedCall, int]] = deque(maxlen=MAX_TAKEN)
        self._taken: list[tuple[CachedCall, int]] = []

    @property
    def waiting(self) -> bool:
        """Whether a call, or a work that is still referenced, is in flight."""
        in_flight = any(group.pending or group.enqueued for group in [*self.groups.values()])
        return bool(self._inside) or self._own > 0 or in_flight

    def install(self, distributed: ModuleType, *others: ModuleType, late: bool = False) -> None:
        """Install the wrappers in torch's module, and in the modules that have imported its functions.

        `late`: programs may have imported functions as well. isend and irecv are not replaced then, because torch
        compares them by identity in P2POp.
        """
        if self._torch is not None:
            return
        self._torch = distributed
        for name, kind in KINDS.items():
            call = getattr(distributed, name, None)
            if call is None or (late and name in ("isend", "irecv")):  # None: a different version of torch
                continue
            wrapper = self._wrapped(call, SAME.get(name, name), kind)
            for module in (distributed, *others):
                if getattr(module, name, None) is call:
                    setattr(module, name, wrapper)
        self._wrap_wait(distributed.Work)

    def take_order(self) -> int:
        """A hash, 0 <= n < 2**52, of the calls over all ranks since the last `take_order`; equal on ranks that agree.

        It depends on the order within each group, not between groups. It covers kind, name, type, line, and the shape
        if all ranks must pass the same shape.
        """
        groups = [*self._gone, *self.groups.values()]
        parts = sorted((group.name, group.checksum, group.count) for group in groups if group.count)
        for group in groups:
            group.checksum = group.count = 0
        self._gone.clear()
        self._taken = [*self._current]
        self._current.clear()
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little") >> 4

    def taken(self) -> list[Op]:
        """The calls in the last `take_order`, the oldest first; at most the last 256."""
        return [replace(known.op, seq=seq, done=True) for known, seq in self._taken]

    def begin_own(self, owner: object, ranks: tuple[int, ...], op: Op, *, of_all: bool = True) -> StartedCall | None:
        """Record the start of an operation of paceline, for `end_own`; None if nothing is recorded. Never raises.

        `owner` takes the role of a process group for its `ranks` of the world: numbers rise during its lifetime. `op`
        has no number and no line yet. `of_all`: these are all ranks of the world.
        """
        if not self.active:
            return None
        try:
            group = self.groups.get(id(owner))
            if group is None or group.still_there() is not owner:
                if group is not None:
                    self._gone.append(group)
                group = self.groups[id(owner)] = Group(op.group, of_all, ranks, True, weakref.ref(owner))
            place = call_site(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
            known = self._known_at(place, (op,), lambda site: replace(op, site=site))
            group.calls += 1
            self._own += 1
            return self._note(known, group, group.calls, NO_PEER if op.peer is None else op.peer)
        except Exception as error:
            self._warn_once(error)
            return None

    def end_own(self, begun: StartedCall | None, work: Any = None, *, failed: bool = False) -> None:
        """Record the end of an operation; with a `work`, it ends when `work.is_completed()`."""
        if begun is not None:
            self._own -= 1
            self._end(begun, work, failed=failed)

    def group_of(self, backend: Any) -> Group | None:
        """The record of a process group; None if this rank is not a member."""
        found = self.groups.get(id(backend))
        if found is not None and found.still_there() is backend:
            return found
        world = self._torch._world
        if backend not in world.pg_names:
            return None
        for key, group in [*self.groups.items()]:
            if group.still_there() is None:  # its calls still count, because ranks drop a group at different moments
                self._gone.append(self.groups.pop(key))
        members = tuple(sorted(world.pg_group_ranks[backend]))
        of_all = len(members) == world.default_pg.size()
        # querying NCCL during the capture of a CUDA graph would invalidate the graph
        polled = "nccl" not in str(world.pg_backend_config[backend])
        found = self.groups[id(backend)] = Group(world.pg_names[backend], of_all, members, polled, weakref.ref(backend))
        return found

    def _wrapped(self, call: Callable[..., Any], name: str, kind: ReadingRule) -> Callable[..., Any]:
        places = {parameter: at for at, parameter in enumerate(signature(call).parameters)}
        tensor_at, group_at, tensor_name = places.get(kind.tensor, 99), places["group"], kind.tensor
        peers = [(places[peer], peer) for peer in kind.peer or () if peer in places]
        inside = self._inside

        @hide_from_warnings
        @wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            if thread in inside or not self.active:
                return call(*args, **kwargs)
            begun, internal_error = None, None
            try:
                group = args[group_at] if len(args) > group_at else kwargs.get("group")
                passed = args[tensor_at] if len(args) > tensor_at else kwargs.get(tensor_name)
                asked = peers and [args[at] if len(args) > at else kwargs.get(peer) for at, peer in peers]
                begun = self._begin(name, kind, passed, group, asked)
            except Exception as error:
                internal_error = error
            if begun is None:
                result = call(*args, **kwargs)  # if it also raises, the arguments were invalid
                if internal_error is not None:
                    self._warn_once(internal_error)
                return result
            inside.add(thread)
            before = self._box.enter(Phase.SYNC) if self.marker is not None and thread == self._main else None
            try:
                result = call(*args, **kwargs)
            except BaseException as error:
                self._end(begun, None, failed=True)
                self._report(error)
                raise
            finally:
                inside.discard(thread)
                if before is not None and not self._box.get("released"):  # an unblocked call is not progress
                    self._box.enter(before)
            self._end(begun, result)
            return result

        made: Any = wrapper
        made._torchdynamo_disable = True  # compiled code calls it untraced, as torch's functions
        leave_untraced(made.__code__)
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

        made: Any = wait
        made._torchdynamo_disable = True
        leave_untraced(made.__code__)
        work.wait = wait

    def _report(self, error: BaseException) -> None:
        if self.failed is not None and self.active:
            try:
                self.failed(error)
            except Exception as internal_error:
                self._warn_once(internal_error)

    def _begin(self, name: str, kind: ReadingRule, passed: Any, group: Any, asked: list[Any]) -> StartedCall | None:
        backend = self._torch._world.default_pg if group is None else group
        found = None if backend is None else self.group_of(backend)
        if found is None:
            return None  # torch raises an error or does nothing
        known = self._recall(name, kind, passed, found.name)
        before = torch_number(backend, found)
        peer = peer_of(asked, found, kind) if asked else NO_PEER
        if kind.message:
            seq = found.messages[name, peer] = found.messages.get((name, peer), 0) + 1
        else:
            seq = before + 1 - found.ahead
            found.calls += 1
        if not kind.single:
            found.spans.append((before, float("inf"), found.ahead))  # open until the call returns
        begun = self._note(known, found, seq, peer, message=kind.message)
        if kind.message:
            found.sent += 1
            begun = begun._replace(number=-found.sent)
        return begun._replace(backend=backend, before=before, single=kind.single and not kind.message)

    def _note(self, known: CachedCall, group: Group, seq: int, peer: int, *, message: bool = False) -> StartedCall:
        if group.pending:
            group.sweep(self._box)
        if group.of_all and not message:
            group.checksum = zlib.crc32(known.text, group.checksum)
            group.count += 1
            self._current.append((known, seq))
            if self.marker is not None:
                self.marker.note(group.name, len(group.members), known.order, known.text)
        return StartedCall(self._box.begin_text(seq, peer, known.text), group, None, 0, True, 0 if message else 1, seq)

    def _recall(self, name: str, kind: ReadingRule, passed: Any, group: str) -> CachedCall:
        place = call_site(sys._getframe(3))  # pyright: ignore[reportPrivateUsage]
        shape = dtype = None
        label, several = "", isinstance(passed, list | tuple)
        if passed is not None and not (several and not passed):
            first = passed[0] if several else passed
            dtype, label = first.dtype, first.__dict__.get(NAME, "")
            if kind.shape:
                shape = tuple([tensor.shape for tensor in passed]) if several else first.shape

        def made(site: str) -> Op:
            shapes = () if shape is None else shape if several else (shape,)
            shown = " ".join(str([*one]) for one in shapes)
            return Op(group, 0, name, str(label), shown, str(dtype).removeprefix("torch.") if dtype else "", site)

        return self._known_at(place, (name, shape, dtype, label, group), made)

    def _known_at(self, place: Site, asked: tuple[object, ...], made: Callable[[str], Op]) -> CachedCall:
        frame, library = place
        code = sys._getframe().f_code if frame is None else frame.f_code  # pyright: ignore[reportPrivateUsage]
        inner = code if library is None else library.f_code
        key = (id(code), -1 if frame is None else frame.f_lasti, id(inner), library and library.f_lasti, *asked)
        known = self._known.get(key)
        if known is not None and known.code is code and known.inner is inner:
            return known
        op = made(place.words())
        known = CachedCall(code, inner, op, ring_text(op), order_hash(op))
        if len(self._known) >= MAX_CACHED:  # varying shapes fill the cache
            self._known.clear()
        self._known[key] = known
        return known

    def _end(self, begun: StartedCall, result: Any, *, failed: bool = False) -> None:
        try:
            if not begun.single:
                begun.group.count_ahead(begun)
            if not failed:  # the record of a failed call stays in flight
                begun.group.returned(begun, result, self._box)
        except Exception as error:
            self._warn_once(error)


def order_hash(op: Op) -> int:
    """A hash of the parts of a call that must be equal on all ranks, without the line of rooted and named calls."""
    return zlib.crc32(ring_text(replace(op, site="") if op.name or op.kind in ROOTED else op))


class OrderMarks:
    """Records the order of a script's collectives over the first groups of all ranks; agents compare the orders."""

    def __init__(self, box: StatusPage, names: Names) -> None:
        self._box, self._names = box, names
        self._groups: dict[str, tuple[int, Order]] = {}

    def note(self, group: str, members: int, call: int, text: bytes) -> None:
        """Record a call: its hash and its text."""
        if group not in self._groups:
            self._groups[group] = len(self._groups), Order(zlib.crc32(group.encode()), members, 0, ())
            self._box.put("marks", self._box.get("marks") + 1)
        table, order = self._groups[group]
        if table < GROUPS:
            self._names.of_call(call, text)
            put_call(self._box, table, order, call)
            self._groups[group] = table, order._replace(made=order.made + 1)
