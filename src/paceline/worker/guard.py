"""A process's own part of the hang guard: what it shows of itself while it runs, and how it is freed.

    guard = Guard.of_process()
    with guard.phase(Phase.EVALUATE): ...        # what it does, in the box that its agent reads
    guard.take_order()                           # what collectives it has called, as a number that ranks compare
    guard.stall_error(error)                     # whether `error` is the guard's doing, and then why

There is one for each process, made at the first call: a process has one agent, one box, one torch whose functions can
be wrapped once, one handler for a signal. `--stall-after off` leaves nothing of it but the count of steps.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import ClassVar, Self

import msgspec

from paceline.contract.birth import WorkerBirth
from paceline.contract.box import Box, make_box
from paceline.contract.evidence import Op, Phase
from paceline.contract.failure import is_victim
from paceline.errors import ExitCode, StallError
from paceline.worker.calls import Begun
from paceline.worker.imports import when_imported
from paceline.worker.ledger import MODULE, Ledger
from paceline.worker.probes.calls import OrderMarks
from paceline.worker.release import Connections
from paceline.worker.watcher import NativeStacks, Watcher

OTHERS_FIRST_SECONDS = 1.0  # a rank that is freed a little earlier closes its side of our connections


class _Word(msgspec.Struct, frozen=True):
    kind: str = ""
    page: str = ""
    exit_code: int = ExitCode.STALLED


class Guard:
    """One for each process: see the module's docstring."""

    max_steps = float("inf")  # after which a session ends its training; the script continues
    _of_process: ClassVar[Guard | None] = None

    def __init__(self, box: Box | None, *, on: bool) -> None:
        """`box` is the agent's; None in a process without an agent of ours, where nobody asks and nobody frees."""
        self.on = on
        self._has_agent = box is not None
        self.record = -1  # memory for the record of a failure, for an agent that did not start us
        self.leave: Callable[[int], None] = lambda code: None  # tells it the exit code with which this process ends
        self.box = box or Box(make_box(0))
        self._complained = False
        self._ledger = Ledger(self.box, self.complain)
        self.connections = Connections()
        self._watcher: Watcher | None = None
        self._look_away: Callable[[], None] | None = None  # from a script that nobody changed
        if not on:
            self.box.keep_for_steps()
            self._ledger.active = False

    @classmethod
    def of_process(cls) -> Guard:
        """This process's guard, the same at every call."""
        if Guard._of_process is None:
            birth = WorkerBirth.here()
            box = None if birth is None else Box.inherited(birth.box)
            Guard._of_process = guard = cls(box, on=birth is None or birth.guarded)
            os.register_at_fork(after_in_child=guard._in_child)
        return Guard._of_process

    @classmethod
    def observed(cls, box: int, record: int) -> Guard:
        """Make this process's guard, where no agent of ours has started it: another process is to read these two."""
        Guard._of_process = guard = cls(Box(box), on=True)
        guard.record = record
        os.register_at_fork(after_in_child=guard._in_child)
        return guard

    def start(self) -> Self:
        """Begin to speak for this process, where an agent listens: a worker's first act. Never raises."""
        if not (self.on and self._has_agent) or self._watcher is not None:
            return self
        native: NativeStacks | None = None
        try:
            os.set_inheritable(self.box.descriptor, False)  # programs that the script starts have no box
            native = NativeStacks(self.box)
        except Exception as error:
            self.complain(error)
        self._watcher = Watcher(self.box, self._ledger, self.connections, native, self.complain)
        self._watcher.start()
        atexit.register(self._watcher.stop)
        return self

    def watch_torch(self) -> Self:
        """See torch.distributed's calls from now on, or as soon as it is imported. Never raises."""
        try:
            when_imported(MODULE, self._install)
        except Exception as error:
            self.complain(error)
        return self

    def looks_on(
        self, look_away: Callable[[], None], marker: OrderMarks | None, failed: Callable[[BaseException], None] | None
    ) -> None:
        """This process's script is seen from outside, until `look_away` is called. `failed` gets what its collectives
        raise.
        """
        self._look_away, self._ledger.marker, self._ledger.failed = look_away, marker, failed
        self.box.put("script", 1)

    def take_over(self) -> None:
        """What runs here says itself what it does, and checks itself: a training of ours, a session."""
        if self._look_away is not None:
            self._look_away()
            self._ledger.marker = self._ledger.failed = None
        self.box.put("script", 0)

    @contextmanager
    def phase(self, phase: Phase) -> Generator[None]:
        """Inside, the process says that it is in this phase."""
        before = self.box.enter(phase)
        try:
            yield
        finally:
            self.box.enter(before)

    def begin_own(self, owner: object, ranks: tuple[int, ...], op: Op, *, of_all: bool = True) -> Begun | None:
        """Show that an operation begins that is none of torch's; see `Ledger.begin_own`. Never raises."""
        try:
            return self._ledger.begin_own(owner, ranks, op, of_all=of_all)
        except Exception as error:
            self.complain(error)
            return None

    def end_own(self, begun: Begun | None, work: object = None, *, failed: bool = False) -> None:
        """Show that it is over, or will be when `work` is completed; see `Ledger.end_own`."""
        if begun is not None:
            self._ledger.end_own(begun, work, failed=failed)

    def take_order(self) -> int:
        """A hash, 0 <= n < 2**52, of the collectives over all ranks since the last take; the same on ranks that agree.

        In order within each group, whatever the order between groups. In it: kind, name, type, line, and shape where
        all ranks must pass the same.
        """
        return self._ledger.take_order()

    def taken(self) -> list[Op]:
        """What the last `take_order` covered, the oldest first; of more than 256 the last."""
        return self._ledger.taken()

    def released(self) -> str:
        """The agent's reason, as JSON, if it has freed this rank; else empty."""
        return (self.box.word().decode(errors="replace") or "{}") if self.box.get("released") else ""

    def check_freed(self) -> None:
        """Raise StallError if the agent has freed this rank: what collectives have given since then is no result.

        NCCL returns from an aborted collective without an error. To be called after the host has read what came, and
        before that is believed, applied or saved; the agent says so before this rank aborts.
        """
        if self.box.get("released"):
            raise self.stall_error(RuntimeError()) or StallError("the hang guard has ended this wait")

    def stall_error(self, error: BaseException) -> StallError | None:
        """What to raise in place of `error`, out of a collective, if the guard has broken that up; else None.

        Waits for the agent's word for a second if `error` speaks of a lost connection: ranks are not freed at once.
        """
        deadline = time.monotonic() + OTHERS_FIRST_SECONDS
        while self._has_agent and self.on and not self.released() and is_victim(error) and time.monotonic() < deadline:
            time.sleep(0.01)
        text = self.released()
        if not text:
            return None
        try:
            word = msgspec.json.decode(text, type=_Word)
            code = ExitCode(word.exit_code)
        except (msgspec.MsgspecError, ValueError):
            word, code = _Word(), ExitCode.STALLED
        return StallError(word.page or "another rank stood still: the hang guard has ended this wait", code)

    def _install(self, *, late: bool) -> None:
        module = sys.modules[MODULE]
        others = [sys.modules["torch.distributed"]] if late else []
        if self.on:
            self._ledger.install(module, *others, late=late)
        self.connections.install(module)

    def _in_child(self) -> None:
        # a forked process loads data, or is the script's own business: it must not speak in the rank's name
        self.box.keep_for_loaders()
        self._ledger.active = False
        self.on = self._has_agent = False
        self.record, self.leave = -1, lambda code: None

    def complain(self, error: BaseException) -> None:
        """Say once that something of ours has failed; what it was about goes on."""
        if not self._complained:
            self._complained = True
            print(f"paceline: the hang guard of this process has a fault, and goes on: {error!r}", file=sys.stderr)
