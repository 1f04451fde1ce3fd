"""A thread that speaks, four times a second, for a worker whose main thread may be stuck.

It says that the interpreter still runs, counts the collectives that torch has called from C++, answers the agent's
question for stacks and collectives, and cuts the connections of a collective that will never end. It holds no lock that
the main thread may want, imports nothing, and whatever goes wrong in it ends there.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from paceline.contract.box import SIGNAL, SIGNAL_SAFE, WATCHED, Box
from paceline.contract.evidence import Answer
from paceline.host.procfs import GUARD_THREAD
from paceline.worker import recorder
from paceline.worker.calls import Group
from paceline.worker.ledger import Ledger
from paceline.worker.release import Connections, abort_nccl

WAKE_SECONDS = 0.25


class Watcher:
    """The thread's state; `start` begins it, `stop` ends it."""

    def __init__(
        self,
        box: Box,
        ledger: Ledger,
        connections: Connections,
        native: NativeStacks | None,
        complain: Callable[[BaseException], None],
    ) -> None:
        self._box, self._ledger, self._connections, self._native = box, ledger, connections, native
        self._complain = complain
        self._main = threading.main_thread().ident or 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=GUARD_THREAD, daemon=True)
        self._last, self._still, self._answered, self._aborted = (0, 0), 0, 0, False

    def start(self) -> None:
        """Begin."""
        self._box.put("ready", WATCHED if self._native is None else self._native.ready())
        self._thread.start()

    def stop(self) -> None:
        """End it before the process ends, so that it is not within torch when torch is taken down."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        with suppress(OSError):  # by this name the agent knows the thread that wakes nobody
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(GUARD_THREAD)
        while not self._stop.wait(WAKE_SECONDS):
            for part in (self._beat, self._reply, self._release):
                try:
                    part()
                except Exception as error:
                    self._complain(error)

    def _beat(self) -> None:
        box = self._box
        box.put("beat_ns", time.monotonic_ns())
        if self._native is not None:
            box.put("ready", self._native.ready())
        groups = [*self._ledger.groups.values()]
        for group in groups:
            group.sweep(box)
        enqueued = [group for group in groups if group.enqueued]
        if enqueued and not recorder.capturing.is_set() and (self._still > 0 or not recorder.in_flight()):
            pending = recorder.pending(self._groups()) if recorder.in_flight() else ()
            for group in enqueued:
                group.end_enqueued(pending, box)
        now = (sum(recorder.sequence_numbers().values()), box.get("ops"))
        self._still = self._still + 1 if now == self._last else 0
        self._last = now
        box.put("enqueued", now[0])
        box.put("waiting", self._ledger.waiting or (self._still > 0 and recorder.in_flight()))

    def _reply(self) -> None:
        asked = self._box.get("asked")
        if asked <= self._answered:
            return
        self._answered = asked
        groups = self._groups()
        stacks = recorder.stacks(self._main)
        answer = Answer(
            ops=tuple(recorder.merged(self._box.ring(), groups, stacks[0] if stacks else None)),
            groups={group.name: group.members for group in groups.values()} | recorder.group_members(),
            titles=recorder.group_titles(),
            stacks=stacks,
            enqueued=self._last[0],
        )
        self._box.answer(asked, msgspec.json.encode(answer))

    def _groups(self) -> dict[str, Group]:
        return {group.name: group for group in [*self._ledger.groups.values()] if group.still_there() is not None}

    def _release(self) -> None:
        if not self._box.get("released"):
            return
        if not self._aborted and (module := recorder.distributed()) is not None:
            self._aborted = True
            threading.Thread(target=abort_nccl, args=(module,), name="paceline-abort", daemon=True).start()
        self._connections.shut()


class NativeStacks:
    """Python's faulthandler, which on SIGNAL writes its stacks to the end of the box, without the interpreter lock.

    So a regular expression that runs for ever, or a C extension that never returns, is seen with the line of Python
    that called it.
    """

    def __init__(self, box: Box) -> None:
        """Raises OSError where /proc is not to be had."""
        path = f"/proc/self/fd/{box.descriptor}"
        self._file: BinaryIO | None = open(path, "ab", buffering=0)  # noqa: PTH123, SIM115 - as long as the process
        self._inode = os.fstat(self._file.fileno()).st_ino
        # Only the thread that the kernel gives the signal to, the main one if it can: the stacks of threads that run,
        # begin and end meanwhile cannot be read without the lock (measured: the process died of it, now and then).
        faulthandler.register(SIGNAL, file=self._file, all_threads=False, chain=False)

    def ready(self) -> int:
        """SIGNAL_SAFE while the file is still the box: a program that closes all descriptors may have another there."""
        if self._file is None:
            return WATCHED
        try:
            if os.fstat(self._file.fileno()).st_ino == self._inode:
                return SIGNAL_SAFE
        except OSError:
            pass
        faulthandler.unregister(SIGNAL)
        self._file = None
        return WATCHED
