"""Records which collectives this process calls, from which line: thin wrappers around torch.distributed's functions.

Each call leaves a record in the box's ring, which outlives the process, and goes into a hash by which ranks compare the
order of their calls (`take_order`). What a wrapper does besides never raises, changes nothing, and costs microseconds.
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
SAME = {  # another name, or the other way to wait, for what is one call to the other ranks
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "isend": "send",
    "irecv": "recv",
}
MODULE = "torch.distributed.distributed_c10d"
MAX_TAKEN, MAX_CACHED = 256, 4096
NAME = "collective"  # what a caller may set in a tensor's __dict__: "bucket 3"


@dataclass(frozen=True)
class ReadingRule:
    """How to read one function's arguments. Only the values that must be equal on all ranks are kept."""

    tensor: str = ""  # the argument whose shape and type tell; a tensor, or a list of them
    shape: bool = True  # False where ranks may rightly pass different sizes
    peer: tuple[str, str] | None = None  # the arguments that name the other rank, or the root: of the world, the group
    message: bool = False  # between two ranks, not a collective
    single: bool = True  # raises torch's number by one; else by more, or by what the backend likes


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
    """What has been called over one process group.

    A collective's number is counted per group, from 1, and a call counts once: torch's numbers also rise with messages
    to a peer, and by several for calls that it makes out of others (`Group.own`).
    """

    name: str
    of_all: bool  # all ranks of the world are members
    members: tuple[int, ...]
    polled: bool  # a work may be asked whether it is completed, at any time
    still_there: weakref.ref[Any]
    spans: deque[tuple[int, float, int]] = field(default_factory=lambda: deque[tuple[int, float, int]](maxlen=512))
    """where torch's numbers run ahead: (the number before a call, after it, by how many all such calls so far)"""
    ahead: int = 0
    calls: int = 0  # for backends that do not count
    messages: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    pending: deque[tuple[int, weakref.ref[Any]]] = field(
        default_factory=lambda: deque[tuple[int, weakref.ref[Any]]](maxlen=RECORDS)
    )
    enqueued: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """record and number of NCCL calls that may be in flight: they return as soon as the GPU has them queued"""
    sent: int = 0  # and received
    checksum: int = 0
    count: int = 0

    def own(self, number: int) -> int | None:
        """Our number for torch's; None inside a call that counts once, or if it is too long ago."""
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
        """Note by how much torch's number has risen more than ours with a call that has returned."""
        after = torch_number(begun.backend, self)
        self.ahead += after - begun.before - begun.counts
        if begun.counts:
            self.spans.pop()  # the open one
        if after > begun.before:
            self.spans.append((begun.before, after, self.ahead))

    def returned(self, begun: StartedCall, result: Any, box: StatusPage) -> None:
        """A call has returned, with a `Work` perhaps; end its record, unless it may be on its way."""
        if self.polled and hasattr(result, "is_completed"):
            self.pending.append((begun.record, weakref.ref(result)))
            return
        if self.polled:
            box.end(begun.record)
            return
        self.enqueued.append((begun.record, begun.number))
        if len(self.enqueued) > RECORDS // 2:  # so long ago that nobody needs to be asked
            box.end(self.enqueued.popleft()[0])

    def end_enqueued(self, pending: Collection[tuple[str, int]], box: StatusPage) -> None:
        """End the records of all that is not `pending`, known by group and number."""
        for entry in [*self.enqueued]:
            if (self.name, entry[1]) not in pending:
                with suppress(ValueError):  # pushed out meanwhile, by the main thread
                    self.enqueued.remove(entry)
                box.end(entry[0])

    def sweep(self, box: StatusPage) -> None:
        """End the records of asynchronous calls that are over by now, up to the first that is not."""
        while self.pending:
            entry = self.pending.popleft()
            work = entry[1]()
            if work is not None and not work.is_completed():  # None: nobody can wait for it any more
                self.pending.appendleft(entry)
                return
            box.end(entry[0])


@dataclass(frozen=True)
class CachedCall:
    """One call as it comes again and again: at this line, with these arguments."""

    code: CodeType  # kept, as the next one, so that no other code can have its address
    inner: CodeType
    op: Op
    text: bytes
    order: int = 0  # a hash of what all ranks have in common, in the order of calls


class StartedCall(NamedTuple):  # made at every call: half the price of a dataclass
    """A call that is on its way."""

    record: int
    group: Group
    backend: Any
    before: int  # torch's number
    single: bool  # which the call raises by one
    counts: int  # 1 for a collective, 0 for a message
    number: int  # ours; of a message -1, -2, ...: how many this process has sent and received over the group


def torch_number(backend: Any, group: Group) -> int:
    """How many collectives torch has counted on this group."""
    try:
        return backend._get_sequence_number_for_group()
    except RuntimeError:  # MPI, and groups of two backends
        return group.calls


def peer_of(asked: list[Any], group: Group, kind: ReadingRule) -> int:
    """The other rank of a call, of the world, out of the arguments that may name it."""
    of_world, of_group = [*asked, None][:2]
    if of_world is not None:
        return of_world
    if of_group is not None:
        return group.members[of_group]
    return NO_PEER if kind.message else 0  # from anybody; torch's default for a root


def leave_untraced(code: CodeType) -> None:
    """Have torch.compile leave frames of this code, and their calls, as they are; without importing its compiler."""
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    with suppress(AttributeError, TypeError):  # a torch with other names: then it is traced, in vain but rightly
        action = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action, action))


class Ledger:
    """The collectives that this process has called. A process has one ledger: torch's functions can be wrapped once."""

    def __init__(self, box: StatusPage, warn_once: Callable[[BaseException], None]) -> None:
        """`warn_once` gets internal errors of the ledger; the calls are made anyway."""
        self.active = True
        self.marker: OrderMarks | None = None  # of a script's calls, whose waits are shown, too
        self.failed: Callable[[BaseException], None] | None = None
        """called with the errors of a script's calls, and of its waits for a `Work`"""
        self.groups: dict[int, Group] = {}
        self._gone: list[Group] = []  # taken down since the last `take_order`
        self._box, self._warn_once = box, warn_once
        self._torch: Any = None
        self._inside: set[int] = set()  # threads in a wrapped call: what it calls in turn is part of it
        self._main = main_thread().ident
        self._own = 0  # operations that are none of torch's, and on their way
        self._known: dict[tuple[object, ...], CachedCall] = {}
        self._current: deque[tuple[CachedCall, int]] = deque(maxlen=MAX_TAKEN)
        self._taken: list[tuple[CachedCall, int]] = []

    @property
    def waiting(self) -> bool:
        """Whether a call, or a work that is still referenced, is in flight."""
        on_its_way = any(group.pending or group.enqueued for group in [*self.groups.values()])
        return bool(self._inside) or self._own > 0 or on_its_way

    def install(self, distributed: ModuleType, *others: ModuleType, late: bool = False) -> None:
        """Put the wrappers into torch's module, and into those that have imported its functions already; `late`:
        programs may have, too. torch identifies isend and irecv in P2POp by identity, so these stay.
        """
        if self._torch is not None:
            return
        self._torch = distributed
        for name, kind in KINDS.items():
            call = getattr(distributed, name, None)
            if call is None or (late and name in ("isend", "irecv")):  # None: another version of torch
                continue
            wrapper = self._wrapped(call, SAME.get(name, name), kind)
            for module in (distributed, *others):
                if getattr(module, name, None) is call:
                    setattr(module, name, wrapper)
        self._hang_on_waits(distributed.Work)

    def take_order(self) -> int:
        """A hash, 0 <= n < 2**52, of the calls over all ranks since the last take; equal on ranks that agree.

        The order counts within each group, not between groups. The hash covers kind, name, type, line, and shape if
        all ranks must pass the same.
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
        """What the last `take_order` covered, the oldest first; of more than 256 the last."""
        return [replace(known.op, seq=seq, done=True) for known, seq in self._taken]

    def begin_own(self, owner: object, ranks: tuple[int, ...], op: Op, *, of_all: bool = True) -> StartedCall | None:
        """Record the start of an operation of paceline's, for `end_own`; None if nothing is recorded. Never raises.

        `owner` is the object that its `ranks` (of the world) have in common, as a process group is: numbers count up
        during its life. `op` has no number and line yet; `of_all`: these are all ranks of the world.
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
        """Record its end, or, with a `work`, that it ends when `work.is_completed()`."""
        if begun is not None:
            self._own -= 1
            self._end(begun, work, failed=failed)

    def group_of(self, backend: Any) -> Group | None:
        """The record of a process group; None if this rank is no member."""
        found = self.groups.get(id(backend))
        if found is not None and found.still_there() is backend:
            return found
        world = self._torch._world
        if backend not in world.pg_names:
            return None
        for key, group in [*self.groups.items()]:
            if group.still_there() is None:  # its calls still count: ranks do not forget a group at one moment
                self._gone.append(self.groups.pop(key))
        members = tuple(sorted(world.pg_group_ranks[backend]))
        of_all = len(members) == world.default_pg.size()
        # asking NCCL while a CUDA graph is captured would spoil the graph
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
            begun, trouble = None, None
            try:
                group = args[group_at] if len(args) > group_at else kwargs.get("group")
                passed = args[tensor_at] if len(args) > tensor_at else kwargs.get(tensor_name)
                asked = peers and [args[at] if len(args) > at else kwargs.get(peer) for at, peer in peers]
                begun = self._begin(name, kind, passed, group, asked)
            except Exception as error:
                trouble = error
            if begun is None:
                result = call(*args, **kwargs)  # if it raises, too, the trouble was the caller's arguments
                if trouble is not None:
                    self._warn_once(trouble)
                return result
            inside.add(thread)
            before = self._box.enter(Phase.SYNC) if self.marker is not None and thread == self._main else None
            try:
                result = call(*args, **kwargs)
            except BaseException as error:
                self._end(begun, None, failed=True)
                self._tell(error)
                raise
            finally:
                inside.discard(thread)
                if before is not None and not self._box.get("released"):  # that is no progress of its own
                    self._box.enter(before)
            self._end(begun, result)
            return result

        made: Any = wrapper
        made._torchdynamo_disable = True  # compiled code calls it, as it calls torch's own, untraced
        leave_untraced(made.__code__)
        return wrapper

    def _hang_on_waits(self, work: Any) -> None:
        """A call with `async_op=True` fails in its wait. Its `Work` takes no attribute: the class has the wrapper."""
        call = work.wait

        # by this name, and its first argument, pybind11 knows that this was called already, and does not take it for
        # the wait of a class that a script has made from torch's: that would call itself without end
        @wraps(call)
        def wait(self_: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(self_, *args, **kwargs)
            except BaseException as error:
                self._tell(error)
                raise

        made: Any = wait
        made._torchdynamo_disable = True
        leave_untraced(made.__code__)
        work.wait = wait

    def _tell(self, error: BaseException) -> None:
        if self.failed is not None and self.active:
            try:
                self.failed(error)
            except Exception as trouble:
                self._warn_once(trouble)

    def _begin(self, name: str, kind: ReadingRule, passed: Any, group: Any, asked: list[Any]) -> StartedCall | None:
        backend = self._torch._world.default_pg if group is None else group
        found = None if backend is None else self.group_of(backend)
        if found is None:
            return None  # torch's own error, or nothing, will follow
        known = self._recall(name, kind, passed, found.name)
        before = torch_number(backend, found)
        peer = peer_of(asked, found, kind) if asked else NO_PEER
        if kind.message:
            seq = found.messages[name, peer] = found.messages.get((name, peer), 0) + 1
        else:
            seq = before + 1 - found.ahead
            found.calls += 1
        if not kind.single:
            found.spans.append((before, float("inf"), found.ahead))  # until it is known how far the number rises
        begun = self._note(known, found, seq, peer, message=kind.message)
        if kind.message:
            found.sent += 1
            begun = begun._replace(number=-found.sent)
        return begun._replace(backend=backend, before=before, single=kind.single and not kind.message)

    def _note(self, known: CachedCall, group: Group, seq: int, peer: int, *, message: bool = False) -> StartedCall:
        """Record the start of a call in the ring, and in the hash that ranks compare."""
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
        """The call of this kind from this line, and this line of a library, which is described once."""
        frame, library = place
        code = sys._getframe().f_code if frame is None else frame.f_code  # pyright: ignore[reportPrivateUsage]
        inner = code if library is None else library.f_code
        key = (id(code), -1 if frame is None else frame.f_lasti, id(inner), library and library.f_lasti, *asked)
        known = self._known.get(key)
        if known is not None and known.code is code and known.inner is inner:
            return known
        op = made(place.words())
        known = CachedCall(code, inner, op, ring_text(op), order_hash(op))
        if len(self._known) >= MAX_CACHED:  # shapes that never come again
            self._known.clear()
        self._known[key] = known
        return known

    def _end(self, begun: StartedCall, result: Any, *, failed: bool = False) -> None:
        try:
            if not begun.single:
                begun.group.count_ahead(begun)
            if not failed:  # else its record stays: begun, and never over
                begun.group.returned(begun, result, self._box)
        except Exception as error:
            self._warn_once(error)


def order_hash(op: Op) -> int:
    """A hash of the part that must be equal on all ranks: without the line of rooted and of named calls."""
    return zlib.crc32(ring_text(replace(op, site="") if op.name or op.kind in ROOTED else op))


class OrderMarks:
    """Which collectives this process's script calls over the first groups of all ranks: agents compare the orders."""

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
