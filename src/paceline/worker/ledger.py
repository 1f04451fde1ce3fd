"""Records which collectives this process calls, from which line: thin wrappers around torch.distributed's functions.

Each call leaves a record in the box's ring, which outlives the process, and goes into a hash by which ranks compare the
order of their calls (`take_order`). What a wrapper does besides never raises, changes nothing, and costs microseconds.
"""

import hashlib
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from functools import wraps
from inspect import signature
from threading import get_ident, main_thread
from types import ModuleType
from typing import Any

import msgspec.structs

from paceline.contract.box import NO_PEER, Box, ring_text
from paceline.contract.evidence import Op, Phase
from paceline.worker.calls import KINDS, SAME, Begun, Group, Known, ReadingRule, leave_untraced, peer_of, torch_number
from paceline.worker.probes.calls import OrderMarks, order_hash
from paceline.worker.sites import Site, call_site
from paceline.worker.unseen import unseen

MODULE = "torch.distributed.distributed_c10d"
MAX_TAKEN, MAX_CACHED = 256, 4096
NAME = "collective"  # what a caller may set in a tensor's __dict__: "bucket 3"


class Ledger:
    """What this process has called. One for a process: a torch of its own has only one set of functions to wrap."""

    def __init__(self, box: Box, complain: Callable[[BaseException], None]) -> None:
        """`complain` gets an error of the ledger's own; the call that it was about has been made all the same."""
        self.active = True
        self.marker: OrderMarks | None = None  # of a script's calls, whose waits are shown, too
        self.failed: Callable[[BaseException], None] | None = None
        """told of what a script's calls raise, and its waits for a `Work`"""
        self.groups: dict[int, Group] = {}
        self._gone: list[Group] = []  # taken down since the last `take_order`
        self._box, self._complain = box, complain
        self._torch: Any = None
        self._inside: set[int] = set()  # threads in a wrapped call: what it calls in turn is part of it
        self._main = main_thread().ident
        self._own = 0  # operations that are none of torch's, and on their way
        self._known: dict[tuple[object, ...], Known] = {}
        self._current: deque[tuple[Known, int]] = deque(maxlen=MAX_TAKEN)
        self._taken: list[tuple[Known, int]] = []

    @property
    def waiting(self) -> bool:
        """Whether a call, or a work that somebody still holds, is on its way."""
        on_its_way = any(group.pending or group.enqueued for group in [*self.groups.values()])
        return bool(self._inside) or self._own > 0 or on_its_way

    def install(self, distributed: ModuleType, *others: ModuleType, late: bool = False) -> None:
        """Put the wrappers into torch's module, and into those that have imported its functions already; `late`:
        programs may have, too. torch tells isend and irecv in P2POp by their identity, so these stay.
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
        """A hash, 0 <= n < 2**52, of what has been called over all ranks since the last take; see `Guard`."""
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
        """What the last `take_order` covered: 256 at most."""
        return [msgspec.structs.replace(known.op, seq=seq, done=True) for known, seq in self._taken]

    def begin_own(self, owner: object, ranks: tuple[int, ...], op: Op, *, of_all: bool = True) -> Begun | None:
        """Note that an operation begins that is none of torch's, for `end_own`; None where nothing is noted.

        `owner` is what its `ranks` (of the world) have in common, as a process group is: numbers count up as long as it
        lives. `op` comes without number and line, which are found here; `of_all`: these are all ranks of the world.
        """
        if not self.active:
            return None
        group = self.groups.get(id(owner))
        if group is None or group.still_there() is not owner:
            if group is not None:
                self._gone.append(group)
            group = self.groups[id(owner)] = Group(op.group, of_all, ranks, True, weakref.ref(owner))
        place = call_site(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        known = self._known_at(place, (op,), lambda site: msgspec.structs.replace(op, site=site))
        group.calls += 1
        self._own += 1
        return self._note(known, group, group.calls, NO_PEER if op.peer is None else op.peer)

    def end_own(self, begun: Begun, work: Any = None, *, failed: bool = False) -> None:
        """Note that it is over, or, with a `work`, that it will be when `work.is_completed()`."""
        self._own -= 1
        self._end(begun, work, failed=failed)

    def group_of(self, backend: Any) -> Group | None:
        """What is known of a process group; None if this rank is no member."""
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

        @unseen
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
                    self._complain(trouble)
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
                self._complain(trouble)

    def _begin(self, name: str, kind: ReadingRule, passed: Any, group: Any, asked: list[Any]) -> Begun | None:
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

    def _note(self, known: Known, group: Group, seq: int, peer: int, *, message: bool = False) -> Begun:
        """Write down that a call begins: into the ring, and into what ranks compare."""
        if group.pending:
            group.sweep(self._box)
        if group.of_all and not message:
            group.checksum = zlib.crc32(known.text, group.checksum)
            group.count += 1
            self._current.append((known, seq))
            if self.marker is not None:
                self.marker.note(group.name, len(group.members), known.order, known.text)
        return Begun(self._box.begin_text(seq, peer, known.text), group, None, 0, True, 0 if message else 1, seq)

    def _recall(self, name: str, kind: ReadingRule, passed: Any, group: str) -> Known:
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

    def _known_at(self, place: Site, asked: tuple[object, ...], made: Callable[[str], Op]) -> Known:
        """The call of this kind from this line, and this line of a library, which is described once."""
        frame, library = place
        code = sys._getframe().f_code if frame is None else frame.f_code  # pyright: ignore[reportPrivateUsage]
        inner = code if library is None else library.f_code
        key = (id(code), -1 if frame is None else frame.f_lasti, id(inner), library and library.f_lasti, *asked)
        known = self._known.get(key)
        if known is not None and known.code is code and known.inner is inner:
            return known
        op = made(place.words())
        known = Known(code, inner, op, ring_text(op), order_hash(op))
        if len(self._known) >= MAX_CACHED:  # shapes that never come again
            self._known.clear()
        self._known[key] = known
        return known

    def _end(self, begun: Begun, result: Any, *, failed: bool = False) -> None:
        try:
            if not begun.single:
                begun.group.count_ahead(begun)
            if not failed:  # else its record stays: begun, and never over
                begun.group.returned(begun, result, self._box)
        except Exception as error:
            self._complain(error)
